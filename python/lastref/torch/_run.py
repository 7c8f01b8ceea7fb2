"""What ``python -m lastref.torch`` adds to the program that it runs: the guard, and the report at its death.

`start` is called once, when the program has imported torch. A program that dies of an exception calls
`sys.excepthook`, with the frames that died and their variables; the one set here calls the one before it, which
prints the traceback, and then prints the report. Where the program has set a hook of its own later, the
report is printed at exit instead: Python keeps the exception in `sys.last_value` until then. A thread that dies
is reported in the same way, by `threading.excepthook`, though the program goes on.
"""

import atexit
import os
import re
import sys
import threading
import warnings
from types import TracebackType
from typing import TYPE_CHECKING, Any

from . import _jobs

if TYPE_CHECKING:
    from ._report import Report

_reported: list[int] = []


def start(settings: dict[str, Any]) -> None:
    """Guards the program from here on."""
    # What the report needs is imported while there is memory.
    from . import _guard, _report, _retry  # noqa: F401

    try:
        if settings["collect"]:
            # A report is made at each failure, while the frames that failed are still there; it is shown if
            # the program dies.
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                _guard.guard(signal=settings["signal"], report="apart")
            for warning in caught:
                _jobs.say(str(warning.message))
        elif settings["signal"] is not None:
            _jobs.install_signal(settings["signal"])
    except Exception as error:
        _jobs.say(
            f"not guarded: {error}; if the program runs out of memory, there is a report nevertheless"
        )
    previous = sys.excepthook

    def excepthook(
        type_: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        previous(type_, error, traceback)
        report_death(error, settings)

    sys.excepthook = excepthook
    previous_of_threads = threading.excepthook

    def excepthook_of_threads(dying: threading.ExceptHookArgs) -> None:
        previous_of_threads(dying)
        if dying.exc_value is not None:
            report_death(dying.exc_value, settings)

    threading.excepthook = excepthook_of_threads
    atexit.register(_at_exit, settings)


def _at_exit(settings: dict[str, Any]) -> None:
    error = getattr(sys, "last_value", None)
    if error is not None:
        report_death(error, settings)


def report_death(error: BaseException, settings: dict[str, Any]) -> None:
    """Says what held the memory, if the error is about that. Raises nothing."""
    if id(error) in _reported:
        return
    try:
        from ._retry import chain, is_out_of_memory

        cause = next((e for e in chain(error) if is_out_of_memory(e)), None)
        if cause is None:
            return
        _reported.append(id(error))
        report = _report_of(cause)
        sys.stdout.flush()
        _print(report, settings)
    except Exception as problem:
        _jobs.say(f"the report could not be made: {problem!r}")


def _report_of(error: BaseException) -> "Report":
    """The report made when the allocation failed, or else one of now: the traceback has its frames still."""
    from . import _guard, _report

    report = _guard.last_report()
    if report is not None:
        return report
    text = str(error)
    asked = re.search(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB|TiB)", text)
    device = re.search(r"\bGPU (\d+)", text)
    if asked is None or device is None:
        return _report.report()
    unit = ("bytes", "KiB", "MiB", "GiB", "TiB").index(asked[2])
    num_bytes = round(float(asked[1]) * 1024**unit)
    return _report.for_out_of_memory(int(device[1]), num_bytes, message=text.partition("\n")[0])


def _print(report: "Report", settings: dict[str, Any]) -> None:
    stream = sys.stderr
    if stream is None:
        return
    if settings["json"]:
        print(report.to_json(), file=stream)
    else:
        color = (
            stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        )
        print(f"\n{report.text(color=color).rstrip()}\n", file=stream)
    stem = os.path.join(settings["report_dir"], _jobs.report_stem("oom"))
    written = [
        path
        for path in (
            _jobs.write_report(report, directory=settings["report_dir"]),
            _jobs.write_file(stem + ".html", report.to_html()),
        )
        if path is not None
    ]
    if written:
        _jobs.say("this report is in " + " and ".join(map(_short, written)))


def _short(path: str) -> str:
    """The path, relative to the current folder if it is in there."""
    relative = os.path.relpath(path)
    return path if relative.startswith(os.pardir) else relative
