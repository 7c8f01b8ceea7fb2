"""Several Python threads at once, and threads that wait for the device."""

import random
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

import lastref
from conftest import MIB
from lastref import Tensor, cuda


def test_threads_make_share_and_drop_tensors() -> None:
    shared: list[Tensor | None] = [None] * 16

    def work(seed: int) -> int:
        rng = random.Random(seed)
        device = f"cuda:{seed % 2}"
        done = 0
        for step in range(400):
            size = rng.randrange(1, 40_000)
            t = lastref.full((size,), seed, dtype=lastref.int32, device=device)
            slot = rng.randrange(len(shared))
            taken, shared[slot] = shared[slot], t[rng.randrange(size) :]
            if taken is not None and step % 8 == 0:
                values = set(taken.tolist())
                assert len(values) == 1, f"another thread's values in one tensor: {values}"
                assert values <= set(range(6))
            done += 1
        return done

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(work, range(6))) == [400] * 6
    shared.clear()


def test_threads_use_one_tensor() -> None:
    t = lastref.zeros(1000, dtype=lastref.int64)
    start = threading.Barrier(4)

    def use(value: int) -> None:
        start.wait()
        for _ in range(200):
            t.fill_(value)
            assert set(t.tolist()) <= {0, 1, 2, 3}
            t.tag = [value]
            assert t.tag[0] in range(4)
            assert t.numpy().shape == (1000,)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(use, range(4)))


def test_each_thread_has_its_own_current_device_and_stream() -> None:
    stream = cuda.Stream()
    seen: list[tuple[int, bool]] = []

    def look() -> None:
        seen.append((cuda.current_device(), cuda.current_stream(0) == stream))
        cuda.set_device(1)

    with cuda.stream(stream):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert cuda.current_device() == 0
        assert cuda.current_stream() == stream
    assert seen == [(0, False)]


WAITS: dict[str, Callable[[Tensor], object]] = {
    "synchronize": lambda _: cuda.synchronize(),
    "stream": lambda _: cuda.current_stream().synchronize(),
    "event": lambda _: cuda.current_stream().record_event().synchronize(),
    "empty_cache": lambda _: cuda.empty_cache(),
    "ones": lambda t: lastref.ones_like(t, device="cpu"),
    "cpu": lambda t: t.cpu(),
    "clone": lambda t: t.clone(),
    "fill_": lambda t: t.fill_(1),
    "copy_": lambda t: t.copy_(t[:1]),
    "setitem": lambda t: t.__setitem__(0, 1),
    "item": lambda t: t[0].item(),
    "tolist": lambda t: t[:9].tolist(),
    "tensor": lambda t: lastref.tensor(t),
    "dlpack": lambda t: t.__dlpack__(),
}


@pytest.mark.parametrize("call", WAITS.values(), ids=WAITS.keys())
def test_other_threads_run_while_one_waits(call: Callable[[Tensor], object]) -> None:
    stop = threading.Event()
    counted = [0]

    def count() -> None:
        while not stop.is_set():
            counted[0] += 1
            time.sleep(0)

    t = lastref.empty(16 * MIB, dtype=lastref.uint8, device="cuda")
    thread = threading.Thread(target=count)
    thread.start()
    # From here on the interpreter takes the lock from nobody: the other thread runs during the call
    # only if the call lets go of it.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(600)
    try:
        for _ in range(100):
            for value in range(20):
                t.fill_(value)  # work to wait for
            before = counted[0]
            call(t)
            if counted[0] > before:
                break
        else:
            raise AssertionError("the other thread never ran during the call")
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()


def test_threads_run_out_of_memory_together() -> None:
    # 8 GiB, and each thread wants up to 3: who finds the device full gets an error, and no more.
    failed = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(60):
            try:
                t = lastref.empty(rng.randrange(1, 3072) * MIB, dtype=lastref.uint8, device="cuda")
            except lastref.OutOfMemoryError as error:
                failed.append(error.requested_bytes)
            else:
                del t

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert cuda.memory_allocated() == 0
    t = lastref.empty(7168 * MIB, dtype=lastref.uint8, device="cuda")
    assert t.nbytes == 7168 * MIB
