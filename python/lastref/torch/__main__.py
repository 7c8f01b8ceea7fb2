"""``python -m lastref.torch PROGRAM ARGS``: runs a program of PyTorch guarded, and says what held the memory
if it dies for want of it.

The program is run by Python itself, in this very process: with the same arguments, the same ``sys.path`` and
``__main__``, the same exit status and signals, and no frame of ours in its tracebacks. All that is added is
a module that Python imports at its start (``_start/sitecustomize.py``) and that guards torch once the
program has imported it.
"""

import json
import os
import re
import signal
import sys
from typing import NoReturn

USAGE = "usage: python -m lastref.torch [options] PROGRAM [ARGS...]"
HELP = f"""{USAGE}
       python -m lastref.torch [options] -m MODULE [ARGS...]
       python -m lastref.torch [options] -c CODE [ARGS...]

Runs a program as Python would. Before a CUDA allocation fails, dead cycles are collected. If the
program dies of out of memory, a report says what held the memory, on standard error and in two
files, oom-HOST-RANK-PID.json and .html. Exit status and traceback stay the program's own.

options, which come before the program; -- ends them:
  --report-dir DIR  where the files go; at first the folder that LASTREF_REPORT_DIR names, or else
                    the current one
  --json            the report on standard error is JSON
  --no-collect      change nothing, only report
  --signal NAME     write a report whenever this signal comes, for example SIGUSR2
  -h, --help        this text
"""

START = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_start")


def main() -> NoReturn:
    """Becomes the program that the arguments name. Returns never."""
    arguments = sys.argv[1:]
    settings, program = parse(arguments)
    for flag, words in ((sys.flags.ignore_environment, "-E or -I"), (sys.flags.no_site, "-S")):
        if flag:
            fail(
                f"under Python's option {words} nothing can be added to a program; leave it out, or call "
                "lastref.torch.guard() in the program"
            )
    settings["package"] = os.path.dirname(
        os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    )
    settings["pythonpath"] = pythonpath = os.environ.get("PYTHONPATH")
    os.environ["LASTREF_TORCH_RUN"] = json.dumps(settings)
    os.environ["PYTHONPATH"] = START if not pythonpath else START + os.pathsep + pythonpath
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execv(sys.executable, [sys.executable, *interpreter_options(arguments), *program])
    except OSError as error:
        fail(f"cannot start {sys.executable}: {error.strerror}")


def parse(arguments: list[str]) -> tuple[dict[str, object], list[str]]:
    """The settings, and the arguments that Python gets."""
    settings: dict[str, object] = {
        "report_dir": os.environ.get("LASTREF_REPORT_DIR") or ".",
        "json": False,
        "collect": True,
        "signal": None,
    }
    rest = list(arguments)
    while rest:
        option, equals, value = rest[0].partition("=")
        if option in ("-h", "--help"):
            print(HELP, end="")
            sys.exit(0)
        elif option == "--json":
            settings["json"] = True
        elif option == "--no-collect":
            settings["collect"] = False
        elif option in ("--report-dir", "--signal"):
            if not equals:
                if len(rest) < 2:
                    fail(f"{option} wants a value")
                value = rest.pop(1)
            settings[option.strip("-").replace("-", "_")] = value
        elif option == "--":
            rest.pop(0)
            break
        else:
            break
        rest.pop(0)
    if settings["signal"] is not None:
        settings["signal"] = signal_number(str(settings["signal"]))
    # A relative folder is meant where the command is given, not where the program goes.
    settings["report_dir"] = os.path.abspath(str(settings["report_dir"]))
    if not rest:
        fail(f"no program to run\n{USAGE}")
    first = rest[0]
    if first[:2] in ("-m", "-c"):
        if len(first) == 2 and len(rest) < 2:
            fail(f"{first} wants a {'module' if first == '-m' else 'program'}\n{USAGE}")
    elif first.startswith("-") and first != "-":
        fail(f"unknown option {first}; options of Python go before -m lastref.torch\n{USAGE}")
    return settings, rest


def signal_number(name: str) -> int:
    if name.isdigit():
        return int(name)
    try:
        return int(signal.Signals["SIG" + name.upper().removeprefix("SIG")])
    except KeyError:
        fail(f"no signal is called {name}")


def interpreter_options(arguments: list[str]) -> list[str]:
    """Python's own options of this process: what comes before ``-m lastref.torch``."""
    before = sys.orig_argv[1 : len(sys.orig_argv) - len(arguments)]
    if before and before[-1] == "lastref.torch":
        before.pop()
    if before:
        # `-m` may end a cluster of options, and the module's name may be its end: -um, -umlastref.torch
        last = re.sub(r"m(lastref\.torch)?$", "", before.pop())
        if last != "-":
            before.append(last)
    return before


def fail(text: str) -> NoReturn:
    print(f"lastref.torch: {text}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
