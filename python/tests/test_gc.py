"""Tensors take part in Python's cycle collector through the attributes that users set on them."""

import gc
import weakref
from typing import Any

import pytest

import lastref
from conftest import MIB
from lastref import Tensor, cuda


def make() -> Tensor:
    return lastref.empty(MIB, dtype=lastref.uint8, device="cuda")


def test_attributes() -> None:
    t = make()
    assert not hasattr(t, "tag")
    t.tag = "weights"
    t.note = note = object()
    assert t.tag == "weights"
    assert t.note is note
    assert t.__dict__ == {"tag": "weights", "note": note}
    del t.tag
    with pytest.raises(AttributeError, match="tag"):
        _ = t.tag


def test_properties_cannot_be_hidden_by_attributes() -> None:
    t = make()
    with pytest.raises(AttributeError):
        setattr(t, "shape", (1, 2))  # noqa: B010
    assert t.shape == (MIB,)


def test_attributes_belong_to_the_object_not_to_the_storage() -> None:
    t = make()
    t.tag = "t"
    assert not hasattr(t[:], "tag")


def test_collector_sees_the_attributes() -> None:
    t = make()
    t.items = items = [1, 2]
    assert gc.is_tracked(t)
    assert items in gc.get_referents(t) or any(
        items in gc.get_referents(x) for x in gc.get_referents(t) if isinstance(x, dict)
    )


def cycle_through_itself() -> Tensor:
    t = make()
    t.me = t
    return t


def cycle_through_a_pair() -> Tensor:
    t, u = make(), make()
    t.other, u.other = u, t
    return t


def cycle_through_a_container() -> Tensor:
    t = make()
    t.items = {"list": [(t,)]}
    return t


def cycle_through_an_instance() -> Tensor:
    class Node:
        tensor: Tensor

    node = Node()
    node.tensor = make()
    node.tensor.node = node
    return node.tensor


def cycle_through_a_closure() -> Tensor:
    t = make()
    t.function = lambda: t.nbytes
    return t


def cycle_through_a_bound_method() -> Tensor:
    t = make()
    t.method = t.numel
    return t


class Subclass(Tensor):
    pass


def cycle_through_a_subclass() -> Tensor:
    t = Subclass(make())
    t.me = t
    return t


@pytest.mark.usefixtures("gc_disabled")
@pytest.mark.parametrize(
    "cycle",
    [
        cycle_through_itself,
        cycle_through_a_pair,
        cycle_through_a_container,
        cycle_through_an_instance,
        cycle_through_a_closure,
        cycle_through_a_bound_method,
        cycle_through_a_subclass,
    ],
)
def test_cycle_is_collected_and_its_memory_freed(cycle: Any) -> None:
    gc.collect()
    t = cycle()
    weak = weakref.ref(t)
    held = cuda.memory_allocated()
    assert held >= MIB
    gc.collect()
    assert cuda.memory_allocated() == held, "still referred to by a variable"
    del t
    assert cuda.memory_allocated() == held, "reference counting cannot free a cycle"
    assert gc.collect() > 0
    assert weak() is None
    assert cuda.memory_allocated() == 0
    cuda.empty_cache()
    assert cuda.memory_reserved() == 0


@pytest.mark.usefixtures("gc_disabled")
def test_collector_leaves_what_is_reachable() -> None:
    t = cycle_through_a_pair()
    gc.collect()
    assert t.other.other is t
    assert cuda.memory_allocated() == 2 * MIB
    t.other.other = None
    del t
    assert cuda.memory_allocated() == 0, "no cycle any more"


def test_collector_runs_while_an_attribute_is_destroyed() -> None:
    class Finalizer:
        def __del__(self) -> None:
            gc.collect()

    t = make()
    t.finalizer = Finalizer()
    del t
    assert cuda.memory_allocated() == 0


def test_a_finalizer_cannot_bring_back_a_freed_tensor() -> None:
    found: list[Any] = []

    class Finalizer:
        weak: Any

        def __del__(self) -> None:
            found.append(self.weak())

    t = make()
    t.finalizer = Finalizer()
    t.finalizer.weak = weakref.ref(t)
    del t
    assert found == [None]


def test_subclass() -> None:
    t = Subclass(make())
    t.tag = 1
    assert isinstance(t, Tensor)
    assert t.is_cuda
    assert t.shape == (MIB,)
    weak = weakref.ref(t)
    del t
    assert weak() is None
    assert cuda.memory_allocated() == 0
