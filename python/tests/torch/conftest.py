"""What the tests under real PyTorch share: programs that run with it, on a device that the stand-in plays.

PyTorch is imported by the programs that tests start, not by the tests: the stand-in must be there before. Without
PyTorch these tests are skipped, and say so; with LASTREF_TEST_ALL=1 that is an error.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
#: Thorough runs, as in CI: all the rounds, and nothing is skipped.
ALL = os.environ.get("LASTREF_TEST_ALL") == "1"


def has_torch() -> bool:
    # This folder has the same name, and can be taken for a package without files of its own.
    spec = importlib.util.find_spec("torch")
    return spec is not None and spec.origin is not None


if not has_torch():
    if ALL:
        raise pytest.UsageError("LASTREF_TEST_ALL=1 wants the tests under PyTorch, and torch is not installed")
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> str | None:
    if not has_torch():
        return "tests under PyTorch: skipped, torch is not installed (`cargo xtask test --all` installs it)"
    return None


@pytest.fixture(scope="session")
def standin() -> dict[str, str]:
    """The variables under which a program finds the stand-in's devices, from the command that the wheel brings."""
    asked = [sys.executable, "-m", "lastref", "standin", "--env"]
    said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    return dict(line.split("=", 1) for line in said.splitlines())


RunTorch = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_torch(standin: dict[str, str]) -> RunTorch:
    """Runs a program in an interpreter of its own, where PyTorch finds devices.

    ``mib`` is the memory of each of the ``devices``. ``status`` is the exit status that is expected, None for any.
    Variables whose names begin with LASTREF_, PYTORCH_ and PYTHON are not passed on, but for LASTREF_CACHE.
    """

    def run(
        *args: str,
        mib: int = 11_000,
        devices: int = 1,
        env: dict[str, str] | None = None,
        status: int | None = 0,
        cwd: Path | None = None,
        input: str | None = None,
        timeout: float = 300,
    ) -> "subprocess.CompletedProcess[str]":
        variables = {
            name: value
            for name, value in os.environ.items()
            if name in ("LASTREF_CACHE", "PYTHONPATH")
            or not name.startswith(("LASTREF_", "PYTORCH_", "PYTHON"))
        }
        variables |= {
            **standin,
            "LASTREF_STANDIN_QUIET": "1",
            "LASTREF_STANDIN_MEMORY": f"{mib}MiB",
            "LASTREF_STANDIN_DEVICES": str(devices),
            **(env or {}),
        }
        done = subprocess.run(
            [sys.executable, *args],
            env=variables,
            capture_output=True,
            text=True,
            input=input,
            cwd=cwd,
            timeout=timeout,
            check=False,
        )
        if status is not None:
            assert done.returncode == status, f"{done.args}\n{done.stdout}\n{done.stderr}"
        return done

    return run


# What the programs begin with. `full(mib)` is memory that stays, `dead_cycle(mib)` what only gc finds.
PRELUDE = """
import gc, json, sys, warnings
import torch
import lastref, lastref.torch
from lastref.torch import _guard
warnings.filterwarnings("ignore", message="nvml")
MIB = 1 << 20

def full(mib, device=0):
    return torch.empty(mib * MIB, dtype=torch.uint8, device=f"cuda:{device}")

class Garbage:
    def __init__(self, kept):
        self.kept, self.me = kept, self

def dead_cycle(mib, device=0):
    Garbage(full(mib, device))

def text_of(action):
    try:
        action()
    except torch.OutOfMemoryError as error:
        return str(error)
    raise SystemExit("no error")

def num_ooms():
    return torch.cuda.memory_stats()["num_ooms"]

def rescues():
    stats = lastref.torch.guard_stats()
    return {name: rung["rescues"] for name, rung in stats["rungs"].items()}

def say(**values):
    print(json.dumps(values))
"""


@pytest.fixture
def run_program(run_torch: RunTorch) -> Callable[..., dict[str, Any]]:
    """Runs a program after `PRELUDE`. Returns what it said last, and its output under ``stdout`` and ``stderr``."""

    def run(program: str, *args: str, **options: Any) -> dict[str, Any]:
        done = run_torch("-c", PRELUDE + program, *args, **options)
        lines = done.stdout.splitlines()
        said = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
        return {**said, "stdout": done.stdout, "stderr": done.stderr}

    return run


@pytest.fixture
def rounds() -> int:
    """How often a test of threads repeats: few, or as many as it takes to trust it."""
    return 50 if ALL else 5
