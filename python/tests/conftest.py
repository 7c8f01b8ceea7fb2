"""What the tests share: two simulated GPUs of 8 GiB, and the proof that a test has leaked nothing."""

import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator

import pytest

import lastref

MIB = 1 << 20
GIB = 1 << 30

lastref.sim.enable("2x8GiB")


@pytest.fixture(autouse=True)
def nothing_is_leaked() -> Iterator[None]:
    """Each test starts on empty devices, and leaves no device memory allocated."""
    # The traceback of a test that failed before this one refers to its variables.
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        vars(sys).pop(name, None)
    gc.collect()
    for device in range(lastref.cuda.device_count()):
        assert lastref.cuda.memory_allocated(device) == 0, "an earlier test left memory allocated"
        lastref.cuda.reset_peak_memory_stats(device)
        lastref.cuda.reset_accumulated_memory_stats(device)
    lastref.cuda.empty_cache()
    yield
    gc.collect()
    for device in range(lastref.cuda.device_count()):
        left = lastref.cuda.memory_allocated(device)
        assert left == 0, f"the test left {left} bytes allocated on device {device}"
    assert lastref.cuda.current_device() == 0


@pytest.fixture
def gc_disabled() -> Iterator[None]:
    """Without Python's cycle collector: what is freed is freed by reference counting alone."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def no_gc() -> Iterator[None]:
    """As `gc_disabled`, with nothing left to collect before and after, and nothing frozen."""
    gc.collect()
    gc.disable()
    yield
    gc.unfreeze()
    gc.enable()
    gc.collect()


RunPython = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_python() -> RunPython:
    """Runs a program in an interpreter of its own, by default without a simulated GPU.

    ``sim`` is the value of LASTREF_SIM. The interpreter is in development mode, warnings are errors.
    """

    def run(
        *args: str, sim: str | None = None, status: int = 0, dev: bool = True
    ) -> subprocess.CompletedProcess[str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("LASTREF_", "PYTHON"))}
        if sim is not None:
            env["LASTREF_SIM"] = sim
        options = ["-X", "dev", "-W", "error"] if dev else []
        done = subprocess.run(
            [sys.executable, *options, *args],
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == status, f"{done.args}\n{done.stdout}\n{done.stderr}"
        return done

    return run


def pytest_configure() -> None:
    # Development mode shows these once; pytest makes them errors.
    warnings.simplefilter("error")
