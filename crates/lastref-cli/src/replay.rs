//! `lastref replay`: an allocation trace through the allocator on a simulated device.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anstyle::Style;
use anyhow::{Context, anyhow};
use clap::Args;
use lastref::alloc::pytorch;
use lastref::alloc::replay::{
    AtEnd, OutOfMemory, ReplayError, ReplayOptions, ReplayReport, Smallest, peak_live_bytes,
    replay, smallest,
};
use lastref::alloc::sim::{Call, SimDevice, SimOptions};
use lastref::alloc::{AllocatorOptions, Bytes, CONF_VARIABLE, CachingAllocator, DeviceError};
use lastref::sim::Spec;
use lastref_snapshot::Dump;
use lastref_snapshot::trace::Trace;
use serde::Serialize;

use crate::Failure;
use crate::escape::escaped;
use crate::numbers::grouped;
use crate::policy::{Policy, described};
use crate::program;
use crate::progress::Progress;

/// The device of a replay has this capacity, or twice the peak of live bytes if that is more.
const DEFAULT_CAPACITY: u64 = 80 << 30;

#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// The trace: CSV with the header op,id,bytes,stream,phase,label, plain or gzip; - reads
    /// standard input. Or a memory snapshot of PyTorch's with a history
    trace: PathBuf,

    /// The device's memory, such as 8GiB or 11GB [default: 80GiB, or twice the peak of live bytes]
    #[arg(long, value_name = "SIZE", value_parser = capacity)]
    capacity: Option<u64>,

    /// Write to every block and check it when it is freed, and that no two overlap
    #[arg(long)]
    verify: bool,

    /// Divide all sizes by N; with --verify, every byte of every block is then checked
    #[arg(long, value_name = "N", default_value = "1")]
    scale: NonZeroU64,

    /// Find the smallest device that completes, in steps of 2 MiB
    #[arg(long, conflicts_with = "capacity")]
    smallest: bool,

    /// Use segments, as on a device without virtual memory
    #[arg(long)]
    segments: bool,

    /// Whose allocator: lastref, pytorch, or pytorch:SETTINGS with settings as in
    /// PYTORCH_CUDA_ALLOC_CONF
    #[arg(long, default_value = "lastref", conflicts_with_all = ["verify", "segments", "verbose"])]
    policy: Policy,

    /// The seed of the simulated device's scheduler
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,

    /// Write what the allocator held at the end, or when memory ran out, and its history to FILE, as PyTorch's
    /// `_dump_snapshot` does: for `lastref explain`, `lastref view` and PyTorch's own tools
    #[arg(long, value_name = "FILE", conflicts_with_all = ["policy", "smallest"])]
    snapshot: Option<PathBuf>,

    /// Print one line of JSON
    #[arg(long)]
    json: bool,

    /// Also print how the allocator came by the memory, its statistics and the device's calls, to
    /// standard error
    #[arg(long, short)]
    verbose: bool,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Json<'a> {
    operations: u64,
    peak_live_bytes: u64,
    peak_reserved_bytes: u64,
    reserved_over_live: f64,
    device_allocations: u64,
    device_microseconds: f64,
    nanoseconds_per_operation: f64,
    out_of_memory: Option<JsonOutOfMemory<'a>>,
    /// Of lastref's allocator.
    #[serde(flatten)]
    ways: Option<Ways>,
    #[serde(flatten)]
    smallest: Option<JsonSmallest>,
}

/// How the allocator came by the memory.
#[derive(Serialize)]
struct Ways {
    /// Of all allocations, how many a thread's own cache served.
    thread_cache_hit_rate: f64,
    pages_created: u64,
    pages_moved: u64,
    segments_allocated: u64,
    /// Before growing and before an error, on the host.
    host_waits: u64,
    /// Made by one stream for another, on the device.
    device_waits: u64,
    /// In the order of the ladder.
    rungs: Vec<JsonRung>,
}

#[derive(Serialize)]
struct JsonRung {
    rung: String,
    times: u64,
    failed: u64,
    bytes: u64,
    microseconds: u64,
}

impl Ways {
    fn of(allocator: &CachingAllocator<SimDevice>) -> Self {
        let stats = allocator.stats();
        let counters = allocator.device().counters();
        let allocations = stats.allocation.all.allocated;
        Self {
            thread_cache_hit_rate: stats.num_thread_cache_hits as f64 / allocations.max(1) as f64,
            pages_created: counters.calls(Call::CreatePage),
            pages_moved: stats.num_pages_moved,
            segments_allocated: counters.calls(Call::AllocSegment),
            host_waits: stats.num_sync_all_streams,
            device_waits: stats.num_stream_waits,
            rungs: stats
                .all_rungs()
                .iter()
                .map(|(rung, totals)| JsonRung {
                    rung: rung.key(),
                    times: totals.num_tried,
                    failed: totals.num_failed,
                    bytes: totals.bytes_freed,
                    microseconds: totals.microseconds,
                })
                .collect(),
        }
    }
}

#[derive(Serialize)]
struct JsonSmallest {
    smallest_bytes: u64,
    smallest_over_live: f64,
}

#[derive(Serialize)]
struct JsonOutOfMemory<'a> {
    operation: u64,
    line: u64,
    id: u64,
    stream: u64,
    label: &'a str,
    requested_bytes: u64,
    message: String,
}

/// Reads the capacity of a device.
pub(crate) fn capacity(text: &str) -> Result<u64, String> {
    let spec: Spec = text.parse().map_err(|error| match error {
        lastref::Error::InvalidSetting { reason, .. } => reason,
        other => other.to_string(),
    })?;
    if spec.count() == 1 {
        Ok(spec.capacity_bytes())
    } else {
        Err(format!("{} devices, a replay has one", spec.count()))
    }
}

pub(crate) fn run(arguments: &Arguments, out: &mut impl Write) -> Result<(), Failure> {
    let name = program::name(&arguments.trace);
    let settings = AllocatorOptions::from_env()
        .map_err(|error| Failure::BadInput(anyhow!("{CONF_VARIABLE}: {error}")))?;
    let trace = program::one(&arguments.trace)
        .with_context(|| format!("cannot read the trace from {name}"))
        .map_err(Failure::BadInput)?;
    let live = peak_live_bytes(&trace, arguments.scale);
    let capacity = arguments
        .capacity
        .unwrap_or_else(|| DEFAULT_CAPACITY.max(live.saturating_mul(2)));
    let outcome = match &arguments.policy {
        Policy::PyTorch(policy) => Ok(replay_pytorch(arguments, policy, &trace, capacity)),
        Policy::Lastref if arguments.smallest => find_smallest(arguments, &settings, &trace),
        Policy::Lastref => replay_once(arguments, &settings, &trace, capacity),
    };
    let Outcome {
        report,
        smallest,
        allocator,
        snapshot,
    } = outcome.map_err(|error| match error {
        // The one device call that input can make fail: a size beyond what a host can address.
        ReplayError::Device(error) => Failure::BadInput(
            anyhow!(error).context(format!("cannot simulate a device for {}", Bytes(live))),
        ),
        error => Failure::No(anyhow!(error).context(format!("replaying {name}"))),
    })?;
    if arguments.json {
        serde_json::to_writer(
            &mut *out,
            &json(&report, smallest.as_ref(), allocator.as_ref()),
        )
        .map_err(io::Error::from)?;
        writeln!(out)?;
    } else {
        let memory = match &arguments.policy {
            Policy::PyTorch(policy) => format!("PyTorch's policy, {}", described(policy)),
            Policy::Lastref if arguments.segments => "simulated, with segments".into(),
            Policy::Lastref => "simulated, with virtual memory".into(),
        };
        let capacity = Bytes(
            smallest
                .as_ref()
                .map_or(capacity, |smallest| smallest.bytes),
        );
        let bold = Style::new().bold();
        writeln!(out, "{bold}{}{bold:#}", escaped(&name))?;
        write_line(out, "device", &capacity.to_string(), &memory)?;
        write_report(out, &report, smallest.as_ref(), arguments.verify)?;
    }
    if arguments.verbose
        && let Some(allocator) = allocator
    {
        out.flush()?;
        write_details(&mut anstream::stderr(), &allocator)?;
    }
    if let (Some(path), Some(snapshot)) = (&arguments.snapshot, &snapshot) {
        write_snapshot(snapshot, path)
            .with_context(|| format!("cannot write the snapshot to {}", path.display()))
            .map_err(Failure::BadInput)?;
    }
    match report.out_of_memory {
        None => Ok(()),
        Some(OutOfMemory { place, error, .. }) => {
            Err(Failure::No(anyhow!(error).context(place.to_string())))
        }
    }
}

fn allocator(
    arguments: &Arguments,
    settings: &AllocatorOptions,
    capacity: u64,
) -> Result<CachingAllocator<SimDevice>, DeviceError> {
    let options = SimOptions::new(capacity)
        .with_virtual_memory(!arguments.segments)
        // Only a check looks at them.
        .with_contents(arguments.verify)
        .with_seed(arguments.seed);
    let device = SimDevice::new(options)?;
    Ok(CachingAllocator::with_options(device, settings))
}

/// A replay, and the allocator it ended with, if that was lastref's.
struct Outcome {
    report: ReplayReport,
    smallest: Option<Smallest>,
    allocator: Option<CachingAllocator<SimDevice>>,
    /// If it was asked for.
    snapshot: Option<Dump>,
}

/// The most entries of the history that a snapshot of a replay has: 2 million allocations and their frees.
const HISTORY_ENTRIES: usize = 4_000_000;

/// Writes a snapshot beside `path` and then in its place, so that a failure leaves what was there. What
/// is no file, such as a pipe, is written to.
fn write_snapshot(snapshot: &Dump, path: &Path) -> io::Result<()> {
    // Where a link leads.
    let path = &fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    if path.exists() && !path.is_file() {
        let mut out = BufWriter::new(File::options().write(true).open(path)?);
        return snapshot.write(&mut out).and_then(|()| out.flush());
    }
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}", std::process::id()));
    let beside = path.with_file_name(name);
    let file = File::create(&beside)?;
    let mut out = BufWriter::new(file);
    let written = snapshot.write(&mut out).and_then(|()| out.flush());
    let done = written.and_then(|()| fs::rename(&beside, path));
    if done.is_err() {
        // What is left of it is of no use to anybody.
        let _ = fs::remove_file(&beside);
    }
    done
}

fn replay_pytorch(
    arguments: &Arguments,
    settings: &pytorch::Settings,
    trace: &Trace,
    capacity: u64,
) -> Outcome {
    let mut bar = Progress::operations("replaying", trace.operations().len() as u64);
    let options = ReplayOptions {
        scale: arguments.scale,
        progress: Some(&mut |done| bar.set(done)),
        ..ReplayOptions::default()
    };
    let (report, smallest) = if arguments.smallest {
        let found = pytorch::smallest(trace, settings, options);
        (found.report.clone(), Some(found))
    } else {
        (pytorch::replay(trace, settings, capacity, options), None)
    };
    Outcome {
        report,
        smallest,
        allocator: None,
        snapshot: None,
    }
}

fn replay_once(
    arguments: &Arguments,
    settings: &AllocatorOptions,
    trace: &Trace,
    capacity: u64,
) -> Result<Outcome, ReplayError> {
    let allocator = allocator(arguments, settings, capacity)?;
    if arguments.snapshot.is_some() {
        allocator.record_history(HISTORY_ENTRIES);
    }
    let mut bar = Progress::operations("replaying", trace.operations().len() as u64);
    let mut held = None;
    let mut look = |allocator: &CachingAllocator<SimDevice>| held = Some(allocator.snapshot());
    let options = ReplayOptions {
        verify: arguments.verify,
        scale: arguments.scale,
        progress: Some(&mut |done| bar.set(done)),
        at_end: arguments
            .snapshot
            .is_some()
            .then_some(&mut look as &mut AtEnd<'_>),
    };
    let mut report = replay(&allocator, trace, options)?;
    let snapshot = held.map(|held| {
        let done = usize::try_from(report.operations).unwrap_or(usize::MAX);
        Dump::of_replay(&held, trace, done)
    });
    if !arguments.verify && report.out_of_memory.is_none() {
        report.host_time = usual_time(arguments, settings, trace, capacity, report.host_time)?;
    }
    Ok(Outcome {
        report,
        smallest: None,
        allocator: Some(allocator),
        snapshot,
    })
}

/// The time that a replay takes: the median of a few, each with an allocator of its own, if one is
/// short. A first replay of a few milliseconds is mostly the machine's time for code and memory that
/// nobody has touched before.
fn usual_time(
    arguments: &Arguments,
    settings: &AllocatorOptions,
    trace: &Trace,
    capacity: u64,
    first: Duration,
) -> Result<Duration, ReplayError> {
    const REPLAYS: usize = 9;
    const LONG: Duration = Duration::from_millis(500);
    let started = Instant::now();
    let mut times = vec![first];
    while times.len() < REPLAYS && started.elapsed() + first < LONG {
        let allocator = allocator(arguments, settings, capacity)?;
        let options = ReplayOptions {
            scale: arguments.scale,
            ..ReplayOptions::default()
        };
        times.push(replay(&allocator, trace, options)?.host_time);
    }
    times.sort_unstable();
    Ok(times[times.len() / 2])
}

fn find_smallest(
    arguments: &Arguments,
    settings: &AllocatorOptions,
    trace: &Trace,
) -> Result<Outcome, ReplayError> {
    let mut line = Progress::spinner("searching");
    let mut tries = 0;
    let mut last = None;
    let options = ReplayOptions {
        verify: arguments.verify,
        scale: arguments.scale,
        ..ReplayOptions::default()
    };
    let found = smallest(trace, options, |capacity| {
        tries += 1;
        line.say(format!("try {tries}: a device of {}", Bytes(capacity)));
        let allocator = allocator(arguments, settings, capacity)?;
        last = Some(allocator.clone());
        Ok(allocator)
    })?;
    Ok(Outcome {
        report: found.report.clone(),
        smallest: Some(found),
        allocator: last,
        snapshot: None,
    })
}

/// Writes how the allocator came by the memory, its statistics under torch's keys, and the device's calls.
fn write_details(out: &mut impl Write, allocator: &CachingAllocator<SimDevice>) -> io::Result<()> {
    let ways = Ways::of(allocator);
    writeln!(out, "\nhow the memory was come by")?;
    let lines = [
        (
            "thread cache",
            format!("{:.1} %", ways.thread_cache_hit_rate * 100.0),
            "of all allocations, without the heap and its lock",
        ),
        (
            "pages created",
            grouped(ways.pages_created),
            "of virtual memory, 2 MiB each",
        ),
        (
            "pages moved",
            grouped(ways.pages_moved),
            "idle ones, to where they were needed, instead of creating more",
        ),
        (
            "segments",
            grouped(ways.segments_allocated),
            "obtained, where there is no virtual memory",
        ),
        (
            "host waits",
            grouped(ways.host_waits),
            "for streams, before growing past the slack or before an error",
        ),
        (
            "device waits",
            grouped(ways.device_waits),
            "of a stream for another, to be given its free memory",
        ),
    ];
    for (name, value, meaning) in lines {
        write_line(out, name, &value, meaning)?;
    }
    writeln!(out, "\nwhat each rung gave")?;
    writeln!(
        out,
        "  {:<24} {:>9} {:>7} {:>12} {:>12}",
        "rung", "times", "failed", "bytes", "us"
    )?;
    for rung in &ways.rungs {
        writeln!(
            out,
            "  {:<24} {:>9} {:>7} {:>12} {:>12}",
            rung.rung,
            grouped(rung.times),
            grouped(rung.failed),
            Bytes(rung.bytes).to_string(),
            grouped(rung.microseconds)
        )?;
    }
    writeln!(out, "\nallocator")?;
    for (key, value) in allocator.stats().torch_keys() {
        writeln!(out, "  {key:<40} {value:>15}")?;
    }
    writeln!(out, "\ndevice calls, with those of --verify")?;
    let counters = allocator.device().counters();
    for call in Call::ALL {
        let count = counters.calls(*call);
        if count > 0 {
            writeln!(out, "  {:<40} {:>15}", call.name(), grouped(count))?;
        }
    }
    Ok(())
}

fn json<'a>(
    report: &'a ReplayReport,
    smallest: Option<&Smallest>,
    allocator: Option<&CachingAllocator<SimDevice>>,
) -> Json<'a> {
    Json {
        operations: report.operations,
        peak_live_bytes: report.peak_live_bytes,
        peak_reserved_bytes: report.peak_reserved_bytes,
        reserved_over_live: report.reserved_over_live(),
        device_allocations: report.device_allocations,
        device_microseconds: report.device_microseconds,
        nanoseconds_per_operation: report.nanoseconds_per_operation(),
        out_of_memory: report
            .out_of_memory
            .as_ref()
            .map(|out_of_memory| JsonOutOfMemory {
                operation: out_of_memory.place.operation,
                line: out_of_memory.place.line,
                id: out_of_memory.place.id,
                stream: out_of_memory.place.stream,
                label: &out_of_memory.place.label,
                requested_bytes: out_of_memory.requested,
                message: out_of_memory.error.to_string(),
            }),
        ways: allocator.map(Ways::of),
        smallest: smallest.map(|smallest| JsonSmallest {
            smallest_bytes: smallest.bytes,
            smallest_over_live: smallest.over_live(),
        }),
    }
}

/// Writes the report as lines of a name, a value and what the value means.
pub(crate) fn write_report(
    out: &mut impl Write,
    report: &ReplayReport,
    smallest: Option<&Smallest>,
    verified: bool,
) -> io::Result<()> {
    let mut lines = vec![
        (
            "operations",
            grouped(report.operations),
            "allocations and frees".into(),
        ),
        (
            "peak live",
            Bytes(report.peak_live_bytes).to_string(),
            "requested and not freed".into(),
        ),
        (
            "peak reserved",
            Bytes(report.peak_reserved_bytes).to_string(),
            format!(
                "as the device counts it, {:.4} of live",
                report.reserved_over_live()
            ),
        ),
        (
            "device allocations",
            grouped(report.device_allocations),
            format!(
                "{:.1} ms of device time, as an A100 takes",
                report.device_microseconds / 1000.0
            ),
        ),
        (
            "host time",
            format!("{:.0} ns", report.nanoseconds_per_operation()),
            if verified {
                "an operation, verifying; device time apart".into()
            } else {
                "an operation, device time apart".into()
            },
        ),
    ];
    if let Some(smallest) = smallest {
        lines.push((
            "smallest device",
            Bytes(smallest.bytes).to_string(),
            format!(
                "{:.4} of live; 2 MiB less is not enough",
                smallest.over_live()
            ),
        ));
    }
    if verified && report.out_of_memory.is_none() {
        lines.push((
            "verified",
            "yes".into(),
            "each block kept its bytes, no two overlapped".into(),
        ));
    }
    for (name, value, meaning) in lines {
        write_line(out, name, &value, &meaning)?;
    }
    Ok(())
}

fn write_line(out: &mut impl Write, name: &str, value: &str, meaning: &str) -> io::Result<()> {
    let dim = Style::new().dimmed();
    writeln!(out, "  {name:<18} {value:>11}  {dim}{meaning}{dim:#}")
}
