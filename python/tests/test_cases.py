"""Programs that each have the essence of something people run into; they say which.

Those in `cases` are this project's own. Others are run where the folder they come from is beside the
checkout."""

import pathlib

import pytest

from conftest import RunPython

HERE = pathlib.Path(__file__).parent
OWN = sorted(path for path in (HERE / "cases").glob("*.py") if path.stem != "adapter")
OTHERS = sorted((HERE.parents[2] / "shared" / "cases" / "py").glob("r*.py"))


@pytest.mark.parametrize("program", OWN, ids=lambda path: path.stem)
def test_own(program: pathlib.Path, run_python: RunPython) -> None:
    run_python(str(program), sim="16GiB")


@pytest.mark.skipif(not OTHERS, reason="no other programs are beside the checkout")
@pytest.mark.parametrize("program", OTHERS, ids=lambda path: path.stem)
def test_others(program: pathlib.Path, run_python: RunPython) -> None:
    start = f"""
import os, runpy, sys
sys.path[:0] = [{str(HERE / "cases")!r}, {str(program.parent)!r}]
os.environ["LAB_BACKEND"] = "adapter"
runpy.run_path({str(program)!r}, run_name="__main__")
"""
    done = run_python("-c", start, sim="16GiB")
    assert '"ok": true' in done.stdout
