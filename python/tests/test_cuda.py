"""`lastref.cuda`: devices, streams, events and statistics."""

import threading

import pytest

import lastref
from conftest import GIB, MIB, RunPython
from lastref import cuda


def test_devices() -> None:
    assert cuda.is_available()
    assert lastref.sim.is_enabled()
    assert cuda.device_count() == 2
    assert "simulated" in cuda.get_device_name()
    properties = cuda.get_device_properties("cuda:1")
    assert properties.total_memory == 8 * GIB
    assert properties.is_simulated
    assert properties.name == cuda.get_device_name(1)


def test_current_device() -> None:
    assert cuda.current_device() == 0
    with cuda.device(1):
        assert cuda.current_device() == 1
        with cuda.device(None), cuda.device("cuda:0"):
            assert cuda.current_device() == 0
        assert cuda.current_device() == 1
        cuda.set_device(0)
    assert cuda.current_device() == 0
    with pytest.raises(KeyError), cuda.device(1):
        raise KeyError
    assert cuda.current_device() == 0


def test_a_context_manager_can_be_entered_again() -> None:
    context = cuda.device(1)
    with context, context:
        pass
    with context:
        assert cuda.current_device() == 1
    assert cuda.current_device() == 0


def test_streams() -> None:
    default = cuda.current_stream()
    assert default == cuda.default_stream()
    assert default.stream_id == 0
    stream = cuda.Stream()
    other = cuda.Stream(device=1, priority=-1)
    assert stream != default
    assert len({stream, default, other}) == 3
    assert other.device == lastref.device(1)
    assert other.priority == -1
    assert "stream_id" in repr(stream)
    with cuda.stream(stream) as context:
        assert context is None
        assert cuda.current_stream() == stream
        with cuda.stream(other):
            assert cuda.current_device() == 1
            assert cuda.current_stream() == other
            assert cuda.current_stream(0) == stream
        assert cuda.current_device() == 0
        assert cuda.current_stream(1) == cuda.default_stream(1)
        with cuda.stream(None):
            assert cuda.current_stream() == stream
    assert cuda.current_stream() == default


def test_waiting_for_a_stream() -> None:
    stream = cuda.Stream()
    with cuda.stream(stream):
        t = lastref.zeros(64 * MIB, dtype=lastref.uint8, device="cuda")
    # The simulated device works while it is asked, so this ends.
    while not stream.query():
        pass
    t.fill_(1)
    cuda.synchronize()
    assert cuda.current_stream().query()
    assert t[-1].item() == 1


def test_events_order_streams() -> None:
    first, second = cuda.Stream(), cuda.Stream()
    with cuda.stream(first):
        t = lastref.full((MIB,), 7, dtype=lastref.uint8, device="cuda")
        event = first.record_event()
    with cuda.stream(second):
        event.wait()
        t.record_stream(second)
        u = t.clone()
        assert u[-1].item() == 7, "read on the stream that made it"
    cuda.current_stream().wait_stream(second)
    assert u[-1].item() == 7, "and on one that waits for that"
    second.wait_stream(first)
    second.wait_event(event)
    event.synchronize()
    assert event.query()
    assert event.device == lastref.device(0)
    assert cuda.Event().device is None
    assert cuda.Event().query(), "nothing was recorded, so nothing is pending"


def test_events_measure_device_time() -> None:
    start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    with pytest.raises(RuntimeError, match="recorded"):
        start.elapsed_time(end)
    start.record()
    t = lastref.zeros(256 * MIB, dtype=lastref.uint8, device="cuda")
    end.record(cuda.current_stream())
    end.synchronize()
    assert start.elapsed_time(end) > 0
    assert t.is_cuda


def test_record_stream_delays_reuse() -> None:
    side = cuda.Stream()

    def reused(*, recorded: bool) -> bool:
        cuda.synchronize()
        t = lastref.empty(16 * MIB, dtype=lastref.uint8, device="cuda")
        address = t.data_ptr()
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            # Much work: some of it is done by the time the next tensor is made, never all.
            for value in range(200):
                t.fill_(value)
        if recorded:
            t.record_stream(side)
        del t
        u = lastref.empty(16 * MIB, dtype=lastref.uint8, device="cuda")
        return u.data_ptr() == address

    assert reused(recorded=False)
    assert not reused(recorded=True)
    cuda.synchronize()


def test_statistics() -> None:
    t = lastref.empty(1000, dtype=lastref.uint8, device="cuda:1")
    stats = cuda.memory_stats(1)
    assert stats["allocated_bytes.all.current"] == cuda.memory_allocated(1) == 1024
    assert stats["allocated_bytes.small_pool.current"] == 1024
    assert stats["requested_bytes.all.current"] == 1000
    assert stats["allocation.all.current"] == 1
    assert stats["allocation.all.allocated"] == 1
    assert stats["reserved_bytes.all.current"] == cuda.memory_reserved(1)
    assert cuda.memory_allocated() == cuda.memory_allocated(0) == 0
    families = "allocation segment active inactive_split allocated_bytes reserved_bytes active_bytes"
    for family in [*families.split(), "inactive_split_bytes", "requested_bytes"]:
        for pool in ["all", "small_pool", "large_pool"]:
            for face in ["current", "peak", "allocated", "freed"]:
                assert isinstance(stats[f"{family}.{pool}.{face}"], int)
    for counter in ["num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free"]:
        assert isinstance(stats[counter], int)
    for counter in ["num_stream_waits", "num_waits_before_growing", "num_trims", "num_trimmed_bytes"]:
        assert isinstance(stats[counter], int)
    rungs = "thread_caches finished_events stream_waits move_pages release_cached wait_for_streams"
    for rung in rungs.split():
        for face in ["num_tried", "num_failed", "bytes_freed", "microseconds"]:
            assert isinstance(stats[f"rung.{rung}.{face}"], int)
    del t
    assert cuda.memory_stats(1)["allocation.all.freed"] == 1
    assert cuda.max_memory_allocated(1) == 1024
    assert cuda.max_memory_reserved(1) == cuda.memory_reserved(1)
    cuda.reset_peak_memory_stats(1)
    assert cuda.max_memory_allocated(1) == 0
    cuda.reset_accumulated_memory_stats(1)
    assert cuda.memory_stats(1)["allocation.all.allocated"] == 0


def test_idle_memory_goes_back(run_python: RunPython) -> None:
    program = """
import lastref, time
cuda = lastref.cuda
del_me = lastref.empty(64 << 20, dtype=lastref.uint8, device="cuda")
del del_me
assert cuda.trim() == 0
cuda._set_allocator_settings("idle_trim_ms:1,idle_keep_mb:16,stream_waits:at_limit")
time.sleep(0.05)
assert cuda.trim() == 48 << 20
assert cuda.memory_reserved() == 16 << 20
stats = cuda.memory_stats()
assert (stats["num_trims"], stats["num_trimmed_bytes"]) == (1, 48 << 20)
"""
    run_python("-c", program, sim="8GiB")


def test_races_are_found_where_that_is_asked_for(run_python: RunPython) -> None:
    program = """
import sys, lastref
if len(sys.argv) > 1:
    lastref.sim.enable("8GiB", races=True)
t = lastref.zeros(1 << 20, device="cuda")
with lastref.cuda.stream(lastref.cuda.Stream()):
    t.fill_(1)
print(len(lastref.sim.races()))
"""
    for sim, arguments, races in [("8GiB", [], 0), ("8GiB,races=true", [], 1), ("", ["ask"], 1)]:
        done = run_python("-c", program, *arguments, sim=sim)
        assert done.stdout.split() == [str(races)]
        assert ("race between stream 0 and stream 1" in done.stderr) == bool(races), done.stderr


def test_summary() -> None:
    t = lastref.empty(3 * MIB, dtype=lastref.uint8, device="cuda")
    assert f"{t.nbytes // 1024} KiB" in cuda.memory_summary()
    assert "device ID 1" in cuda.memory_summary(1)


def test_snapshot() -> None:
    t = lastref.empty(1000, dtype=lastref.uint8, device="cuda")
    u = lastref.empty(3 * MIB, dtype=lastref.uint8, device="cuda")
    segments = cuda.memory_snapshot()
    assert sum(s["allocated_size"] for s in segments) == cuda.memory_allocated()
    assert sum(s["total_size"] for s in segments) == cuda.memory_reserved()
    blocks = {b["address"]: b for s in segments for b in s["blocks"]}
    assert blocks[t.data_ptr()]["size"] == 1024
    assert blocks[t.data_ptr()]["requested_size"] == 1000
    assert blocks[t.data_ptr()]["state"] == "active_allocated"
    assert blocks[u.data_ptr()]["size"] == u.nbytes
    for segment in segments:
        assert segment["device"] == 0
        assert segment["segment_type"] in ("small", "large")
        assert sum(b["size"] for b in segment["blocks"]) == segment["total_size"]
    assert cuda.memory_snapshot(1) == []


def test_set_allocator_settings() -> None:
    change = lastref.cuda._set_allocator_settings
    change("per_process_memory_fraction:0.5")
    try:
        assert lastref.cuda.get_per_process_memory_fraction() == 0.5
        change("history_entries:10")
        assert lastref.cuda.get_per_process_memory_fraction() == 0.5
        for wrong in ("nonsense:1", "expandable_segments:true", "history_entries:-1", "x"):
            with pytest.raises(ValueError, match="valid are|takes "):
                change(wrong)
        with pytest.raises(RuntimeError, match="cannot change"):
            change("expandable_segments:False")
    finally:
        change("per_process_memory_fraction:1,history_entries:0")
    assert lastref.cuda.get_per_process_memory_fraction() == 1


def test_mem_pool() -> None:
    pool = cuda.MemPool()
    assert pool.id[0] == 0 and pool.id[1] > 0
    assert pool.device == lastref.device("cuda:0")
    assert repr(pool).startswith("<lastref.cuda.MemPool device=cuda:0 id=(0, ")

    def make() -> lastref.Tensor:
        return lastref.empty(3 * MIB, dtype=lastref.uint8, device="cuda")

    inner = cuda.MemPool(device=0)
    outside = make()
    with cuda.use_mem_pool(pool):
        first = make()
        with cuda.use_mem_pool(inner, device="cuda"):
            second = make()
        third = make()
        in_thread: list[lastref.Tensor] = []
        thread = threading.Thread(target=lambda: in_thread.append(make()))
        thread.start()
        thread.join()
    after = make()
    assert pool.memory_allocated() == 6 * MIB
    assert inner.memory_allocated() == 3 * MIB
    assert pool.memory_reserved() >= 6 * MIB
    assert cuda.memory_allocated() >= 18 * MIB
    del pool, inner
    first.fill_(1)
    assert first[5].item() == 1, "a tensor outlives its pool"
    del outside, second, third, in_thread, after


def test_mem_pool_scopes_end() -> None:
    pool = cuda.MemPool()
    context = cuda.use_mem_pool(pool)
    with pytest.raises(KeyError), context:
        raise KeyError
    lastref.empty(1, device="cuda")
    assert pool.memory_reserved() == 0, "the block was left by the exception"
    with context, context:
        pass
    with pytest.raises(ValueError, match="the pool is on cuda:0, not on cuda:1"):
        cuda.use_mem_pool(pool, device=1).__enter__()

    context.__enter__()
    errors: list[str] = []

    def leave() -> None:
        try:
            context.__exit__(None, None, None)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert errors == ["use_mem_pool: left on another thread than it was entered on"]
    context.__exit__(None, None, None)


def test_summary_advises_against_emptying_the_cache() -> None:
    cuda.reset_accumulated_memory_stats()
    for _ in range(3):
        lastref.empty(40 * MIB, dtype=lastref.uint8, device="cuda")
        cuda.empty_cache()
    advice = "advice: empty_cache released what the next step re-allocated, 3 times"
    assert advice in cuda.memory_summary()
    cuda.reset_accumulated_memory_stats()
    assert advice not in cuda.memory_summary()
