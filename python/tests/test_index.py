"""Indexing, assignment and views against NumPy as the oracle: same elements, and the same memory."""

from typing import Any

import numpy
from hypothesis import given, settings
from hypothesis import strategies as st

import lastref


@st.composite
def shapes_and_indices(draw: Any) -> tuple[tuple[int, ...], Any]:
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    items: list[Any] = []
    for size in shape[: draw(st.integers(0, len(shape)))]:
        choices: list[st.SearchStrategy[Any]] = [
            st.slices(size + 2).filter(lambda s: s.step is None or s.step > 0),
            st.builds(
                slice,
                st.none() | st.integers(-9, 9),
                st.none() | st.integers(-9, 9),
                st.none() | st.integers(1, 5),
            ),
        ]
        if size > 0:
            choices.append(st.integers(-size, size - 1))
        items.append(draw(st.one_of(choices)))
    if draw(st.booleans()):
        items.insert(draw(st.integers(0, len(items))), ...)
        # Dimensions after the ellipsis count from the end: keep only indices that fit there too.
        after = len(items) - items.index(...) - 1
        for position, item in enumerate(items[items.index(...) + 1 :]):
            size = shape[len(shape) - after + position]
            if isinstance(item, int) and not -size <= item < size:
                items[items.index(...) + 1 + position] = slice(None)
    for _ in range(draw(st.integers(0, 2))):
        items.insert(draw(st.integers(0, len(items))), None)
    return shape, items[0] if len(items) == 1 and draw(st.booleans()) else tuple(items)


def pair(shape: tuple[int, ...], device: str = "cpu") -> tuple[Any, lastref.Tensor]:
    array = numpy.arange(int(numpy.prod(shape)), dtype=numpy.int64).reshape(shape)
    return array, lastref.tensor(array, device=device)


@settings(max_examples=400, deadline=None)
@given(shapes_and_indices(), st.sampled_from(["cpu", "cuda"]))
def test_getitem(case: tuple[tuple[int, ...], Any], device: str) -> None:
    shape, index = case
    array, tensor = pair(shape, device)
    expected = array[index]
    found = tensor[index]
    assert found.shape == expected.shape
    assert found.tolist() == expected.tolist()
    assert found.untyped_storage() == tensor.untyped_storage(), "a view, not a copy"
    if device == "cpu" and expected.size:
        assert found.numpy().strides == expected.strides or expected.size == 1 or any(
            size == 1 for size in expected.shape
        )


@settings(max_examples=400, deadline=None)
@given(shapes_and_indices(), st.sampled_from(["cpu", "cuda"]), st.booleans())
def test_setitem(case: tuple[tuple[int, ...], Any], device: str, scalar: bool) -> None:
    shape, index = case
    array, tensor = pair(shape, device)
    selected = array[index]
    value: Any = -7
    if not scalar:
        value = -numpy.arange(1, selected.size + 1, dtype=numpy.int64).reshape(selected.shape)
    array[index] = value
    tensor[index] = value if scalar else lastref.tensor(value)
    assert tensor.tolist() == array.tolist()


@settings(max_examples=100, deadline=None)
@given(shapes_and_indices())
def test_setitem_broadcasts_and_converts(case: tuple[tuple[int, ...], Any]) -> None:
    shape, index = case
    array, tensor = pair(shape)
    if array[index].ndim == 0:
        return
    row = numpy.full(array[index].shape[-1:], 2.75)
    array[index] = row
    tensor[index] = row
    assert tensor.tolist() == array.tolist()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_views(shape: list[int], data: Any) -> None:
    array, tensor = pair(tuple(shape), data.draw(st.sampled_from(["cpu", "cuda"])))
    for _ in range(data.draw(st.integers(1, 4))):
        ndim = array.ndim
        kind = data.draw(st.sampled_from("permute transpose squeeze unsqueeze narrow select reshape T expand".split()))
        if kind == "permute":
            order = data.draw(st.permutations(range(ndim)))
            array, tensor = array.transpose(order), tensor.permute(order)
        elif kind == "T":
            array, tensor = array.T, tensor.T
        elif kind == "reshape":
            array, tensor = array.reshape(-1), tensor.reshape(-1)
        elif kind == "squeeze":
            array, tensor = array.squeeze(), tensor.squeeze()
        elif kind == "unsqueeze":
            dim = data.draw(st.integers(-ndim - 1, ndim))
            array, tensor = numpy.expand_dims(array, dim), tensor.unsqueeze(dim)
        elif kind == "expand":
            array = numpy.broadcast_to(array, (2, *array.shape))
            tensor = tensor.expand(2, *tensor.shape)
        elif ndim > 0:
            dim = data.draw(st.integers(-ndim, ndim - 1))
            if kind == "transpose":
                other = data.draw(st.integers(-ndim, ndim - 1))
                array, tensor = array.swapaxes(dim, other), tensor.transpose(dim, other)
            elif kind == "narrow":
                start = data.draw(st.integers(0, array.shape[dim]))
                length = data.draw(st.integers(0, array.shape[dim] - start))
                array = array.take(range(start, start + length), axis=dim)
                tensor = tensor.narrow(dim, start, length)
            elif array.shape[dim] > 0:
                at = data.draw(st.integers(-array.shape[dim], array.shape[dim] - 1))
                array, tensor = array.take(at, axis=dim), tensor.select(dim, at)
    assert tensor.shape == array.shape
    assert tensor.tolist() == array.tolist()
    assert tensor.clone().tolist() == array.tolist()
    assert tensor.contiguous().is_contiguous()


def test_iteration_gives_views() -> None:
    t = lastref.zeros(3, 2)
    for i, row in enumerate(t):
        row.fill_(i)
    assert t.tolist() == [[0, 0], [1, 1], [2, 2]]
    assert len(t) == 3
    assert [int(x) for x in t[2]] == [2, 2]
    a, b, c = t
    assert c.is_set_to(t[2])
    assert not b.is_set_to(a)


def test_overlapping_assignment() -> None:
    array, tensor = pair((10,))
    array[1:] = array[:-1].copy()
    tensor[1:] = tensor[:-1]
    assert tensor.tolist() == array.tolist()


def test_numpy_ints_are_indices() -> None:
    _, tensor = pair((3, 4))
    assert tensor[numpy.int32(1), numpy.int64(-1)].item() == 7
    assert tensor[numpy.int8(1) : numpy.int8(2)].shape == (1, 4)
