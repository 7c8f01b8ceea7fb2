"""Bad input: a clear exception of the type PyTorch raises, and nothing leaked (see conftest)."""

import gc
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy
import pytest

import lastref
from conftest import MIB
from lastref import Tensor, cuda


def on_device() -> Tensor:
    return lastref.zeros(4, 5, device="cuda")


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        # Shapes.
        (lambda: lastref.empty(-1), RuntimeError, "negative size -1"),
        (lambda: lastref.empty((2, -3), device="cuda"), RuntimeError, "-3"),
        (lambda: lastref.zeros(1 << 62, 4), RuntimeError, "2^63 - 1"),
        (lambda: lastref.empty(1 << 62, device="cuda"), RuntimeError, "2^63 - 1"),
        (lambda: lastref.empty(1 << 64), RuntimeError, "64 bits"),
        (lambda: lastref.empty(1 << 46), RuntimeError, "host memory"),
        (lambda: lastref.empty(2.5), TypeError, "2.5"),
        (lambda: lastref.empty("23"), TypeError, "str"),
        (lambda: lastref.empty(True), TypeError, "True"),
        (lambda: lastref.empty((2, "3")), TypeError, "'3'"),
        (lambda: lastref.empty(((2, 3), 4)), TypeError, "(2, 3)"),
        (lambda: lastref.full(3, 1), TypeError, "sequence"),
        # Options.
        (lambda: lastref.empty(2, requires_grad=True), RuntimeError, "gradients"),
        (lambda: lastref.empty(2, dtype="float32"), TypeError, "dtype"),
        (lambda: lastref.empty(2, device=1.5), TypeError, "device"),
        (lambda: lastref.empty(2, nonsense=1), TypeError, "nonsense"),
        # Devices.
        (lambda: lastref.empty(2, device="cuda:7"), RuntimeError, "7"),
        (lambda: lastref.empty(2, device="gpu"), RuntimeError, '"gpu"'),
        (lambda: lastref.empty(2, device="cuda:"), RuntimeError, '"cuda:"'),
        (lambda: lastref.empty(2, device="cuda:-1"), RuntimeError, '"cuda:-1"'),
        (lambda: lastref.empty(2, device=-1), RuntimeError, "-1"),
        (lambda: lastref.device("cuda:99999999999"), RuntimeError, "cuda:99999999999"),
        (lambda: lastref.device("cpu", 1), RuntimeError, "1"),
        (lambda: lastref.device("cuda:0", 1), RuntimeError, "already"),
        (lambda: lastref.zeros(2).cuda(5), RuntimeError, "5"),
        (lambda: lastref.zeros(2).cuda("cpu"), RuntimeError, "cpu"),
        (lambda: cuda.set_device(2), RuntimeError, "2"),
        (lambda: cuda.memory_allocated("cpu"), ValueError, "cpu"),
        (lambda: cuda.memory_stats(9), RuntimeError, "9"),
        (lambda: cuda.Stream(9), RuntimeError, "9"),
        # Values.
        (lambda: lastref.tensor([[1, 2], [3]]), ValueError, "length 2"),
        (lambda: lastref.tensor([1, [2]]), ValueError, "number"),
        (lambda: lastref.tensor([[1], 2]), ValueError, "sequence"),
        (lambda: lastref.tensor("text"), TypeError, "str"),
        (lambda: lastref.tensor([b"text"]), TypeError, "bytes"),
        (lambda: lastref.tensor(None), TypeError, "NoneType"),
        (lambda: lastref.tensor({1, 2}), TypeError, "set"),
        (lambda: lastref.tensor(1 << 63), RuntimeError, "64 bits"),
        (lambda: lastref.tensor(300, dtype=lastref.uint8), RuntimeError, "300"),
        (lambda: lastref.tensor(-1, dtype=lastref.uint8), RuntimeError, "-1"),
        (lambda: lastref.tensor(1e30, dtype=lastref.int64), RuntimeError, "int64"),
        (lambda: lastref.tensor(float("nan"), dtype=lastref.int32), RuntimeError, "NaN"),
        (lambda: on_device().to(lastref.int8).fill_(128), RuntimeError, "128"),
        (lambda: on_device().fill_("x"), TypeError, "number"),
        (lambda: lastref.arange(0, 10, 0), RuntimeError, "step"),
        (lambda: lastref.arange(0, 10, -1), RuntimeError, "step"),
        # Views.
        (lambda: on_device().view(3, 7), RuntimeError, "[3, 7]"),
        (lambda: on_device().view(-1, -1), RuntimeError, "-1"),
        (lambda: on_device().t().view(20), RuntimeError, "view"),
        (lambda: on_device().permute(0, 0), RuntimeError, "0"),
        (lambda: on_device().permute(0), RuntimeError, "permute"),
        (lambda: on_device().transpose(0, 2), IndexError, "2"),
        (lambda: on_device().narrow(0, 3, 2), IndexError, "narrow"),
        (lambda: on_device().narrow(0, 0, -1), IndexError, "-1"),
        (lambda: on_device().select(1, 5), IndexError, "5"),
        (lambda: on_device().select(2, 0), IndexError, "2"),
        (lambda: on_device().squeeze(2), IndexError, "2"),
        (lambda: on_device().unsqueeze(4), IndexError, "4"),
        (lambda: on_device().expand(4, 6), RuntimeError, "6"),
        (lambda: on_device().expand(5), RuntimeError, "[5]"),
        (lambda: on_device().unsqueeze(0).t(), RuntimeError, "3"),
        (lambda: on_device().size(2), IndexError, "2"),
        (lambda: on_device().stride(-3), IndexError, "-3"),
        (lambda: lastref.tensor(1).unbind(), IndexError, "unbind"),
        # Indices.
        (lambda: on_device()[4], IndexError, "4"),
        (lambda: on_device()[0, 0, 0], IndexError, "3"),
        (lambda: on_device()[..., ...], IndexError, "ellipsis"),
        (lambda: on_device()[::-1], ValueError, "-1"),
        (lambda: on_device()[::0], ValueError, "zero"),
        (lambda: on_device()[1.0], TypeError, "float"),
        (lambda: on_device()[[0, 1]], TypeError, "list"),
        (lambda: on_device()[True], TypeError, "bool"),
        (lambda: on_device()["a"], TypeError, "str"),
        (lambda: on_device()[1 << 70], IndexError, "range"),
        (lambda: on_device().__setitem__(0, [1, 2]), RuntimeError, "[2]"),
        (lambda: on_device().__setitem__(9, 1), IndexError, "9"),
        (lambda: on_device().__setitem__(0, "x"), TypeError, "str"),
        (lambda: on_device()[:1].expand(3, 5).fill_(1), RuntimeError, "fill_"),
        # One element.
        (lambda: on_device().item(), RuntimeError, "20 elements"),
        (lambda: bool(on_device()), RuntimeError, "20 elements"),
        (lambda: float(lastref.empty(0)), RuntimeError, "0 elements"),
        (lambda: range(10)[lastref.tensor(1.0)], TypeError, "float32"),
        (lambda: range(10)[lastref.tensor([1, 2])], TypeError, "2 elements"),
        (lambda: len(lastref.tensor(1)), TypeError, "dimensions"),
        (lambda: iter(lastref.tensor(1)), TypeError, "dimensions"),
        (lambda: 1.0 in on_device(), TypeError, "numpy"),
        (lambda: on_device() == 0, TypeError, "numpy"),
        (lambda: on_device() != on_device(), TypeError, "numpy"),
        (lambda: on_device() < 1, TypeError, "'<'"),
        (lambda: on_device() + 1, TypeError, "operand"),
        # Conversions.
        (lambda: on_device().numpy(), TypeError, "cpu()"),
        (lambda: numpy.asarray(on_device()), TypeError, "cpu()"),
        (lambda: lastref.zeros(2, dtype=lastref.bfloat16).numpy(), TypeError, "bfloat16"),
        (lambda: memoryview(on_device()), BufferError, "cpu()"),
        (lambda: on_device().to("cpu", "cuda"), TypeError, "cuda"),
        (lambda: on_device().to(lastref.int8, dtype=lastref.int8), TypeError, "twice"),
        (lambda: on_device().to([1]), TypeError, "list"),
        (lambda: on_device().copy_(lastref.zeros(3, 5)), RuntimeError, "[3, 5]"),
        (lambda: lastref.zeros(2).record_stream(cuda.current_stream()), RuntimeError, "cpu"),
        # Settings.
        (lambda: lastref.sim.enable("lots"), ValueError, "lots"),
        (lambda: lastref.sim.enable("16GiB"), RuntimeError, "already"),
        (lambda: cuda.set_per_process_memory_fraction(1.5), ValueError, "1.5"),
        (lambda: cuda.set_per_process_memory_fraction(float("nan")), ValueError, "NaN"),
        # Other objects.
        (lambda: lastref.from_numpy([1, 2]), TypeError, "list"),
        (lambda: lastref.from_dlpack([1, 2]), TypeError, "list"),
        (lambda: Tensor(), TypeError, "data"),
        (lambda: Tensor([1]), TypeError, "list"),
    ],
)
def test_bad_input(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    before = [cuda.memory_stats(d)["allocation.all.current"] for d in range(2)]
    with pytest.raises(error, match=re.escape(text)) as raised:
        call()
    message = str(raised.value)
    assert not message.endswith("."), "no full stop"
    del raised
    assert [cuda.memory_stats(d)["allocation.all.current"] for d in range(2)] == before


@pytest.mark.parametrize("name", ["int8", "int16", "int32", "int64", "uint8"])
@pytest.mark.parametrize("kind", [int, float])
def test_integers_that_just_do_not_fit(name: str, kind: type) -> None:
    dtype = getattr(lastref, name)
    limits = numpy.iinfo(name)
    if kind is int or name != "int64":
        assert lastref.tensor(kind(limits.max), dtype=dtype).item() == limits.max
    assert lastref.tensor(kind(limits.min), dtype=dtype).item() == limits.min
    # Of floats, the next one below the least int64 is 2048 away.
    below = kind(limits.min) - (2048 if kind is float and name == "int64" else 1)
    t = lastref.ones(2, dtype=dtype)
    for value in (kind(limits.max + 1), below):
        for call in (
            lambda: lastref.tensor([0, value], dtype=dtype),
            lambda: lastref.full((2,), value, dtype=dtype),
            lambda: t.fill_(value),
            lambda: t.__setitem__(0, value),
            lambda: t.__setitem__(0, [value]),
        ):
            with pytest.raises(RuntimeError, match="fit"):
                call()
    assert t.tolist() == [1, 1], "and nothing was written"


def test_a_list_that_holds_itself() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ValueError, match="64 sequences"):
        lastref.tensor(endless)


def test_a_sequence_that_fails() -> None:
    class Broken:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> int:
            raise KeyError("broken")

    with pytest.raises((KeyError, TypeError)):
        lastref.tensor(Broken())
    with pytest.raises((KeyError, TypeError)):
        lastref.empty(Broken())


def test_a_failing_index() -> None:
    class Broken:
        def __index__(self) -> int:
            raise KeyError("broken")

    for call in (lambda: lastref.empty(Broken()), lambda: lastref.zeros(2).fill_(Broken())):
        with pytest.raises(KeyError, match="broken"):
            call()


def test_more_than_the_device_has() -> None:
    with pytest.raises(lastref.OutOfMemoryError, match="ask for less"):
        lastref.empty(1 << 40, device="cuda")


def test_out_of_memory_says_where_the_memory_is() -> None:
    held = [lastref.empty(1024 * MIB, dtype=lastref.uint8, device="cuda") for _ in range(6)]
    with pytest.raises(lastref.OutOfMemoryError, match="out of memory") as raised:
        lastref.empty(4096 * MIB, dtype=lastref.uint8, device="cuda")
    error = raised.value
    assert isinstance(error, RuntimeError)
    assert type(error) is cuda.OutOfMemoryError
    assert error.requested_bytes == 4096 * MIB
    assert error.allocated_bytes == 6144 * MIB
    assert error.capacity_bytes == 8192 * MIB
    assert error.limit_bytes is None
    parts = (
        error.allocated_bytes
        + error.pending_bytes
        + error.cached_bytes
        + error.other_bytes
        + error.device_free_bytes
    )
    assert parts == error.capacity_bytes
    assert cuda.memory_allocated() == 6144 * MIB
    held.clear()
    again = lastref.empty(4096 * MIB, dtype=lastref.uint8, device="cuda")
    assert again.nbytes == 4096 * MIB, "the device works on after the error"


def test_memory_fraction_is_a_limit() -> None:
    cuda.set_per_process_memory_fraction(0.25)
    try:
        assert cuda.get_per_process_memory_fraction() == 0.25
        assert cuda.get_per_process_memory_fraction(1) == 1
        with pytest.raises(lastref.OutOfMemoryError):
            lastref.empty(3072 * MIB, dtype=lastref.uint8, device="cuda")
        t = lastref.empty(1024 * MIB, dtype=lastref.uint8, device="cuda")
        with pytest.raises(lastref.OutOfMemoryError) as raised:
            lastref.empty(1536 * MIB, dtype=lastref.uint8, device="cuda")
        assert raised.value.limit_bytes == 2048 * MIB
        assert t.nbytes == cuda.memory_allocated()
    finally:
        cuda.set_per_process_memory_fraction(1.0)


class Foreign:
    """A DLPack producer that hands out what it is told to."""

    def __init__(self, device: tuple[int, int], array: numpy.ndarray[Any, Any]) -> None:
        self.device = device
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(max_version=options.get("max_version"))

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


def unaligned() -> numpy.ndarray[Any, Any]:
    return numpy.frombuffer(bytearray(17), dtype=numpy.uint8)[1:].view(numpy.float32)


def read_only() -> numpy.ndarray[Any, Any]:
    array = numpy.zeros(3)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (unaligned, BufferError, "not aligned"),
        (read_only, BufferError, "read-only"),
        (lambda: numpy.zeros(3)[::-1], BufferError, "negative stride"),
        (lambda: numpy.zeros(3, dtype=numpy.uint32), BufferError, "32 bits"),
        (lambda: numpy.zeros(3, dtype=numpy.complex64), BufferError, "bits"),
        (lambda: numpy.zeros(3, dtype=object), BufferError, "DLPack only supports"),
        (lambda: numpy.zeros(3, dtype=">f4"), BufferError, "byte order"),
    ],
)
def test_arrays_that_cannot_be_shared(make: Any, error: type[Exception], text: str) -> None:
    array = make()
    references = sys.getrefcount(array)
    for function in (lastref.from_numpy, lastref.from_dlpack):
        with pytest.raises(error, match=re.escape(text)):
            function(array)
    gc.collect()
    assert sys.getrefcount(array) == references, "a refused array is let go of"


def test_an_array_on_a_foreign_device() -> None:
    with pytest.raises((BufferError, ValueError), match="device"):
        lastref.from_dlpack(Foreign((4, 0), numpy.zeros(3)))


def test_a_capsule_can_be_used_once() -> None:
    capsule = lastref.ones(3).__dlpack__()
    assert lastref.from_dlpack(capsule).tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="capsule"):
        lastref.from_dlpack(capsule)


def test_a_producer_that_fails() -> None:
    class Broken:
        def __dlpack__(self, **options: Any) -> Any:
            raise KeyError("broken")

        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

    with pytest.raises(KeyError, match="broken"):
        lastref.from_dlpack(Broken())
