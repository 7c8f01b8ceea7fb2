"""Reports as files: from a job that ran out of memory, and from one that runs, at a signal.

Who does what: `write_report` writes, on whatever thread, and raises nothing, since it is called while an
error is on its way. The signal's handler does no more than wake a thread of its own, which makes the report: Python
runs handlers on the main thread only, between two of its instructions, and that thread may be inside a call
that takes an hour. What wakes the thread is the byte that Python's C handler writes at once
(`signal.set_wakeup_fd`); the handler itself wakes it only where another library, such as an event
loop, has taken that place.

Invariants:

1. A file under its final name is whole: it is written under another name first.
2. A byte meant for whoever had the wakeup file descriptor before is passed on to it.
3. After a fork the child has a socket and a thread of its own; the thread starts at its first signal.
"""

import contextlib
import json
import os
import re
import signal
import socket
import sys
import tempfile
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._report import Report

__all__ = ["install_signal", "remove_signal", "report_stem", "write_file", "write_report"]

#: Where a launcher says which of a job's processes this is.
RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "LOCAL_RANK")

_lock = threading.Lock()
_numbers: dict[str, int] = {}
#: The report that was written last, and where to: it is not written there twice.
_latest: "tuple[Report, str] | None" = None


# Files


def report_stem(kind: str) -> str:
    """The name of a report's file without its suffix: ``oom-HOST-RANK-PID``."""
    host = re.sub(r"[^A-Za-z0-9._]", "_", socket.gethostname()) or "host"
    return f"{kind}-{host}-{rank()}-{os.getpid()}"


def rank() -> int:
    """Which of a job's processes this is; 0 where no launcher says so."""
    for name in RANK_VARIABLES:
        text = os.environ.get(name, "")
        if text.isdecimal():
            return int(text)
    return 0


def write_report(
    report: "Report", reason: str = "out of memory", *, directory: str | None = None
) -> str | None:
    """Writes the report into the folder that ``LASTREF_REPORT_DIR`` names, as JSON, and returns the path.

    Without a folder nothing is written. A failure of this process replaces the one before it,
    ``oom-HOST-RANK-PID.json``: the last is the one that it died of, and a program that goes on after failures does not
    fill a disk. A report for another reason gets a number, ``report-HOST-RANK-PID-1.json``.

    A file that cannot be written is a line on standard error, never an exception.
    """
    directory = directory or os.environ.get("LASTREF_REPORT_DIR")
    if not directory:
        return None
    global _latest
    if _latest is not None and _latest[0] is report and os.path.dirname(_latest[1]) == directory:
        return _latest[1]
    kind = "oom" if reason == "out of memory" else "report"
    with _lock:
        number = _numbers[kind] = _numbers.get(kind, 0) + 1
    name = report_stem(kind) + (".json" if kind == "oom" else f"-{number}.json")
    try:
        text = json.dumps({**report.to_dict(), "reason": reason, "number": number}, indent=1)
    except Exception as error:
        say(f"the report could not be made: {error!r}")
        return None
    path = write_file(os.path.join(directory, name), text)
    _latest = None if path is None else (report, path)
    return path


def write_file(path: str, text: str) -> str | None:
    """`replace_file`; None and a line on standard error if it cannot be done."""
    try:
        replace_file(path, text)
    except OSError as error:
        say(
            f"{path} could not be written: {error.strerror}; LASTREF_REPORT_DIR names the folder for reports"
        )
        return None
    return path


def replace_file(path: str, text: str) -> None:
    """Writes a file that is whole at every moment: under another name first."""
    directory = os.path.dirname(path) or "."
    os.makedirs(directory, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=directory, prefix=".lastref-", suffix=".tmp")
    try:
        # A program's arguments may be no text.
        with open(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _umask() -> int:
    # Reading it means setting it, which other threads would see.
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("Umask:")).split()[1], 8)
    return 0o022


def say(text: str) -> None:
    """One line on standard error, if there is one."""
    with contextlib.suppress(Exception):
        print(f"lastref: {text}", file=sys.stderr, flush=True)


# The signal


class _Reporter:
    """The thread that makes reports, and the socket that wakes it."""

    def __init__(self) -> None:
        self.previous: dict[int, Any] = {}
        self.installed: dict[int, int] = {}  # how often
        self.open()
        os.register_at_fork(after_in_child=self.after_fork)

    def open(self) -> None:
        self.wake, self.sleep = socket.socketpair()
        # A handler must not wait: where the buffer is full there is enough to do.
        self.wake.setblocking(False)
        self.thread: threading.Thread | None = None
        self.previous_fd = -1

    def after_fork(self) -> None:
        if self.previous:
            self.wake.close()
            self.sleep.close()
            previous_fd = self.previous_fd
            self.open()
            self.previous_fd = previous_fd
            with contextlib.suppress(ValueError):
                signal.set_wakeup_fd(self.wake.fileno(), warn_on_full_buffer=False)

    def start(self) -> None:
        if self.thread is None:
            self.thread = threading.Thread(
                target=self.run, args=(self.sleep,), name="lastref-report", daemon=True
            )
            self.thread.start()

    def handle(self, number: int, frame: FrameType | None) -> None:
        self.start()
        fd = signal.set_wakeup_fd(self.wake.fileno(), warn_on_full_buffer=False)
        if fd != self.wake.fileno():
            # Somebody has taken this place since, and keeps it; or has left it.
            if fd >= 0:
                signal.set_wakeup_fd(fd)
            with contextlib.suppress(OSError):
                self.wake.send(bytes([number]))
        before = self.previous.get(number)
        if callable(before):
            before(number, frame)

    def run(self, sleep: socket.socket) -> None:
        while True:
            try:
                numbers = sleep.recv(4096)
            except OSError:
                return
            if not numbers:
                return
            # Signals that came while a report was made are answered by one more.
            for number in dict.fromkeys(numbers):
                if self.installed.get(number):
                    write_signal_report(number)
            if self.previous_fd >= 0:
                with contextlib.suppress(OSError):
                    os.write(self.previous_fd, numbers)


_reporter: _Reporter | None = None


def install_signal(number: int) -> None:
    """From now on a report is written whenever the signal comes.

    The file is ``report-HOST-RANK-PID-NUMBER.json`` in the folder that ``LASTREF_REPORT_DIR`` names, or else in the
    current one; a line on standard error says its path. A handler that was there before is called too.

    Raises:
        ValueError: this is not the main thread, or the signal cannot be handled.
    """
    global _reporter
    if threading.current_thread() is not threading.main_thread():
        raise ValueError(
            "guard: a signal's handler can only be set on the main thread; call guard(signal=...) there"
        )
    number = int(number)
    if _reporter is None:
        _reporter = _Reporter()
    if number not in _reporter.previous:
        try:
            previous = signal.signal(number, _reporter.handle)
        except (OSError, ValueError) as error:
            raise ValueError(f"guard: signal {number} cannot be handled: {error}") from None
        # A call that the signal arrives in goes on.
        signal.siginterrupt(number, False)
        _reporter.previous[number] = previous
        fd = signal.set_wakeup_fd(_reporter.wake.fileno(), warn_on_full_buffer=False)
        if fd != _reporter.wake.fileno():
            _reporter.previous_fd = fd
        _reporter.start()
    _reporter.installed[number] = _reporter.installed.get(number, 0) + 1


def remove_signal(number: int) -> None:
    """Takes back one `install_signal`; with the last, what was there before is there again.

    Off the main thread the handler stays, and only calls the one that was there before.
    """
    number = int(number)
    if _reporter is None or not _reporter.installed.get(number):
        return
    _reporter.installed[number] -= 1
    if _reporter.installed[number] or threading.current_thread() is not threading.main_thread():
        return
    previous = _reporter.previous.pop(number)
    signal.signal(number, previous if previous is not None else signal.SIG_DFL)
    if not _reporter.previous:
        fd = signal.set_wakeup_fd(-1)
        if fd == _reporter.wake.fileno():
            fd, _reporter.previous_fd = _reporter.previous_fd, -1
        if fd >= 0:
            signal.set_wakeup_fd(fd)


def write_signal_report(number: int) -> str | None:
    """Makes a report now and writes it; says where on standard error."""
    try:
        name = signal.Signals(number).name
    except ValueError:  # a real-time signal
        name = f"signal {number}"
    try:
        from ._report import report as make

        report = make()
    except Exception as error:
        say(f"{name}: the report could not be made: {error!r}")
        return None
    directory = os.environ.get("LASTREF_REPORT_DIR") or os.getcwd()
    path = write_report(report, name, directory=directory)
    if path is not None:
        say(f"{name}: report written to {path}")
    return path
