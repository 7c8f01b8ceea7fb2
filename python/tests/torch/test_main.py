"""``python -m lastref.torch``: a program runs as under Python alone, and says what held the memory if it dies."""

import json
import os
import pathlib
import re
import subprocess
from collections.abc import Callable

import pytest

RunTorch = Callable[..., "subprocess.CompletedProcess[str]"]

MAIN = ["-m", "lastref.torch"]

SHOW = """
import json, os, sys
main = sys.modules["__main__"]
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "name": __name__, "file": globals().get("__file__"),
    "package": __package__, "spec": getattr(__spec__, "name", None), "loader": type(__loader__).__name__,
    "same": vars(main) is globals(), "globals": sorted(globals()), "flags": str(sys.flags),
    "warnings": sys.warnoptions, "xoptions": sys._xoptions, "python": sys.executable,
    "environment": {k: v for k, v in os.environ.items() if k != "_"}, "hook": sys.excepthook is sys.__excepthook__,
    "finders": [getattr(f, "__name__", "") for f in sys.meta_path if type(f).__name__ != "AfterTorch"],
    "torch": "torch" in sys.modules, "lastref": "lastref" in sys.modules,
}))
"""


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder with a program in each of the forms that Python takes."""
    (tmp_path / "show.py").write_text(SHOW)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "__main__.py").write_text(SHOW)
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory" / "__main__.py").write_text(SHOW)
    return tmp_path


# As under Python alone


@pytest.mark.parametrize(
    "arguments",
    [
        ["show.py"],
        ["show.py", "--json", "-m", "--", "x"],
        ["./show.py", ""],
        ["-m", "show", "a"],
        ["-m", "package", "-c"],
        ["-mpackage"],
        ["-c", SHOW, "a", "--report-dir"],
        ["-c" + SHOW],
        ["directory", "a"],
        ["-"],
    ],
    ids=lambda arguments: " ".join(arguments).replace(SHOW, "CODE"),
)
def test_the_program_sees_what_it_always_sees(
    arguments: list[str], folder: pathlib.Path, run_torch: RunTorch
) -> None:
    plain = run_torch(*arguments, cwd=folder, input=SHOW)
    ours = run_torch(*MAIN, *arguments, cwd=folder, input=SHOW)
    assert json.loads(ours.stdout) == json.loads(plain.stdout)
    assert ours.stderr == plain.stderr == ""


@pytest.mark.parametrize(
    "options",
    [["-u"], ["-O", "-X", "utf8", "-W", "ignore::UserWarning"], ["-s"], ["-P"], ["-B", "-b"]],
)
def test_options_of_python_are_kept(
    options: list[str], folder: pathlib.Path, run_torch: RunTorch
) -> None:
    plain = run_torch(*options, "show.py", cwd=folder)
    for main in (MAIN, ["-mlastref.torch"]):
        ours = run_torch(*options, *main, "--", "show.py", cwd=folder)
        assert json.loads(ours.stdout) == json.loads(plain.stdout)
    if options == ["-u"]:
        ours = run_torch("-um", "lastref.torch", "show.py", cwd=folder)
        assert json.loads(ours.stdout) == json.loads(plain.stdout)


ENDS = {
    "normally": "print('done')",
    "exit 0": "import sys; sys.exit()",
    "exit 3": "import sys; sys.exit(3)",
    "exit text": "import sys; sys.exit('a text')",
    "exit object": "raise SystemExit([1])",
    "exception": "def f(): 1 / 0\nf()",
    "exception chain": "try: {}['x']\nexcept KeyError as e: raise ValueError('y') from e",
    "exception group": "raise ExceptionGroup('two', [ValueError(1), TypeError(2)])",
    "syntax": "print('x'\n",
    "keyboard": "raise KeyboardInterrupt",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "abort": "import os; os._exit(7)",
    "atexit": "import atexit; atexit.register(print, 'at exit'); 1 / 0",
    "thread": "import threading; t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()",
    "hook": "import sys; sys.excepthook = lambda *a: print('hook', a[0]); 1 / 0",
}


@pytest.mark.parametrize("program", ENDS.values(), ids=ENDS.keys())
def test_the_program_ends_as_it_always_ends(
    program: str, tmp_path: pathlib.Path, run_torch: RunTorch
) -> None:
    (tmp_path / "program.py").write_text(program)
    plain = run_torch("program.py", cwd=tmp_path, status=None)
    ours = run_torch(*MAIN, "program.py", cwd=tmp_path, status=None)
    assert ours.returncode == plain.returncode
    assert ours.stdout == plain.stdout
    assert without_numbers(ours.stderr) == without_numbers(plain.stderr)


def without_numbers(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+|Thread-\d+", "N", text)


def test_a_missing_program_is_pythons_matter(tmp_path: pathlib.Path, run_torch: RunTorch) -> None:
    for arguments in (["nothing.py"], ["-m", "nothing"]):
        plain = run_torch(*arguments, cwd=tmp_path, status=None)
        ours = run_torch(*MAIN, *arguments, cwd=tmp_path, status=None)
        assert (ours.returncode, ours.stderr) == (plain.returncode, plain.stderr)
        assert plain.returncode != 0


def test_the_machines_own_start_module_runs(tmp_path: pathlib.Path, run_torch: RunTorch) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('customized')")
    show = "import os; print(os.environ.get('PYTHONPATH', ''))"
    path = os.pathsep.join(filter(None, [str(tmp_path), run_torch("-c", show).stdout.strip()]))
    done = run_torch(
        *MAIN, "-c", "import sitecustomize; print(sitecustomize.__file__)", env={"PYTHONPATH": path}
    )
    # Once when Python starts for the command, once when it starts for the program.
    assert done.stdout == f"customized\ncustomized\n{tmp_path / 'sitecustomize.py'}\n"


def test_processes_that_it_starts_are_not_touched(
    tmp_path: pathlib.Path, run_torch: RunTorch
) -> None:
    (tmp_path / "program.py").write_text("""
import multiprocessing, sys
def work(x): return x, sys.modules["__main__"].__file__, any(type(f).__name__ == "AfterTorch" for f in sys.meta_path)
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(work, [1]))
""")
    plain = run_torch("program.py", cwd=tmp_path)
    ours = run_torch(*MAIN, "program.py", cwd=tmp_path)
    assert ours.stdout == plain.stdout
    assert "False" in plain.stdout


# When memory runs out

OUT_OF_MEMORY = """
import torch

MIB = 1 << 20

def train():
    activations = torch.empty(6000 * MIB, dtype=torch.uint8, device="cuda")
    return torch.empty(6000 * MIB, dtype=torch.uint8, device="cuda")
"""


def test_a_program_that_dies_says_what_held_the_memory(
    tmp_path: pathlib.Path, run_torch: RunTorch
) -> None:
    (tmp_path / "program.py").write_text(OUT_OF_MEMORY + "train()\n")
    plain = run_torch("program.py", cwd=tmp_path, status=1)
    ours = run_torch(*MAIN, "program.py", cwd=tmp_path, status=1)
    assert ours.stdout == plain.stdout == ""
    traceback = plain.stderr[plain.stderr.index("Traceback") :].partition(". GPU 0")[0]
    assert traceback in ours.stderr, "the traceback is what it is without"
    assert "lastref/torch" not in ours.stderr
    report = ours.stderr.partition(traceback)[2]
    assert report.count("held by tensors") == 1, "once, after the traceback"
    assert "5.86 GiB" in report
    assert "activations" in report
    assert "\x1b" not in ours.stderr, "no colour where nobody looks"
    files = sorted(path.name for path in tmp_path.iterdir() if path.name != "program.py")
    assert len(files) == 2
    assert re.fullmatch(r"oom-[\w.]+-0-\d+\.html", files[0])
    assert re.fullmatch(r"oom-[\w.]+-0-\d+\.json", files[1])
    assert files[0] in report and files[1] in report
    document = json.loads((tmp_path / files[1]).read_text())
    assert document["schema"] == "lastref.report/1"
    assert (document["reason"], document["number"]) == ("out of memory", 1)
    assert document["out_of_memory"]["requested"] == 6000 << 20
    assert "activations" in json.dumps(document["storages"])


@pytest.mark.parametrize(
    ("end", "reported"),
    [
        ("try: train()\nexcept RuntimeError as e: raise ValueError('step') from e", True),
        (
            "import sys; sys.excepthook = lambda *a: print('own hook', file=sys.stderr)\ntrain()",
            True,
        ),
        ("try: train()\nexcept RuntimeError: print('caught')", False),
        ("try: train()\nexcept RuntimeError: pass\n1 / 0", False),
        ("try: train()\nexcept RuntimeError: raise SystemExit(3)", False),
    ],
)
def test_when_there_is_a_report(
    end: str, reported: bool, tmp_path: pathlib.Path, run_torch: RunTorch
) -> None:
    done = run_torch(*MAIN, "-c", OUT_OF_MEMORY + end, cwd=tmp_path, status=None)
    assert ("this report is in" in done.stderr) == reported, done.stderr
    assert len(list(tmp_path.iterdir())) == (2 if reported else 0)


def test_a_thread_that_dies_is_reported(tmp_path: pathlib.Path, run_torch: RunTorch) -> None:
    program = "import threading\nt = threading.Thread(target=train)\nt.start()\nt.join()\nprint('on')"
    done = run_torch(*MAIN, "-c", OUT_OF_MEMORY + program, cwd=tmp_path)
    assert done.stdout == "on\n"
    assert done.stderr.count("this report is in") == 1
    assert "variable `activations` in `train`" in done.stderr
    assert len(list(tmp_path.iterdir())) == 2


def test_a_report_as_json_and_elsewhere(tmp_path: pathlib.Path, run_torch: RunTorch) -> None:
    done = run_torch(
        *MAIN, "--json", "--report-dir=a/b", "-c", OUT_OF_MEMORY + "train()", cwd=tmp_path, status=1
    )
    (path,) = (tmp_path / "a" / "b").glob("*.json")
    start = done.stderr.index("{\n") if "{\n" in done.stderr else done.stderr.index('{"')
    shown, _ = json.JSONDecoder().raw_decode(done.stderr[start:])
    written = json.loads(path.read_text())
    assert written | shown == written


def test_the_folder_for_reports_gets_it_once(tmp_path: pathlib.Path, run_torch: RunTorch) -> None:
    done = run_torch(
        *MAIN,
        "-c",
        OUT_OF_MEMORY + "train()",
        env={"LASTREF_REPORT_DIR": str(tmp_path / "reports"), "RANK": "2"},
        status=1,
    )
    (path,) = (tmp_path / "reports").glob("oom-*-2-*.json")
    assert json.loads(path.read_text())["number"] == 1
    assert str(path) in done.stderr


def test_a_folder_that_cannot_be_written_is_one_line(
    tmp_path: pathlib.Path, run_torch: RunTorch
) -> None:
    (tmp_path / "file").write_text("")
    done = run_torch(
        *MAIN,
        "--report-dir",
        str(tmp_path / "file" / "x"),
        "-c",
        OUT_OF_MEMORY + "train()",
        cwd=tmp_path,
        status=1,
    )
    assert "could not be written: Not a directory" in done.stderr
    assert "activations" in done.stderr, "the report itself is there"


def test_dead_cycles_complete_unless_told_not_to(
    tmp_path: pathlib.Path, run_torch: RunTorch
) -> None:
    program = """
import gc, torch
gc.disable()
class Garbage:
    def __init__(self, tensor):
        self.me, self.tensor = self, tensor
for n in range(60):
    Garbage(torch.empty(1024 * 100, 1024, device="cuda"))
print("completed")
"""
    assert run_torch(*MAIN, "-c", program, cwd=tmp_path).stdout == "completed\n"
    assert list(tmp_path.iterdir()) == []
    done = run_torch(*MAIN, "--no-collect", "-c", program, cwd=tmp_path, status=1)
    assert "this report is in" in done.stderr


def test_without_the_shim_there_is_a_line_and_a_report(
    tmp_path: pathlib.Path, run_torch: RunTorch
) -> None:
    program = OUT_OF_MEMORY + "train()"
    env = {"LASTREF_TORCH_SHIM": "0"}
    for options in ([], ["-W", "error"]):
        done = run_torch(*options, *MAIN, "-c", program, cwd=tmp_path, env=env, status=1)
        line, _, rest = done.stderr.partition("\n")
        assert line.startswith("lastref: lastref.torch.guard cannot try failed allocations again: ")
        assert "Failures are reported only" in line
        assert rest.count("held by tensors") == 1
        assert "activations" in rest


def test_a_program_that_uses_no_gpu_runs(run_torch: RunTorch) -> None:
    program = "import torch; print(torch.ones(3).sum().item(), torch.cuda.is_initialized())"
    done = run_torch(*MAIN, "-c", program, env={"LD_PRELOAD": "", "LD_LIBRARY_PATH": ""})
    assert (done.stdout, done.stderr) == ("3.0 False\n", "")


def test_settings_for_torch_made_by_the_program_hold(run_torch: RunTorch) -> None:
    program = """
import os
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
import torch
torch.zeros(1, device="cuda")
print(torch.cuda.memory_snapshot()[0]["is_expandable"])
"""
    assert run_torch(*MAIN, "-c", program).stdout == "True\n"


def test_colour_on_a_terminal(tmp_path: pathlib.Path, run_torch: RunTorch) -> None:
    program = f"""
import os, pty, subprocess, sys
master, slave = pty.openpty()
child = subprocess.Popen([sys.executable, "-m", "lastref.torch", "-c", {OUT_OF_MEMORY + "train()"!r}], stderr=slave)
os.close(slave)
shown = b""
while True:
    try:
        shown += os.read(master, 4096)
    except OSError:  # the other end is closed
        break
assert child.wait() == 1
print(b"\\x1b[" in shown)
"""
    for no_color, colored in (("", True), ("1", False)):
        env = {"TERM": "xterm", "NO_COLOR": no_color}
        assert run_torch("-c", program, cwd=tmp_path, env=env).stdout == f"{colored}\n"


# The command itself


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "no program to run"),
        (["--json"], "no program to run"),
        (["--colour", "x.py"], "unknown option --colour"),
        (["--report-dir"], "--report-dir wants a value"),
        (["-m"], "-m wants a module"),
        (["--signal", "SIGNOTHING", "x.py"], "no signal is called SIGNOTHING"),
    ],
)
def test_wrong_use(arguments: list[str], text: str, run_torch: RunTorch) -> None:
    done = run_torch(*MAIN, *arguments, status=2)
    assert done.stdout == ""
    assert done.stderr.startswith(f"lastref.torch: {text}")


def test_isolated_python_is_told(run_torch: RunTorch) -> None:
    done = run_torch("-E", "-c", "import lastref", status=None)
    if done.returncode:
        pytest.skip("lastref is only found through PYTHONPATH here")
    done = run_torch("-E", *MAIN, "x.py", status=2)
    assert "under Python's option -E or -I nothing can be added" in done.stderr


def test_help(run_torch: RunTorch) -> None:
    assert "--report-dir" in run_torch(*MAIN, "--help").stdout
