"""lastref's collector runs Python's: when bytes have grown, and before an out-of-memory error."""

import gc
import pathlib
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import lastref
from conftest import GIB, MIB, RunPython
from lastref import Tensor, cuda

EXAMPLE = pathlib.Path(__file__).parents[1] / "examples" / "dead_cycles.py"


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """Each test starts with what the collector starts with, but without automatic runs."""
    lastref.gc.disable()
    yield
    lastref.gc.enable()
    lastref.gc.set_before_out_of_memory(True)
    lastref.gc.set_wait_bound(30)
    for device in range(cuda.device_count()):
        lastref.gc.set_byte_threshold(None, device)
    gc.unfreeze()
    gc.set_debug(0)
    gc.garbage.clear()


def make(num_bytes: int = MIB) -> Tensor:
    return lastref.empty(num_bytes, dtype=lastref.uint8, device="cuda")


class Node:
    def __init__(self, num_bytes: int = MIB) -> None:
        self.me = self
        self.tensor = make(num_bytes)


# The example, and what switches do to it. 27 times 400 MiB fit in 11,000 MiB.

SETTINGS = {
    "as it is": ("11000MiB", ""),
    "Python's gc disabled": ("11000MiB", "import gc; gc.disable()"),
    "lastref.gc disabled": ("11000MiB", "lastref.gc.disable()"),
    "no byte trigger": ("11000MiB", "lastref.gc.set_byte_threshold(0)"),
    "a memory limit": ("40000MiB", "lastref.cuda.set_per_process_memory_fraction(11 / 40)"),
    "a memory limit, Python's gc disabled": (
        "40000MiB",
        "import gc; gc.disable(); lastref.cuda.set_per_process_memory_fraction(11 / 40)",
    ),
}


@pytest.mark.parametrize(("sim", "setting"), SETTINGS.values(), ids=SETTINGS.keys())
def test_dead_cycles_never_fill_the_device(sim: str, setting: str, run_python: RunPython) -> None:
    program = f"import lastref, runpy; {setting}\nrunpy.run_path({str(EXAMPLE)!r})"
    done = run_python("-c", program, sim=sim)
    found = re.fullmatch(
        r"400 objects of 400 MiB\n"
        r"collections: (\d+)\n"
        r"milliseconds in them: [\d.]+\n"
        r"peak: (\d+) MiB\n"
        r"left after collect and empty_cache: 0 bytes\n",
        done.stdout,
    )
    assert found, done.stdout
    collections, peak = map(int, found.groups())
    assert collections >= 1
    assert 400 < peak <= 11000


def test_without_the_collector_they_fill_it(run_python: RunPython) -> None:
    program = """
import gc
import lastref
# Python's own count of objects would find them too, sooner or later.
gc.disable()
lastref.gc.set_before_out_of_memory(False)
lastref.gc.set_byte_threshold(0)
class Garbage:
    def __init__(self):
        self.cycle = self
        self.tensor = lastref.empty(400 << 20, dtype=lastref.uint8, device="cuda")
for n in range(400):
    try:
        Garbage()
    except lastref.OutOfMemoryError as error:
        assert "set_before_out_of_memory(False)" in str(error), error
        break
print(n)
"""
    assert run_python("-c", program, sim="11000MiB").stdout == "27\n", "the 28th allocation"


def test_growth_of_bytes_starts_a_run() -> None:
    lastref.gc.enable()
    lastref.gc.set_byte_threshold(4 * MIB)
    before = lastref.gc.stats()["bytes"]
    kept = []
    until = time.monotonic() + 20
    while lastref.gc.stats()["bytes"].objects == before.objects:
        assert time.monotonic() < until, "no automatic run freed anything"
        Node()
        kept = [make() for _ in range(8)]
        time.sleep(0.001)
    after = lastref.gc.stats()["bytes"]
    assert after.runs > before.runs
    assert after.device_bytes_freed >= before.device_bytes_freed + MIB
    assert after.microseconds >= before.microseconds
    assert len(kept) == 8


def automatic_runs_free(num_cycles: int) -> bool:
    """Whether automatic runs, of which there are many, free any of some dead cycles."""
    lastref.gc.enable()
    lastref.gc.set_byte_threshold(4 * MIB)
    alive = [weakref.ref(Node()) for _ in range(num_cycles)]
    runs = lastref.gc.stats()["bytes"].runs
    until = time.monotonic() + 20
    while lastref.gc.stats()["bytes"].runs < runs + 5:
        assert time.monotonic() < until, "no automatic run"
        kept = [make() for _ in range(8)]
        del kept
        time.sleep(0.001)
    lastref.gc.disable()
    return any(ref() is None for ref in alive)


def test_automatic_runs_free() -> None:
    assert automatic_runs_free(5)


@pytest.mark.usefixtures("gc_disabled")
def test_automatic_runs_respect_what_the_program_disabled() -> None:
    assert not automatic_runs_free(5)


@pytest.mark.usefixtures("gc_disabled")
def test_no_run_is_forced_while_memory_is_ample() -> None:
    runs = lastref.gc.stats()["oom"].runs
    kept = [make(GIB) for _ in range(8)]
    del kept[4:]
    kept += [make(GIB) for _ in range(4)]
    assert lastref.gc.stats()["oom"].runs == runs


@pytest.mark.usefixtures("gc_disabled")
@pytest.mark.parametrize("num_bytes", [4096, 7 * GIB], ids=["small", "large"])
def test_an_allocation_waits_for_the_run(num_bytes: int) -> None:
    # A small one keeps the interpreter lock at first, which the collector's thread needs.
    num_ooms = cuda.memory_stats()["num_ooms"]
    lastref.gc.set_before_out_of_memory(False)
    while True:  # until not even a small one fits
        try:
            Node(GIB if num_bytes > GIB else 64 * MIB)
        except lastref.OutOfMemoryError:
            break
    lastref.gc.set_before_out_of_memory(True)
    before = lastref.gc.stats()["oom"]
    t = make(num_bytes)
    after = lastref.gc.stats()["oom"]
    assert t.nbytes == num_bytes
    assert after.runs > before.runs
    assert after.objects > before.objects
    assert after.device_bytes_freed >= before.device_bytes_freed + num_bytes
    assert cuda.memory_stats()["num_ooms"] >= num_ooms


SMALL: dict[str, Callable[[], Tensor]] = {
    "empty": lambda: lastref.empty(8, device="cuda"),
    "zeros": lambda: lastref.zeros(8, device="cuda"),
    "ones": lambda: lastref.ones(8, device="cuda"),
    "full": lambda: lastref.full((8,), 1, device="cuda"),
    "arange": lambda: lastref.arange(8, device="cuda"),
    "tensor": lambda: lastref.tensor([1, 2], device="cuda"),
    "as_tensor": lambda: lastref.as_tensor([1, 2], device="cuda"),
    "empty_like": lambda: lastref.empty_like(lastref.zeros(8), device="cuda"),
    "cuda": lambda: lastref.zeros(8).cuda(),
    "rebuild": lambda: lastref._lastref.rebuild_tensor(Tensor, b"12", lastref.uint8, (2,), "cuda"),
}


@pytest.mark.usefixtures("gc_disabled")
@pytest.mark.parametrize("allocate", SMALL.values(), ids=SMALL.keys())
def test_no_small_allocation_waits_with_the_interpreter_lock(
    allocate: Callable[[], Tensor],
) -> None:
    for _ in range(8):
        Node(GIB)
    assert cuda.memory_allocated() == 8 * GIB
    started = time.monotonic()
    t = allocate()
    assert time.monotonic() - started < 10, "it waited for a thread that waited for it"
    assert t.is_cuda


# Reports.


@pytest.mark.usefixtures("gc_disabled")
def test_collect_by_hand() -> None:
    gc.collect()
    Node()
    before = lastref.gc.stats()["manual"]
    # The instance and its dict; Python 3.13 and later keep no dict for it.
    assert lastref.gc.collect() in (1, 2)
    assert cuda.memory_allocated() == 0
    after = lastref.gc.stats()["manual"]
    assert after.runs == before.runs + 1
    assert after.device_bytes_freed == before.device_bytes_freed + MIB
    assert lastref.gc.collect() == 0
    Node()
    assert lastref.gc.collect(0) > 0, "it was young"
    assert cuda.memory_allocated() == 0


@pytest.mark.parametrize("generation", [-1, 3, 1 << 40])
def test_there_are_three_generations(generation: int) -> None:
    with pytest.raises(ValueError, match=f"not {generation}"):
        lastref.gc.collect(generation)


def test_settings_can_be_queried() -> None:
    assert not lastref.gc.isenabled()
    lastref.gc.enable()
    assert lastref.gc.isenabled()
    assert lastref.gc.get_before_out_of_memory()
    lastref.gc.set_before_out_of_memory(False)
    assert not lastref.gc.get_before_out_of_memory()
    assert lastref.gc.get_wait_bound() == 30
    lastref.gc.set_wait_bound(0.25)
    assert lastref.gc.get_wait_bound() == 0.25
    for seconds in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="set_wait_bound"):
            lastref.gc.set_wait_bound(seconds)
    assert lastref.gc.get_byte_threshold() == GIB, "an eighth of 8 GiB"
    lastref.gc.set_byte_threshold(123, "cuda:1")
    assert lastref.gc.get_byte_threshold(1) == 123
    assert lastref.gc.get_byte_threshold() == GIB
    lastref.gc.set_byte_threshold(0, 1)
    assert lastref.gc.get_byte_threshold(1) == 0
    lastref.gc.set_byte_threshold(None, 1)
    assert lastref.gc.get_byte_threshold(1) == GIB
    with pytest.raises(OverflowError):
        lastref.gc.set_byte_threshold(-1)


@pytest.mark.usefixtures("gc_disabled")
def test_callbacks() -> None:
    calls: list[tuple[str, dict[str, Any], str]] = []

    @lastref.gc.add_callback
    def callback(phase: str, info: dict[str, Any]) -> None:
        calls.append((phase, info, threading.current_thread().name))

    Node()
    lastref.gc.collect(1)
    lastref.gc.remove_callback(callback)
    lastref.gc.collect()
    (start, info, thread), (stop, result, _) = calls
    assert (start, stop) == ("start", "stop")
    assert thread == threading.current_thread().name
    assert info == {
        "reason": "manual",
        "generation": 1,
        "objects": 0,
        "device_bytes_freed": 0,
        "microseconds": 0,
    }
    assert result["objects"] > 0
    assert result["device_bytes_freed"] == MIB
    with pytest.raises(ValueError, match="not among"):
        lastref.gc.remove_callback(callback)

    calls.clear()
    lastref.gc.add_callback(callback)
    for _ in range(8):
        Node(GIB)
    make()
    lastref.gc.remove_callback(callback)
    assert {info["reason"] for _, info, _ in calls} == {"oom"}
    assert threading.current_thread().name not in {thread for _, _, thread in calls}
    assert sum(info["device_bytes_freed"] for _, info, _ in calls) == 8 * GIB


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_callback_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", failed.append)

    @lastref.gc.add_callback
    def callback(phase: str, info: dict[str, Any]) -> None:
        raise RuntimeError(phase)

    gc.collect()
    Node()
    assert lastref.gc.collect() > 0
    lastref.gc.remove_callback(callback)
    assert len(failed) == 2
    assert cuda.memory_allocated() == 0


# What hides garbage from every collection.


@pytest.mark.usefixtures("gc_disabled")
def test_an_error_tells_of_frozen_objects() -> None:
    for _ in range(8):
        Node(GIB)
    gc.freeze()
    with pytest.raises(lastref.OutOfMemoryError, match="python's gc holds") as caught:
        make()
    # CPython 3.12 and later have frozen some before lastref was imported.
    count = caught.value.gc_frozen_count
    assert 0 < count <= gc.get_freeze_count()
    assert not caught.value.gc_saves_all
    assert f"{count} frozen objects" in str(caught.value)
    del caught
    gc.unfreeze()
    make()


@pytest.mark.usefixtures("gc_disabled")
def test_an_error_tells_of_saved_garbage() -> None:
    for _ in range(8):
        Node(GIB)
    gc.set_debug(gc.DEBUG_SAVEALL)
    with pytest.raises(lastref.OutOfMemoryError, match="DEBUG_SAVEALL") as caught:
        make()
    assert caught.value.gc_saves_all
    del caught
    gc.set_debug(0)
    assert len(gc.garbage) >= 8
    gc.garbage.clear()
    make()


def test_an_error_says_no_more_than_there_is_to_say() -> None:
    kept = make(8 * GIB)
    with pytest.raises(lastref.OutOfMemoryError) as caught:
        make()
    assert "python's gc" not in str(caught.value)
    assert caught.value.gc_frozen_count == 0
    assert not caught.value.gc_saves_all
    assert kept.is_cuda


# `gc.collect(); empty_cache()` leaves nothing, whatever the shape of the cycle.


def itself() -> None:
    Node()


def pair() -> None:
    a, b = Node(), Node()
    a.me, b.me = b, a


def ring() -> None:
    nodes = [Node(4096) for _ in range(1000)]
    for i, node in enumerate(nodes):
        node.me = nodes[i - 1]


def closure() -> None:
    t = make()

    def call_itself(n: int) -> int:
        return call_itself(n - 1) if n else t.nbytes

    call_itself(2)


def exception_traceback() -> None:
    t = make()
    try:
        raise RuntimeError(t.nbytes)
    except RuntimeError as error:
        kept = error  # the frame refers to the exception, whose traceback refers to the frame
    assert kept.__traceback__ is not None


def chained_exceptions() -> None:
    t = make()
    try:
        try:
            raise KeyError(t.nbytes)
        except KeyError as error:
            raise RuntimeError from error
    except RuntimeError as error:
        kept = error
    assert kept.__cause__ is not None


def bound_method() -> None:
    node = Node()
    node.me = None  # type: ignore[assignment]
    node.method = node.__init__  # type: ignore[attr-defined, misc]


def instance_dict() -> None:
    node = Node()
    node.me = vars(node)  # type: ignore[assignment]


def weak_proxies() -> None:
    node = Node()
    proxy = weakref.proxy(node)
    node.proxy = proxy  # type: ignore[attr-defined]
    node.refs = weakref.WeakSet([node])  # type: ignore[attr-defined]
    weakref.finalize(node, lambda: None)


def containers() -> None:
    inner: list[Any] = [make()]
    inner.append({"set": {(0, 1)}, "tuple": (inner, [{"deep": inner}])})


def tensor_attributes() -> None:
    t, u = make(), make()
    t.other, u.other, t.items = u, [t], {"me": t}


def view_attributes() -> None:
    t = make()
    view = t[10:]
    view.base, t.view_of_me = t, view


def class_cycle() -> None:
    class Local:  # a class is in a cycle with its own method resolution order
        tensor = make()

    assert Local.tensor.is_cuda


def generator() -> None:
    t = make()

    def suspended() -> Iterator[Any]:
        me = yield t
        while True:
            yield me, t

    g: Any = suspended()
    next(g)
    g.send(g)


def finalizer() -> None:
    class Finalized(Node):
        def __del__(self) -> None:
            assert self.tensor.nbytes == MIB

    Finalized()




SHAPES = [
    itself,
    pair,
    ring,
    closure,
    exception_traceback,
    chained_exceptions,
    bound_method,
    instance_dict,
    weak_proxies,
    containers,
    tensor_attributes,
    view_attributes,
    class_cycle,
    generator,
    finalizer,
]


@pytest.mark.usefixtures("gc_disabled")
@pytest.mark.parametrize("collect", [gc.collect, lastref.gc.collect], ids=["gc", "lastref.gc"])
@pytest.mark.parametrize("shape", SHAPES)
def test_collect_then_empty_cache_leaves_nothing(
    shape: Callable[[], None], collect: Callable[[], int]
) -> None:
    shape()
    assert cuda.memory_allocated() >= MIB, "a dead cycle stays allocated"
    collect()
    cuda.empty_cache()
    assert cuda.memory_allocated() == 0
    assert cuda.memory_reserved() == 0


@pytest.mark.usefixtures("gc_disabled")
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_freed_before_out_of_memory(shape: Callable[[], None]) -> None:
    shape()
    assert cuda.memory_allocated() >= MIB
    assert make(8 * GIB).nbytes == 8 * GIB
