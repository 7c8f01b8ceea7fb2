"""The benchmark's own stand-in, in C, counts what PyTorch asks of the device."""

import importlib.util
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

RunTorch = Callable[..., "subprocess.CompletedProcess[str]"]

PROGRAM = """
import ctypes, json
import torch

class Count(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("calls", ctypes.c_ulonglong), ("bytes", ctypes.c_ulonglong),
                ("nanoseconds", ctypes.c_ulonglong)]

standin = ctypes.CDLL(None)
standin.standin_counts.restype = standin.standin_peak.restype = ctypes.c_size_t
def counts():
    all = (Count * 64)()
    n = standin.standin_counts(all, 64)
    return {c.name.decode(): [c.calls, c.bytes, c.nanoseconds > 0] for c in all[:n] if c.calls}

torch.cuda.init()
other = torch.cuda.Stream()
standin.standin_reset_counts()
said = []
one = torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
said.append(counts())
two = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
two.record_stream(other)
del one, two
torch.cuda.empty_cache()
said.append(counts())
said.append(standin.standin_peak(0))
print(json.dumps(said))
"""

MIB = 1 << 20


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables under which a program finds its devices. It takes a second to build."""
    place = Path(__file__).parent / "standin" / "build.py"
    spec = importlib.util.spec_from_file_location("lastref_standin_build", place)
    assert spec is not None
    assert spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    found: dict[str, str] = build.environment(build.build(tmp_path_factory.mktemp("standin")), 11_000)
    return found


@pytest.mark.parametrize(
    ("conf", "first", "more"),
    [
        (
            "",
            {"cudaMalloc": [1, 30 * MIB, True]},
            {"cudaMalloc": [2, 32 * MIB, True], "cudaFree": [2, 0, True]},
        ),
        (
            "expandable_segments:True",
            {
                "cuMemAddressReserve": [1, None, True],
                "cuMemCreate": [2, 40 * MIB, True],
                "cuMemMap": [2, 40 * MIB, True],
                "cuMemSetAccess": [1, 40 * MIB, True],
            },
            {
                "cuMemCreate": [3, 42 * MIB, True],
                "cuMemRelease": [3, 42 * MIB, True],
                "cuMemUnmap": [3, 42 * MIB, True],
            },
        ),
    ],
)
def test_calls_are_counted_with_their_bytes(
    run_torch: RunTorch,
    counting: dict[str, str],
    conf: str,
    first: dict[str, list[object]],
    more: dict[str, list[object]],
) -> None:
    """Native segments are of the size asked for; expandable ones grow by handles of 20 MiB, or 2 for small blocks."""
    ran = run_torch("-c", PROGRAM, env={**counting, "PYTORCH_CUDA_ALLOC_CONF": conf})
    after_one, at_the_end, peak = json.loads(ran.stdout)
    for expected, found in ((first, after_one), (more, at_the_end)):
        for name, (calls, size, timed) in expected.items():
            assert found[name][0] == calls, (name, found)
            assert size is None or found[name][1] == size, (name, found)
            assert found[name][2] == timed, (name, found)
    assert ("cudaMalloc" in after_one) == (conf == "")
    # The block that another stream used is waited for with an event.
    for name in ("cudaEventCreate", "cudaEventRecord", "cudaEventSynchronize"):
        assert at_the_end[name][0] >= 1, at_the_end
        assert not at_the_end[name][2]
    assert peak == (32 if conf == "" else 42) * MIB
