"""The cycle collector: what reference counting cannot free.

Objects that refer to each other in a circle keep each other: nobody can reach them, and they stay
until Python's `gc` finds them. If they hold tensors, the device memory stays allocated too. Python
counts objects and knows of no bytes, so it may let hundreds of gigabytes wait. lastref's collector
runs it when bytes ask for it, on a thread of its own:

* when the bytes in use on a device have grown by a threshold (`set_byte_threshold`), unless the
  program has called ``gc.disable()`` or `disable`;
* before an allocation fails for want of memory, whatever those two say. Only
  `set_before_out_of_memory` switches that off. The thread that allocates waits, at most as long as
  `set_wait_bound` says, and other Python threads run meanwhile.

Finalizers therefore run on the collector's thread. An allocation that one of them makes there does
not wait for the collector again; it fails if the device is full. What ``gc.freeze()`` has hidden, or
``gc.DEBUG_SAVEALL`` keeps, cannot be freed: an out-of-memory error says so. From the beginning of the
interpreter's exit, Python's collector is left alone.

>>> import lastref
>>> class Node:
...     def __init__(self, tensor):
...         self.me, self.tensor = self, tensor
>>> Node(lastref.zeros(1000)).tensor.nbytes  # a dead cycle from here on
4000
>>> lastref.gc.collect() > 0
True

How often Python's own automatic collection runs is still a matter of Python's ``gc``; ``gc.collect()``
finds cycles of Python objects as well as `collect` does.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from . import _lastref
from ._lastref import device as _Device

__all__ = [
    "RunStats",
    "add_callback",
    "collect",
    "disable",
    "enable",
    "get_before_out_of_memory",
    "get_byte_threshold",
    "get_wait_bound",
    "isenabled",
    "remove_callback",
    "set_before_out_of_memory",
    "set_byte_threshold",
    "set_wait_bound",
    "stats",
]

_DeviceLike = _Device | str | int | None
_Callback = TypeVar("_Callback", bound=Callable[[str, dict[str, Any]], object])


# By hand


def collect(generation: int = 2) -> int:
    """Collects now, on this thread, and returns how many unreachable objects were found.

    First Python's ``gc.collect(generation)``, then what Rust code has made with ``lastref::gc``.
    `lastref.cuda.empty_cache` then gives the memory back to the device.

    Raises:
        ValueError: ``generation`` is not 0, 1 or 2.
    """
    return _lastref.gc_collect(generation)


# By itself


def enable() -> None:
    """Lets the collector run by itself when bytes have grown, as it does from the start."""
    _lastref.gc_enable()


def disable() -> None:
    """Keeps the collector from running by itself. It still runs before an allocation fails.

    ``gc.disable()`` does the same for the part that is Python's.
    """
    _lastref.gc_disable()


def isenabled() -> bool:
    """Whether the collector runs by itself."""
    return _lastref.gc_is_enabled()


def set_byte_threshold(num_bytes: int | None, device: _DeviceLike = None) -> None:
    """Sets the growth of the bytes in use on the device, since the last run, that starts a run.

    0 means never. None means the default: 64 MiB or an eighth of the device, whichever is more. Under
    ``lastref.torch.guard`` the bytes of PyTorch's tensors count too.

    >>> import lastref
    >>> lastref.gc.set_byte_threshold(1 << 30, 0)
    >>> lastref.gc.get_byte_threshold(0)
    1073741824
    >>> lastref.gc.set_byte_threshold(None, 0)
    """
    _lastref.gc_set_byte_threshold(num_bytes, device)


def get_byte_threshold(device: _DeviceLike = None) -> int:
    """The growth of the bytes in use on the device that starts a run; 0 for never."""
    return _lastref.gc_get_byte_threshold(device)


def set_before_out_of_memory(runs: bool) -> None:
    """Sets whether the collector runs before an allocation fails; it does from the start.

    ``gc.disable()`` and `disable` do not prevent this run.
    """
    _lastref.gc_set_before_out_of_memory(runs)


def get_before_out_of_memory() -> bool:
    """Whether the collector runs before an allocation fails."""
    return _lastref.gc_get_before_out_of_memory()


def set_wait_bound(seconds: float) -> None:
    """Sets how long an allocation that finds the device full waits for the collector: 30 at first.

    It waits for other threads to let go of the interpreter lock, and for finalizers. One that wants
    a lock which the waiting thread holds makes it wait that long, and then fail.

    Raises:
        ValueError: ``seconds`` is negative or not a number.
    """
    _lastref.gc_set_wait_bound(seconds)


def get_wait_bound() -> float:
    """How long, in seconds, an allocation that finds the device full waits for the collector."""
    return _lastref.gc_get_wait_bound()


# What it did


class RunStats(NamedTuple):
    """Sums over the runs that had one reason."""

    runs: int
    """Runs that have ended."""
    objects: int
    """Objects found to be unreachable."""
    device_bytes_freed: int
    """Device bytes that became free by it."""
    microseconds: int
    """The time that the runs took, finalizers included."""


def stats() -> dict[str, RunStats]:
    """What the collector's runs did since the start, by their reasons.

    ``"manual"``: `collect` was called. ``"bytes"``: the bytes in use had grown. ``"oom"``: an
    allocation was about to fail; one failure makes up to three runs, of generations 0, 1 and 2, until
    enough is free. ``"count"`` and ``"time"``: candidates of Rust code; Python's part is not run.

    >>> import lastref
    >>> before = lastref.gc.stats()["manual"]
    >>> _ = lastref.gc.collect()
    >>> lastref.gc.stats()["manual"].runs - before.runs
    1
    """
    return {reason: RunStats(*sums) for reason, *sums in _lastref.gc_stats()}


def add_callback(callback: _Callback) -> _Callback:
    """Calls ``callback(phase, info)`` at the beginning and the end of every run, where it happens.

    The phase is ``"start"`` or ``"stop"``. The dict ``info`` has the keys ``reason`` and
    ``generation``, and at the end ``objects``, ``device_bytes_freed`` and ``microseconds``; they are
    0 at the beginning. An exception is reported and otherwise ignored. Returns the callback, so it
    can decorate a function.
    """
    _lastref.gc_add_callback(callback)
    return callback


def remove_callback(callback: Callable[[str, dict[str, Any]], object]) -> None:
    """Calls ``callback`` no more.

    Raises:
        ValueError: it was not added.
    """
    _lastref.gc_remove_callback(callback)
