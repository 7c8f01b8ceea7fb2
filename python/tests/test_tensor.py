"""Making tensors, what they say of themselves, and how they are shown."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy
import pytest

import lastref as torch
from lastref import Tensor

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]
DEVICES = ["cpu", "cuda:0", "cuda:1"]


def test_properties() -> None:
    t = torch.zeros(4, 5)
    assert isinstance(t, Tensor)
    assert torch.is_tensor(t)
    assert not torch.is_tensor([])
    assert t.shape == t.size() == (4, 5)
    assert type(t.shape) is torch.Size
    assert t.size(-1) == 5
    assert t.stride() == (5, 1)
    assert t.stride(0) == 5
    assert t[1:, 2:].storage_offset() == 7
    assert t[1:, 2:].data_ptr() == t.data_ptr() + 28
    assert (t.dim(), t.ndim, t.numel(), len(t)) == (2, 2, 20, 4)
    assert (t.nbytes, t.element_size(), t.itemsize) == (80, 4, 4)
    assert t.is_contiguous()
    assert not t.t().is_contiguous()
    assert t.is_cpu
    assert not t.is_cuda
    assert not t.requires_grad
    assert t.untyped_storage().nbytes() == len(t.untyped_storage()) == 80


def test_size() -> None:
    size = torch.empty(2, 3, 4).shape
    assert repr(size) == "lastref.Size([2, 3, 4])"
    assert size.numel() == 24
    assert isinstance(size[1:], torch.Size)
    assert size[1:] == (3, 4)
    assert hash(size) == hash((2, 3, 4))
    assert torch.zeros(size).shape == size
    assert pickle.loads(pickle.dumps(size)) == size


def test_storage_is_shared_by_views() -> None:
    t = torch.zeros(4, 5)
    storage = t.untyped_storage()
    assert storage == t[2:].untyped_storage()
    assert hash(storage) == hash(t.T.untyped_storage())
    assert storage != t.clone().untyped_storage()
    assert storage != 5
    before = storage.ref_count()
    view = t[1]
    assert storage.ref_count() == before + 1
    assert view.untyped_storage().data_ptr() == storage.data_ptr()
    del view
    assert storage.ref_count() == before


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_creation(dtype: Any, device: str) -> None:
    options = {"dtype": dtype, "device": device}
    for t, values in [
        (torch.zeros(2, 3, **options), [[0] * 3] * 2),
        (torch.ones((2, 3), **options), [[1] * 3] * 2),
        (torch.full([2, 3], 1, **options), [[1] * 3] * 2),
        (torch.tensor([[1, 0, 1], [0, 1, 0]], **options), [[1, 0, 1], [0, 1, 0]]),
        (torch.arange(2, **options), [0, 1]),
        (torch.tensor(1, **options), 1),
        (torch.zeros(0, 3, **options), []),
    ]:
        assert t.dtype is dtype
        assert t.device == torch.device(device)
        assert t.tolist() == values
    t = torch.empty(2, 3, **options)
    assert t.shape == (2, 3)
    for like, value in [
        (torch.zeros_like(t), 0),
        (torch.ones_like(t), 1),
        (torch.full_like(t, 1), 1),
    ]:
        assert (like.dtype, like.device, like.tolist()) == (dtype, t.device, [[value] * 3] * 2)
    assert torch.empty_like(t, dtype=torch.int8, device="cpu").dtype is torch.int8


def test_dtypes_without_one() -> None:
    assert torch.zeros(1).dtype is torch.float32
    assert torch.full((1,), 1).dtype is torch.int64
    assert torch.full((1,), True).dtype is torch.bool
    assert torch.full((1,), 1.5).dtype is torch.float32
    assert torch.arange(3).dtype is torch.int64
    assert torch.arange(0, 1, 0.25).tolist() == [0, 0.25, 0.5, 0.75]
    assert torch.arange(5, 0, -2).tolist() == [5, 3, 1]
    assert torch.tensor([True]).dtype is torch.bool
    assert torch.tensor([True, 2]).dtype is torch.int64
    assert torch.tensor([1, 2.5]).dtype is torch.float32
    assert torch.tensor([]).dtype is torch.float32
    assert torch.tensor(numpy.zeros(1)).dtype is torch.float64
    assert torch.tensor(numpy.bool_(True)).dtype is torch.bool
    assert torch.tensor([numpy.int16(3)]).tolist() == [3]
    assert torch.tensor([torch.tensor(3), 4]).tolist() == [3, 4]
    assert torch.tensor([numpy.arange(2), [5, 6]]).tolist() == [[0, 1], [5, 6]]
    assert torch.tensor(range(3)).tolist() == [0, 1, 2]
    assert torch.zeros(1, dtype=float).dtype is torch.float64
    assert torch.zeros(1, dtype=int).dtype is torch.int64
    assert torch.zeros(1, dtype=bool).dtype is torch.bool


def test_tensor_copies_and_as_tensor_shares() -> None:
    source = torch.zeros(3)
    assert torch.tensor(source).untyped_storage() != source.untyped_storage()
    assert torch.as_tensor(source) is source
    array = numpy.zeros(3, dtype=numpy.float32)
    shared, copied = torch.as_tensor(array), torch.tensor(array)
    array[0] = 1
    assert shared.tolist() == [1, 0, 0]
    assert copied.tolist() == [0, 0, 0]
    assert torch.as_tensor(array, dtype=torch.int8).tolist() == [1, 0, 0]
    assert torch.as_tensor([1, 2], device="cuda").is_cuda
    assert torch.tensor(source.cuda()).is_cuda


def test_integers_are_exact() -> None:
    values = [2**63 - 1, -(2**63), 2**53 + 1, 0]
    for device in DEVICES:
        assert torch.tensor(values, device=device).tolist() == values
    assert torch.full((1,), 2**63 - 1).item() == 2**63 - 1


def test_dtype_objects() -> None:
    assert torch.float is torch.float32
    assert torch.double is torch.float64
    assert torch.half is torch.float16
    assert torch.long is torch.int64
    assert torch.int is torch.int32
    assert torch.short is torch.int16
    assert len({*DTYPES}) == 10
    for dtype in DTYPES:
        assert repr(dtype).startswith("lastref.")
        assert getattr(torch, repr(dtype).removeprefix("lastref.")) is dtype
        assert pickle.loads(pickle.dumps(dtype)) is dtype
        assert copy.deepcopy(dtype) is dtype
        assert dtype.itemsize == torch.zeros(1, dtype=dtype).nbytes
    assert [d.is_floating_point for d in DTYPES] == [True] * 4 + [False] * 6
    assert [d.is_signed for d in DTYPES] == [True] * 8 + [False] * 2


def test_device_objects() -> None:
    device = torch.device("cuda:1")
    assert (device.type, device.index) == ("cuda", 1)
    assert repr(device) == "device(type='cuda', index=1)"
    assert str(device) == "cuda:1"
    assert device == torch.device("cuda", 1) == torch.device(1) == torch.device(device)
    assert device != torch.device("cuda") != torch.device("cpu")
    assert device != "cuda:1"
    assert len({device, torch.device(1), torch.device("cpu")}) == 2
    assert torch.device("cuda").index is None
    # A name that was put together while the program ran is another object of the same text.
    assert torch.device("".join(["cu", "da"])) == torch.device("cuda")
    assert pickle.loads(pickle.dumps(device)) == device
    assert torch.zeros(1, device="cuda").device == torch.device("cuda:0")
    with torch.cuda.device(1):
        assert torch.zeros(1, device="cuda").device == device
        assert torch.zeros(1).cuda().device == device


@pytest.mark.parametrize("device", DEVICES)
def test_moves(device: str) -> None:
    t = torch.arange(6).view(2, 3)
    there = t.to(device)
    assert there.device == torch.device(device)
    assert (there is t) == (device == "cpu")
    assert there.to(device) is there
    assert there.to(device, copy=True) is not there
    assert there.cpu().tolist() == t.tolist()
    assert there.cpu().device.type == "cpu"
    assert there.T.to("cpu").tolist() == t.T.tolist()
    both = there.to("cuda", torch.float16)
    assert both.is_cuda
    assert both.dtype is torch.float16
    assert both.tolist() == t.tolist()
    assert t.to(both).dtype is torch.float16
    assert t.to(both).device == both.device
    assert t.to(dtype=torch.int8, device=device).dtype is torch.int8


@pytest.mark.parametrize("device", DEVICES)
def test_conversions(device: str) -> None:
    t = torch.tensor([0.0, 1.5, -2.75, 300.0], device=device)
    assert t.double().tolist() == t.half().tolist() == t.bfloat16().tolist() == t.tolist()
    assert t.long().tolist() == t.int().tolist() == t.short().tolist() == [0, 1, -2, 300]
    assert t.bool().tolist() == [False, True, True, True]
    assert t.float() is t
    assert t.to(torch.uint8)[:2].tolist() == [0, 1]


@pytest.mark.parametrize("device", DEVICES)
def test_in_place(device: str) -> None:
    t = torch.empty(2, 3, device=device)
    assert t.fill_(2.5) is t
    assert t.tolist() == [[2.5] * 3] * 2
    assert t.zero_() is t
    assert t.tolist() == [[0] * 3] * 2
    assert t.copy_(torch.arange(3)) is t
    assert t.tolist() == [[0, 1, 2]] * 2
    t.T.copy_(torch.arange(6).view(3, 2))
    assert t.tolist() == [[0, 2, 4], [1, 3, 5]]
    t[0, ::2] = -1
    assert t.tolist() == [[-1, 2, -1], [1, 3, 5]]
    same = t.contiguous()
    assert same is t
    assert t.T.contiguous().stride() == (2, 1)
    assert t.clone().is_set_to(t) is False


@pytest.mark.parametrize("device", DEVICES)
def test_one_element(device: str) -> None:
    assert torch.tensor(2.5, device=device).item() == 2.5
    assert torch.tensor([[3]], device=device).item() == 3
    assert torch.tensor(True, device=device).item() is True
    assert float(torch.tensor(3, device=device)) == 3.0
    assert int(torch.tensor(3.9, device=device)) == 3
    assert bool(torch.tensor([0.0], device=device)) is False
    assert [10, 20, 30][torch.tensor(2, device=device)] == 30


def test_identity() -> None:
    t, u = torch.zeros(2), torch.zeros(2)
    assert len({t, u, t}) == 2
    assert {t: 1}[t] == 1
    assert t in [t, u]
    assert [t, u].index(t) == 0
    assert (t == None) is False  # noqa: E711
    assert (t != "text") is True
    compared: Any = t == numpy.zeros(2)
    assert compared.tolist() == [True, True], "NumPy compares"


def test_deepcopy() -> None:
    t = torch.ones(2, device="cuda")
    t.tag = [1]
    t.me = t
    u = copy.deepcopy({"a": t, "b": t})
    assert u["a"] is u["b"] is u["a"].me
    assert u["a"] is not t
    assert u["a"].tag == [1]
    assert u["a"].tag is not t.tag
    assert u["a"].tolist() == [1, 1]
    assert u["a"].untyped_storage() != t.untyped_storage()
    del t.me
    del u["a"].me


class Subclass(Tensor):
    def __init__(self, data: Tensor) -> None:
        self.made = True


def test_copy() -> None:
    t = torch.ones(2, device="cuda")[1:]
    t.tag = [1]
    u = copy.copy(t)
    assert u is not t
    assert u.is_set_to(t)
    assert u.tag is t.tag
    u.tag = 2
    assert t.tag == [1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_pickle(dtype: Any, device: str) -> None:
    t = torch.tensor([[0, 1, 1], [1, 0, 1]], dtype=dtype, device=device).t()
    t.tag = t
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        u = pickle.loads(pickle.dumps(t, protocol))
        assert (u.dtype, u.device, u.shape) == (dtype, t.device, t.shape)
        assert u.tolist() == t.tolist()
        assert u.tag is u
        del u.tag
    del t.tag


def test_a_subclass_is_copied_as_such() -> None:
    t = Subclass(torch.arange(3))
    for u in (copy.copy(t), copy.deepcopy(t), pickle.loads(pickle.dumps(t))):
        assert type(u) is Subclass
        assert u.tolist() == [0, 1, 2]
        assert u.made


def test_a_pickle_that_was_tampered_with() -> None:
    rebuild, arguments, _ = torch.arange(3).__reduce__()
    cls, data, dtype, _, device = arguments
    with pytest.raises(RuntimeError, match="from_bytes"):
        rebuild(cls, data, dtype, (4,), device)
    with pytest.raises(RuntimeError, match="-1"):
        rebuild(cls, data, dtype, (-1,), device)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.tensor([[0.0, 1.0], [2.0, 3.0]]), "tensor([[0., 1.],\n        [2., 3.]])"),
        (lambda: torch.tensor(3.5), "tensor(3.5000)"),
        (lambda: torch.tensor(7), "tensor(7)"),
        (lambda: torch.tensor([]), "tensor([])"),
        (lambda: torch.empty(0, 3), "tensor([], size=(0, 3))"),
        (lambda: torch.zeros(0, dtype=torch.int64), "tensor([], dtype=lastref.int64)"),
        (lambda: torch.tensor([1, 10, -5]), "tensor([ 1, 10, -5])"),
        (lambda: torch.tensor([True, False]), "tensor([ True, False])"),
        (lambda: torch.tensor([1], dtype=torch.int8), "tensor([1], dtype=lastref.int8)"),
        (lambda: torch.tensor([0.5, 100.25]), "tensor([  0.5000, 100.2500])"),
        (lambda: torch.tensor([1e-5, 1.0]), "tensor([1.0000e-05, 1.0000e+00])"),
        (lambda: torch.tensor([1.0, 20000.0]), "tensor([1.0000e+00, 2.0000e+04])"),
        (lambda: torch.tensor([1.0, float("nan")]), "tensor([1., nan])"),
        (lambda: torch.tensor([1.5, float("-inf")]), "tensor([1.5000,   -inf])"),
        (lambda: torch.arange(1001), "tensor([   0,    1,    2,  ...,  998,  999, 1000])"),
        (
            lambda: torch.arange(3, dtype=torch.float16, device="cuda:1"),
            "tensor([0., 1., 2.], device='cuda:1', dtype=lastref.float16)",
        ),
        (
            lambda: torch.arange(30),
            "tensor([ 0,  1,  2,  3,  4,  5,  6,  7,  8,  9, 10, 11, 12, 13, 14, 15, 16, 17,\n"
            "        18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29])",
        ),
        (
            lambda: torch.zeros(2, 2, 2),
            "tensor([[[0., 0.],\n         [0., 0.]],\n\n        [[0., 0.],\n         [0., 0.]]])",
        ),
        (
            lambda: torch.zeros(40, 40, dtype=torch.int64),
            "tensor([[0, 0, 0,  ..., 0, 0, 0],\n        [0, 0, 0,  ..., 0, 0, 0],\n"
            "        [0, 0, 0,  ..., 0, 0, 0],\n        ...,\n"
            "        [0, 0, 0,  ..., 0, 0, 0],\n        [0, 0, 0,  ..., 0, 0, 0],\n"
            "        [0, 0, 0,  ..., 0, 0, 0]])",
        ),
    ],
    ids=lambda value: value.replace("\n", " ") if isinstance(value, str) else "",
)
def test_repr(make: Callable[[], Tensor], text: str) -> None:
    # The texts are PyTorch's for the same tensors, with `lastref` for `torch`.
    tensor = make()
    assert repr(tensor) == str(tensor) == text


def test_repr_of_a_large_tensor_reads_only_the_edges() -> None:
    t = torch.empty(1 << 32, dtype=torch.int8, device="cuda")  # 4 GiB that nobody has touched
    t[:3] = 1
    t[-3:] = 2
    assert repr(t) == "tensor([1, 1, 1,  ..., 2, 2, 2], device='cuda:0', dtype=lastref.int8)"
