"""The command ``lastref``: ``python -m lastref``, or ``lastref`` once the package is installed."""

import os
import signal
import sys
from pathlib import Path

from . import _lastref

#: What plays the GPU for `lastref standin`.
_STANDIN = Path(__file__).parent / "_standin" / "liblastref_standin.so"


def main() -> int:
    """Runs the command with this process's arguments and gives its exit status."""
    # The command runs outside the interpreter, where Python's handler would only take a note.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if _STANDIN.is_file():
        os.environ.setdefault("LASTREF_STANDIN_LIBRARY", str(_STANDIN))
    return _lastref.run_command(["lastref", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
