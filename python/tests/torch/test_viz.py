"""What lastref writes, PyTorch's own tools open, with the same totals."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TESTDATA = Path(__file__).parents[3] / "crates/lastref-snapshot/testdata"

PROGRAM = """
import json, pickle, sys
from torch.cuda import _memory_viz as viz
with open(sys.argv[1], "rb") as file:
    snapshot = pickle.load(file)
viz.segsum(snapshot)  # asserts that blocks sum up to their segments
viz.trace(snapshot)
viz.trace_plot(snapshot)
viz.segment_plot(snapshot)
print(json.dumps({
    "reserved": sum(s["total_size"] for s in snapshot["segments"]),
    "allocated": sum(viz.calc_active(s) for s in snapshot["segments"]),
    "entries": sum(map(len, snapshot["device_traces"])),
}))
"""


@pytest.mark.parametrize("name", ["three-pools", "mixed-precision-forward", "small-inference"])
def test_a_written_snapshot_gives_pytorchs_tools_the_same_totals(name, tmp_path):
    import lastref

    snapshot = lastref.snapshot.read(TESTDATA / f"{name}.pickle.gz")
    path = tmp_path / "again.pickle"
    snapshot.write(path)
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    stats = snapshot.stats()
    device = stats["devices"]["0"]
    assert found == {
        "reserved": device["reserved_bytes"],
        "allocated": device["bytes_by_state"]["active_allocated"],
        "entries": sum(history["entries"] for history in stats["history"]),
    }


def test_lastrefs_own_snapshot_opens_in_pytorchs_tools(tmp_path):
    path = tmp_path / "own.pickle"
    program = """
import sys, lastref
lastref.sim.enable("1GiB")
kept = [lastref.empty(3 << 20, dtype=lastref.uint8, device="cuda") for _ in range(5)]
del kept[1]
lastref.cuda.memory._dump_snapshot(sys.argv[1])
print(lastref.cuda.memory_reserved(), lastref.cuda.memory_allocated())
"""
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    reserved, allocated = map(int, done.stdout.split())
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["reserved"], found["allocated"]) == (reserved, allocated)
