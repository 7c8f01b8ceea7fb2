"""What memory there is: the storages of all live tensors, and where a device's bytes are.

A storage is found through the tensors that Python objects stand for. What only C++ refers to is found
by `lastref.torch._autograd`, or counted as held by a native owner. Nothing here allocates device
memory, and no code of a tensor's subclass is run.
"""

import bisect
import ctypes
import math
import os
from typing import Any

import torch

# The methods of the class under all tensors, which no subclass has replaced.
_base: Any = vars(torch._C)["TensorBase"]
_get = {
    name: getattr(_base, name).__get__
    for name in ("device", "dtype", "shape", "requires_grad", "is_leaf", "grad_fn", "grad", "retains_grad")
}
_untyped_storage = _base.untyped_storage
_storage_address: Any = getattr(torch._C, "_storage_address", None)
_numel = _base.numel
_element_size = _base.element_size
_layout = _base.layout.__get__
_data_address: Any = torch._C._data_address  # type: ignore[attr-defined]

PAGE = 2 << 20


# Asking a tensor for its storage makes a Python object that stays as long as the storage does. So the C++
# object is read where it lies: where it has its size is found once, by storages whose sizes are known.


def _word(address: int, at: int) -> int:
    return ctypes.c_uint64.from_address(address + 8 * at).value


def _place_of_size() -> int | None:
    """At which word of a storage's C++ object its size is; None if that cannot be told."""
    if _storage_address is None:
        return None
    places = set(range(8))  # No storage has fewer.
    for size in (1237, 7919, 104_729):
        made = torch.empty(size, dtype=torch.uint8, device="cpu")
        address = _storage_address(made)
        places = {at for at in places if _word(address, at) == size}
    return places.pop() if len(places) == 1 else None


_size_at = _place_of_size()
#: From here on the word is no size: it stands for one that is not known yet.
_NO_SIZE = 1 << 62


class Held:
    """A storage, and what is known of who refers to it."""

    __slots__ = (
        "address", "bytes", "capsules", "device", "dtype", "grads", "is_parameter", "num_tensors",
        "objects", "requires_grad", "shape", "used",
    )  # fmt: skip

    def __init__(self, address: int, num_bytes: int, device: str) -> None:
        self.address = address
        self.bytes = num_bytes
        self.device = device
        self.used = 0
        self.dtype = ""
        self.shape: tuple[int, ...] = ()
        self.requires_grad = False
        self.is_parameter = False
        self.num_tensors = 0
        self.objects: list[Any] = []
        self.grads: list[Any] = []
        self.capsules: list[Any] = []

    def see(self, tensor: Any, *, has_object: bool) -> None:
        """Notes a tensor on this storage; `has_object`: Python refers to it."""
        used = min(_numel(tensor) * _element_size(tensor), self.bytes)
        if has_object:
            self.objects.append(tensor)
            self.num_tensors += 1
        if used >= self.used or not self.dtype:
            self.used = used
            self.dtype = str(_get["dtype"](tensor)).removeprefix("torch.")
            try:
                self.shape = tuple(_get["shape"](tensor))
            except RuntimeError:  # a nested tensor has many
                self.shape = (_numel(tensor),)
        self.requires_grad = self.requires_grad or _get["requires_grad"](tensor)
        self.is_parameter = self.is_parameter or type(tensor) is torch.nn.Parameter


class Storages:
    """All storages that were found, by the address of their C++ object."""

    def __init__(self) -> None:
        self.by_key: dict[int, Held] = {}

    def of(self, tensor: Any) -> Held | None:
        """The storage of a tensor; None if it has none of its own, or none with bytes."""
        try:
            if _size_at is None:
                # The storage's own `data_ptr` would make a copy that was put off.
                return self._of_storage(_untyped_storage(tensor), _data_address(tensor))
            key: int = _storage_address(tensor)
            held = self.by_key.get(key)
            if held is not None:
                return held
            size, address = _word(key, _size_at), _data_address(tensor)
            if not 0 < size < _NO_SIZE or address == 0:
                return None
            held = self.by_key[key] = Held(address, size, str(_get["device"](tensor)))
            return held
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            return None  # sparse, a wrapper around other tensors, a tensor with no data

    def _of_storage(self, storage: Any, address: int | None = None) -> Held | None:
        key: int = storage._cdata
        held = self.by_key.get(key)
        if held is None:
            device = storage.device
            size = storage.nbytes()
            if device.type == "meta" or size == 0:
                return None
            try:
                address = storage.data_ptr() if address is None else address
            except RuntimeError:
                return None
            held = self.by_key[key] = Held(address, size, str(device))
        return held

    def see(self, tensor: Any, *, is_referred_to: bool) -> None:
        """Notes a tensor that a Python object stands for.

        One that no Python object refers to, such as the base of a view, is kept by C++ alone.
        """
        if _layout(tensor) is torch.strided:
            held = self.of(tensor)
            if held is not None and is_referred_to:
                held.see(tensor, has_object=True)
            elif held is not None:
                held.objects.append(tensor)
            return
        for part in _parts(tensor):
            held = self.of(part)
            if held is not None:
                held.see(part, has_object=False)
                held.objects.append(tensor)

    def see_storage(self, storage: Any) -> None:
        """Notes a storage that a Python object stands for."""
        try:
            held = self._of_storage(storage)
        except (RuntimeError, NotImplementedError, TypeError):
            return
        if held is not None:
            held.objects.append(storage)

    def at(self, address: int) -> Held | None:
        """The storage that this address lies in."""
        for held in self.by_key.values():
            if held.address <= address < held.address + held.bytes:
                return held
        return None


def _parts(tensor: Any) -> list[Any]:
    """The dense tensors that a sparse one is made of."""
    names = ("_values", "_indices", "values", "crow_indices", "col_indices", "ccol_indices", "row_indices")
    found = []
    for name in names:
        try:
            found.append(getattr(_base, name)(tensor))
        except (RuntimeError, AttributeError):
            continue
    return found


# Devices


def used_devices() -> list[int]:
    """The CUDA devices whose allocator may have given out memory."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return []
    return list(range(torch.cuda.device_count()))


def snapshot() -> list[dict[str, Any]] | None:
    """The allocator's segments, without their history; None if the allocator cannot tell."""
    take: Any = torch.cuda.memory_snapshot
    try:
        segments: list[dict[str, Any]] = take(include_traces=False)
    except TypeError:  # before 2.11 there is no such argument
        segments = take()
    except RuntimeError:  # an allocator that was plugged in
        return None
    return segments


def device_memory(index: int, segments: list[dict[str, Any]]) -> dict[str, Any]:
    """Where the bytes of a device are: the parts add up to its total. See `Report`."""
    free, total = torch.cuda.mem_get_info(index)
    live = pending = cached = fragmented = hole = in_pools = 0
    for segment in segments:
        if segment["device"] != index:
            continue
        blocks = segment["blocks"]
        is_in_pool = tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
        is_unused = all(block["state"] == "inactive" for block in blocks)
        for block in blocks:
            size = block["size"]
            if block["state"] == "active_allocated":
                live += size
            elif block["state"] == "inactive":
                hole = max(hole, size)
                whole = size if is_unused else 0
                if segment.get("is_expandable") and not is_unused:
                    # Pages of such a segment are given back one by one.
                    first = math.ceil(block["address"] / PAGE) * PAGE
                    whole = max(0, (block["address"] + size) // PAGE * PAGE - first)
                cached += whole
                in_pools += whole if is_in_pool else 0
                fragmented += size - whole
            else:
                pending += size
    rest = max(0, total - free - live - pending - cached - fragmented)
    others = other_processes(index)
    if others is not None:
        others = min(others, rest)
    found: dict[str, Any] = {
        "index": index,
        "name": torch.cuda.get_device_name(index),
        "total": total,
        "free": free,
        "live": live,
        "cached": cached,
        "pending": pending,
        "fragmented": fragmented,
        "context": rest - (others or 0),
        "other_processes": others,
        "largest_hole": hole,
    }
    found["cures"] = device_cures({**found, "cached": cached - in_pools, "in_pools": in_pools})
    fraction = torch.cuda.get_per_process_memory_fraction(index)
    if fraction < 1:
        allowed = round(fraction * total / (1 << 20))
        found["cures"].append(
            f"a limit: set_per_process_memory_fraction({fraction:g}) allows this process {allowed} MiB of the device"
        )
    return found


def device_cures(memory: dict[str, Any]) -> list[str]:
    """What helps against each kind of memory that is a twentieth of the device or more."""
    texts = {
        "cached": "cached memory: torch.cuda.empty_cache() gives it to other programs; this one reuses it by itself",
        "in_pools": "cached in pools: it stays until the torch.cuda.MemPool or the CUDA graph is let go of; empty_cache() does not give it back",
        "pending": "pending memory: another stream still uses it; torch.cuda.synchronize() lets it be reused",
        "fragmented": "fragmented memory: set PYTORCH_ALLOC_CONF=expandable_segments:True, or free the small tensors in between",
        "context": "context and libraries: only the end of the process gives it back; fewer libraries and processes on the device need less",
        "other_processes": "other processes: end them; `nvidia-smi` lists them",
        "live": "live memory: let go of the storages listed here",
    }
    least = memory["total"] // 20
    return [text for kind, text in texts.items() if (memory.get(kind) or 0) >= max(least, 1)]


class _ProcessInfo(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


def other_processes(index: int) -> int | None:
    """The bytes that other processes use on the device, as NVML tells; None if it does not."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return None
        handle = ctypes.c_void_p()
        uuid = str(torch.cuda.get_device_properties(index).uuid)
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else "GPU-" + uuid
        if nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)) != 0:
            return None
        count = ctypes.c_uint(256)
        infos = (_ProcessInfo * 256)()
        if nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), infos) != 0:
            return None
    except (OSError, AttributeError, RuntimeError):
        return None
    unknown = (1 << 64) - 1
    entries: list[Any] = [infos[at] for at in range(count.value)]
    if any(entry.used == unknown for entry in entries):
        return None
    return int(sum(entry.used for entry in entries if entry.pid != os.getpid()))


def unknown_blocks(segments: list[dict[str, Any]], addresses: set[int], device: int | None) -> tuple[int, int]:
    """The bytes and the number of live blocks in which no storage that was found begins."""
    num_bytes = count = 0
    ordered = sorted(addresses)
    for segment in segments:
        if device is not None and segment["device"] != device:
            continue
        for block in segment["blocks"]:
            if block["state"] != "active_allocated":
                continue
            at = bisect.bisect_left(ordered, block["address"])
            if at == len(ordered) or ordered[at] >= block["address"] + block["size"]:
                num_bytes += block["size"]
                count += 1
    return num_bytes, count
