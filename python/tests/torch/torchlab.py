"""What the programs of `test_cases_torch` call a device: tensors of so many MiB, a count of what is live, a cap.

With LAB_DEVICE=cuda that is the device and its allocator under `guard`; else host memory, counted here, where the
collector runs before the cap is passed. Each look at what is live also writes who holds it to the file that LAB_REPORTS
names: one line of JSON. Programs that know of other devices find the same functions in a module for each.
"""

import gc
import json
import os
import weakref
from typing import Any

import torch

from lastref.torch import guard, guard_stats, report

MIB = 1 << 20
ON_DEVICE = os.environ.get("LAB_DEVICE") == "cuda"
#: Set by programs; here the collector runs in any case.
on_pressure: Any = None
_live = 0
_cap: int | None = None
_collections = 0


class OutOfHostMemory(RuntimeError):
    pass


OOM: type[Exception] = torch.OutOfMemoryError if ON_DEVICE else OutOfHostMemory
if ON_DEVICE:
    guard(report=False)


class _Buffer(bytearray):
    __slots__ = ("__weakref__",)


def _gone(mib: int) -> None:
    global _live
    _live -= mib


def alloc(mib: int, requires_grad: bool = False) -> torch.Tensor:
    global _live, _collections
    if ON_DEVICE:
        return torch.empty(mib * MIB // 4, device="cuda", requires_grad=requires_grad)
    if _cap is not None and _live + mib > _cap:
        _collections += 1
        gc.collect()
    if _cap is not None and _live + mib > _cap:
        raise OutOfHostMemory(f"{mib} MiB more than {_live} of {_cap}")
    buffer = _Buffer(mib * MIB)
    _live += mib
    weakref.finalize(buffer, _gone, mib)
    return torch.frombuffer(buffer, dtype=torch.float32).requires_grad_(requires_grad)


def live_mib() -> int:
    storages = [s for s in report(top=50).to_dict()["storages"] if s["bytes"] >= MIB // 2]
    with open(os.environ["LAB_REPORTS"], "a") as file:
        file.write(json.dumps(storages) + "\n")
    if not ON_DEVICE:
        return _live
    # What was asked for: the allocator rounds it up.
    return (torch.cuda.memory_stats().get("requested_bytes.all.current", 0) + MIB // 2) // MIB


def empty_cache() -> None:
    if ON_DEVICE:
        torch.cuda.empty_cache()


def set_cap(mib: int) -> None:
    global _cap
    _cap = mib
    if ON_DEVICE:
        _, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(mib * MIB / total)


def __getattr__(name: str) -> int:
    """`collections`: how often the collector ran before a failure, as a number."""
    if name == "collections":
        return int(guard_stats()["collections"]["before failure"]) if ON_DEVICE else _collections
    raise AttributeError(name)
