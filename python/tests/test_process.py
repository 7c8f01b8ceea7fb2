"""What needs a process of its own: interpreter exit, settings, leaks, the command, documentation."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import sysconfig

import pytest

import lastref
from conftest import RunPython

SCRIPTS = pathlib.Path(sysconfig.get_path("scripts"))


# Interpreter exit: every program must end with status 0 and say nothing but that the GPU is simulated.

EXITS = {
    "module global": "t = lastref.zeros(4, device='cuda')",
    "imported module's global": "import sys; sys.t = lastref.zeros(4, device='cuda')",
    "cycle": "t = lastref.zeros(4, device='cuda'); t.me = t",
    "cycle with a finalizer": """
        class F:
            def __del__(self):
                lastref.zeros(4, device='cuda').tolist()
        t = lastref.zeros(4, device='cuda'); t.me = t; t.f = F()
    """,
    "atexit": "import atexit; t = lastref.zeros(4, device='cuda'); atexit.register(lambda: t.tolist())",
    "atexit allocates": "import atexit; atexit.register(lambda: lastref.ones(9, device='cuda').cpu())",
    "gc disabled": "import gc; gc.disable(); t = lastref.zeros(4, device='cuda'); t.me = t",
    "numpy array outlives": "import numpy; a = lastref.zeros(4, device='cpu').numpy(); import sys; sys.a = a",
    "foreign array": "import numpy, sys; sys.t = lastref.from_numpy(numpy.zeros(4))",
    "dlpack capsule": "import sys; sys.c = lastref.zeros(4, device='cuda').__dlpack__()",
    "stream and event": "s = lastref.cuda.Stream(); e = s.record_event()",
    "inside a stream": "c = lastref.cuda.stream(lastref.cuda.Stream()); c.__enter__()",
    "thread local": """
        import threading
        local = threading.local(); local.t = lastref.zeros(4, device='cuda')
    """,
    "thread not joined": """
        import threading, time
        def work():
            for _ in range(2000):
                lastref.zeros(100, device='cuda').tolist()
        threading.Thread(target=work).start()
    """,
    # The interpreter ends these in the middle of a call that waits for its lock.
    "daemon threads": """
        import threading, time
        def work():
            kept = []
            while True:
                kept.append(lastref.zeros(100_000, device='cuda'))
                kept[-1].tolist()
                lastref.cuda.synchronize()
                del kept[:-3]
        for _ in range(4):
            threading.Thread(target=work, daemon=True).start()
        time.sleep(0.1)
    """,
    "weakref callback at exit": """
        import weakref, sys
        t = lastref.zeros(4, device='cuda')
        sys.w = weakref.ref(t, lambda _: lastref.cuda.memory_allocated())
    """,
}


@pytest.mark.parametrize("program", EXITS.values(), ids=EXITS.keys())
def test_exit(program: str, run_python: RunPython) -> None:
    lines = [line for line in program.split("\n") if line.strip()]
    indent = len(lines[0]) - len(lines[0].lstrip())
    program = "\n".join(["import lastref", *(line[indent:] for line in lines)])
    # Where threads race with the exit, once is not enough.
    for _ in range(5 if "threading" in program else 1):
        done = run_python("-c", program, sim="8GiB")
        assert done.stdout == ""
        assert re.fullmatch(r"lastref: using 1 simulated GPU .*\n|", done.stderr), done.stderr


def test_fork_does_not_disturb_the_parent(run_python: RunPython) -> None:
    program = """
import os, lastref
t = lastref.arange(4, device="cuda")
child = os.fork()
if child == 0:
    del t
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert t.tolist() == [0, 1, 2, 3]
assert lastref.cuda.memory_allocated() == 512
"""
    run_python("-c", program, sim="8GiB")


# Settings.


@pytest.mark.parametrize(
    ("sim", "count", "total"),
    [
        ("8GiB", 1, 8 << 30),
        ("2x8GiB", 2, 8 << 30),
        ("11GB", 1, 11_000_000_000),
        ("11000MiB", 1, 11000 << 20),
    ],
)
def test_lastref_sim(sim: str, count: int, total: int, run_python: RunPython) -> None:
    program = (
        "import lastref; c = lastref.cuda;"
        "print(c.is_available(), c.device_count(), c.mem_get_info()[1], lastref.sim.is_enabled())"
    )
    done = run_python("-c", program, sim=sim)
    assert done.stdout == f"True {count} {total} True\n"
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("sim", ["lots", "8", "8XB", "0x8GiB", "x8GiB", "-1GiB", "8 GiB GiB", "9e9"])
def test_a_malformed_lastref_sim(sim: str, run_python: RunPython) -> None:
    program = f"""
import lastref
assert not lastref.cuda.is_available()
assert lastref.cuda.device_count() == 0
for call in (lastref.cuda.mem_get_info, lastref.cuda.synchronize, lastref.zeros(2).cuda):
    try:
        call()
    except RuntimeError as error:
        assert "LASTREF_SIM" in str(error) and {sim!r} in str(error), error
    else:
        raise AssertionError(call)
assert lastref.zeros(2).tolist() == [0, 0], "host memory works all the same"
"""
    done = run_python("-c", program, sim=sim)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "LASTREF_SIM" in line


def test_without_a_gpu(run_python: RunPython) -> None:
    program = """
import lastref
c = lastref.cuda
assert not c.is_available() and c.device_count() == 0
c.empty_cache()
assert c.memory_allocated() == c.memory_reserved() == c.max_memory_allocated() == 0
assert not lastref.sim.is_enabled()
for call in (lambda: lastref.zeros(2, device="cuda"), lastref.zeros(2).cuda, c.synchronize, c.Stream,
             c.get_device_name, c.mem_get_info, lambda: c.set_device(0), c.current_stream):
    try:
        call()
    except RuntimeError as error:
        assert "CUDA" in str(error) or "device" in str(error), error
    else:
        raise AssertionError(call)
lastref.sim.enable("1GiB")
assert c.is_available()
assert lastref.zeros(2, device="cuda").is_cuda
lastref.sim.enable("1GiB")
"""
    done = run_python("-c", program)
    assert done.stdout == ""


# Leaks.


def test_no_leak_over_100000_rounds(run_python: RunPython) -> None:
    program = """
import copy, gc, sys, lastref, numpy

array = numpy.zeros(300)

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def rounds(n):
    for i in range(n):
        t = lastref.empty(1024, device="cuda")
        u = t[3:].view(-1, 1021)
        u.tag = t
        t = None
        u.untyped_storage(), u.shape, u.dtype, u.device, u.T
        try:
            u[5]
        except IndexError:
            pass
        host = lastref.from_numpy(array)
        memoryview(host), host.numpy(), host.__dlpack__(), host.__dlpack__(max_version=(1, 0))
        if i % 64 == 0:
            u.me = u  # a cycle
            u.cpu().numpy()
            copy.deepcopy(u)
            lastref.cuda.memory_stats()

rounds(5_000)
gc.collect()
before = resident()
objects = len(gc.get_objects())
references = [sys.getrefcount(x) for x in (array, lastref.float32, lastref.Tensor, None)]
lastref.cuda.reset_accumulated_memory_stats()
rounds(100_000)
gc.collect()
assert lastref.cuda.memory_allocated() == 0
stats = lastref.cuda.memory_stats()
assert stats["allocation.all.allocated"] == stats["allocation.all.freed"] > 100_000
assert len(gc.get_objects()) <= objects + 5
after = [sys.getrefcount(x) for x in (array, lastref.float32, lastref.Tensor, None)]
assert all(a - b < 50 for a, b in zip(after, references, strict=True)), (references, after)
growth = resident() - before
assert growth < 4 << 20, f"resident memory grew by {growth} bytes"
"""
    # Development mode's allocator keeps what is freed for a while, which looks like growth.
    run_python("-c", program, sim="8GiB", dev=False)


# The command.


@pytest.mark.parametrize("start", [[str(SCRIPTS / "lastref")], [sys.executable, "-m", "lastref"]])
def test_the_command(start: list[str], tmp_path: pathlib.Path) -> None:
    def run(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*start, *args],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=tmp_path,
            env={k: v for k, v in os.environ.items() if k != "LASTREF_SIM"},
        )

    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"lastref {lastref.__version__}\n")
    done = run("no-such-command")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "no-such-command" in done.stderr
    done = run("replay", "no-such-file.csv")
    assert done.returncode == 2
    assert "no-such-file.csv" in done.stderr
    done = run("devices")
    assert done.returncode == 0


def test_ctrl_c_ends_the_command() -> None:
    # It waits for a trace on standard input, outside the interpreter.
    with subprocess.Popen(
        [sys.executable, "-m", "lastref", "replay", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        status = pathlib.Path(f"/proc/{process.pid}/syscall")
        for _ in range(1000):
            # Blocked in read(0, ...): system call 0 on x86-64, 63 on aarch64, with descriptor 0.
            if re.match(r"(0|63) 0x0 ", status.read_text()):
                break
            try:
                process.wait(0.01)
            except subprocess.TimeoutExpired:
                continue
            raise AssertionError(f"ended early: {process.stderr and process.stderr.read()!r}")
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == -signal.SIGINT


# Documentation.


def test_examples_in_the_documentation() -> None:
    import doctest
    import types

    finder = doctest.DocTestFinder()
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    num_examples = 0
    for module in (lastref, lastref.cuda, lastref.gc, lastref.sim, lastref._size):
        for test in finder.find(module, module.__name__):
            num_examples += len(test.examples)
            runner.run(test)
    # The compiled part: the finder passes over what has no Python source.
    parser = doctest.DocTestParser()
    pending = [(name, getattr(lastref._lastref, name)) for name in dir(lastref._lastref)]
    while pending:
        name, item = pending.pop()
        if isinstance(item, type) and not issubclass(item, Exception):
            pending += [(f"{name}.{key}", value) for key, value in vars(item).items()]
        elif isinstance(item, types.ModuleType):
            continue
        text = getattr(item, "__doc__", None)
        if isinstance(text, str) and ">>>" in text:
            test = parser.get_doctest(text, {}, name, None, None)
            num_examples += len(test.examples)
            runner.run(test)
    assert num_examples > 30
    assert runner.failures == 0


def test_everything_public_has_a_docstring() -> None:
    for module in (lastref, lastref.cuda, lastref.gc, lastref.sim):
        assert module.__doc__
        for name in module.__all__:
            item = getattr(module, name)
            if name == "__version__" or isinstance(item, lastref.dtype):
                continue
            assert item.__doc__, name
            if isinstance(item, type):
                for key, value in vars(item).items():
                    if not key.startswith("_"):
                        assert getattr(value, "__doc__", None), f"{name}.{key}"


def test_stubs_agree_with_the_package(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("mypy")
    allow = tmp_path / "allow.txt"
    allow.write_text(
        r"""
# Written by PyO3; nobody imports * from the compiled part.
lastref\._lastref\.__all__
# Has no stubs of its own, and needs PyTorch to be imported.
lastref\.torch.*
# Any attribute may be set on a tensor.
lastref\._lastref\.Tensor\.__[gs]etattr__
"""
        # CPython gives it to what offers a buffer, from 3.12 on.
        + r"lastref\._lastref\.Tensor\.__buffer__" * (sys.version_info < (3, 12))
    )
    settings = tmp_path / "mypy.ini"
    settings.write_text("""
[mypy]
[mypy-lastref.torch.*]
ignore_errors = True
[mypy-torch.*,IPython.*,prometheus_client.*]
ignore_missing_imports = True
""")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy.stubtest", "lastref"),
            *("--allowlist", str(allow), "--mypy-config-file", str(settings)),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
