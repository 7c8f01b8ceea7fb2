"""`guard`: dead cycles are collected before an allocation of PyTorch's fails, and a failure says why.

Three parts share the work. The C++ shim (``_shim/lastref_torch.cpp``) wraps PyTorch's allocator object and
climbs the ladder; lastref's extension (``python/src/torch.rs``) runs what must run on the collector's
thread; what is here puts the wrapper in and out, and is what that thread calls for user callbacks and
the report.

Invariants:

1. Guards are counted: the last one to end takes the wrapper out.
2. `_call_back` and `_report_text` run on the collector's thread, with the interpreter lock and no other.
3. Without the shim there is PyTorch's own observer instead, which cannot be detached: it is attached
   once, and does nothing while nobody guards.
"""

import ctypes
import os
import signal as _signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from .. import _lastref
from .. import gc as _lastref_gc
from . import _shim

if TYPE_CHECKING:
    from ._report import Report

__all__ = ["Guard", "guard", "guard_stats", "is_guarded", "unguard"]

#: Frees device memory if it can: called with the device's index and the bytes that are wanted.
Callback = Callable[[int, int], object]

_RUNGS = ("search again", "cycle collection", "callbacks")
#: How long a failing allocation waits for its report. The search itself has a bound of its own, below this.
_REPORT_SECONDS = 20.0

_lock = threading.RLock()
_guards: list["Guard"] = []
_library: ctypes.CDLL | None = None
_why_no_shim: str | None = None
_is_observing = False
_observed_failures = 0
_last_report: "Report | None" = None


class Guard:
    """What `guard` returns: a guard that is in force, until `close`, the end of a ``with``, or `unguard`."""

    def __init__(
        self,
        mode: str,
        why: str | None,
        report: bool | Literal["apart"],
        callbacks: tuple[Callback, ...],
        signal: int | None,
        thresholds: dict[int, int],
    ) -> None:
        self.mode = mode
        """``"retry"``; or ``"observer"``, if the shim is not available: failures are reported, not prevented."""
        self.why = why
        """What is missing and how to get it, if the mode is not ``"retry"``."""
        self.report = report
        self.callbacks = callbacks
        self._signal = signal
        self._thresholds = thresholds

    def close(self) -> None:
        """Ends this guard. The wrapper is taken out with the last one."""
        with _lock:
            if self not in _guards:
                return
            _guards.remove(self)
            if not _guards and _library is not None:
                _library.lastref_torch_uninstall()
        for device, threshold in self._thresholds.items():
            _lastref_gc.set_byte_threshold(threshold, device)
        if self._signal is not None:
            from . import _jobs

            _jobs.remove_signal(self._signal)

    def __enter__(self) -> "Guard":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "in force" if self in _guards else "closed"
        return f"<lastref.torch.Guard mode={self.mode!r}, {state}>"


def guard(
    *,
    signal: int | None = None,
    byte_threshold: int | None = None,
    report: bool | Literal["apart"] = True,
    callbacks: Iterable[Callback] = (),
) -> Guard:
    """Has dead cycles collected before an allocation of PyTorch's on a GPU fails.

    PyTorch's allocator stays, with all its features. An allocation that finds the device full then, in
    this order, until it succeeds: searches again, for PyTorch does not after it has waited for pending
    frees; has lastref's collector run, Python's part of it too (`lastref.gc`), young generation first;
    calls the callbacks. If all that does not help, ``torch.OutOfMemoryError`` leaves as it would without,
    with lastref's report added to its text. The collector also runs when the bytes in use on a device
    have grown by a threshold.

    It is in force from the call on. Used in a ``with`` statement, it ends there; `unguard` ends all.
    CUDA is not initialised by it.

    >>> import lastref.torch                                                     # doctest: +SKIP
    >>> with lastref.torch.guard():                                              # doctest: +SKIP
    ...     train()

    Collections, finalizers, callbacks and reports run on the collector's thread, while the thread that
    allocates waits, with the interpreter lock let go of. `lastref.gc.set_wait_bound` limits the wait. An
    allocation by a finalizer on that thread does not wait, and nobody waits during the capture of a
    CUDA graph: there an error leaves at once.

    With ``PYTORCH_NO_CUDA_MEMORY_CACHING=1`` the error is PyTorch's ``torch.AcceleratorError``, with the report too.
    PyTorch does not count its bytes then, so that only failures drive collections.

    What a ``torch.cuda.MemPool`` in use or a CUDA graph has in its cache stays there, as without a guard: a graph may
    use it when it is replayed. A request in another size than those cached can fail for that.

    A request that is larger than the device, or than the limit set for it, fails at once.

    Observers that ``torch._C._cuda_attach_out_of_memory_observer`` attaches after `guard` see only failures that
    leave; those attached before see each attempt. ``num_ooms`` in ``torch.cuda.memory_stats`` counts only those that
    leave, as long as the guard is in force.
    A history of ``torch.cuda.memory._record_memory_history`` has an ``oom`` entry for each attempt.

    Without the shim (no compiler, an unknown version of torch) a warning says what is missing and how to
    get it. A report is still made when an allocation fails, and printed on standard error, but the
    allocation is not tried again, and bytes drive no collection.

    Args:
        signal: a signal, such as ``signal.SIGUSR2``, at which the running program writes a report.
        byte_threshold: what to set by `lastref.gc.set_byte_threshold` on every device, until the guard ends.
        report: whether an error's text gets the report of who holds the memory. Without, it says
            in a few lines how much is live, cached and pending, and what was tried. With ``"apart"`` it says
            so too, and the report goes to the folder that ``LASTREF_REPORT_DIR`` names, if it names one.
        callbacks: called one after the other with the device's index and the bytes that are wanted, when
            the collector has not freed enough; after each the allocation is tried again. An exception
            in one is printed and otherwise ignored.

    Returns:
        The guard, whose ``mode`` says whether failures are prevented (``"retry"``) or only reported.

    Raises:
        RuntimeError: PyTorch's allocator has been replaced by another (``torch.cuda.change_current_allocator``).
        ValueError: ``signal`` is given and this is not the main thread.
    """
    import torch

    global _why_no_shim
    callbacks = tuple(callbacks)
    with _lock:
        why = _install(torch)
        if signal is not None:
            from . import _jobs

            try:
                signal = _signal.Signals(signal)
                _jobs.install_signal(signal)
            except BaseException:
                if not _guards and _library is not None:
                    _library.lastref_torch_uninstall()
                raise
        if why is not None:
            if why != _why_no_shim:
                _why_no_shim = why
                warnings.warn(
                    f"lastref.torch.guard cannot try failed allocations again: {why}. Failures are reported only",
                    RuntimeWarning,
                    stacklevel=2,
                )
            _observe(torch)
        thresholds: dict[int, int] = {}
        if byte_threshold is not None:
            for device in range(torch.cuda.device_count()):
                thresholds[device] = _lastref_gc.get_byte_threshold(device)
                _lastref_gc.set_byte_threshold(byte_threshold, device)
        made = Guard(
            "retry" if why is None else "observer", why, report, callbacks, signal, thresholds
        )
        _guards.append(made)
    if report:
        _prepare_report()
    return made


def unguard() -> None:
    """Ends all guards: PyTorch's allocator is again as it was.

    If another library has put a wrapper of its own on top meanwhile, lastref's stays under it and only
    passes on what it is asked.
    """
    with _lock:
        for each in reversed(_guards.copy()):
            each.close()


def is_guarded() -> bool:
    """Whether a guard is in force that tries failed allocations again."""
    return bool(_guards) and _library is not None


def guard_stats() -> dict[str, Any]:
    """What guards have done since the program began.

    ``mode``: ``"retry"``, ``"observer"`` or ``"off"``. ``failures``: errors that left. ``rescues``:
    allocations that failed at first and then succeeded. ``rungs``: for ``"search again"``, ``"cycle collection"``
    and ``"callbacks"`` each a dict of ``runs`` (allocations that came to that rung), ``rescues``, ``bytes``
    (that became free by it) and ``microseconds``. ``collections``: runs of the collector before a failure, and
    because bytes had grown; `lastref.gc.stats` has more.
    """
    counters = [0] * (2 + 4 * len(_RUNGS))
    if _library is not None:
        buffer = (ctypes.c_uint64 * len(counters))()
        _library.lastref_torch_counters(buffer)
        counters = list(buffer)
    failures, without_ladder, *rest = counters
    rungs = {
        name: dict(zip(("runs", "rescues", "bytes", "microseconds"), rest[4 * at : 4 * at + 4]))
        for at, name in enumerate(_RUNGS)
    }
    runs = _lastref_gc.stats()
    return {
        "mode": _guards[-1].mode if _guards else "off",
        "failures": failures + _observed_failures,
        "failures_without_ladder": without_ladder,
        "rescues": sum(rung["rescues"] for rung in rungs.values()),
        "rungs": rungs,
        "collections": {"before failure": runs["oom"].runs, "bytes grown": runs["bytes"].runs},
        "microseconds": sum(rung["microseconds"] for rung in rungs.values()),
    }


def last_report() -> "Report | None":
    """The report of the latest failure that left, if one was made. It holds no tensors."""
    return _last_report


# With the shim


def _install(torch: Any) -> str | None:
    """Puts the wrapper in. Returns what is missing, if it cannot."""
    global _library
    if _library is None and _why_no_shim is not None:
        return _why_no_shim
    if _library is None:
        backend = torch.cuda.get_allocator_backend() if torch.version.cuda else "native"
        if backend not in ("native", "cudaMallocAsync"):
            raise RuntimeError(
                f"guard: PyTorch's allocator has been replaced by another ({backend}), which does not say when "
                "it is out of memory: call guard before torch.cuda.memory.change_current_allocator, or not at all"
            )
        try:
            library = _shim.load(torch)
        except _shim.Unavailable as error:
            return str(error)
        except OSError as error:
            return f"the shim cannot be loaded: {error}"
        _lastref.torch_attach(
            _address(library.lastref_torch_device_bytes),
            _address(library.lastref_torch_bytes_freed),
            _call_back,
            _report_text,
            _REPORT_SECONDS,
        )
        _library = library
    python = ctypes.pythonapi
    functions = (python.PyGILState_Check, python.PyEval_SaveThread, python.PyEval_RestoreThread)
    problem = _library.lastref_torch_install(_lastref.torch_hooks(), *map(_address, functions))
    if problem is not None:
        raise RuntimeError(f"guard: {problem.decode(errors='replace')}")
    return None


def _address(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


def _call_back(number: int, device: int, num_bytes: int) -> bool:
    """Calls one of the callbacks of all guards; false if there are not so many."""
    callbacks = [callback for each in _guards.copy() for callback in each.callbacks]
    if number >= len(callbacks):
        return False
    try:
        callbacks[number](device, num_bytes)
    except Exception:
        # Printed, not raised: it must not take the place of the error that is on its way.
        traceback.print_exc()
    return True


def _report_text(
    device: int,
    num_bytes: int,
    rungs: list[tuple[str, int, int]],
    obstacles: list[str],
    summary: str,
) -> str:
    """What is added to an error's text: the summary, what kept Python's collector from freeing, the report."""
    lines = [f"  python's gc {obstacle}" for obstacle in obstacles]
    if any(each.report for each in _guards.copy()):
        made = _make_report(device, num_bytes, rungs)
        if made is not None and any(each.report is True for each in _guards.copy()):
            last = summary.rpartition("\n")[2].strip()
            first = last if last.startswith("nothing was tried") else "nothing that was tried freed enough"
            return "\n".join([f"lastref: {first}", *lines, str(made)])
    return "\n".join([summary, *lines])


def _make_report(
    device: int, num_bytes: int, rungs: list[tuple[str, int, int]]
) -> "Report | None":
    global _last_report
    try:
        from . import _report

        described = [
            {"name": name, "bytes": freed, "microseconds": microseconds}
            for name, freed, microseconds in rungs
        ]
        made = _report.for_out_of_memory(device, num_bytes, described)
    except Exception as error:
        print(f"lastref: the report could not be made: {error!r}", file=sys.stderr)
        return None
    _last_report = made
    if os.environ.get("LASTREF_REPORT_DIR"):
        from . import _jobs

        _jobs.write_report(made)
    return made


def _prepare_report() -> None:
    """Imports what a report needs, while there is memory."""
    try:
        from . import _jobs, _report  # noqa: F401
    except ImportError as error:
        warnings.warn(f"lastref.torch.guard: no reports, since {error}", RuntimeWarning, stacklevel=3)


# Without the shim


def _observe(torch: Any) -> None:
    """Attaches PyTorch's own observer, once CUDA is initialised."""
    global _is_observing
    if _is_observing or torch.version.cuda is None:
        return
    _is_observing = True
    torch.cuda._lazy_call(lambda: torch._C._cuda_attach_out_of_memory_observer(_on_failure))


def _on_failure(device: int, num_bytes: int, limit: int, free: int) -> None:
    """Called by PyTorch on the thread that allocates, before the error leaves."""
    global _observed_failures
    guards = _guards.copy()
    if not guards or is_guarded():
        return
    _observed_failures += 1
    if any(each.report for each in guards):
        made = _make_report(device, num_bytes, [])
        if made is not None and any(each.report is True for each in guards):
            print(str(made), file=sys.stderr)
