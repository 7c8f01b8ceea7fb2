"""Giving a variable that held a GPU tensor a new value, with the statistics read between the lines."""

import pathlib

import lastref as torch
from conftest import MIB, RunPython

EXAMPLE = pathlib.Path(__file__).parents[1] / "examples" / "reassign.py"


def device_bytes_in_use() -> int:
    """What the device itself says, not the allocator."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_the_tensor_is_freed_at_the_rebinding_and_not_before() -> None:
    nothing = device_bytes_in_use()
    t1 = torch.empty(4, 5)
    assert torch.cuda.memory_allocated() == 0

    t1 = t1.cuda()
    assert t1.is_cuda
    assert torch.cuda.memory_allocated() == 512  # 80 bytes, in granules of 512
    reserved = torch.cuda.memory_reserved()
    assert reserved >= 512
    assert device_bytes_in_use() == nothing + reserved

    other = torch.empty(4, 5)  # makes the new value, and rebinds nothing
    assert torch.cuda.memory_allocated() == 512

    t1 = other
    assert not t1.is_cuda
    assert torch.cuda.memory_allocated() == 0, "freed at the rebinding"
    assert torch.cuda.memory_reserved() == reserved, "and cached"
    assert device_bytes_in_use() == nothing + reserved, "so the device still counts it"

    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0
    assert device_bytes_in_use() == nothing, "now it is gone from the device"


def test_a_new_tensor_is_made_before_the_old_one_is_freed() -> None:
    t = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    t = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() == t.nbytes == MIB
    assert torch.cuda.max_memory_allocated() == 2 * MIB, "both lived while the right side ran"


def test_the_example_with_a_simulated_gpu(run_python: RunPython) -> None:
    done = run_python(str(EXAMPLE), sim="8GiB")
    assert done.stdout == "True\nFalse\n"
    assert "simulated" in done.stderr
    assert len(done.stderr.splitlines()) == 1, "one line says so, once"


def test_the_example_without_a_gpu(run_python: RunPython) -> None:
    done = run_python(str(EXAMPLE))
    assert done.stdout == "False\nFalse\n"
    assert done.stderr == ""
