"""The same memory for NumPy and others: the buffer protocol, `__array__` and DLPack, without a copy."""

import gc
import hashlib
import sys
import weakref
from typing import Any

import numpy
import pytest

import lastref
from conftest import MIB
from lastref import cuda

NUMPY_DTYPES = {
    lastref.float64: numpy.float64,
    lastref.float32: numpy.float32,
    lastref.float16: numpy.float16,
    lastref.int64: numpy.int64,
    lastref.int32: numpy.int32,
    lastref.int16: numpy.int16,
    lastref.int8: numpy.int8,
    lastref.uint8: numpy.uint8,
    lastref.bool: numpy.bool_,
}


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_numpy_shares_memory(dtype: Any) -> None:
    t = lastref.zeros(2, 3, dtype=dtype)
    arrays: list[Any] = [t.numpy(), numpy.asarray(t), numpy.from_dlpack(t)]
    for array in arrays:
        assert array.dtype == NUMPY_DTYPES[dtype]
        assert array.shape == (2, 3)
        assert array.ctypes.data == t.data_ptr()
    a = t.numpy()
    a[1, 2] = 1
    assert t[1, 2].item() == 1
    t[0] = 1
    assert a.tolist() == [[1, 1, 1], [0, 0, 1]]


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
@pytest.mark.parametrize("function", [lastref.from_numpy, lastref.from_dlpack, lastref.as_tensor])
def test_from_numpy_shares_memory(dtype: Any, function: Any) -> None:
    array = numpy.zeros((2, 3), dtype=NUMPY_DTYPES[dtype])
    t = function(array)
    assert t.dtype is dtype
    assert t.data_ptr() == array.ctypes.data
    array[1, 2] = 1
    assert t.tolist() == [[0, 0, 0], [0, 0, 1]]
    t.fill_(1)
    assert array.all()


def test_strides_and_offsets_survive() -> None:
    t = lastref.arange(24).view(2, 3, 4)
    for view in (t, t.T, t[:, 1:, ::2], t[0], t[1, 2, 3], t[:, :, :1].expand(2, 3, 5), t[:0]):
        for array in (view.numpy(), numpy.from_dlpack(view)):
            assert array.tolist() == view.tolist()
            back = lastref.from_numpy(array)
            assert back.tolist() == view.tolist()
            if view.numel():
                assert back.data_ptr() == view.data_ptr()
    array = numpy.arange(24).reshape(4, 6)[1:, ::2]
    assert lastref.from_numpy(array).tolist() == array.tolist()


def test_an_array_keeps_the_memory_alive() -> None:
    t = lastref.ones(1024)
    weak = weakref.ref(t)
    storage = t.untyped_storage()
    buffer: Any = t.numpy()
    dlpack: Any = numpy.from_dlpack(t)
    del t
    assert weak() is not None, "a buffer holds the tensor"
    buffer = None
    assert weak() is None
    assert storage.ref_count() == 2, "an export holds the storage"
    assert dlpack.sum() == 1024
    dlpack = None
    assert storage.ref_count() == 1


def test_a_tensor_keeps_the_array_alive() -> None:
    class Array(numpy.ndarray[Any, Any]):
        pass

    array = numpy.ones(1024).view(Array)
    weak = weakref.ref(array)
    t = lastref.from_numpy(array)
    view = t[3:5]
    del array, t
    assert weak() is not None
    assert view.tolist() == [1, 1]
    del view
    assert weak() is None


def test_copies_do_not_share() -> None:
    t = lastref.zeros(3)
    for array in (
        numpy.array(t),
        numpy.asarray(t, dtype=numpy.float64),
        t.__array__(copy=True),
        t.__array__(numpy.int64),
        numpy.from_dlpack(t, copy=True),
    ):
        array[0] = 5
    assert t.tolist() == [0, 0, 0]
    assert t.__array__().ctypes.data == t.data_ptr()


def test_memoryview() -> None:
    t = lastref.arange(6, dtype=lastref.int16).view(2, 3)
    view = memoryview(t)
    assert (view.shape, view.strides, view.format, view.itemsize) == ((2, 3), (6, 2), "h", 2)
    assert not view.readonly
    assert view.tolist() == t.tolist()
    view[1, 1] = 40
    assert t[1, 1].item() == 40
    assert bytes(t) == t.numpy().tobytes()
    assert bytes(memoryview(t[1])) == t.numpy()[1].tobytes()
    assert memoryview(t.T).tobytes() == t.T.numpy().tobytes()
    assert memoryview(lastref.tensor(7)).shape == ()
    # Consumers that cannot follow strides are refused what needs them.
    with pytest.raises(BufferError, match="contiguous"):
        hashlib.sha256(t[:, ::2])
    # An empty tensor has a buffer too.
    assert bytes(lastref.empty(0, 3)) == b""


def test_a_simulated_device_exports_host_memory() -> None:
    t = lastref.arange(1000, device="cuda")
    assert t.__dlpack_device__() == (1, 0), "kDLCPU: a consumer must not take it for CUDA memory"
    array = numpy.from_dlpack(t)
    assert array.ctypes.data == t.data_ptr()
    assert array.tolist() == list(range(1000)), "what was pending on the stream is done"
    held = cuda.memory_allocated()
    del t
    assert cuda.memory_allocated() == held
    del array
    assert cuda.memory_allocated() == 0


def test_dlpack_between_tensors() -> None:
    t = lastref.ones(2, 3, dtype=lastref.bfloat16)
    u = lastref.from_dlpack(t)
    assert u.dtype is lastref.bfloat16
    assert u.data_ptr() == t.data_ptr()
    t.fill_(4)
    assert u.tolist() == [[4] * 3] * 2


@pytest.mark.parametrize("max_version", [None, (0, 8), (1, 0), (1, 3), (2, 0)])
def test_dlpack_protocol_arguments(max_version: tuple[int, int] | None) -> None:
    t = lastref.ones(3)
    versioned = max_version is not None and max_version >= (1, 0)
    capsule = t.__dlpack__(max_version=max_version)
    assert ("dltensor_versioned" in repr(capsule)) == versioned
    assert lastref.from_dlpack(capsule).data_ptr() == t.data_ptr()
    assert lastref.from_dlpack(t.__dlpack__(stream=None, copy=False)).data_ptr() == t.data_ptr()
    copied = lastref.from_dlpack(t.__dlpack__(max_version=max_version, copy=True))
    assert copied.data_ptr() != t.data_ptr()
    assert copied.tolist() == [1, 1, 1]
    here = t.__dlpack__(max_version=max_version, dl_device=(1, 0))
    assert lastref.from_dlpack(here).data_ptr() == t.data_ptr()
    with pytest.raises(BufferError, match="type 2, index 0"):
        t.__dlpack__(max_version=max_version, dl_device=(2, 0))


def test_an_unused_capsule_frees_what_it_holds() -> None:
    t = lastref.empty(MIB, device="cuda")
    capsule = t.__dlpack__(max_version=(1, 0))
    legacy = t.__dlpack__()
    del t
    assert cuda.memory_allocated() == 4 * MIB
    del capsule
    assert cuda.memory_allocated() == 4 * MIB
    del legacy
    assert cuda.memory_allocated() == 0


def test_objects_with_dlpack_alone() -> None:
    class Wrapper:
        def __init__(self, array: Any) -> None:
            self.array = array

        def __dlpack__(self, **options: Any) -> Any:
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self.array.__dlpack_device__()

    array = numpy.arange(3)
    assert lastref.from_dlpack(Wrapper(array)).data_ptr() == array.ctypes.data
    assert lastref.tensor(Wrapper(array)).tolist() == [0, 1, 2]
    t = lastref.zeros(3)
    t[:] = Wrapper(array)
    assert t.tolist() == [0, 1, 2]


def test_no_reference_is_lost_or_kept() -> None:
    t = lastref.zeros(3)
    array = numpy.zeros(3)
    gc.collect()
    before = (sys.getrefcount(t), sys.getrefcount(array), t.untyped_storage().ref_count())
    for _ in range(1000):
        t.numpy()
        memoryview(t)
        numpy.from_dlpack(t)
        t.__dlpack__()
        lastref.from_numpy(array)
        lastref.tensor(array)
        t.copy_(lastref.from_numpy(array))
    assert (sys.getrefcount(t), sys.getrefcount(array), t.untyped_storage().ref_count()) == before
