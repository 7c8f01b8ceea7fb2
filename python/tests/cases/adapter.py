"""What the programs in this folder call a device: MiB instead of tensors' shapes, and a cap.

Programs that know of other devices than lastref's find the same functions in a module for each.
"""

import typing

import lastref
from lastref import OutOfMemoryError as OOM
from lastref import cuda

__all__ = ["OOM", "Tensor", "alloc", "empty_cache", "live_mib", "set_cap"]

MIB = 1 << 20


class Tensor(lastref.Tensor):
    """A tensor that keeps what it was computed from, as those with gradients do."""

    requires_grad = False
    inputs: tuple[typing.Any, ...] = ()

    def __getitem__(self, index: typing.Any) -> "Tensor":
        return Tensor(super().__getitem__(index))

    def small_copy(self) -> "Tensor":
        return alloc_bytes(1)

    def detach(self) -> "Tensor":
        return Tensor(self)

    def sum(self) -> "Tensor":
        return computed_from(self)

    def __mul__(self, other: object) -> "Tensor":
        return computed_from(self, other)

    def __add__(self, other: object) -> "Tensor":
        return computed_from(self, other)

    __radd__ = __add__


def alloc_bytes(num_bytes: int) -> Tensor:
    return Tensor(lastref.empty(num_bytes, dtype=lastref.uint8, device="cuda"))


def computed_from(*inputs: object) -> Tensor:
    result = alloc_bytes(1)
    result.requires_grad = any(getattr(tensor, "requires_grad", False) for tensor in inputs)
    if result.requires_grad:
        result.inputs = inputs
    return result


def alloc(mib: int, requires_grad: bool = False) -> Tensor:
    tensor = alloc_bytes(mib * MIB)
    tensor.requires_grad = requires_grad
    return tensor


def live_mib() -> int:
    return (cuda.memory_allocated() + MIB // 2) // MIB


def empty_cache() -> None:
    cuda.empty_cache()


def set_cap(mib: int) -> None:
    _, total = cuda.mem_get_info()
    cuda.set_per_process_memory_fraction(mib * MIB / total)


def __getattr__(name: str) -> int:
    """`collections`: the runs that allocations which found the cap waited for, as a number."""
    if name == "collections":
        return lastref.gc.stats()["oom"].runs
    raise AttributeError(name)
