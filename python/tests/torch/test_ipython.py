"""``%gpu_memory``, in an IPython shell without a terminal."""

import json
import subprocess
from collections.abc import Callable

import pytest

RunTorch = Callable[..., "subprocess.CompletedProcess[str]"]

START = """
import os, tempfile
os.environ["IPYTHONDIR"] = os.path.join(tempfile.gettempdir(), "lastref-ipython")
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config
config = Config()
config.HistoryManager.enabled = False
shell = InteractiveShell.instance(config=config)
def run(cell):
    shell.run_cell(cell, store_history=True)
run("import torch")
run("%load_ext lastref.torch")
"""


def test_what_an_output_holds_is_shown(run_torch: RunTorch) -> None:
    program = (
        START
        + """
run("def make(): return torch.zeros(300 << 20, dtype=torch.uint8, device='cuda')")
run("make()")
run("%gpu_memory")
run("1 + 1")
run("2 + 2")
run("3 + 3")
run("%gpu_memory")
"""
    )
    shown = run_torch("-c", program).stdout
    first, second = shown.split("Out[6]: 2\n")
    for part in (first, second):
        assert "300 MiB" in part
        assert "`Out[4]`, what IPython has shown" in part
    assert "`_`" in first, "the last output is _"
    assert "`_`" not in second.partition("300 MiB")[2].partition("cure")[0], (
        "three outputs later it is only in Out"
    )


def test_json_and_top(run_torch: RunTorch) -> None:
    program = (
        START
        + """
run("tensors = [torch.zeros(n << 20, dtype=torch.uint8, device='cuda') for n in (30, 20, 10)]")
run("%gpu_memory json top=2")
"""
    )
    shown = run_torch("-c", program).stdout
    document, _ = json.JSONDecoder().raw_decode(shown[shown.index("{") :])
    assert document["schema"] == "lastref.report/1"
    assert [storage["bytes"] >> 20 for storage in document["storages"]] == [30, 20]


@pytest.mark.parametrize("line", ["tops=3", "top=x", "json=1", "everything"])
def test_what_is_not_understood_is_told(line: str, run_torch: RunTorch) -> None:
    done = run_torch("-c", START + f"run('%gpu_memory {line}')")
    assert (
        f"%gpu_memory: '{line}' is not understood. Usage: %gpu_memory [top=N]"
        in done.stderr + done.stdout
    )


def test_html_is_displayed_and_the_magic_can_be_unloaded(run_torch: RunTorch) -> None:
    program = (
        START
        + """
run("%gpu_memory html")
run("%unload_ext lastref.torch")
run("%gpu_memory")
"""
    )
    done = run_torch("-c", program)
    assert "IPython.core.display.HTML object" in done.stdout
    assert "Line magic function `%gpu_memory` not found" in done.stdout + done.stderr
