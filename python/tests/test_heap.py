"""The graph of Python's objects, and the words for ways through it: on plain objects, without PyTorch."""

import gc
import os
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest

import lastref
from lastref._lastref import Heap, heap_frame_variables, heap_instance_values

try:
    from lastref.torch._holders import describe, describe_cycle
except ImportError:
    # Without PyTorch that package refuses; this module of it needs none.
    package = types.ModuleType("lastref.torch")
    package.__path__ = [os.path.join(os.path.dirname(lastref.__file__), "torch")]
    sys.modules["lastref.torch"] = package
    from lastref.torch._holders import describe, describe_cycle

    del sys.modules["lastref.torch"]

HERE = "test_heap.py"


class Wanted:
    """What is searched for."""


class Box:
    def __init__(self, value: Any) -> None:
        self.other = 1
        self.value = value


@pytest.fixture
def heap() -> Iterator[Any]:
    """Makes heaps, and closes them."""
    made: list[Heap] = []

    def make(**options: Any) -> Heap:
        arguments = {"seconds": 20.0, "max_edges": 1 << 30, **options}
        made.append(Heap([Wanted], "/no such folder/", **arguments))
        return made[-1]

    yield make
    for each in made:
        each.close()


def words(found: Heap, target: Any, limit: int = 10) -> list[str]:
    paths = [describe(*row).words for row in found.paths([target], limit)]
    return [path.replace(__file__, HERE) for path in paths]


def test_variable_and_attribute(heap: Any) -> None:
    x = Wanted()
    box = Box([x])
    found = words(heap(), x)
    assert len(found) == 2
    assert found[0].startswith(f"variable `x` in `test_variable_and_attribute` ({HERE}:")
    assert found[1].startswith(f"variable `box.value[0]` in `test_variable_and_attribute` ({HERE}:")
    del box


def test_attributes_need_no_dict() -> None:
    box = Box(1)
    assert heap_instance_values(box) == [("other", 1), ("value", 1)]
    del box.other
    assert heap_instance_values(box) == [("value", 1)]
    assert vars(box) == {"value": 1}
    if sys.version_info < (3, 13):  # From then on the values stay where they are.
        assert heap_instance_values(box) is None
    assert heap_instance_values([]) is None
    assert heap_instance_values(object()) is None


def test_variables_of_frames_and_generators() -> None:
    def outer(a: int) -> Any:
        shared = a + 1

        def inner() -> int:
            return shared

        return inner, sys._getframe()

    inner, frame = outer(5)
    got = {name: value for name, value in heap_frame_variables(frame) if name is not None}
    assert got["a"] == 5
    assert got["inner"] is inner
    assert got["shared"].cell_contents == 6

    def count() -> Iterator[int]:
        start = 7
        yield start

    running = count()
    next(running)
    assert dict(heap_frame_variables(running))["start"] == 7
    list(running)
    assert dict(heap_frame_variables(running)).get("start") is None
    assert heap_frame_variables(sys._getframe())


def test_closure_and_default(heap: Any) -> None:
    x = Wanted()
    holders: dict[str, Any] = {"closure": lambda: x}
    holders["default"] = lambda y=x: y
    found = words(heap(), x)
    assert any("`holders['default']`" in path and "default argument `y`" in path for path in found), found
    assert any("closure cell `x` of function" in path for path in found), found


def test_generator(heap: Any) -> None:
    def rows() -> Iterator[int]:
        x = Wanted()  # noqa: F841
        yield 1

    kept = rows()
    next(kept)
    graph = heap()
    (target,) = graph.instances(0)
    assert f"local `x` of the suspended generator `rows` ({HERE}:" in words(graph, target)[0]
    kept.close()  # type: ignore[attr-defined]


def test_threads(heap: Any) -> None:
    ready, over = threading.Event(), threading.Event()

    def work() -> None:
        x = Wanted()  # noqa: F841
        ready.set()
        over.wait()

    thread = threading.Thread(target=work, name="other")
    thread.start()
    ready.wait()
    try:
        graph = heap()
        (target,) = graph.instances(0)
        assert f"variable `x` in `work` ({HERE}:" in words(graph, target)[0]
        assert "on thread `other`" in words(graph, target)[0]
    finally:
        over.set()
        thread.join()


def dead_cycle() -> None:
    box = Box(Wanted())
    box.other = box  # type: ignore[assignment]


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("freezes", [False, True])
def test_cycle(heap: Any, freezes: bool) -> None:
    dead_cycle()
    if freezes:
        gc.freeze()
    graph = heap()
    assert graph.knows_frozen
    (target,) = graph.instances(0)
    assert graph.paths([target], 5) == []
    cycle, way = graph.cycle([target])
    natives = graph.native([cycle[0]], 4)
    ring = describe_cycle(graph, cycle, way, natives)
    assert ring.words.startswith(f"{__name__}.Box.other → {__name__}.Box; ")
    assert ring.collectable == (not freezes)
    assert ("gc.unfreeze()" in ring.words) == freezes
    assert natives == []
    del target, cycle, way


@pytest.mark.usefixtures("no_gc")
def test_nothing_is_added() -> None:
    def look() -> None:
        graph = Heap([Wanted], "/no such folder/", 20.0, 1 << 30)
        for target in graph.instances(0):
            words(graph, target)
        graph.close()

    kept = [Box(Wanted()) for _ in range(20)]
    for _ in range(20):
        look()
    counts = [sys.getrefcount(box.value) for box in kept]
    before = len(gc.get_objects())
    blocks = sys.getallocatedblocks()
    for _ in range(20):
        look()
    # Python keeps free dicts and tuples in lists of its own, which fill up; each look makes hundreds of objects.
    assert sys.getallocatedblocks() - blocks < 300
    assert len(gc.get_objects()) == before
    assert [sys.getrefcount(box.value) for box in kept] == counts


def test_bounds(heap: Any) -> None:
    assert heap(seconds=0.0).truncated
    assert heap(max_edges=1000).truncated
    assert not heap().truncated


def test_closed(heap: Any) -> None:
    x = Wanted()
    graph = heap()
    graph.close()
    assert graph.instances(0) == []
    assert graph.paths([x], 5) == []
    assert graph.cycle([x]) is None
    assert graph.native([x], 5) == []
    assert not graph.is_frozen(x)
    assert graph.found_references(x) == graph.uncounted_references(x) == 0
    graph.close()


def test_what_did_not_exist_yet(heap: Any) -> None:
    graph = heap()
    x = Wanted()
    assert graph.paths([x], 5) == []


def test_module_and_exception(heap: Any) -> None:
    module = types.ModuleType("some.module")
    module.cache = {"k": Wanted()}  # type: ignore[attr-defined]
    sys.modules["some.module"] = module
    try:
        graph = heap()
        (target,) = graph.instances(0)
        assert "global `cache['k']` of module `some.module`" in words(graph, target)
    finally:
        del sys.modules["some.module"]

    def fail() -> None:
        x = Wanted()  # noqa: F841
        raise ValueError

    graph.close()
    del target, graph
    module.cache.clear()  # type: ignore[attr-defined]
    try:
        fail()
    except ValueError:
        graph = heap()
        (target,) = graph.instances(0)
        found = words(graph, target)
    assert found[0].startswith("the exception being handled (`ValueError`) → its traceback → variable `x` in `fail`")
    del target
