"""Reports as files: at a failure, and at a signal while the program runs."""

import json
import os
import pathlib
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lastref.torch import _jobs

RunTorch = Callable[..., "subprocess.CompletedProcess[str]"]


class Made:
    """A report that is as large as it must be."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def to_dict(self) -> dict[str, Any]:
        return {"schema": "lastref.report/1", **self.values}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*_jobs.RANK_VARIABLES, "LASTREF_REPORT_DIR"):
        monkeypatch.delenv(name, raising=False)
    _jobs._numbers.clear()
    yield


def write(report: Any, reason: str = "out of memory") -> pathlib.Path:
    path = _jobs.write_report(report, reason)
    assert path is not None
    return pathlib.Path(path)


# Files


def test_without_a_folder_nothing_is_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _jobs.write_report(Made()) is None  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_the_last_failure_is_kept(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LASTREF_REPORT_DIR", str(tmp_path / "made" / "for us"))
    first, second = write(Made(n=1)), write(Made(n=2))
    assert first == second
    assert re.fullmatch(rf"oom-[\w.]+-0-{os.getpid()}\.json", second.name)
    assert json.loads(second.read_text()) == {
        "schema": "lastref.report/1",
        "n": 2,
        "reason": "out of memory",
        "number": 2,
    }
    assert [path.name for path in second.parent.iterdir()] == [second.name], "nothing else is left"


def test_a_report_is_written_once(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LASTREF_REPORT_DIR", str(tmp_path))
    made = Made()
    assert write(made) == write(made)
    assert json.loads(write(made).read_text())["number"] == 1


def test_reports_for_another_reason_are_numbered(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LASTREF_REPORT_DIR", str(tmp_path))
    assert [write(Made(), "SIGUSR2").name.rpartition("-")[2] for _ in range(2)] == [
        "1.json",
        "2.json",
    ]


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, 0),
        ({"RANK": "3", "LOCAL_RANK": "1"}, 3),
        ({"SLURM_PROCID": "12"}, 12),
        ({"OMPI_COMM_WORLD_RANK": "5"}, 5),
        ({"LOCAL_RANK": "1"}, 1),
        ({"RANK": "one", "SLURM_PROCID": "2"}, 2),
    ],
)
def test_the_rank_is_the_launchers(
    environment: dict[str, str], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert _jobs.rank() == rank
    assert f"-{rank}-" in _jobs.report_stem("oom")


def test_a_strange_host_name_is_a_file_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_jobs.socket, "gethostname", lambda: "a/b c-ü.example")
    assert _jobs.report_stem("oom").startswith("oom-a_b_c__.example-0-")


@pytest.mark.parametrize("why", ["file", "read-only", "full"])
def test_what_cannot_be_written_is_one_line(
    why: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "folder"
    if why == "file":
        folder.write_text("")
        words = "File exists|Not a directory"
    elif why == "read-only":
        monkeypatch.setattr(_jobs.os, "makedirs", raising(OSError(30, "Read-only file system")))
        words = "Read-only file system"
    else:
        monkeypatch.setattr(_jobs.os, "fsync", raising(OSError(28, "No space left on device")))
        words = "No space left on device"
    monkeypatch.setenv("LASTREF_REPORT_DIR", str(folder))
    assert _jobs.write_report(Made()) is None  # type: ignore[arg-type]
    text = capfd.readouterr().err
    assert re.fullmatch(
        rf"lastref: .*oom-.*\.json could not be written: ({words}); LASTREF_REPORT_DIR .*\n", text
    )
    if why == "full":
        assert list(folder.iterdir()) == [], "no part of a file is left"


def raising(error: OSError) -> Callable[..., None]:
    def function(*args: object, **kwargs: object) -> None:
        raise error

    return function


def test_a_report_that_cannot_be_made_is_one_line(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LASTREF_REPORT_DIR", str(tmp_path))
    assert _jobs.write_report(Made(n=object())) is None  # type: ignore[arg-type]
    assert capfd.readouterr().err.startswith("lastref: the report could not be made: TypeError(")


def test_an_existing_file_keeps_its_permissions_as_the_umask_says(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LASTREF_REPORT_DIR", str(tmp_path))
    before = os.umask(0o027)
    try:
        assert write(Made()).stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)


def test_a_failure_is_written(tmp_path: pathlib.Path, run_torch: RunTorch) -> None:
    program = """
import torch, lastref.torch
lastref.torch.guard()
big = torch.empty(6000 << 20, dtype=torch.uint8, device="cuda")
for _ in range(3):
    try:
        torch.empty(6000 << 20, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        pass
"""
    done = run_torch("-c", program, env={"LASTREF_REPORT_DIR": str(tmp_path), "RANK": "7"})
    (path,) = tmp_path.iterdir()
    assert re.fullmatch(r"oom-[\w.]+-7-\d+\.json", path.name), done.stderr
    document = json.loads(path.read_text())
    assert document["schema"] == "lastref.report/1"
    assert (document["reason"], document["number"], document["rank"]) == ("out of memory", 3, 7)
    assert document["out_of_memory"]["requested"] == 6000 << 20
    assert document["storages"][0]["bytes"] == 6000 << 20
    assert "big" in json.dumps(document["storages"][0]["paths"])


def test_the_schema_is_documented(tmp_path: pathlib.Path, run_torch: RunTorch) -> None:
    """docs/report-schema.md has all keys of a report, and a report has all that it has."""
    program = """
import torch, lastref.torch
lastref.torch.guard()
model = torch.nn.Linear(64, 64, device="cuda")
total = model(torch.randn(64, 64, device="cuda")).square().sum()
try:
    torch.empty(20000 << 20, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    pass
"""
    run_torch("-c", program, env={"LASTREF_REPORT_DIR": str(tmp_path)})
    (path,) = tmp_path.iterdir()
    report = json.loads(path.read_text())
    text = (pathlib.Path(__file__).parents[3] / "docs" / "report-schema.md").read_text()

    def documented(heading: str) -> set[str]:
        section = text.partition(f"## {heading}\n")[2].partition("\n##")[0]
        rows = re.findall(r"^\| (`.*?) \|", section, re.M)
        return {name for row in rows for name in re.findall(r"`(\w+)`", row)}

    assert documented("The report") == report.keys()
    assert documented("`out_of_memory`") == report["out_of_memory"].keys()
    assert documented("`devices`") == report["devices"][0].keys()
    assert documented("`storages`") == report["storages"][0].keys()
    path_ = report["storages"][0]["paths"][0]
    assert path_.keys() == {"words", "kind", "steps", "cure"}
    assert path_["steps"][0].keys() >= {"text", "kind", "type"}
    device = report["devices"][0]
    parts = ("free", "live", "cached", "pending", "fragmented", "context", "other_processes")
    assert sum(device[part] or 0 for part in parts) == device["total"]


def test_the_command_compares_ranks(tmp_path: pathlib.Path, run_torch: RunTorch) -> None:
    """What is written is what `lastref explain FOLDER` reads."""
    program = """
import os, signal, sys, time, torch, lastref.torch
lastref.torch.guard(signal=signal.SIGUSR2)
kept = [torch.empty(400 << 20, dtype=torch.uint8, device="cuda") for _ in range(4)]
if os.environ["RANK"] == "1":
    cache = torch.empty(9000 << 20, dtype=torch.uint8, device="cuda")
    torch.empty(2000 << 20, dtype=torch.uint8, device="cuda")
os.kill(os.getpid(), signal.SIGUSR2)
while not any(name.startswith("report") for name in os.listdir(os.environ["LASTREF_REPORT_DIR"])):
    time.sleep(0.01)
"""
    for rank in (0, 1):
        folder = tmp_path / str(rank)
        folder.mkdir()
        variables = {"LASTREF_REPORT_DIR": str(folder), "RANK": str(rank)}
        run_torch("-c", program, env=variables, status=rank)
    for path in [*tmp_path.glob("*/*.json")]:
        path.rename(tmp_path / path.name)
    done = run_torch("-m", "lastref", "explain", "--json", str(tmp_path))
    first, second = map(json.loads, done.stdout.splitlines())
    assert (first["rank"], first["out_of_memory"], first["odd"]) == (0, False, False)
    assert (second["rank"], second["out_of_memory"], second["odd"]) == (1, True, True)
    assert second["requested_bytes"] == 2000 << 20
    assert "`cache`" in second["holder"] and second["holder_bytes"] == 9000 << 20
    assert "`cache`" in second["why"]
    assert first["holder_bytes"] == 1600 << 20


# A signal

START = """
import os, signal, sys, threading, time, pathlib
import torch, lastref.torch
big = torch.empty(600 << 20, dtype=torch.uint8, device="cuda")
folder = pathlib.Path(os.environ.get("LASTREF_REPORT_DIR", "."))
def wait_for(number, seconds=60):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if len(found := sorted(folder.glob("report-*.json"))) >= number:
            return [path.name for path in found]
        time.sleep(0.01)
    raise SystemExit("no report came")
"""


def test_a_signal_writes_a_report(tmp_path: pathlib.Path, run_torch: RunTorch) -> None:
    program = (
        START
        + """
lastref.torch.guard(signal=signal.SIGUSR2)
os.kill(os.getpid(), signal.SIGUSR2)
wait_for(1)
signal.raise_signal(signal.SIGUSR2)
wait_for(2)
lastref.torch.unguard()
print(signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL, signal.set_wakeup_fd(-1))
"""
    )
    done = run_torch("-c", program, env={"LASTREF_REPORT_DIR": str(tmp_path)})
    assert done.stdout == "True -1\n"
    names = sorted(path.name for path in tmp_path.iterdir())
    assert [name.rpartition("-")[2] for name in names] == ["1.json", "2.json"]
    assert done.stderr.count("lastref: SIGUSR2: report written to ") == 2
    document = json.loads((tmp_path / names[0]).read_text())
    assert (document["reason"], document["out_of_memory"]) == ("SIGUSR2", None)
    assert document["storages"][0]["bytes"] == 600 << 20


def test_without_a_folder_it_is_the_current_one(
    tmp_path: pathlib.Path, run_torch: RunTorch
) -> None:
    program = (
        START
        + """
lastref.torch.guard(signal=signal.SIGUSR2)
os.kill(os.getpid(), signal.SIGUSR2)
wait_for(1)
"""
    )
    run_torch("-c", program, cwd=tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def test_while_the_main_thread_is_in_a_long_call(
    tmp_path: pathlib.Path, run_torch: RunTorch
) -> None:
    """No instruction of Python runs on the main thread between the signal and the report."""
    program = (
        START
        + """
import ctypes
lastref.torch.guard(signal=signal.SIGUSR2)
def send():
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGUSR2)
    wait_for(1)
    os.write(ready, b"x")
waiting, ready = os.pipe()
threading.Thread(target=send).start()
# A read that the signal does not end, in C, with the interpreter lock released.
libc = ctypes.CDLL(None)
buffer = ctypes.create_string_buffer(1)
print(libc.read(waiting, buffer, 1))
"""
    )
    done = run_torch("-c", program, env={"LASTREF_REPORT_DIR": str(tmp_path)})
    assert done.stdout == "1\n"


def test_beside_an_event_loop_with_handlers(tmp_path: pathlib.Path, run_torch: RunTorch) -> None:
    program = (
        START
        + """
import asyncio
lastref.torch.guard(signal=signal.SIGUSR2)
async def main():
    came = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, came.set)  # takes the wakeup fd
    os.kill(os.getpid(), signal.SIGUSR2)
    await asyncio.to_thread(wait_for, 1)
    os.kill(os.getpid(), signal.SIGUSR1)
    await asyncio.wait_for(came.wait(), 30)
asyncio.run(main())
os.kill(os.getpid(), signal.SIGUSR2)  # the loop has left the place
wait_for(2)
print("both")
"""
    )
    done = run_torch("-c", program, env={"LASTREF_REPORT_DIR": str(tmp_path)})
    assert done.stdout == "both\n"


def test_inside_an_event_loop_that_was_first(tmp_path: pathlib.Path, run_torch: RunTorch) -> None:
    program = (
        START
        + """
import asyncio
async def main():
    came = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, came.set)
    lastref.torch.guard(signal=signal.SIGUSR2)  # passes on what is not its own
    os.kill(os.getpid(), signal.SIGUSR1)
    await asyncio.wait_for(came.wait(), 30)
    os.kill(os.getpid(), signal.SIGUSR2)
    await asyncio.to_thread(wait_for, 1)
asyncio.run(main())
print("both")
"""
    )
    done = run_torch("-c", program, env={"LASTREF_REPORT_DIR": str(tmp_path)})
    assert done.stdout == "both\n"


def test_a_handler_that_was_there_is_called_too(
    tmp_path: pathlib.Path, run_torch: RunTorch
) -> None:
    program = (
        START
        + """
signal.signal(signal.SIGUSR2, lambda number, frame: print("before", number == signal.SIGUSR2))
lastref.torch.guard(signal=signal.SIGUSR2)
os.kill(os.getpid(), signal.SIGUSR2)
wait_for(1)
"""
    )
    done = run_torch("-c", program, env={"LASTREF_REPORT_DIR": str(tmp_path)})
    assert done.stdout == "before True\n"


def test_a_forked_child_writes_its_own(tmp_path: pathlib.Path, run_torch: RunTorch) -> None:
    program = (
        START
        + """
lastref.torch.guard(signal=signal.SIGUSR2)
child = os.fork()
if child == 0:
    os.kill(os.getpid(), signal.SIGUSR2)
    wait_for(1)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print([str(child) in name for name in wait_for(1)])
os.kill(os.getpid(), signal.SIGUSR2)
wait_for(2)
"""
    )
    done = run_torch("-c", program, env={"LASTREF_REPORT_DIR": str(tmp_path)})
    assert done.stdout == "[True]\n"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (f"lastref.torch.guard(signal={int(signal.SIGKILL)})", "signal 9 cannot be handled"),
        (
            "t = threading.Thread(target=lambda: work()); t.start(); t.join()",
            "a signal's handler can only be set on the main thread",
        ),
    ],
)
def test_what_cannot_be_handled_is_refused(call: str, text: str, run_torch: RunTorch) -> None:
    program = (
        START
        + f"""
def work():
    try:
        lastref.torch.guard(signal=signal.SIGUSR2)
    except ValueError as error:
        print(error)
try:
    {call}
except ValueError as error:
    print(error)
"""
    )
    assert text in run_torch("-c", program).stdout
