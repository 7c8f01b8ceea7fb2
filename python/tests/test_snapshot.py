"""lastref.snapshot, and the file that lastref.cuda writes."""

import gzip
import io
import os
import json
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import lastref
import pytest

TESTDATA = Path(__file__).parents[2] / "crates/lastref-snapshot/testdata"
TRACE = TESTDATA.parents[1] / "lastref-cli/testdata/resnet50_train.csv.gz"


def test_a_snapshot_of_pytorch_is_read_without_pytorch():
    snapshot = lastref.snapshot.read(TESTDATA / "three-pools.pickle.gz")
    stats = snapshot.stats()
    assert stats["devices"]["0"]["reserved_bytes"] == 26189234176
    assert stats["pools"] == [[0, 0], [0, 1], [0, 2]]
    [device] = snapshot.explain()
    assert device["moment"] == "snapshot"
    assert device["memory"]["reserved_bytes"] == 26189234176


def test_to_dict_is_what_the_file_says():
    path = TESTDATA / "federated.pickle.gz"
    with gzip.open(path) as file:
        wanted = pickle.load(file)
    found = lastref.snapshot.read(path).to_dict()
    for key in ("device_traces", "external_annotations"):
        assert len(found[key]) == len(wanted[key])
    for found_segment, wanted_segment in zip(
        found["segments"], sorted(wanted["segments"], key=lambda s: s["address"]), strict=True
    ):
        assert found_segment == wanted_segment
    for found_entry, wanted_entry in zip(found["device_traces"][0], wanted["device_traces"][0], strict=True):
        assert found_entry == wanted_entry


def test_bad_files_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError):
        lastref.snapshot.read(tmp_path / "none")
    cut = tmp_path / "cut.pickle"
    cut.write_bytes((TESTDATA / "forms/protocol-4.pickle").read_bytes()[:300])
    with pytest.raises(ValueError, match="cut.pickle: byte 300: the file is cut"):
        lastref.snapshot.read(cut)

    class Harm:
        def __reduce__(self):
            return (os.system, ("echo harm",))

    harm = tmp_path / "harm.pickle"
    harm.write_bytes(pickle.dumps({"segments": [], "x": Harm()}))
    with pytest.raises(ValueError, match=r"names .*system"):
        lastref.snapshot.read(harm)


PROGRAM = """
import sys, lastref
kept = [lastref.empty(1 << 20, dtype=lastref.uint8, device=f"cuda:{i % 2}") for i in range(5)]
del kept[1]
lastref.cuda.memory._dump_snapshot(sys.argv[1])
print(lastref.cuda.memory_allocated(0), lastref.cuda.memory_reserved(0), lastref.cuda.memory_allocated(1))
"""


def test_lastrefs_own_snapshot_has_the_totals_of_its_statistics(tmp_path):
    path = tmp_path / "own.pickle"
    env = {**os.environ, "LASTREF_SIM": "2x1GiB", "LASTREF_ALLOC_CONF": "history_entries:1000"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path)], env=env, capture_output=True, text=True, check=True
    )
    allocated, reserved, other = map(int, done.stdout.split())
    # PyTorch's own tools load it with pickle.
    snapshot = pickle.loads(path.read_bytes())
    assert {segment["device"] for segment in snapshot["segments"]} == {0, 1}
    of = [segment for segment in snapshot["segments"] if segment["device"] == 0]
    assert sum(segment["total_size"] for segment in of) == reserved
    assert sum(segment["allocated_size"] for segment in of) == allocated
    stats = lastref.snapshot.read(path).stats()
    assert stats["devices"]["0"]["reserved_bytes"] == reserved
    assert stats["devices"]["1"]["bytes_by_state"]["active_allocated"] == other
    assert [history["device"] for history in stats["history"]] == [0, 1]
    assert [history["active_at_start_bytes"] for history in stats["history"]] == [0, 0]
    assert stats["problems"] == []


def test_what_is_written_is_what_was_read(tmp_path):
    first = lastref.snapshot.read(TESTDATA / "forms/protocol-4.pickle")
    first.write(tmp_path / "again.pickle")
    again = lastref.snapshot.read(tmp_path / "again.pickle")
    assert again.to_dict() == first.to_dict()
    assert io.BytesIO((tmp_path / "again.pickle").read_bytes()).read(2) == b"\x80\x04"


def test_advise_is_what_the_command_says():
    file = TESTDATA / "transformer-training.pickle.gz"
    found = lastref.snapshot.advise([TRACE, str(file)], capacity_bytes=8 << 30, settings=["max_split_size_mb:48"])
    command = [sys.executable, "-m", "lastref", "advise", "--json", "--capacity", "8GiB"]
    command += ["--with", "max_split_size_mb:48", str(TRACE), str(file)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert found == json.loads(said)
    assert found["recommended"]["line"].startswith("PYTORCH_CUDA_ALLOC_CONF=")
    assert len(found["files"]) == 2


def test_advise_on_one_path_and_on_too_small_a_device():
    for path in (TRACE, str(TRACE)):
        found = lastref.snapshot.advise(path, capacity_bytes=1 << 30)
        assert found["recommended"] is None
        [file] = found["files"]
        assert not any(tried["completes"] for tried in file["tried"])


def test_advise_refuses_with_the_reason(tmp_path, monkeypatch):
    advise = lastref.snapshot.advise
    with pytest.raises(FileNotFoundError):
        advise(tmp_path / "none")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError):
        advise("-")
    with pytest.raises(ValueError, match="no file"):
        advise([])
    with pytest.raises(ValueError, match="no_such_setting"):
        advise(TRACE, settings=["no_such_setting:1"])
    with pytest.raises(TypeError, match="list of texts"):
        advise(TRACE, settings="expandable_segments:True")
    with pytest.raises(ValueError, match="0 bytes"):
        advise(TRACE, capacity_bytes=0)
    with pytest.raises(OverflowError):
        advise(TRACE, capacity_bytes=-1)
    with pytest.raises(ValueError, match="no history"):
        advise(TESTDATA / "three-pools.pickle.gz")


def test_other_threads_run_while_advice_is_found():
    ticks = []
    done = threading.Event()

    def tick():
        while not done.wait(0.001):
            ticks.append(1)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        lastref.snapshot.advise([TRACE] * 4)
    finally:
        done.set()
        thread.join()
    assert len(ticks) > 20


INTERRUPTED = """
import os, signal, sys, threading, lastref
settings = [f"max_split_size_mb:{mib}" for mib in range(21, 50_000)]
# Who starts a program in the background may have it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    lastref.snapshot.advise(sys.argv[1], settings=settings)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_advise_can_be_interrupted():
    # It would take minutes to try all of them.
    command = [sys.executable, "-c", INTERRUPTED, str(TRACE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("interrupted\n", "")


def test_advise_runs_in_a_forked_child():
    program = (
        "import os, sys, lastref\n"
        "lastref.snapshot.advise(sys.argv[1])\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    lastref.snapshot.advise(sys.argv[1])\n"
        "    os._exit(7)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(TRACE)], timeout=120)
    assert done.returncode == 7
