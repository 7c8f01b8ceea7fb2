"""The command ``lastref``: ``python -m lastref``, or ``lastref`` once the package is installed."""

import signal
import sys

from . import _lastref


def main() -> int:
    """Runs the command with this process's arguments and gives its exit status."""
    # The command runs outside the interpreter, where Python's handler would only take a note.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _lastref.run_command(["lastref", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
