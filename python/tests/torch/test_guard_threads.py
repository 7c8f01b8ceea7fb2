"""`lastref.torch.guard` among threads, locks, finalizers, forks and exits: no deadlock, and no false error.

Each program repeats what it tries, a few times or (LASTREF_TEST_ALL=1) fifty; one that hangs is killed, and fails.
"""

from pathlib import Path
from typing import Any

import pytest

# Only what is asked for here collects: neither Python by itself nor growing bytes.
QUIET = """
import ctypes, threading, time
ROUNDS = int(sys.argv[1])
gc.disable()
lastref.gc.disable()
torch.cuda.init()
# Of what the imports made, nothing dies: a thorough collection takes microseconds without it.
gc.freeze()

def in_threads(*targets):
    problems = []
    def guarded(target):
        try:
            target()
        except BaseException as problem:
            problems.append(problem)
    threads = [threading.Thread(target=guarded, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
"""


@pytest.fixture
def run(run_program: Any, rounds: int) -> Any:
    def run(program: str, *args: str, **options: Any) -> str:
        options = {"mib": 1000, "timeout": 120} | options
        done = run_program(QUIET + program, str(rounds), *args, **options)
        return str(done["stdout"] + done["stderr"])

    return run


def test_threads_allocate_while_others_hold_the_interpreter_lock(run: Any) -> None:
    run(
        """
lastref.torch.guard(report=False)
holding = ctypes.PyDLL(None)

def allocate():
    # Three threads of at most 100 MiB live each: what does not fit is always dead.
    for _ in range(10):
        dead_cycle(100)
        kept = full(100)
        del kept

def hold():
    for _ in range(10):
        holding.usleep(5_000)

for _ in range(ROUNDS):
    in_threads(allocate, allocate, allocate, hold, hold)
stats = lastref.torch.guard_stats()
assert stats["failures"] == 0 and stats["rescues"] >= ROUNDS, stats
"""
    )


def test_autograd_worker_threads_are_rescued(run: Any) -> None:
    run(
        """
lastref.torch.guard(report=False)
workers = set()

class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        workers.add(threading.get_native_id())
        # Made on the worker's thread, which Python did not start.
        dead_cycle(100)
        return grad * 2

for _ in range(ROUNDS):
    for _ in range(8):
        x = torch.empty(25 * MIB, device="cuda", requires_grad=True)
        (Doubles.apply(Doubles.apply(x)) * 2).sum().backward()
        assert x.grad is not None
        del x
stats = lastref.torch.guard_stats()
assert workers and threading.get_native_id() not in workers, workers
assert stats["failures"] == 0 and stats["rescues"] >= ROUNDS, stats
# At the interpreter's end PyTorch's workers now and then abort the process, also without a guard.
import os
os._exit(0)
"""
    )


def test_autograd_state_is_intact_after_a_rescue_inside_an_operation(run: Any) -> None:
    """Finalizers run on the collector's thread, so that what they set there is not set here."""
    run(
        """
lastref.torch.guard(report=False)
finalized = []

class Rude(Garbage):
    def __del__(self):
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float32)
        torch.empty(8, device="cuda", requires_grad=True)
        finalized.append(threading.get_native_id())

for number in range(ROUNDS):
    x = torch.empty(50 * MIB, device="cuda", requires_grad=True)
    Rude(full(500))
    before = rescues()["cycle collection"]
    if number % 2:
        with torch.no_grad():
            y = x * 2
            assert not torch.is_grad_enabled()
        assert torch.is_grad_enabled() and not y.requires_grad
    else:
        # Three results of 200 MiB, of which the second finds the device full.
        a, b = x * 2, x * 3
        assert torch.is_grad_enabled() and a.requires_grad and b.requires_grad
        assert b.grad_fn is not None and x.requires_grad
        del a, b
    y = full(500)
    assert rescues()["cycle collection"] > before
    del x, y
    torch.cuda.empty_cache()
assert len(finalized) == ROUNDS and threading.get_native_id() not in finalized
"""
    )


@pytest.fixture
def lock_shape(run_torch: Any, tmp_path: Path) -> str:
    library = tmp_path / "lock_shape.so"
    program = """
import sys, torch
from pathlib import Path
from lastref.torch import _shim
_shim.compile_library(torch, Path(sys.argv[1]), Path(sys.argv[2]))
"""
    run_torch("-c", program, str(Path(__file__).with_name("lock_shape.cpp")), str(library))
    return str(library)


def test_a_lock_wanted_with_the_interpreter_lock_held_costs_the_bound_and_no_more(
    run: Any, lock_shape: str
) -> None:
    """Here nobody can collect: one thread holds a lock and waits for a collection, another keeps the interpreter.

    The wait ends at the bound, the first thread fails and lets go, and all goes on. With the interpreter lock let
    go of in time, the same allocation succeeds.
    """
    out = run(
        """
lastref.torch.guard(report=False)
free, holding = ctypes.CDLL(sys.argv[2]), ctypes.PyDLL(sys.argv[2])
free.allocate_locked.argtypes = [ctypes.c_size_t, ctypes.c_int]
lastref.gc.set_wait_bound(0.3)
outcomes = []

def allocates():
    outcomes.append(free.allocate_locked(400 * MIB, 50))

def wants_the_lock():
    time.sleep(0.02)
    holding.take_the_lock()

def keeps_the_interpreter():
    time.sleep(0.02)
    holding.stay(80)

for _ in range(max(2, ROUNDS // 5)):
    dead_cycle(700)
    start = time.monotonic()
    in_threads(allocates, wants_the_lock)
    assert outcomes.pop() == 0, "nothing could be collected"
    assert time.monotonic() - start < 20
    # The collection that nobody waits for any more happens when it can.
    full(400)
lastref.gc.set_wait_bound(60)
for _ in range(ROUNDS):
    dead_cycle(700)
    in_threads(allocates, keeps_the_interpreter)
    assert outcomes.pop() == 1, lastref.torch.guard_stats()
print("through")
""",
        lock_shape,
    )
    assert "through" in out


def test_the_error_says_that_the_wait_was_in_vain(run: Any) -> None:
    """A finalizer that wants a lock which the allocating thread holds."""
    out = run(
        """
lastref.torch.guard()
lastref.gc.set_wait_bound(0.5)
lock = threading.Lock()

class Wants(Garbage):
    def __del__(self):
        with lock:
            pass

Wants(full(700))
with lock:
    text = text_of(lambda: full(400))
assert "cycle collection: did not end within" in text and "lastref.gc.set_wait_bound" in text, text
lastref.gc.set_wait_bound(60)
full(400)
print("through")
"""
    )
    assert "through" in out


def test_finalizers_may_allocate(run: Any) -> None:
    """Also when there is no memory for them: then they fail, at once, as any code would."""
    out = run(
        """
lastref.torch.guard(report=False)
seen = {"made": 0, "failed": 0, "calls": 0}

class Allocates(Garbage):
    def __del__(self):
        self.kept = None
        try:
            full(50)
            seen["made"] += 1
            # Seldom there, inside a collection.
            full(950)
            seen["made"] += 1
        except torch.OutOfMemoryError as error:
            assert "this thread is itself collecting" in str(error), error
            seen["failed"] += 1
        seen["calls"] += 1

for _ in range(ROUNDS):
    for _ in range(20):
        Allocates(full(100))
# Those that are left have nothing to do at the exit.
del Allocates.__del__
assert seen["made"] >= ROUNDS and seen["failed"] >= ROUNDS, seen
assert seen["calls"] >= 10 * ROUNDS, seen
assert lastref.torch.guard_stats()["failures"] == seen["failed"]
print("through")
"""
    )
    assert "through" in out
    assert "Exception ignored" not in out


def test_a_collection_inside_an_allocation_inside_a_collection(run: Any) -> None:
    """Python's collector runs no second time inside itself: such an allocation fails, or finds other memory."""
    out = run(
        """
lastref.torch.guard(report=False)
outcomes = {"made": 0, "failed": 0}

class Inside(Garbage):
    def __del__(self):
        try:
            full(600)
            outcomes["made"] += 1
        except torch.OutOfMemoryError:
            outcomes["failed"] += 1
        gc.collect()

for number in range(ROUNDS):
    Inside(None)
    kept = full(500) if number % 5 == 0 else None
    # On this thread, then on the collector's.
    gc.collect() if number % 2 == 0 else lastref.gc.collect()
    del kept
    dead_cycle(700)
    Inside(None)
    full(500)
    gc.collect()
assert sum(outcomes.values()) == 2 * ROUNDS, outcomes
assert outcomes["made"] and outcomes["failed"], outcomes
print("through")
"""
    )
    assert "through" in out


def test_a_forked_child_has_a_collector_of_its_own(run_program: Any, rounds: int) -> None:
    """CUDA itself does not survive a fork, so the parent has not begun to use it. Its collector has run."""
    program = """
import os
ROUNDS = int(sys.argv[1])
gc.disable()
lastref.gc.disable()
lastref.torch.guard(report=False)
lastref.sim.enable("10MiB")
kept = lastref.empty(6 * MIB, dtype=lastref.uint8, device="cuda")
try:
    lastref.empty(6 * MIB, dtype=lastref.uint8, device="cuda")
except lastref.OutOfMemoryError:
    pass
assert lastref.gc.stats()["oom"].runs > 0 and not torch.cuda.is_initialized()
for _ in range(ROUNDS):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for _ in range(20):
                dead_cycle(200)
            status = 0 if rescues()["cycle collection"] >= 2 else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
dead_cycle(600)
full(600)
assert rescues()["cycle collection"] == 1
"""
    run_program(program, str(rounds), mib=1000, timeout=300)


def test_the_interpreter_exits_while_threads_allocate(run: Any) -> None:
    """Daemon threads go on into the exit, and finalizers run in it."""
    for _ in range(2):
        run(
            """
lastref.torch.guard()

def allocate():
    while True:
        dead_cycle(100)

class Late(Garbage):
    def __del__(self):
        try:
            full(2000)
        except Exception:
            pass

late = Late(full(10))
for _ in range(3):
    threading.Thread(target=allocate, daemon=True).start()
time.sleep(0.3)
""",
            status=None,
        )
