"""Numbers for Prometheus, as its own client reads them."""

import pathlib
import re
import subprocess
from collections.abc import Callable

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from lastref.torch import metrics

RunTorch = Callable[..., "subprocess.CompletedProcess[str]"]


def samples(text: str) -> dict[str, float]:
    """The samples as Prometheus's parser reads them; each must have a HELP and a TYPE."""
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        assert family.type in ("gauge", "counter"), family.name
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter")
            key = sample.name + "".join(
                f",{name}={value}" for name, value in sorted(sample.labels.items())
            )
            assert key not in found
            found[key] = sample.value
    return found


def test_the_text_is_what_the_client_makes_of_the_collector() -> None:
    registry = prometheus_client.CollectorRegistry()
    collector = metrics.register(registry)
    assert isinstance(collector, metrics.Collector)
    ours, theirs = (
        samples(metrics.text()),
        samples(prometheus_client.generate_latest(registry).decode()),
    )
    assert ours.keys() == theirs.keys()
    assert "lastref_collections_total,reason=oom" in ours
    names = set(re.findall(r"``(lastref_\w+)``", metrics.__doc__ or ""))
    assert names == set(re.findall(r"^# TYPE (\w+)", metrics.text(), re.M)), "the table is complete"


def test_asking_starts_nothing(run_torch: RunTorch) -> None:
    program = """
import torch, lastref.torch.metrics as metrics
text = metrics.text()
assert 'allocator="torch"' not in text
assert not torch.cuda.is_initialized()
"""
    assert run_torch("-c", program).stderr == ""


def test_what_happened_on_the_devices(tmp_path: pathlib.Path, run_torch: RunTorch) -> None:
    program = """
import sys, torch, lastref, lastref.torch, lastref.torch.metrics as metrics
MIB = 1 << 20
lastref.torch.guard(report=False)
class Garbage:
    def __init__(self, tensor):
        self.me, self.tensor = self, tensor
import gc; gc.disable()
lastref.gc.disable()
for _ in range(40):
    Garbage(torch.empty(400 * MIB, dtype=torch.uint8, device="cuda"))
gc.collect()
torch.cuda.empty_cache()
held = torch.empty(600 * MIB, dtype=torch.uint8, device="cuda")
hole = torch.empty(300 * MIB, dtype=torch.uint8, device="cuda")
del hole
try:
    torch.empty(20000 * MIB, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    pass
hole = torch.empty(300 * MIB, dtype=torch.uint8, device="cuda")
del hole
own = lastref.empty(30 * MIB, dtype=lastref.uint8, device="cuda")
metrics.write_textfile(sys.argv[1])
"""
    path = tmp_path / "lastref.prom"
    run_torch("-c", program, str(path), env={"LASTREF_SIM": "1GiB"})
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    found = samples(path.read_text())
    mib = 1 << 20
    assert found["lastref_allocated_bytes,allocator=torch,device=0"] == 600 * mib
    assert found["lastref_reserved_bytes,allocator=torch,device=0"] == 900 * mib
    assert found["lastref_largest_hole_bytes,allocator=torch,device=0"] == 300 * mib
    assert found["lastref_out_of_memory_total,allocator=torch,device=0"] == 1
    assert found["lastref_rung_rescues_total,rung=cycle collection"] >= 1
    assert found["lastref_rung_freed_bytes_total,rung=cycle collection"] >= 26 * 400 * mib
    assert found["lastref_rung_seconds_total,rung=cycle collection"] > 0
    assert found["lastref_collections_total,reason=oom"] >= 1
    assert found["lastref_collection_seconds_total,reason=oom"] > 0
    assert found["lastref_allocated_bytes,allocator=lastref,device=0"] == 30 * mib
    assert found["lastref_out_of_memory_total,allocator=lastref,device=0"] == 0


def test_a_file_that_cannot_be_written_raises(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        metrics.write_textfile(tmp_path / "file" / "x.prom")


def test_without_the_client_it_says_what_to_install(run_torch: RunTorch) -> None:
    program = """
import sys
sys.modules["prometheus_client"] = None
import lastref.torch.metrics as metrics
metrics.text()
try:
    metrics.register()
except ImportError as error:
    print(error)
"""
    assert "pip install prometheus-client" in run_torch("-c", program).stdout


def test_another_allocator_gives_what_it_can(run_torch: RunTorch) -> None:
    program = """
import torch
import lastref.torch.metrics as metrics
x = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
print(metrics.text())
"""
    found = samples(run_torch("-c", program, env={"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}).stdout)
    assert "lastref_collections_total,reason=oom" in found
