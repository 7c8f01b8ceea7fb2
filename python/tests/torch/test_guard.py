"""`lastref.torch.guard` on the real PyTorch: what it rescues, what it says, and what it leaves alone."""

import json
from pathlib import Path
from typing import Any

import pytest

DEAD_CYCLES = """
if sys.argv[1] == "guarded":
    lastref.torch.guard()
gc.collect()
done = 0
try:
    for _ in range(400):
        dead_cycle(400)
        done += 1
except torch.OutOfMemoryError as error:
    assert "Tried to allocate 400.00 MiB" in str(error), error
say(done=done, num_ooms=num_ooms(), reserved=torch.cuda.max_memory_reserved())
"""


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"], ids=["native", "expandable"])
def test_dead_cycles_complete_where_plain_pytorch_fails(conf: str, run_program: Any) -> None:
    env = {"PYTORCH_CUDA_ALLOC_CONF": conf} if conf else {}
    plain = run_program(DEAD_CYCLES, "plain", mib=11_000, env=env)
    assert (plain["done"], plain["num_ooms"]) == (27, 1)
    guarded = run_program(DEAD_CYCLES, "guarded", mib=11_000, env=env)
    assert (guarded["done"], guarded["num_ooms"]) == (400, 0)


def test_dead_cycles_are_found_while_gc_is_disabled(run_program: Any) -> None:
    done = run_program("gc.disable()\n" + DEAD_CYCLES, "guarded", mib=11_000)
    assert done["done"] == 400


def test_bytes_drive_collections_before_the_cache_grows_by_much(run_program: Any) -> None:
    """With time to run in, the collector finds dead cycles long before the device is full."""
    done = run_program(
        """
import time
def grow(threshold):
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = lastref.gc.stats()["bytes"].runs
    for _ in range(100):
        dead_cycle(100)
        # The collector's thread needs the interpreter lock at some time.
        time.sleep(0.002)
    # On a busy machine it may have come late.
    peak = torch.cuda.max_memory_reserved() // MIB
    runs = lastref.gc.stats()["bytes"].runs - before
    gc.collect()
    return peak, runs

gc.set_threshold(0)
lastref.torch.guard(byte_threshold=500 * MIB)
peak, runs = grow(None)
lastref.torch.unguard()
assert lastref.gc.get_byte_threshold(0) != 500 * MIB
lastref.torch.guard(byte_threshold=0)
never = grow(None)
lastref.torch.unguard()
lastref.torch.guard(byte_threshold=500 * MIB)
gc.disable()
disabled = grow(None)
gc.enable()
stats = lastref.torch.guard_stats()["collections"]
say(peak=peak, runs=runs, never=never[0], disabled=disabled[0], stats=stats)
""",
        mib=16_000,
    )
    assert done["runs"] >= 3, done
    assert done["peak"] < 5_000, done
    assert done["never"] >= 10_000, done
    assert done["disabled"] >= 10_000, "gc.disable() keeps automatic runs away"
    assert done["stats"]["bytes grown"] >= done["runs"]
    assert done["stats"]["before failure"] == 0


def test_threshold_is_of_bytes_in_use_not_of_bytes_allocated(run_program: Any) -> None:
    """Tensors that die at once are no growth."""
    done = run_program(
        """
lastref.torch.guard(byte_threshold=500 * MIB)
for _ in range(1000):
    full(100)
say(runs=lastref.gc.stats()["bytes"].runs)
"""
    )
    assert done["runs"] == 0


# Pending frees

SPLIT = """
import ctypes
standin = ctypes.CDLL(None)
if "guarded" in sys.argv:
    lastref.torch.guard()
side = torch.cuda.Stream()
# Two halves of one segment: it stays, since the first half is in use, and so the device stays full.
segment = full(900)
del segment
kept, freed = full(450), full(450)
freed.record_stream(side)
standin.lastref_standin_delay_events(1)
del freed
assert torch.cuda.memory_reserved() == 900 * MIB
try:
    again = full(450)
    say(ok=True, rescues=rescues() if "guarded" in sys.argv else None, num_ooms=num_ooms())
except torch.OutOfMemoryError:
    say(ok=False)
"""


def test_memory_freed_by_waiting_for_streams_is_searched_again(run_program: Any) -> None:
    assert not run_program(SPLIT, "plain", mib=1000)["ok"]
    done = run_program(SPLIT, "guarded", mib=1000)
    assert done["ok"]
    assert done["rescues"] == {"search again": 1, "cycle collection": 0, "callbacks": 0}
    assert done["num_ooms"] == 0


# What the program sees


def test_observers_and_counts_see_only_failures_that_leave(run_program: Any) -> None:
    done = run_program(
        """
seen = {"before": [], "after": []}
torch.cuda.init()
torch._C._cuda_attach_out_of_memory_observer(lambda *args: seen["before"].append(args))
lastref.torch.guard(report=False)
torch._C._cuda_attach_out_of_memory_observer(lambda *args: seen["after"].append(args))
gc.set_threshold(0)
lastref.gc.disable()
for _ in range(30):
    dead_cycle(100)
rescued = lastref.torch.guard_stats()["rescues"]
after_rescues, ooms = len(seen["after"]), num_ooms()
assert len(seen["before"]) >= 2 * rescued, "attached before: each attempt is seen"
kept = full(600)
text_of(lambda: full(500))
observed = seen["after"][-1]
one = num_ooms()
stats = lastref.torch.guard_stats()
torch.cuda.reset_accumulated_memory_stats()
zero = num_ooms()
text_of(lambda: full(500))
again = num_ooms()
# Without a guard, what was attached under it still works, once for each failure.
lastref.torch.unguard()
before = len(seen["after"])
text_of(lambda: full(500))
say(rescued=rescued, after_rescues=after_rescues, ooms=ooms, observed=observed, one=one, zero=zero, again=again,
    unguarded=len(seen["after"]) - before, failures=stats["failures"])
""",
        mib=1000,
    )
    assert done["rescued"] >= 2
    assert (done["after_rescues"], done["ooms"]) == (0, 0)
    assert done["observed"] == [0, 500 << 20, 1000 << 20, 400 << 20]
    assert (done["one"], done["failures"]) == (1, 1)
    assert (done["zero"], done["again"], done["unguarded"]) == (0, 1, 1)


def test_the_error_says_where_memory_is_and_what_was_tried(run_program: Any) -> None:
    done = run_program(
        """
lastref.torch.guard(report=False)
kept = full(600)
error = text_of(lambda: full(500))
frozen = Garbage(full(200))
del frozen
gc.freeze()
frozen_text = text_of(lambda: full(300))
gc.unfreeze()
full(300)
gc.set_debug(gc.DEBUG_SAVEALL)
dead_cycle(300)
saved_text = text_of(lambda: full(300))
gc.set_debug(0)
gc.garbage.clear()
lastref.gc.set_before_out_of_memory(False)
off_text = text_of(lambda: full(500))
say(error=error, frozen=frozen_text, saved=saved_text, off=off_text)
""",
        mib=1000,
    )
    error = done["error"]
    assert error.startswith("CUDA out of memory. Tried to allocate 500.00 MiB.")
    assert "device 0 holds 600.0 MiB live, 0.0 MiB freed but pending on streams, 0.0 MiB cached" in error
    assert "400.0 MiB of 1000.0 MiB are free" in error
    assert "cycle collection: freed 0.0 MiB in" in error
    assert "frozen objects, which it does not collect: gc.unfreeze() lets it" in done["frozen"]
    assert "gc.DEBUG_SAVEALL is set" in done["saved"]
    assert "lastref.gc.set_before_out_of_memory(False) was called" in done["off"]
    assert "frozen" not in error


def test_an_argument_of_the_failing_call_is_no_native_owner(run_program: Any) -> None:
    program = """
weight = torch.empty(MIB, device="cuda")
with lastref.torch.guard():
    text = text_of(lambda: torch.relu(torch.empty(700 * MIB, dtype=torch.uint8, device="cuda")))
say(text=text)
"""
    text = run_program(program, mib=1000)["text"]
    assert "700 MiB" in text
    assert "probably a value in progress" in text
    assert "look for libraries" not in text


def test_the_report_is_in_the_error_and_as_a_file(run_program: Any, tmp_path: Path) -> None:
    done = run_program(
        """
lastref.torch.guard()
weights = full(600)
error = text_of(lambda: full(500))
report = _guard.last_report()
say(error=error, rungs=report.to_dict()["out_of_memory"]["rungs"])
""",
        mib=1000,
        env={"LASTREF_REPORT_DIR": str(tmp_path)},
    )
    assert "weights" in done["error"]
    assert [rung["name"] for rung in done["rungs"]] == ["search again", "cycle collection", "callbacks"]
    (written,) = tmp_path.glob("oom-*.json")
    assert json.loads(written.read_text())["out_of_memory"]["requested"] == 500 << 20


def test_without_pytorchs_cache(run_program: Any) -> None:
    program = """
gc.disable()
with lastref.torch.guard():
    for _ in range(20):
        dead_cycle(300)
    kept = full(600)
    try:
        full(700)
    except torch.AcceleratorError as error:
        text = str(error)
say(text=text, rescues=rescues(), failures=lastref.torch.guard_stats()["failures"])
"""
    said = run_program(program, mib=1000, env={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    assert "out of memory" in said["text"]
    assert "global `kept`" in said["text"]
    assert said["rescues"]["cycle collection"] >= 5
    assert said["failures"] == 1


def test_a_report_that_fails_or_takes_too_long_leaves_the_few_lines(run_program: Any) -> None:
    program = """
import time
from lastref.torch import _report
def bad(*args):
    if sys.argv[1] == "slow":
        time.sleep(3)
    raise ValueError("no report today")
_report.for_out_of_memory = bad
_guard._REPORT_SECONDS = 0.5
lastref.torch.guard()
kept = full(600)
start = time.monotonic()
error = text_of(lambda: full(500))
took = time.monotonic() - start
# And the collector's thread goes on.
del kept
for _ in range(30):
    dead_cycle(100)
say(error=error, took=took)
"""
    for kind in ("broken", "slow"):
        done = run_program(program, kind, mib=1000)
        assert "device 0 holds 600.0 MiB live" in done["error"], done
        assert done["took"] < 2.5
    assert "no report today" in run_program(program, "broken", mib=1000)["stderr"]


def test_a_program_dies_as_it_would_without(run_program: Any) -> None:
    program = """
if sys.argv[1] == "guarded":
    lastref.torch.guard()
kept = full(600)
full(500)
"""
    plain = run_program(program, "plain", mib=1000, status=1)
    guarded = run_program(program, "guarded", mib=1000, status=1)
    last = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 500.00 MiB."
    assert last in plain["stderr"]
    assert last in guarded["stderr"]
    assert "lastref: " in guarded["stderr"]


def test_what_can_never_fit_is_not_collected_for(run_program: Any) -> None:
    done = run_program(
        """
lastref.torch.guard(report=False, callbacks=[lambda device, num_bytes: print("called")])
dead_cycle(600)
error = text_of(lambda: full(1200))
torch.cuda.memory.set_per_process_memory_fraction(0.7)
limited = text_of(lambda: full(800))
say(error=error, limited=limited, runs=lastref.gc.stats()["oom"].runs, ooms=num_ooms())
""",
        mib=1000,
    )
    assert "nothing was tried, since 1200.0 MiB will never fit" in done["error"]
    assert "nothing was tried, since 800.0 MiB will never fit" in done["limited"]
    assert (done["runs"], done["ooms"]) == (0, 2)
    assert "called" not in done["stdout"]


def test_what_can_never_fit_is_said_with_the_report_too(run_program: Any) -> None:
    done = run_program(
        """
lastref.torch.guard()
error = text_of(lambda: full(1200))
torch.cuda.memory.set_per_process_memory_fraction(0.7)
say(error=error, limited=text_of(lambda: full(800)))
""",
        mib=900,
    )
    for text in done["error"], done["limited"]:
        assert "nothing was tried, since" in text
        assert "tried search" not in text
    assert "it can never fit: the whole device has 900 MiB" in done["error"]
    assert "set_per_process_memory_fraction(0.7) allows this process 630 MiB" in done["limited"]


# Callbacks


def test_callbacks_are_called_one_by_one_until_it_is_enough(run_program: Any) -> None:
    done = run_program(
        """
import threading
calls = []
cache = [full(300), full(300), full(300)]
def broken(device, num_bytes):
    calls.append(["broken", device, num_bytes])
    raise ValueError("a callback's own problem")
def spill(device, num_bytes):
    calls.append(["spill", device, num_bytes, threading.current_thread() is threading.main_thread()])
    cache.pop()
def never(device, num_bytes):
    calls.append(["never"])
with lastref.torch.guard(callbacks=[broken, spill, never]):
    kept = full(300)
    stats = lastref.torch.guard_stats()
text_of(lambda: full(900))
say(calls=calls, callbacks=stats["rungs"]["callbacks"], ooms=num_ooms())
""",
        mib=1000,
    )
    assert done["calls"] == [["broken", 0, 300 << 20], ["spill", 0, 300 << 20, False]]
    assert done["callbacks"]["rescues"] == 1
    assert done["callbacks"]["bytes"] == 300 << 20
    assert "a callback's own problem" in done["stderr"]


# In and out


def test_guards_nest_and_end(run_program: Any) -> None:
    done = run_program(
        """
assert not torch.cuda.is_initialized()
outer = lastref.torch.guard()
assert not torch.cuda.is_initialized(), "guard() makes no CUDA context"
states = [lastref.torch.is_guarded()]
with lastref.torch.guard() as inner:
    assert inner.mode == "retry", inner.why
states.append(lastref.torch.is_guarded())
outer.close()
outer.close()
states.append(lastref.torch.is_guarded())
gc.disable()
dead_cycle(1200)
text_of(lambda: full(1000))
with lastref.torch.guard():
    full(1000)
    kept = full(300)
# Made under a guard, grown and freed without one.
kept.resize_(700 * MIB)
storage = kept.untyped_storage()
storage.resize_(100 * MIB)
del kept, storage
assert torch.cuda.memory_allocated() == 0
say(states=states, mode=lastref.torch.guard_stats()["mode"])
""",
        mib=2000,
    )
    assert done["states"] == [True, True, False]
    assert done["mode"] == "off"


def test_under_another_wrapper_it_becomes_passive(run_program: Any, tmp_path: Path) -> None:
    """A second copy of the library is such a wrapper: it knows nothing of the first."""
    done = run_program(
        """
import ctypes, shutil
lastref.torch.guard()
torch.cuda.init()
other_path = sys.argv[1] + "/other.so"
shutil.copy(_guard._library._name, other_path)
other = ctypes.CDLL(other_path)
python = ctypes.pythonapi
address = lambda function: ctypes.c_size_t(ctypes.cast(function, ctypes.c_void_p).value)
functions = (python.PyGILState_Check, python.PyEval_SaveThread, python.PyEval_RestoreThread)
other.lastref_torch_install.restype = ctypes.c_char_p
hooks = ctypes.c_size_t(lastref._lastref.torch_hooks())
assert other.lastref_torch_install(hooks, *map(address, functions)) is None
gc.disable()
lastref.gc.disable()
dead_cycle(600)
both = full(500)
del both
lastref.torch.unguard()
dead_cycle(600)
upper = full(500)
del upper
assert other.lastref_torch_uninstall() == 0
dead_cycle(600)
text_of(lambda: full(500))
lastref.torch.guard()
again = full(500)
del again
lastref.torch.unguard()
say(ooms=num_ooms())
""",
        str(tmp_path),
        mib=1000,
    )
    assert done["ooms"] >= 1


def test_a_foreign_allocator_is_refused(run_program: Any) -> None:
    done = run_program(
        """
import ctypes
# Any library with two functions will do: they are never called.
libc = torch.cuda.memory.CUDAPluggableAllocator("libc.so.6", "malloc", "free")
torch.cuda.memory.change_current_allocator(libc)
try:
    lastref.torch.guard()
except RuntimeError as error:
    say(error=str(error))
"""
    )
    assert "has been replaced by another (pluggable)" in done["error"]


# PyTorch's own functions


def test_pytorchs_own_functions_work_under_a_guard(run_program: Any) -> None:
    done = run_program(
        """
from torch.cuda import memory
lastref.torch.guard()
assert memory.get_allocator_backend() == "native"

# Statistics, also through the generic front end
a = full(100)
assert memory.memory_allocated() == 100 * MIB == torch.accelerator.memory.memory_allocated()
assert torch.accelerator.memory.memory_stats()["num_ooms"] == 0
del a
memory.empty_cache()
assert memory.memory_reserved() == 0 == torch.accelerator.memory.memory_reserved()
memory.reset_peak_memory_stats()
assert "allocated memory" in memory.memory_summary().lower()

# Raw memory, which dead cycles are collected for as well
class Raw:
    def __init__(self, mib):
        self.pointer, self.me = memory.caching_allocator_alloc(mib * MIB), self
    def __del__(self):
        memory.caching_allocator_delete(self.pointer)
gc.disable()
lastref.gc.disable()
for _ in range(30):
    Raw(200)
assert rescues()["cycle collection"] >= 1, rescues()
gc.collect()
assert memory.memory_allocated() == 0

# History and snapshots
memory._record_memory_history(max_entries=1000)
b = full(30)
snapshot = memory._snapshot()
actions = [entry["action"] for entry in snapshot["device_traces"][0]]
assert "alloc" in actions, actions
assert any(frame["name"] == "full" for segment in snapshot["segments"] for block in segment["blocks"]
           for frame in block["frames"]), snapshot["segments"]
memory._record_memory_history(enabled=None)
del b

# A limit of the user's
memory.set_per_process_memory_fraction(0.5)
dead_cycle(400)
full(400)
kept = full(300)
assert "Tried to allocate" in text_of(lambda: full(400))
memory.set_per_process_memory_fraction(1.0)
del kept

# Pools
pool = torch.cuda.MemPool()
with torch.cuda.use_mem_pool(pool):
    c = full(50)
assert pool.snapshot()
del c, pool

# Streams
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    d = full(20)
d.record_stream(torch.cuda.current_stream())
del d
say(ok=True)
""",
        mib=1000,
    )
    assert done["ok"]


def test_each_device_is_measured_by_itself(run_program: Any) -> None:
    done = run_program(
        """
lastref.torch.guard(report=False)
gc.disable()
lastref.gc.disable()
kept = full(900, device=0)
for _ in range(30):
    dead_cycle(100, device=1)
text = text_of(lambda: full(200, device=0))
say(text=text, rescues=rescues(), ooms=[torch.cuda.memory_stats(d)["num_ooms"] for d in (0, 1)])
""",
        mib=1000,
        devices=2,
    )
    assert "device 0 holds 900.0 MiB live" in done["text"]
    assert done["rescues"]["cycle collection"] >= 2
    assert done["ooms"] == [1, 0]


def test_nothing_is_waited_for_during_a_capture(run_program: Any) -> None:
    done = run_program(
        """
lastref.torch.guard()
gc.disable()
lastref.gc.disable()
torch.cuda.init()
dead_cycle(600)
graph = torch.cuda.CUDAGraph()
failed = None
with torch.cuda.graph(graph):
    try:
        full(500)
    except torch.OutOfMemoryError as error:
        failed = str(error)
stats = lastref.torch.guard_stats()
during = lastref.gc.stats()["oom"].runs
after = full(500)
say(failed=failed, during=during, without=stats["failures_without_ladder"], after=lastref.gc.stats()["oom"].runs)
""",
        mib=1000,
    )
    assert done["failed"] is not None
    assert "lastref" not in done["failed"]
    assert (done["during"], done["without"]) == (0, 1)
    assert done["after"] >= 1


# Without the shim

WITHOUT = """
seen = []
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", RuntimeWarning)
    guard = lastref.torch.guard()
    lastref.torch.guard()
messages = [str(each.message) for each in caught if each.category is RuntimeWarning]
kept_by_name = full(600)
error = text_of(lambda: full(500))
stats = lastref.torch.guard_stats()
lastref.torch.unguard()
text_of(lambda: full(500))
say(mode=guard.mode, guarded=lastref.torch.is_guarded(), messages=messages, error=error, stats=stats,
    has_report=_guard.last_report() is not None, later=lastref.torch.guard_stats()["failures"])
"""


def check_reports_only(done: Any, *texts: str) -> None:
    assert (done["mode"], done["guarded"]) == ("observer", False)
    assert len(done["messages"]) == 1, "said once"
    for text in texts:
        assert text in done["messages"][0]
    assert done["has_report"]
    assert "kept_by_name" in done["stderr"], "the report is printed"
    assert "lastref" not in done["error"]
    assert (done["stats"]["mode"], done["stats"]["failures"]) == ("observer", 1)
    assert done["later"] == 1, "nothing is reported without a guard"


def test_without_a_compiler_failures_are_reported(run_program: Any, tmp_path: Path) -> None:
    env = {"PATH": str(tmp_path), "LASTREF_CACHE": str(tmp_path / "cache"), "CXX": ""}
    done = run_program(WITHOUT, mib=1000, env=env)
    check_reports_only(done, "there is no C++ compiler", "apt-get install g++")


def test_switched_off_failures_are_reported(run_program: Any) -> None:
    done = run_program(WITHOUT, mib=1000, env={"LASTREF_TORCH_SHIM": "off"})
    check_reports_only(done, "LASTREF_TORCH_SHIM")


def test_an_unknown_version_is_told_so(run_program: Any) -> None:
    for version, advice in (("2.99.0", "a newer lastref"), ("2.4.1+cu121", "a newer torch")):
        done = run_program(f"torch.__version__ = {version!r}\n" + WITHOUT, mib=1000)
        check_reports_only(done, f"torch {version} is of a version", "it knows 2.13, 2.14, 2.15", advice)


def test_a_compiler_that_fails_is_quoted(run_program: Any, tmp_path: Path) -> None:
    env = {"LASTREF_CACHE": str(tmp_path), "CXX": "c++ --no-such-option"}
    done = run_program(WITHOUT, mib=1000, env=env)
    check_reports_only(done, "lastref_torch.cpp could not be compiled", "--no-such-option")
    assert list((tmp_path / "shim").glob("*.so")) == []


def test_two_processes_compile_once(run_torch: Any, tmp_path: Path) -> None:
    """The second waits for the first, and takes what that has made; a third compiles nothing."""
    log = tmp_path / "log"
    wrapper = tmp_path / "compiler"
    wrapper.write_text(f'#!/bin/sh\necho run >> {log}\nexec c++ -O0 "$@"\n')
    wrapper.chmod(0o755)
    program = """
import subprocess, sys
child = [sys.executable, "-c", "import lastref.torch; assert lastref.torch.guard().mode == 'retry'"]
both = [subprocess.Popen(child), subprocess.Popen(child)]
assert [each.wait() for each in both] == [0, 0]
assert subprocess.run(child).returncode == 0
"""
    run_torch("-c", program, env={"LASTREF_CACHE": str(tmp_path / "cache"), "CXX": str(wrapper)})
    assert log.read_text() == "run\n"
    assert len(list((tmp_path / "cache" / "shim").glob("*.so"))) == 1


def test_half_a_library_is_compiled_anew(run_program: Any, tmp_path: Path) -> None:
    program = "say(mode=lastref.torch.guard().mode)"
    env = {"LASTREF_CACHE": str(tmp_path)}
    run_program(program, env=env)
    (library,) = (tmp_path / "shim").glob("*.so")
    library.write_bytes(library.read_bytes()[:1000])
    assert run_program(program, env=env)["mode"] == "retry"


def test_a_library_that_anyone_may_write_is_not_loaded(run_program: Any, tmp_path: Path) -> None:
    folder = tmp_path / "shim"
    folder.mkdir()
    folder.chmod(0o777)
    env = {"LASTREF_CACHE": str(tmp_path), "TMPDIR": str(tmp_path), "HOME": str(tmp_path / "home")}
    done = run_program("say(where=str(_guard._shim._cache()))", env=env)
    assert Path(done["where"]) != folder
