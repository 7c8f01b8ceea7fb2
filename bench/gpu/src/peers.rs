//! What is on the machine beside us: PyTorch, and compute-sanitizer.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::Setting;

/// The hot pair and the traces, by PyTorch's own allocator, in its own process: native and expandable.
const SCRIPT: &str = r#"
import csv, gzip, json, sys, time
try:
    import torch
except ImportError:
    print(json.dumps({"skipped": "no module torch"})); sys.exit()
if not torch.cuda.is_available():
    print(json.dumps({"skipped": "torch sees no GPU"})); sys.exit()
allocate, free = torch._C._cuda_cudaCachingAllocator_raw_alloc, torch._C._cuda_cudaCachingAllocator_raw_delete
report = {"version": torch.__version__, "device": torch.cuda.get_device_name()}
torch.empty(1, device="cuda")
# What a loop over two calls from Python costs without the allocator is not taken off.
for kib in (1, 64, 1024, 16 << 10):
    rounds = []
    for _ in range(7):
        start = time.perf_counter()
        for _ in range(20000):
            free(allocate(kib << 10, 0))
        rounds.append((time.perf_counter() - start) * 1e9 / 20000)
    report[f"{kib}KiB_ns"] = round(sorted(rounds)[3], 1)
for path in sys.argv[1:]:
    lines = (gzip.open if path.endswith(".gz") else open)(path, "rt")
    streams, operations, live, peak, sizes = {"0": 0}, [], 0, 0, {}
    for row in csv.DictReader(lines):
        stream = streams.setdefault(row["stream"], None)
        if stream is None:
            streams[row["stream"]] = torch.cuda.Stream()
        if row["op"] == "alloc":
            sizes[row["id"]] = int(row["bytes"])
            live += int(row["bytes"]); peak = max(peak, live)
            operations.append((row["id"], int(row["bytes"]), row["stream"]))
        else:
            live -= sizes[row["id"]]
            operations.append((row["id"], -1, None))
    if peak > torch.cuda.mem_get_info()[0] * 15 // 16:
        continue
    handles = {name: getattr(stream, "cuda_stream", 0) for name, stream in streams.items()}
    torch.cuda.empty_cache(); torch.cuda.reset_peak_memory_stats()
    blocks = {}
    start = time.perf_counter()
    for name, size, stream in operations:
        if size >= 0:
            blocks[name] = allocate(size, handles[stream])
        else:
            free(blocks.pop(name))
    seconds = time.perf_counter() - start
    reserved = torch.cuda.max_memory_reserved()
    for block in blocks.values():
        free(block)
    report[path.rsplit("/", 1)[-1].split(".")[0]] = {
        "ns_per_operation": round(seconds * 1e9 / len(operations), 1), "reserved_over_live": round(reserved / peak, 3)}
print(json.dumps(report))
"#;

pub(crate) fn pytorch(setting: &Setting) -> Result<Value> {
    let mut report = serde_json::Map::new();
    for (name, configuration) in [("native", ""), ("expandable", "expandable_segments:True")] {
        let output = Command::new("python3")
            .args(["-c", SCRIPT])
            .args(&setting.traces)
            .env("PYTORCH_CUDA_ALLOC_CONF", configuration)
            .env("PYTORCH_ALLOC_CONF", configuration)
            .output();
        let Ok(output) = output else {
            return Ok(json!({ "skipped": "no python3" }));
        };
        let said = String::from_utf8_lossy(&output.stdout);
        ensure!(
            output.status.success(),
            "{name}: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
        let value: Value =
            serde_json::from_str(said.trim()).context("the script printed no JSON")?;
        if value.get("skipped").is_some() {
            return Ok(value);
        }
        report.insert(name.to_owned(), value);
    }
    Ok(Value::Object(report))
}

/// Memory errors of the kernel and of the reassigned tensor, seen from outside.
pub(crate) fn sanitizer(_: &Setting) -> Result<Value> {
    let mut report = serde_json::Map::new();
    for part in ["kernel", "reassign"] {
        let output = Command::new("compute-sanitizer")
            .args(["--tool", "memcheck", "--error-exitcode", "9"])
            .arg(std::env::current_exe()?)
            .args(["--only", part])
            .output();
        let Ok(output) = output else {
            return Ok(json!({ "skipped": "no compute-sanitizer" }));
        };
        let said = String::from_utf8_lossy(&output.stdout);
        let summary = said
            .lines()
            .rev()
            .find(|line| line.contains("ERROR SUMMARY"));
        let summary = summary
            .unwrap_or("no summary")
            .trim_start_matches(['=', ' ']);
        ensure!(
            output.status.success(),
            "{part}: {}, {summary}",
            output.status
        );
        report.insert(part.to_owned(), json!(summary));
    }
    Ok(Value::Object(report))
}
