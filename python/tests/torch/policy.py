"""PyTorch's allocator beside lastref's model of it.

    python policy.py LASTREF FOLDER [--few] TRACE...

LASTREF is the command, FOLDER where the harness over PyTorch's allocator is built. Each trace is replayed through both:
under the settings of ``lastref advise`` on a device that is large enough, and on devices that are hardly so, where the
allocator gives memory back and fails. Peak of reserved bytes, device allocations and the operation that failed must be
the same. The setting that ``advise`` names must be, by the real peaks, within 1 % of the best. ``--few``: of the
settings a few, for PyTorch's other versions.
"""

import array
import csv
import gzip
import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
MIB = 1 << 20
#: A device on which nothing is refused.
LARGE_MIB = MIB
#: How far the peak under the setting that is named may be from the best.
NAMED = 1.01
FEW = [
    "",
    "expandable_segments:True",
    "max_split_size_mb:128",
    "roundup_power2_divisions:8",
    "large_segment_size_mb:64",
]
#: Tried on the smallest device that completes, by the model, and on one a page smaller.
TIGHT = ["", "expandable_segments:True", "max_split_size_mb:128", "roundup_power2_divisions:8"]
#: Tried on devices of so many times the live bytes: these depend on the device.
OF_A_DEVICE = [
    (1.1, "garbage_collection_threshold:0.8,per_process_memory_fraction:0.95"),
    (1.4, "garbage_collection_threshold:0.5,per_process_memory_fraction:0.9,max_split_size_mb:200"),
    (1.06, "expandable_segments:True,max_split_size_mb:64"),
    (1.2, "max_split_size_mb:128,max_non_split_rounding_mb:64,roundup_power2_divisions:[256:1,512:2,1024:4,>:8]"),
    (1.05, "throw_on_cudamalloc_oom:True"),
    (1.3, "expandable_segments:True,expandable_segments_reserve:0.6"),
]
#: Keys that PyTorch before 2.15 does not know.
NEW_KEYS = ("expandable_segments_reserve",)

# Our own module beside the benchmarks, which tests do not import from.
_spec = importlib.util.spec_from_file_location("lastref_torch_harness", ROOT / "bench/torch/build.py")
assert _spec is not None
assert _spec.loader is not None
build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(build)


@dataclass(frozen=True)
class Result:
    """How a replay went: what is compared."""

    peak_reserved: int
    device_allocations: int
    operations: int


def lastref(command: str, *args: str) -> Any:
    done = subprocess.run([command, *args], capture_output=True, text=True, check=False)
    # 1: out of memory, which the report says too.
    if done.returncode not in (0, 1):
        raise SystemExit(f"{done.args}\n{done.stderr}")
    return json.loads(done.stdout)


def modelled(command: str, trace: Path, settings: str, mib: int) -> Result:
    policy = f"pytorch:{settings}" if settings else "pytorch"
    report = lastref(command, "replay", "--json", "--policy", policy, "--capacity", f"{mib}MiB", str(trace))
    return Result(report["peak_reserved_bytes"], report["device_allocations"], report["operations"])


def real(folder: Path, operations: Path, settings: str, mib: int) -> Result:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTORCH_")},
        **build.standin.environment(folder, mib),
        "PYTORCH_CUDA_ALLOC_CONF": settings,
    }
    done = subprocess.run(
        [folder / build.PROGRAM, "replay", operations], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{done.args} under {settings!r} on {mib} MiB\n{done.stdout}{done.stderr}")
    report = json.loads(done.stdout)
    stats = report["stats"]
    return Result(stats["reserved_bytes.all.peak"], stats["num_device_alloc"], report["operations"])


def write_operations(trace: Path, out: Path) -> int:
    """Writes a trace as the harness reads it, and returns the peak of live bytes."""
    opened = gzip.open(trace, "rt", newline="") if trace.suffix == ".gz" else trace.open(newline="")
    slots: dict[str, tuple[int, int, int]] = {}
    streams: dict[str, int] = {"0": 0}
    spare: list[int] = []
    words = array.array("Q")
    live = peak = 0
    with opened as lines:
        for row in csv.DictReader(lines):
            name = row["id"]
            if row["op"] == "alloc":
                size = int(row["bytes"])
                stream = streams.setdefault(row["stream"], len(streams))
                slot = spare.pop() if spare else len(slots)
                slots[name] = slot, size, stream
                live += size
                peak = max(peak, live)
            else:
                slot, size, stream = slots[name]
                spare.append(slot)
                live -= size
            words.extend((size, slot | stream << 32 | (row["op"] == "free") << 48))
    with out.open("wb") as file:
        words.tofile(file)
    return peak


class Comparison:
    """All replays of one trace, and what differed."""

    def __init__(self, command: str, folder: Path, trace: Path, pool: ThreadPoolExecutor) -> None:
        self.command, self.folder, self.trace, self.pool = command, folder, trace, pool
        self.name = trace.name.removesuffix(".gz").removesuffix(".csv")
        self.operations = folder / f"{self.name}.operations"
        self.live = write_operations(trace, self.operations)
        self.differences: list[str] = []
        self.compared = 0

    def same(self, what: str, model: Result, torch: Result) -> None:
        self.compared += 1
        if model != torch:
            self.differences.append(f"{self.name}, {what}: the model says {model}, PyTorch {torch}")

    def under(self, settings: str, mib: int) -> None:
        model = modelled(self.command, self.trace, settings, mib)
        self.same(
            f"{settings or 'default'} on {mib} MiB", model, real(self.folder, self.operations, settings, mib)
        )

    def sweep(self) -> str:
        """The settings of ``advise``. Returns a row of the table."""
        advice = lastref(self.command, "advise", "--json", str(self.trace))["files"][0]
        tried = {one["settings"]: one for one in advice["tried"] if one["policy"] == "pytorch"}
        results = self.pool.map(lambda settings: real(self.folder, self.operations, settings, LARGE_MIB), tried)
        peaks = {}
        for (settings, one), torch in zip(tried.items(), results, strict=True):
            model = Result(one["peak_reserved_bytes"], one["device_allocations"], advice["operations"])
            self.same(f"{settings or 'default'} on a large device", model, torch)
            peaks[settings] = torch.peak_reserved
        named = advice["recommended"]["settings"]
        over = peaks[named] / min(peaks.values())
        if over > NAMED:
            self.differences.append(f"{self.name}: {named!r} is named, and takes {over:.4f} of the best")
        for settings in TIGHT:
            mib = tried[settings]["smallest_bytes"] // MIB
            list(self.pool.map(lambda mib, settings=settings: self.under(settings, mib), (mib, mib - 2)))
        return f"{peaks[''] / self.live:>9.4f}  {peaks[named] / self.live:>9.4f}  {over:>12.4f}  {named or 'default'}"

    def few(self) -> str:
        list(self.pool.map(lambda settings: self.under(settings, LARGE_MIB), FEW))
        return ""

    def of_a_device(self, known: bool) -> None:
        cases = [(times, text) for times, text in OF_A_DEVICE if known or not any(key in text for key in NEW_KEYS)]
        list(self.pool.map(lambda case: self.under(case[1], int(self.live * case[0]) // MIB // 2 * 2), cases))


def main() -> None:
    command, folder, *rest = sys.argv[1:]
    few = "--few" in rest
    traces = [Path(trace) for trace in rest if trace != "--few"]
    made = build.harness(Path(folder).resolve()).parent
    print(f"    {'trace':<32} {'compared':>8} {'same':>5}", end="")
    print("" if few else f"  {'default':>9}  {'named':>9}  {'of the best':>12}  named by advise")
    differences: list[str] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for trace in traces:
            comparison = Comparison(command, made, trace, pool)
            row = comparison.few() if few else comparison.sweep()
            comparison.of_a_device(known=not few)
            same = comparison.compared - len(comparison.differences)
            print(f"    {comparison.name:<32} {comparison.compared:>8} {same:>5}  {row}", flush=True)
            differences += comparison.differences
            comparison.operations.unlink()
    if not few:
        print("    default, named: peak reserved over live, of PyTorch's own allocator")
    if differences:
        raise SystemExit("\n".join(differences))


if __name__ == "__main__":
    main()
