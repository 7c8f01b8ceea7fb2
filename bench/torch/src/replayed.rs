//! Traces through both allocators, and what their device calls cost by one latency table.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use lastref_alloc::CachingAllocator;
use lastref_alloc::replay::{ReplayOptions, replay};
use lastref_alloc::sim::{Call, Cost, LatencyTable, SimDevice, SimOptions};
use lastref_snapshot::trace::{OperationKind, Trace};
use serde_json::{Value, json};

/// Both devices have this capacity, or twice the peak of live bytes if that is more.
const CAPACITY: u64 = 80 << 30;

/// The size of lastref's pages of physical memory.
const PAGE_BYTES: u64 = 2 << 20;

/// The device call of lastref's that each counted call of CUDA's is.
const KINDS: [(&str, Call); 21] = [
    ("cudaMalloc", Call::AllocSegment),
    ("cudaFree", Call::FreeSegment),
    ("cudaMemGetInfo", Call::MemoryInfo),
    ("cudaDeviceSynchronize", Call::Synchronize),
    ("cudaStreamCreate", Call::CreateStream),
    ("cudaStreamDestroy", Call::DestroyStream),
    ("cudaStreamSynchronize", Call::SynchronizeStream),
    ("cudaStreamQuery", Call::QueryStream),
    ("cudaStreamWaitEvent", Call::WaitEvent),
    ("cudaEventCreate", Call::CreateEvent),
    ("cudaEventDestroy", Call::DestroyEvent),
    ("cudaEventRecord", Call::RecordEvent),
    ("cudaEventQuery", Call::QueryEvent),
    ("cudaEventSynchronize", Call::SynchronizeEvent),
    ("cuMemAddressReserve", Call::ReserveRange),
    ("cuMemAddressFree", Call::ReleaseRange),
    ("cuMemCreate", Call::CreatePage),
    ("cuMemRelease", Call::DestroyPage),
    ("cuMemMap", Call::MapPage),
    ("cuMemUnmap", Call::UnmapPage),
    ("cuMemSetAccess", Call::SetAccess),
];

/// How an allocator got a trace done.
pub(crate) struct Replayed {
    pub(crate) reserved_over_live: f64,
    /// Host time for one operation, device time apart.
    pub(crate) nanoseconds: f64,
    /// Calls that asked the device for memory.
    pub(crate) device_allocations: u64,
    /// What all its device calls cost by [`LatencyTable::a100`], in microseconds. Those on handles of
    /// physical memory are priced by page of 2 MiB, which is what their published figures are for.
    pub(crate) device_microseconds: f64,
    /// The same, but a handle costs what a page does, whatever its size.
    pub(crate) device_microseconds_by_call: f64,
    /// The operation that had no memory, if one had none.
    pub(crate) out_of_memory: Option<u64>,
    calls: BTreeMap<&'static str, Made>,
}

/// Calls of one kind.
#[derive(Clone, Copy, Default)]
struct Made {
    calls: u64,
    /// Bytes that they named.
    bytes: u64,
}

impl Replayed {
    pub(crate) fn json(&self) -> Value {
        let calls: serde_json::Map<String, Value> = self
            .calls
            .iter()
            .filter(|(_, made)| made.calls > 0)
            .map(|(name, made)| ((*name).to_owned(), made.calls.into()))
            .collect();
        json!({
            "reserved_over_live": self.reserved_over_live,
            "nanoseconds_per_operation": self.nanoseconds,
            "device_allocations": self.device_allocations,
            "device_microseconds": self.device_microseconds,
            "device_microseconds_by_call": self.device_microseconds_by_call,
            "out_of_memory": self.out_of_memory,
            "device_calls": calls,
        })
    }

    /// From what was counted, which is charged here for both allocators.
    fn new(calls: BTreeMap<&'static str, Made>, nanoseconds: f64, reserved: f64) -> Self {
        let table = LatencyTable::a100();
        let price = |by_page: bool| -> f64 {
            KINDS
                .iter()
                .map(|&(name, call)| {
                    let made = calls[name];
                    let cost = table.call(call);
                    let on_handles = matches!(
                        call,
                        Call::CreatePage | Call::DestroyPage | Call::MapPage | Call::UnmapPage
                    );
                    let calls = if by_page && on_handles {
                        made.bytes / PAGE_BYTES
                    } else {
                        made.calls
                    };
                    calls as f64 * cost.microseconds(0)
                        + Cost::per_mib(cost.per_mib).microseconds(made.bytes)
                })
                .sum()
        };
        Self {
            reserved_over_live: reserved,
            nanoseconds,
            device_allocations: calls["cudaMalloc"].calls + calls["cuMemCreate"].calls,
            device_microseconds: price(true),
            device_microseconds_by_call: price(false),
            out_of_memory: None,
            calls,
        }
    }
}

/// Through lastref, on the simulated device.
pub(crate) fn lastref(trace: &Trace) -> Result<Replayed> {
    let device = SimDevice::new(SimOptions::new(capacity(trace)))?;
    let allocator = CachingAllocator::new(device);
    let report = replay(&allocator, trace, ReplayOptions::default())?;
    let counters = allocator.device().counters();
    let calls = KINDS.map(|(name, call)| {
        let calls = counters.calls(call);
        // Of the others, no price depends on bytes.
        let bytes = match call {
            Call::CreatePage | Call::DestroyPage | Call::MapPage | Call::UnmapPage => {
                calls * PAGE_BYTES
            }
            _ => 0,
        };
        (name, Made { calls, bytes })
    });
    ensure!(
        counters.calls(Call::AllocSegment) == 0,
        "the simulated device has virtual memory, and was asked for segments"
    );
    let mut replayed = Replayed::new(
        calls.into(),
        report.nanoseconds_per_operation(),
        report.reserved_over_live(),
    );
    // What is left out of KINDS would show. The streams of the trace are destroyed after the report.
    let unpriced = report.device_microseconds - replayed.device_microseconds;
    ensure!(
        unpriced.abs() < 1.0 + 2.0 * trace.streams().len() as f64,
        "calls for {unpriced} us are missing from the comparison"
    );
    replayed.out_of_memory = report.out_of_memory.map(|failed| failed.place.operation);
    Ok(replayed)
}

/// Both devices' capacity.
pub(crate) fn capacity(trace: &Trace) -> u64 {
    CAPACITY.max(trace.peak_live_bytes() * 2)
}

/// Writes a trace as `torch_alloc` reads it.
pub(crate) fn write(trace: &Trace, path: &Path) -> Result<()> {
    let streams = trace.streams();
    ensure!(
        streams.len() < usize::from(u16::MAX),
        "the trace has {} streams",
        streams.len()
    );
    let mut out = BufWriter::new(File::create(path)?);
    for operation in trace.operations() {
        // Stream 0 is the default one, whether or not the trace uses it.
        let stream = if operation.stream == 0 {
            0
        } else {
            let others = streams.iter().filter(|stream| **stream != 0);
            1 + others
                .take_while(|stream| **stream != operation.stream)
                .count()
        };
        out.write_all(&operation.bytes.to_ne_bytes())?;
        out.write_all(&operation.slot.to_ne_bytes())?;
        out.write_all(&u16::try_from(stream)?.to_ne_bytes())?;
        let is_free = operation.kind == OperationKind::Free;
        out.write_all(&u16::from(is_free).to_ne_bytes())?;
    }
    out.flush()?;
    Ok(())
}

/// What `torch_alloc replay` said.
pub(crate) fn torch(report: &Value) -> Result<Replayed> {
    let number = |field: &str| {
        report[field]
            .as_u64()
            .with_context(|| format!("torch_alloc gave no number `{field}`: {report}"))
    };
    let mut calls = BTreeMap::new();
    for (name, _) in KINDS {
        let made = &report["calls"][name];
        let (Some(calls_made), Some(bytes)) = (made["calls"].as_u64(), made["bytes"].as_u64())
        else {
            bail!("torch_alloc counted no {name}: {report}");
        };
        calls.insert(
            name,
            Made {
                calls: calls_made,
                bytes,
            },
        );
    }
    let nanoseconds = report["nanoseconds"]
        .as_f64()
        .context("torch_alloc gave no time")?;
    let reserved = number("peak_reserved_bytes")? as f64 / number("peak_live_bytes")?.max(1) as f64;
    let mut replayed = Replayed::new(calls, nanoseconds, reserved);
    if report["out_of_memory"] == Value::Bool(true) {
        replayed.out_of_memory = Some(number("operations")?);
    }
    Ok(replayed)
}
