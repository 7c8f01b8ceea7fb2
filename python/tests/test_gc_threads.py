"""The collector beside other Python threads, finalizers, forks and the exit of the interpreter.

Each program has a process of its own: what is tested is that none of them hangs."""

import re
import sys
import textwrap

import pytest

from conftest import RunPython

PRELUDE = """
import ctypes, errno, gc, os, sys, threading, time, weakref
import lastref
from lastref import cuda

MIB, GIB = 1 << 20, 1 << 30
gc.disable()  # what is freed is freed before an allocation fails
holding = ctypes.PyDLL(None)  # calls through it keep the interpreter lock

def make(num_bytes):
    return lastref.empty(num_bytes, dtype=lastref.uint8, device="cuda")

class Node:
    def __init__(self, num_bytes):
        self.me = self
        self.tensor = make(num_bytes)

def fill():
    lastref.gc.set_before_out_of_memory(False)
    try:
        while True:
            Node(GIB)
    except lastref.OutOfMemoryError:
        lastref.gc.set_before_out_of_memory(True)
"""

# Four threads make 256 to 512 MiB at a time, each its own dead cycle, on 16 GiB.
FOUR_THREADS = """
import random
def work(seed):
    rng = random.Random(seed)
    for _ in range(NUM):
        Node(rng.randrange(256, 513) * MIB)

failed = []
threading.excepthook = lambda args: failed.append(args.exc_value)
threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
for thread in threads:
    thread.start()
"""
THEY_SUCCEED = """
for thread in threads:
    thread.join()
assert not failed, failed[0]
assert lastref.gc.stats()["oom"].runs > 10
lastref.gc.collect()
cuda.empty_cache()
assert cuda.memory_allocated() == cuda.memory_reserved() == 0
"""

# A lock of the C library's, waited for with the interpreter lock held.
NATIVE_LOCK = """
mutex = ctypes.create_string_buffer(64)
allocating = threading.Event()
@lastref.gc.add_callback
def callback(phase, info):
    if phase == "start" and info["reason"] == "oom":
        allocating.set()
        time.sleep(0.1)  # the other thread takes the interpreter lock meanwhile
def wants_the_lock():
    allocating.wait()
    until = time.time() + PATIENCE
    deadline = (ctypes.c_long * 2)(int(until), int(until % 1 * 1e9))
    results.append(holding.pthread_mutex_timedlock(mutex, deadline))
results = []
fill()
thread = threading.Thread(target=wants_the_lock)
thread.start()
holding.pthread_mutex_lock(mutex)
started = time.monotonic()
"""

PROGRAMS = {
    "four threads": "NUM = 5000" + FOUR_THREADS + THEY_SUCCEED,
    "one of them holds the interpreter lock for long": "NUM = 500"
    + FOUR_THREADS
    + """
for _ in range(20):
    holding.usleep(100_000)
    time.sleep(0.001)
"""
    + THEY_SUCCEED,
    "one of them computes": "NUM = 200"
    + FOUR_THREADS
    + """
while any(thread.is_alive() for thread in threads):
    sum(range(10_000))
"""
    + THEY_SUCCEED,
    "another thread holds the interpreter lock and wants a native lock of the allocating one": """
PATIENCE = 1.0
"""
    + NATIVE_LOCK
    + """
make(GIB)
assert PATIENCE <= time.monotonic() - started < 20
lastref.gc.remove_callback(callback)
holding.pthread_mutex_unlock(mutex)
thread.join()
assert results == [errno.ETIMEDOUT]
""",
    "and keeps it longer than the bound": """
PATIENCE = 3.0
lastref.gc.set_wait_bound(0.2)
"""
    + NATIVE_LOCK
    + """
try:
    make(GIB)
except lastref.OutOfMemoryError:
    pass
else:
    raise AssertionError("it cannot have been freed")
assert time.monotonic() - started < 20
lastref.gc.remove_callback(callback)
holding.pthread_mutex_unlock(mutex)
thread.join()
assert results == [errno.ETIMEDOUT]
lastref.gc.set_wait_bound(30)
make(GIB)
""",
    "a finalizer allocates": """
threads = []
class Allocates(Node):
    def __del__(self):
        threads.append(threading.current_thread().name)
        make(4096)
for _ in range(50):
    Allocates(GIB - 2 * MIB)  # leaves some for the finalizers
assert threads and "MainThread" not in threads, threads
""",
    "a finalizer allocates on the full device": """
failed = []
class Allocates(Node):
    def __del__(self):
        try:
            make(GIB)
        except lastref.OutOfMemoryError:
            failed.append(threading.current_thread().name)
started = time.monotonic()
kept = [make(GIB) for _ in range(7)]
Allocates(GIB)
try:
    make(2 * GIB)
except lastref.OutOfMemoryError:
    pass
else:
    raise AssertionError
assert failed and "MainThread" not in failed, failed
del kept
make(GIB)
assert time.monotonic() - started < 20, "a finalizer waited for the thread it ran on"
""",
    "a finalizer collects": """
class Collects(Node):
    def __del__(self):
        gc.collect()
        lastref.gc.collect()
        cuda.empty_cache()
for _ in range(50):
    Collects(GIB)
""",
    "a finalizer wants a lock of the allocating thread": """
lock = threading.Lock()
waited = []
class Waits(Node):
    def __del__(self):
        with lock:
            waited.append(threading.current_thread().name)
lastref.gc.set_wait_bound(0.3)
for _ in range(8):
    Waits(GIB)
with lock:
    started = time.monotonic()
    try:
        make(GIB)
    except lastref.OutOfMemoryError:
        assert 0.3 <= time.monotonic() - started < 20
    else:
        raise AssertionError("it cannot have been freed")
lastref.gc.set_wait_bound(30)
make(GIB)
assert len(waited) == 8 and "MainThread" not in waited, waited
""",
    "a finalizer brings its object back": """
saved = []
class Rises(Node):
    def __del__(self):
        saved.append(self)
for _ in range(8):
    Rises(GIB)
try:
    make(GIB)
except lastref.OutOfMemoryError:
    pass
else:
    raise AssertionError
assert len(saved) == 8
saved.clear()
make(GIB)
""",
    "a finalizer raises": """
ignored = []
sys.unraisablehook = lambda args: ignored.append(args.exc_type)  # a traceback would keep it
class Raises(Node):
    def __del__(self):
        raise KeyError
for _ in range(20):
    Raises(GIB)
gc.collect()
assert len(ignored) == 20
""",
    # Python collects on one thread at a time, and `gc.collect` does nothing on a second one.
    "another thread is in the middle of a collection": """
class Sleeps:
    def __init__(self):
        self.me = self
    def __del__(self):
        inside.set()
        time.sleep(0.3)
inside = threading.Event()
Sleeps()
thread = threading.Thread(target=gc.collect, args=(0,))
thread.start()
inside.wait()
fill()
make(GIB)
thread.join()
""",
    "collecting by hand while the collector's thread is at it": """
gc.enable()
lastref.gc.set_byte_threshold(1)
inside = threading.Event()
class Slow(Node):
    def __del__(self):
        inside.set()
        time.sleep(0.2)
Slow(MIB)
while not inside.is_set():
    make(MIB)
    time.sleep(0.001)
lastref.gc.collect()
cuda.empty_cache()
assert cuda.memory_reserved() == 0
""",
    "an allocation inside a collection of its own thread": """
class Allocates(Node):
    def __del__(self):
        try:
            make(9 * GIB - 8 * MIB - GIB)
        except lastref.OutOfMemoryError:
            pass
Allocates(GIB)
started = time.monotonic()
fill_with = [make(GIB) for _ in range(7)]
gc.collect()
assert time.monotonic() - started < 20
""",
    "threads that end while they wait": """
def work():
    for _ in range(20):
        Node(GIB)
for _ in range(10):
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
""",
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_threads_and_finalizers(program: str, run_python: RunPython) -> None:
    sim = "16GiB" if "FOUR" in program or "NUM" in program else "8GiB"
    done = run_python("-c", PRELUDE + program, sim=sim)
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr


FORKS = {
    "before the device is used": """
child = os.fork()
for _ in range(3):
    fill()
make(GIB)
""",
    "with a collector's thread in the parent": """
fill()
make(GIB)
assert lastref.gc.stats()["oom"].runs > 0
child = os.fork()
for _ in range(3):
    fill()
make(GIB)
""",
    # Python's collector would take itself to be at it for ever, in a child made meanwhile.
    "while the collector's thread runs": """
gc.enable()
lastref.gc.set_byte_threshold(1)
inside = threading.Event()
class Plain:
    def __init__(self):
        self.me = self
class Slow(Plain):
    def __del__(self):
        inside.set()
        time.sleep(0.05)
for _ in range(5):
    inside.clear()
    Slow()
    while not inside.is_set():
        make(4096)  # starts a run and does not wait for it
        time.sleep(0.001)
    child = os.fork()
    if child == 0:
        ref = weakref.ref(Plain())
        gc.collect()
        lastref.gc.collect()
        os._exit(0 if ref() is None else 1)
    assert os.waitpid(child, 0)[1] == 0
child = os.fork()
""",
    "by a finalizer on the collector's thread": """
class Forks(Node):
    def __del__(self):
        child = os.fork()
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
Forks(GIB)
fill = [make(GIB) for _ in range(7)]
make(GIB)
child = os.fork()
""",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", FORKS.values(), ids=FORKS.keys())
def test_fork(program: str, run_python: RunPython) -> None:
    program += """
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    # From 3.12 on Python warns of forks beside threads.
    run_python("-W", "ignore::DeprecationWarning", "-c", PRELUDE + program, sim="8GiB")


SLOW = """
gc.enable()
lastref.gc.set_byte_threshold(1)
inside = threading.Event()
class Slow(Node):
    def __del__(self):
        inside.set()
        time.sleep(SECONDS)
"""

EXITS = {
    "while the collector's thread is attached": "SECONDS = 0.3"
    + SLOW
    + """
Slow(MIB)
while not inside.is_set():
    make(MIB)
    time.sleep(0.001)
""",
    # In the order of Python's exit, what is global goes after the last thread was waited for.
    "that lasts longer than the run": "SECONDS = 0.2"
    + SLOW
    + """
Slow(MIB)
while not inside.is_set():
    make(MIB)
    time.sleep(0.001)
class Lasts:
    def __del__(self, sleep=time.sleep):
        sleep(0.4)
lasts = Lasts()
""",
    "while a run begins": "SECONDS = 0"
    + SLOW
    + """
for _ in range(100):
    Slow(MIB)
""",
    "while daemon threads wait for it": """
def work():
    try:
        while True:
            Node(GIB)
    except lastref.OutOfMemoryError:
        pass  # Python's collector is left alone from the beginning of the exit
for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.2)
""",
    "full, with a finalizer that allocates": """
class Allocates(Node):
    def __del__(self):
        lastref.empty(1 << 30, dtype=lastref.uint8, device="cuda")
kept = Allocates(GIB)
lastref.last = Allocates(GIB)
fill = [make(GIB) for _ in range(5)]
""",
    "atexit allocates": """
import atexit
atexit.register(lambda: [Node(GIB) for _ in range(3)] and [Node(GIB) for _ in range(7)] and None)
""",
    "with a callback": """
lastref.gc.add_callback(lambda phase, info: None)
fill()
make(GIB)
""",
}


@pytest.mark.parametrize("program", EXITS.values(), ids=EXITS.keys())
def test_exit(program: str, run_python: RunPython) -> None:
    for _ in range(5):
        done = run_python("-c", PRELUDE + program, sim="8GiB")
        assert done.stdout == ""
        assert re.fullmatch(r"lastref: using 1 simulated GPU .*\n", done.stderr), done.stderr


def test_exit_does_not_wait_for_a_finalizer_that_never_returns(run_python: RunPython) -> None:
    program = """
gc.enable()
lastref.gc.set_byte_threshold(1)
inside = threading.Event()
never = threading.Lock()
never.acquire()
class Hangs(Node):
    def __del__(self):
        inside.set()
        never.acquire()
Hangs(MIB)
while not inside.is_set():
    make(MIB)
    time.sleep(0.001)
"""
    run_python("-c", PRELUDE + program, sim="8GiB")


def test_free_threaded_python_is_refused(run_python: RunPython) -> None:
    program = textwrap.dedent("""
        import sys
        sys.abiflags += "t"
        try:
            import lastref
        except ImportError as error:
            assert "free-threaded" in str(error), error
        else:
            raise AssertionError
    """)
    run_python("-c", program)
    assert "t" not in sys.abiflags
