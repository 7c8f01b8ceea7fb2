"""When the last reference goes, and the device memory with it: the proof of `test_reassign`, for each
way in which a reference can go. Python's cycle collector is off throughout."""

import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

import lastref
from conftest import MIB
from lastref import Tensor, cuda

pytestmark = pytest.mark.usefixtures("gc_disabled")


def make(mib: int = 4) -> Tensor:
    return lastref.empty(mib * MIB, dtype=lastref.uint8, device="cuda")


def in_use() -> int:
    free, total = cuda.mem_get_info()
    return total - free


def assert_held(mib: int) -> None:
    assert cuda.memory_allocated() == mib * MIB
    assert cuda.memory_reserved() >= mib * MIB


def assert_freed_and_cached(reserved: int) -> None:
    """Freed now, cached, and gone from the device once the cache is emptied."""
    assert cuda.memory_allocated() == 0
    assert cuda.memory_reserved() == reserved
    before = in_use()
    cuda.empty_cache()
    assert cuda.memory_reserved() == 0
    assert in_use() == before - reserved


def test_del() -> None:
    t = make()
    assert_held(4)
    reserved = cuda.memory_reserved()
    del t
    assert_freed_and_cached(reserved)


def test_del_of_one_of_two_names() -> None:
    t = make()
    u = t
    del t
    assert_held(4)
    reserved = cuda.memory_reserved()
    del u
    assert_freed_and_cached(reserved)


def test_function_return() -> None:
    def function() -> int:
        t = make()
        assert_held(4)
        assert t.is_cuda
        return cuda.memory_reserved()

    assert_freed_and_cached(function())


def test_a_returned_tensor_lives_on() -> None:
    def function() -> Tensor:
        t = make()
        return t

    t = function()
    assert_held(4)
    reserved = cuda.memory_reserved()
    del t
    assert_freed_and_cached(reserved)


@pytest.mark.parametrize("container", [list, dict])
def test_container_element_replaced(container: type) -> None:
    items: Any = container({0: make(), 1: make()}) if container is dict else [make(), make()]
    assert_held(8)
    items[0] = None
    assert_held(4)
    reserved = cuda.memory_reserved()
    items[1] = lastref.empty(4, 5)
    assert_freed_and_cached(reserved)


def test_container_cleared_and_popped() -> None:
    items = [make() for _ in range(3)]
    popped = items.pop()
    items.clear()
    assert_held(4)
    reserved = cuda.memory_reserved()
    del popped
    assert_freed_and_cached(reserved)


def test_attribute_replaced() -> None:
    class Model:
        weight: Tensor | None = None

    model = Model()
    model.weight = make()
    assert_held(4)
    reserved = cuda.memory_reserved()
    model.weight = None
    assert_freed_and_cached(reserved)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[:1],
        lambda t: t.narrow(0, 5, 2),
        lambda t: t.view(2, -1),
        lambda t: t.view(2, -1).t(),
        lambda t: t.view(2, -1).permute(1, 0),
        lambda t: t.select(0, 3),
        lambda t: t.unsqueeze(0),
        lambda t: t.unsqueeze(0).squeeze(),
        lambda t: t[:1].expand(7),
        lambda t: t.untyped_storage(),
        lambda t: next(iter(t[:1])),
        lambda t: t.detach(),
    ],
)
def test_a_view_keeps_a_big_storage_alive(view: Callable[[Tensor], Tensor]) -> None:
    t = make(64)
    small = view(t)
    del t
    assert_held(64)
    reserved = cuda.memory_reserved()
    del small
    assert_freed_and_cached(reserved)


def test_a_copy_of_a_view_does_not() -> None:
    t = make(64)
    small = t[:512].clone()
    del t
    assert cuda.memory_allocated() == 512 == small.nbytes


def test_last_reference_dropped_on_another_thread() -> None:
    holder = [make()]
    dropped = threading.Event()
    may_drop = threading.Event()
    seen: list[int] = []

    def drop() -> None:
        t = holder.pop()
        may_drop.wait()
        seen.append(cuda.memory_allocated())
        del t
        seen.append(cuda.memory_allocated())
        dropped.set()

    thread = threading.Thread(target=drop)
    thread.start()
    assert_held(4)
    reserved = cuda.memory_reserved()
    may_drop.set()
    assert dropped.wait(30)
    assert seen == [4 * MIB, 0], "freed by the thread that dropped it, at that moment"
    assert_freed_and_cached(reserved)
    thread.join()


def test_exception_unwinding() -> None:
    reserved = 0

    def inner() -> None:
        nonlocal reserved
        t = make()
        assert_held(4)
        reserved = cuda.memory_reserved()
        raise KeyError(t.nbytes)

    try:
        inner()
    except KeyError:
        # The traceback refers to the frames, and they to their variables.
        assert_held(4)
    assert sys.exc_info() == (None, None, None)
    assert_freed_and_cached(reserved)


def test_a_kept_exception_keeps_the_tensor() -> None:
    def inner() -> None:
        t = make()
        raise KeyError(t.nbytes)

    kept: KeyError | None = None
    try:
        inner()
    except KeyError as error:
        kept = error
    assert_held(4)
    reserved = cuda.memory_reserved()
    assert kept is not None
    kept.__traceback__ = None
    assert_freed_and_cached(reserved)


def test_generator_closed() -> None:
    def generator() -> Generator[int, None, None]:
        t = make()
        while True:
            yield t.nbytes

    g = generator()
    assert next(g) == 4 * MIB
    assert_held(4)
    reserved = cuda.memory_reserved()
    g.close()
    assert_freed_and_cached(reserved)


def test_generator_dropped() -> None:
    def generator() -> Iterator[Tensor]:
        t = make()
        yield t
        yield t

    g = generator()
    next(g)
    assert_held(4)
    reserved = cuda.memory_reserved()
    del g
    assert_freed_and_cached(reserved)


def test_closure_dropped() -> None:
    def outer() -> Callable[[], int]:
        t = make()
        return lambda: t.nbytes

    function = outer()
    assert function() == 4 * MIB
    assert_held(4)
    reserved = cuda.memory_reserved()
    del function
    assert_freed_and_cached(reserved)


def test_loop_variable_lives_after_the_loop() -> None:
    for t in (make() for _ in range(3)):
        assert t.is_cuda
    assert_held(4)
    reserved = cuda.memory_reserved()
    del t
    assert_freed_and_cached(reserved)


def test_an_iterator_holds_the_tensor() -> None:
    iterator = iter(make())
    next(iterator)
    assert_held(4)
    reserved = cuda.memory_reserved()
    del iterator
    assert_freed_and_cached(reserved)


def test_to_cpu_copies_and_frees_nothing() -> None:
    t = make()
    host = t.cpu()
    assert_held(4)
    assert not host.is_cuda
    reserved = cuda.memory_reserved()
    t = host
    assert_freed_and_cached(reserved)


def test_a_weak_reference_does_not_keep_it() -> None:
    t = make()
    gone: list[int] = []
    weak = weakref.ref(t, lambda _: gone.append(cuda.memory_allocated()))
    assert weak() is t
    reserved = cuda.memory_reserved()
    del t
    assert weak() is None
    assert gone == [0], "the callback runs after the memory is freed"
    assert_freed_and_cached(reserved)


def test_a_weak_value_dictionary() -> None:
    names: weakref.WeakValueDictionary[str, Tensor] = weakref.WeakValueDictionary()
    t = names["t"] = make()
    assert names["t"] is t
    del t
    assert "t" not in names
    assert cuda.memory_allocated() == 0
