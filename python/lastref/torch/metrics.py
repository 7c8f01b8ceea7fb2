"""Numbers for a monitoring system: what the devices' allocators hold, and what was done before they failed.

Two ways out, with the same metrics: `register` gives them to ``prometheus_client``, a package that is only
needed for that, and `write_textfile` writes the file that Prometheus's node exporter reads.

>>> import lastref.torch.metrics
>>> lastref.torch.metrics.text().splitlines()[1]
'# TYPE lastref_allocated_bytes gauge'

| metric | labels | what it counts |
|---|---|---|
| ``lastref_allocated_bytes`` | allocator, device | bytes that tensors hold |
| ``lastref_reserved_bytes`` | allocator, device | bytes obtained from the device: held and cached |
| ``lastref_largest_hole_bytes`` | allocator, device | the largest cached block that nobody holds |
| ``lastref_out_of_memory_total`` | allocator, device | allocations that failed in the end |
| ``lastref_rung_runs_total`` | rung | allocations under `lastref.torch.guard` that came to a rung before failing |
| ``lastref_rung_rescues_total`` | rung | allocations that succeeded by it |
| ``lastref_rung_freed_bytes_total`` | rung | bytes that became free by it |
| ``lastref_rung_seconds_total`` | rung | time spent on it |
| ``lastref_collections_total`` | reason | runs of the cycle collector; the reasons are those of `lastref.gc.stats` |
| ``lastref_collection_seconds_total`` | reason | time they took |
| ``lastref_collection_freed_bytes_total`` | reason | device bytes that became free by them |

The label ``allocator`` is ``torch`` or ``lastref``. Devices appear once the program has used CUDA; asking for the
metrics starts nothing. The largest hole is read from a snapshot of the allocator, which takes time in
proportion to its blocks.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import lastref

from . import _jobs

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import CollectorRegistry

__all__ = ["Collector", "register", "text", "write_textfile"]


class _Family(NamedTuple):
    name: str
    kind: str  # "gauge" or "counter"; a counter's samples have the suffix "_total"
    help: str
    labels: tuple[str, ...]
    samples: Sequence[tuple[tuple[str, ...], float]]


class Collector:
    """A collector for ``prometheus_client``: give it to a registry, or call `register`."""

    def describe(self) -> "list[Metric]":
        """No metrics: what there is depends on the moment. A registry asks when the collector is added."""
        return []

    def collect(self) -> "Iterator[Metric]":
        """The metrics as they are now."""
        core = _prometheus_client().core
        kinds = {"gauge": core.GaugeMetricFamily, "counter": core.CounterMetricFamily}
        for family in _families():
            metric = kinds[family.kind](family.name, family.help, labels=family.labels)
            for labels, value in family.samples:
                metric.add_metric(labels, value)
            yield metric


def register(registry: "CollectorRegistry | None" = None) -> Collector:
    """Adds a collector to the registry, by default ``prometheus_client``'s own, and returns it.

    Raises:
        ImportError: ``prometheus_client`` is not installed.
    """
    client = _prometheus_client()
    collector = Collector()
    (client.REGISTRY if registry is None else registry).register(collector)
    return collector


def text() -> str:
    """The metrics in Prometheus's text format."""
    lines = []
    for family in _families():
        name = family.name + ("_total" if family.kind == "counter" else "")
        lines += [f"# HELP {name} {family.help}", f"# TYPE {name} {family.kind}"]
        for labels, value in family.samples:
            pairs = ",".join(
                f'{key}="{label}"' for key, label in zip(family.labels, labels, strict=True)
            )
            lines.append(f"{name}{{{pairs}}} {value}")
    return "\n".join(lines) + "\n"


def write_textfile(path: str | os.PathLike[str]) -> None:
    """Writes the metrics for the node exporter's textfile collector, whose files end in ``.prom``.

    The file is whole at every moment: it is written under another name and then renamed.

    Raises:
        OSError: it cannot be written.
    """
    _jobs.replace_file(os.fspath(path), text())


def _prometheus_client() -> Any:
    try:
        import prometheus_client.core
    except ImportError as error:
        raise ImportError(
            "lastref.torch.metrics: prometheus_client is not installed: pip install prometheus-client; or use "
            "write_textfile, which does not need it"
        ) from error
    return prometheus_client


# What there is


def _families() -> list[_Family]:
    on_device = ("allocator", "device")
    devices = [*_torch_devices(), *_lastref_devices()]
    families = [
        _Family(name, kind, help, on_device, [(labels, values[at]) for labels, values in devices])
        for at, (name, kind, help) in enumerate(
            [
                ("lastref_allocated_bytes", "gauge", "Bytes that tensors hold on the device"),
                (
                    "lastref_reserved_bytes",
                    "gauge",
                    "Bytes obtained from the device: held by tensors and cached",
                ),
                (
                    "lastref_largest_hole_bytes",
                    "gauge",
                    "The largest cached block that nobody holds",
                ),
                ("lastref_out_of_memory", "counter", "Allocations that failed in the end"),
            ]
        )
    ]
    from ._guard import guard_stats

    rungs = guard_stats()["rungs"]
    for key, name, help, unit in (
        ("runs", "lastref_rung_runs", "Allocations that came to the rung before failing", 1),
        ("rescues", "lastref_rung_rescues", "Allocations that succeeded by the rung", 1),
        ("bytes", "lastref_rung_freed_bytes", "Bytes that became free by the rung", 1),
        ("microseconds", "lastref_rung_seconds", "Time spent on the rung", 1e6),
    ):
        samples = [
            ((rung,), sums[key] / unit if unit != 1 else sums[key]) for rung, sums in rungs.items()
        ]
        families.append(_Family(name, "counter", help, ("rung",), samples))
    runs = lastref.gc.stats()
    for name, help, values in (
        (
            "lastref_collections",
            "Runs of the cycle collector",
            [each.runs for each in runs.values()],
        ),
        (
            "lastref_collection_seconds",
            "Time that runs of the cycle collector took",
            [each.microseconds / 1e6 for each in runs.values()],
        ),
        (
            "lastref_collection_freed_bytes",
            "Device bytes that became free by runs of the cycle collector",
            [each.device_bytes_freed for each in runs.values()],
        ),
    ):
        samples = [((reason,), value) for reason, value in zip(runs, values, strict=True)]
        families.append(_Family(name, "counter", help, ("reason",), samples))
    return families


_Device = tuple[tuple[str, str], tuple[int, int, int, int]]


def _torch_devices() -> Iterator[_Device]:
    cuda: Any = torch.cuda  # its functions have no types
    if not cuda.is_initialized():
        return
    holes: dict[int, int] = {}
    # Other allocators than PyTorch's own cannot tell everything; a scrape gets what there is.
    with contextlib.suppress(RuntimeError):
        for segment in cuda.memory_snapshot(include_traces=False):
            _add_hole(holes, segment)
    for index in range(cuda.device_count()):
        try:
            stats = cuda.memory_stats(index)
        except RuntimeError:
            continue
        if stats:
            yield ("torch", str(index)), _values(stats, holes.get(index, 0))


def _lastref_devices() -> Iterator[_Device]:
    if not lastref.cuda.is_available():
        return
    for index in range(lastref.cuda.device_count()):
        holes: dict[int, int] = {}
        for segment in lastref.cuda.memory_snapshot(index):
            _add_hole(holes, segment)
        yield (
            ("lastref", str(index)),
            _values(lastref.cuda.memory_stats(index), holes.get(index, 0)),
        )


def _values(stats: dict[str, Any], hole: int) -> tuple[int, int, int, int]:
    return (
        stats["allocated_bytes.all.current"],
        stats["reserved_bytes.all.current"],
        hole,
        stats["num_ooms"],
    )


def _add_hole(holes: dict[int, int], segment: dict[str, Any]) -> None:
    for block in segment["blocks"]:
        if block["state"] == "inactive":
            holes[segment["device"]] = max(holes.get(segment["device"], 0), block["size"])
