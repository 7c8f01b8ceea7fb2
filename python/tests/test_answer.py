"""docs/answer.md, sentence by sentence: when a CUDA variable gets a new value, is the memory it held
freed? The tests have the names of those in crates/lastref/tests/answer.rs."""

import gc
import time

import pytest

import lastref
from conftest import GIB, MIB
from lastref import Tensor, cuda


def make(num_bytes: int) -> Tensor:
    return lastref.empty(num_bytes, dtype=lastref.uint8, device="cuda")


def num_device_calls() -> tuple[int, int]:
    stats = cuda.memory_stats()
    return stats["num_device_alloc"], stats["num_device_free"]


def largest_possible_allocation() -> int:
    """The largest single allocation that succeeds now, to 2 MiB, by bisection."""
    fits, fails = 0, 8 * GIB + 2 * MIB
    while fails - fits > 2 * MIB:
        middle = (fits + fails) // (4 * MIB) * (2 * MIB)
        try:
            make(middle)
            fits = middle
        except lastref.OutOfMemoryError:
            fails = middle
    return fits


def test_the_old_tensor_is_not_moved() -> None:
    t = old = lastref.full((4, 5), 7.0, device="cuda")
    address = old.data_ptr()
    t = lastref.empty(4, 5)
    assert not t.is_cuda
    assert old.is_cuda, "the old tensor is where it was"
    assert old.data_ptr() == address
    assert old.tolist() == [[7.0] * 5] * 4


def test_freed_at_once_when_no_reference_remains() -> None:
    t = make(MIB)
    second = t
    t = lastref.empty(4, 5)
    assert cuda.memory_allocated() == MIB, "one reference remains"
    second = t
    assert second is t
    assert cuda.memory_allocated() == 0


def test_freed_memory_is_cached() -> None:
    t = make(4 * MIB)
    address = t.data_ptr()
    reserved = cuda.memory_reserved()
    del t
    assert cuda.memory_allocated() == 0
    assert cuda.memory_reserved() == reserved
    t = make(4 * MIB)
    assert t.data_ptr() == address, "the program asked again, and got the same memory"
    assert cuda.memory_reserved() == reserved


def test_because_the_driver_is_slow() -> None:
    before = num_device_calls()
    t = make(4 * MIB)
    miss = num_device_calls()
    assert miss[0] > before[0], "a miss asks the device"
    del t
    assert num_device_calls() == miss, "a free does not"
    t = make(4 * MIB)
    assert t.nbytes == 4 * MIB
    assert num_device_calls() == miss, "and a hit does not"


def test_empty_cache_gives_it_back() -> None:
    free, _ = cuda.mem_get_info()
    t = make(4 * MIB)
    reserved = cuda.memory_reserved()
    del t
    assert cuda.mem_get_info()[0] == free - reserved, "other programs do not see it"
    cuda.empty_cache()
    assert cuda.mem_get_info()[0] == free, "now they do"


def test_empty_cache_does_not_enlarge_what_this_process_can_allocate() -> None:
    kept: list[Tensor] = []

    def fill_the_cache() -> None:
        # Many sizes, every other one kept, so that what is cached lies in pieces.
        tensors = [make((1 + i % 7) * MIB) for i in range(200)]
        kept[:] = tensors[::2]

    fill_the_cache()
    assert cuda.memory_reserved() > cuda.memory_allocated() > 0
    with_cache = largest_possible_allocation()
    kept.clear()
    cuda.empty_cache()
    fill_the_cache()
    cuda.empty_cache()
    without_cache = largest_possible_allocation()
    assert with_cache == without_cache > 4 * GIB


def test_given_back_by_itself_before_out_of_memory() -> None:
    def cache_six_gib() -> None:
        tensors = [make(GIB) for _ in range(6)]
        assert cuda.memory_allocated() == 6 * GIB
        del tensors

    cache_six_gib()
    assert cuda.memory_allocated() == 0
    assert cuda.memory_reserved() == 6 * GIB
    ooms = cuda.memory_stats()["num_ooms"]
    t = make(7 * GIB)  # fits only once the cache is given back
    assert t.nbytes == 7 * GIB
    assert cuda.memory_stats()["num_ooms"] == ooms
    with pytest.raises(lastref.OutOfMemoryError):
        make(2 * GIB)
    assert cuda.memory_allocated() == 7 * GIB


class Node:
    """Refers to itself, so that no count in it ever falls to zero."""

    def __init__(self, num_bytes: int) -> None:
        self.me = self
        self.tensor = make(num_bytes)


@pytest.mark.usefixtures("gc_disabled")
def test_a_dead_cycle_stays_allocated_until_the_collector_runs() -> None:
    Node(400 * MIB)
    assert cuda.memory_allocated() == 400 * MIB, "nobody can reach it, and it stays"
    cuda.empty_cache()
    assert cuda.memory_allocated() == 400 * MIB
    assert gc.collect() > 0
    assert cuda.memory_allocated() == 0


def test_the_collector_runs_by_itself() -> None:
    # When bytes have grown: by an eighth of the device, where nothing else is set.
    before = lastref.gc.stats()
    until = time.monotonic() + 20
    while lastref.gc.stats()["bytes"].device_bytes_freed == before["bytes"].device_bytes_freed:
        assert time.monotonic() < until, "no automatic run freed anything"
        Node(512 * MIB)
        time.sleep(0.001)
    # Before an allocation fails, also where automatic runs are switched off.
    gc.disable()
    try:
        for _ in range(30):
            Node(GIB)
    finally:
        gc.enable()
    freed = lastref.gc.stats()["oom"].device_bytes_freed - before["oom"].device_bytes_freed
    assert freed >= 22 * GIB
    assert cuda.max_memory_allocated() <= 8 * GIB


@pytest.mark.usefixtures("gc_disabled")
def test_the_collector_can_be_queried_configured_and_run_by_hand() -> None:
    assert lastref.gc.isenabled()
    lastref.gc.disable()
    assert not lastref.gc.isenabled()
    lastref.gc.enable()
    assert lastref.gc.get_byte_threshold() == GIB, "an eighth of the GPU"
    lastref.gc.set_byte_threshold(123)
    assert lastref.gc.get_byte_threshold() == 123
    lastref.gc.set_byte_threshold(None)

    Node(30 * MIB)
    before = lastref.gc.stats()["manual"]
    assert lastref.gc.collect() > 0
    after = lastref.gc.stats()["manual"]
    assert after.runs == before.runs + 1
    assert after.device_bytes_freed == before.device_bytes_freed + 30 * MIB

    lastref.gc.set_before_out_of_memory(False)
    try:
        with pytest.raises(lastref.OutOfMemoryError):
            for _ in range(9):
                Node(GIB)
    finally:
        lastref.gc.set_before_out_of_memory(True)
    assert make(MIB).is_cuda


@pytest.mark.usefixtures("gc_disabled")
def test_collect_then_empty_cache_leaves_nothing() -> None:
    for num_nodes, num_bytes in ((1, 400 * MIB), (2, 100 * MIB), (1000, MIB)):
        nodes = [Node(num_bytes) for _ in range(num_nodes)]
        for i, node in enumerate(nodes):
            node.me = nodes[i - 1]
        del nodes, node
        assert cuda.memory_allocated() == num_nodes * num_bytes
        gc.collect()
        cuda.empty_cache()
        assert cuda.memory_allocated() == cuda.memory_reserved() == 0
        free, total = cuda.mem_get_info()
        assert free == total
