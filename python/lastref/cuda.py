"""CUDA devices: which there are, their streams, and what their memory holds.

The functions are those of ``torch.cuda``. Where a function takes a ``device``, it may be an index, a
name such as ``"cuda:1"``, a `lastref.device`, or None for the current device.

>>> import lastref
>>> lastref.cuda.device_count() > 0 or not lastref.cuda.is_available()
True
"""

import json
import threading
from types import TracebackType
from typing import Any, NamedTuple

from . import _cuda_memory as memory
from . import _lastref
from ._lastref import Event, MemPool, OutOfMemoryError, Stream
from ._lastref import device as _Device

__all__ = [
    "DeviceProperties",
    "Event",
    "MemPool",
    "MemPoolContext",
    "OutOfMemoryError",
    "Stream",
    "StreamContext",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "empty_cache",
    "get_device_name",
    "get_device_properties",
    "get_per_process_memory_fraction",
    "is_available",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory",
    "memory_allocated",
    "memory_reserved",
    "memory_snapshot",
    "memory_stats",
    "memory_summary",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
    "set_device",
    "set_per_process_memory_fraction",
    "stream",
    "synchronize",
    "trim",
    "use_mem_pool",
]

_DeviceLike = _Device | str | int | None


# Devices


def is_available() -> bool:
    """Whether there is a CUDA device, or a simulated one was asked for.

    Never raises: a malformed ``LASTREF_SIM`` is reported on standard error and the answer is False.
    """
    return _lastref.cuda_is_available()


def device_count() -> int:
    """The number of CUDA devices; 0 where `is_available` is False."""
    return _lastref.cuda_device_count()


def current_device() -> int:
    """The index of the device this thread uses where none is named."""
    return _lastref.cuda_current_device()


def set_device(device: _DeviceLike) -> None:
    """Makes ``device`` the current one for this thread. The context manager `device` undoes itself."""
    _lastref.cuda_set_device(device)


def get_device_name(device: _DeviceLike = None) -> str:
    """The name of the device. A simulated device says that it is simulated."""
    return _lastref.cuda_get_device_name(device)


class DeviceProperties(NamedTuple):
    """What a device is. Does not change while the process runs."""

    name: str
    total_memory: int
    """All the memory the device has, in bytes."""
    is_simulated: bool
    """Whether host memory stands in for the device's."""


def get_device_properties(device: _DeviceLike = None) -> DeviceProperties:
    """The properties of the device."""
    return DeviceProperties(*_lastref.cuda_get_device_properties(device))


class device:
    """A context manager: the current device of this thread within the block.

    None changes nothing.

    >>> import lastref
    >>> with lastref.cuda.device(None):
    ...     pass
    """

    __slots__ = ("_index", "_previous")

    def __init__(self, device: _DeviceLike) -> None:
        self._index = device
        self._previous: list[int] = []

    def __enter__(self) -> None:
        if self._index is not None:
            previous = current_device()
            set_device(self._index)
            self._previous.append(previous)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._index is not None:
            set_device(self._previous.pop())


# Streams


def synchronize(device: _DeviceLike = None) -> None:
    """Waits for all work on all streams of the device. Other Python threads run meanwhile."""
    _lastref.cuda_synchronize(device)


def current_stream(device: _DeviceLike = None) -> Stream:
    """The stream on which this thread's work on the device runs."""
    return _lastref.cuda_current_stream(device)


def default_stream(device: _DeviceLike = None) -> Stream:
    """The stream that exists without being created."""
    return _lastref.cuda_default_stream(device)


class StreamContext:
    """What `stream` gives: a context manager that makes a stream the current one."""

    __slots__ = ("_previous", "_stream")

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream
        self._previous: list[tuple[int, Stream]] = []

    def __enter__(self) -> None:
        if self._stream is not None:
            device = current_device()
            previous = current_stream(self._stream.device)
            _lastref.cuda_set_stream(self._stream)
            self._previous.append((device, previous))

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._stream is not None:
            device, previous = self._previous.pop()
            _lastref.cuda_set_stream(previous)
            set_device(device)


def stream(stream: Stream | None) -> StreamContext:
    """A context manager: within the block, ``stream`` and its device are this thread's current ones.

    Tensors made in the block belong to the stream: their memory is used again on that stream first.
    None changes nothing.
    """
    return StreamContext(stream)


# Pools


class MemPoolContext:
    """What `use_mem_pool` gives: a context manager that sends this thread's new tensors to a pool."""

    __slots__ = ("_device", "_open", "_pool")

    def __init__(self, pool: MemPool, device: _DeviceLike = None) -> None:
        self._pool = pool
        self._device = device
        self._open: list[tuple[int, _lastref._MemPoolScope]] = []

    def __enter__(self) -> None:
        scope = _lastref._MemPoolScope(self._pool, self._device)
        self._open.append((threading.get_ident(), scope))

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        thread, scope = self._open[-1]
        if thread != threading.get_ident():
            raise RuntimeError("use_mem_pool: left on another thread than it was entered on")
        self._open.pop()
        scope.close()


def use_mem_pool(pool: MemPool, device: _DeviceLike = None) -> MemPoolContext:
    """A context manager: tensors that this thread makes in the block lie in ``pool``.

    Of nested blocks the innermost counts, for tensors on its pool's device; other threads are not
    concerned. ``device`` may name the pool's device, as in torch; entering the block raises ValueError
    if it names another.

    >>> import lastref
    >>> pool = lastref.cuda.MemPool() if lastref.cuda.is_available() else None
    >>> if pool is not None:
    ...     with lastref.cuda.use_mem_pool(pool):
    ...         t = lastref.empty(1024, device="cuda")
    ...     assert pool.memory_allocated() == t.nbytes
    """
    return MemPoolContext(pool, device)


# Memory


def empty_cache() -> None:
    """Gives all cached memory back to the devices, where other programs can see it.

    It does not enlarge what this process can allocate: the cache is given back by itself before an
    allocation fails.
    """
    _lastref.cuda_empty_cache()


def trim() -> int:
    """Gives cached memory back that was not used for as long as the setting ``idle_trim_ms`` says.

    Returns how many bytes that was; 0 where it is not set. The same happens by itself when tensors come
    and go: a server that may be idle for long calls this from a timer.
    """
    return _lastref.cuda_trim()


def memory_allocated(device: _DeviceLike = None) -> int:
    """Bytes that tensors hold on the device."""
    return _lastref.cuda_memory_allocated(device)


def max_memory_allocated(device: _DeviceLike = None) -> int:
    """The most bytes that tensors held at once since the start or `reset_peak_memory_stats`."""
    return _lastref.cuda_max_memory_allocated(device)


def memory_reserved(device: _DeviceLike = None) -> int:
    """Bytes obtained from the device: what tensors hold and what is cached."""
    return _lastref.cuda_memory_reserved(device)


def max_memory_reserved(device: _DeviceLike = None) -> int:
    """The most bytes obtained at once since the start or `reset_peak_memory_stats`."""
    return _lastref.cuda_max_memory_reserved(device)


def memory_stats(device: _DeviceLike = None) -> dict[str, int]:
    """All statistics of the device's allocator, with PyTorch's keys.

    For example ``allocated_bytes.all.current``, ``reserved_bytes.small_pool.peak``,
    ``num_alloc_retries``. PyTorch does not have ``num_thread_cache_hits``, ``num_stream_waits``,
    ``num_waits_before_growing``, ``num_pages_moved``, ``num_trims``, ``num_trimmed_bytes``, nor, for each
    rung of the ladder before an out-of-memory error, such as ``move_pages`` or ``reclaimer collection``:
    ``rung.NAME.num_tried``, ``.num_failed``, ``.bytes_freed``, ``.microseconds``.
    """
    return _lastref.cuda_memory_stats(device)


def memory_summary(device: _DeviceLike = None) -> str:
    """The statistics as a table for people."""
    return _lastref.cuda_memory_summary(device)


def memory_snapshot(device: _DeviceLike = None) -> list[dict[str, Any]]:
    """What the allocator holds: a list of segments, each with its blocks, with PyTorch's keys."""
    segments: list[dict[str, Any]] = json.loads(_lastref.cuda_memory_snapshot_json(device))
    return segments


def reset_peak_memory_stats(device: _DeviceLike = None) -> None:
    """Starts the peaks anew from what is held now."""
    _lastref.cuda_reset_peak_memory_stats(device)


def reset_accumulated_memory_stats(device: _DeviceLike = None) -> None:
    """Starts the totals of allocated and freed anew from zero."""
    _lastref.cuda_reset_accumulated_memory_stats(device)


def mem_get_info(device: _DeviceLike = None) -> tuple[int, int]:
    """Bytes free on the device, and all its bytes, as the device counts them for all programs."""
    return _lastref.cuda_mem_get_info(device)


def set_per_process_memory_fraction(fraction: float, device: _DeviceLike = None) -> None:
    """Limits this process to a fraction, 0 to 1, of the device's memory.

    Raises:
        ValueError: ``fraction`` is not between 0 and 1.
    """
    _lastref.cuda_set_per_process_memory_fraction(fraction, device)


def get_per_process_memory_fraction(device: _DeviceLike = None) -> float:
    """The fraction of the device's memory that this process may hold; 1 where none was set."""
    return _lastref.cuda_get_per_process_memory_fraction(device)


def _set_allocator_settings(settings: str) -> None:
    """Changes settings of the allocators of all devices; those that are not named stay as they are.

    ``settings`` is ``key:value,key:value``, as in the environment variable ``LASTREF_ALLOC_CONF``,
    which is read once when the first device is used. The keys, as in PyTorch where the meaning is the
    same:

    * ``expandable_segments`` (``True``, the default, or ``False``): only in ``LASTREF_ALLOC_CONF``.
    * ``per_process_memory_fraction`` (0 to 1): as `set_per_process_memory_fraction`.
    * ``memory_limit_mb`` (MiB): the same as a size.
    * ``waste_slack_per_mille`` (4): by how many thousandths what is reserved may pass the peak in use,
      before idle pages are moved instead of creating new ones.
    * ``wait_before_growing`` (``True`` or ``False``): whether an allocation may wait for streams rather
      than pass that slack.
    * ``stream_waits`` (``never``, ``before_growing``, the default, or ``at_limit``): when a stream may be
      made to wait, on the device, for others that still use freed memory, to be given that: never, rather
      than pass that slack, or where the device is full.
    * ``idle_trim_ms`` (0, never): cached memory that was not used for so long goes back to the device; see
      `trim`.
    * ``idle_keep_mb`` (0): so much cached memory stays, however long it is not used.
    * ``history_entries``: how many allocations and frees `memory_snapshot` shows; 0, the default, for
      none.

    Raises:
        ValueError: A key that is unknown (the text lists the valid ones), a value that does not fit, or
            two keys that contradict each other.
        RuntimeError: The setting cannot change any more.
    """
    _lastref.cuda_set_allocator_settings(settings)
