//! `lastref explain`: what holds the memory, and why an allocation failed; of one file, or of many
//! ranks.

use std::io::Write;
use std::path::PathBuf;

use anstyle::Style;
use anyhow::Context;
use clap::Args;
use lastref::alloc::Bytes;
use lastref_snapshot::explain::{Explanation, Failure as Failed, Moment, Verdict, explain};
use serde::Serialize;

use super::{name_of, ranks, read, write_json};
use crate::Failure;
use crate::escape::escaped;
use crate::numbers::grouped;

#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// The snapshot, trace or report of lastref.torch; or a folder of them, many ranks: it is said which is odd
    file: PathBuf,

    /// The size of the device, such as 80GiB: then it is said what others use
    #[arg(long, value_name = "SIZE", value_parser = crate::replay::capacity)]
    capacity: Option<u64>,

    /// Print JSON: one line, or for a folder one line a rank
    #[arg(long, conflicts_with = "csv")]
    json: bool,

    /// For a folder, print CSV: one line a rank
    #[arg(long)]
    csv: bool,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Json<'a> {
    file: &'a str,
    summary: Vec<[String; 3]>,
    devices: &'a [Explanation],
}

pub(crate) fn run(arguments: &Arguments, out: &mut impl Write) -> Result<(), Failure> {
    if arguments.file.is_dir() {
        let format = match (arguments.json, arguments.csv) {
            (true, _) => ranks::Format::Json,
            (_, true) => ranks::Format::Csv,
            _ => ranks::Format::Text,
        };
        return ranks::run(&arguments.file, arguments.capacity, format, out);
    }
    let report = ranks::report(&arguments.file, &ranks::name(&arguments.file))
        .with_context(|| format!("cannot read {}", name_of(&arguments.file)))
        .map_err(Failure::BadInput)?;
    let devices = match report {
        Some(report) => report.explain(),
        None => explain(&read(&arguments.file)?, arguments.capacity),
    };
    // A device with nothing on it has nothing to say, unless it is all there is.
    let has_something =
        |one: &&Explanation| one.memory.reserved_bytes > 0 || one.memory.live_bytes > 0;
    let some = devices.iter().any(|one| has_something(&one));
    let devices: Vec<_> = devices
        .into_iter()
        .filter(|one| !some || has_something(&one))
        .collect();
    if arguments.json {
        let file = name_of(&arguments.file);
        return write_json(
            out,
            &Json {
                file: &file,
                summary: devices.iter().map(summary).collect(),
                devices: &devices,
            },
        );
    }
    for (index, device) in devices.iter().enumerate() {
        if index > 0 {
            writeln!(out)?;
        }
        write_text(out, device)?;
    }
    if devices.is_empty() {
        writeln!(out, "the snapshot has no segments and no history")?;
    }
    Ok(())
}

/// A place in a program, in one line.
pub(crate) fn place(frames: &[String]) -> String {
    if frames.is_empty() {
        "(no stack recorded)".to_owned()
    } else {
        frames.join(" ← ")
    }
}

fn first(frames: &[String]) -> &str {
    frames
        .first()
        .map_or("a place without a stack", String::as_str)
}

/// What matters, in three lines: what happened, why, and what helps.
pub(crate) fn summary(explanation: &Explanation) -> [String; 3] {
    match &explanation.failure {
        Some(failure) => summary_of_failure(explanation, failure),
        None => summary_of_peak(explanation),
    }
}

const EXPANDABLE: &str = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True";

fn summary_of_failure(explanation: &Explanation, failure: &Failed) -> [String; 3] {
    let requested = Bytes(failure.requested_bytes);
    let free = Bytes(failure.device_free_bytes);
    let memory = &explanation.memory;
    // A report does not say where.
    let at = match explanation.entry {
        Some(_) => format!(" at {}", first(&failure.place)),
        None => String::new(),
    };
    let happened = format!(
        "out of memory on device {}: {requested} asked for{at}, {free} free on the device",
        explanation.device
    );
    let (cause, helps) = match &failure.verdict {
        Verdict::MemoryLimit => (
            format!(
                "a memory limit of this process (its memory fraction): the device had {free} free, \
                 enough for it"
            ),
            "raise the limit: torch.cuda.set_per_process_memory_fraction(1.0)".to_owned(),
        ),
        Verdict::TooLarge { most_bytes } => (
            format!(
                "it is simply too large: the process has and could get {} in all, its own live memory \
                 included",
                Bytes(*most_bytes)
            ),
            "ask for less at once (a smaller batch or sequence, or in parts); no setting of the \
             allocator does it"
                .to_owned(),
        ),
        Verdict::PrivatePool { free_bytes, pool } => (
            format!(
                "{} is free, but in a private pool {pool:?} (of a MemPool or a CUDA graph), which serves \
                 nobody else while it lives",
                Bytes(*free_bytes)
            ),
            "let go of the pool or the graph when it is done with (del pool), or let it lend: \
             torch.cuda.MemPool(use_on_oom=True)"
                .to_owned(),
        ),
        Verdict::OtherStream {
            free_bytes,
            stream,
            largest_hole_bytes,
        } => (
            format!(
                "{} is free, but stranded on another stream (0x{stream:x}): memory freed there is used \
                 again only there; its longest piece is {}",
                Bytes(*free_bytes),
                Bytes(*largest_hole_bytes)
            ),
            format!("{EXPANDABLE}; or allocate on one stream, and record_stream() on the other"),
        ),
        Verdict::Fragmentation {
            free_bytes,
            largest_hole_bytes,
        } => (
            format!(
                "fragmentation: {} is free inside segments, in pieces of {} at most",
                Bytes(*free_bytes),
                Bytes(*largest_hole_bytes)
            ),
            EXPANDABLE.to_owned(),
        ),
        Verdict::PileUp {
            blocks: count,
            bytes,
            freed_before,
            ..
        } => (
            format!(
                "{} ({}) from that same place are live and pile up, {} freed before: dead reference \
                 cycles, which only gc frees, or a container that keeps them",
                blocks(*count),
                Bytes(*bytes),
                if *freed_before == 0 { "none was".to_owned() } else { grouped(*freed_before) }
            ),
            "import gc; gc.collect() frees dead cycles; import lastref.torch; lastref.torch.guard() does \
             it before a failure"
                .to_owned(),
        ),
        _ => {
            let most = explanation.holders.first();
            let most = most.map_or_else(String::new, |holder| {
                format!(
                    ", {} of it from {}",
                    share(holder.bytes, memory.live_bytes.saturating_add(memory.pending_bytes)),
                    first(&holder.place)
                )
            });
            let cure = explanation.holders.first().and_then(|holder| holder.cure.clone());
            (
                format!(
                    "the program's own live memory fills the device: {} live of {} reserved{most}",
                    Bytes(memory.live_bytes),
                    Bytes(memory.reserved_bytes)
                ),
                cure.unwrap_or_else(|| {
                    "hold less at once: a smaller batch, activation checkpointing, offloading; no setting of \
                     the allocator does it"
                        .to_owned()
                }),
            )
        }
    };
    [
        happened,
        format!("cause: {cause}"),
        format!("helps: {helps}"),
    ]
}

fn summary_of_peak(explanation: &Explanation) -> [String; 3] {
    let memory = &explanation.memory;
    let in_use = memory.live_bytes.saturating_add(memory.pending_bytes);
    let happened = match (explanation.moment, explanation.entry) {
        (Moment::Peak, Some(entry)) => format!(
            "no allocation failed on device {}: at its peak, after {} entries, {} was in use",
            explanation.device,
            grouped(entry),
            Bytes(in_use)
        ),
        _ => format!(
            "no allocation failed on device {} that the snapshot knows of: when it was taken, {} was in \
             use",
            explanation.device,
            Bytes(in_use)
        ),
    };
    let holds = explanation.holders.first().map_or_else(
        || "nothing holds memory".to_owned(),
        |holder| {
            format!(
                "most is held by: {} ({} in {}, {})",
                first(&holder.place),
                Bytes(holder.bytes),
                blocks(holder.blocks),
                share(holder.bytes, in_use)
            )
        },
    );
    let at_end = &explanation.at_end;
    let wasted = at_end.cached_bytes.saturating_add(at_end.fragmented_bytes);
    let reserved = memory.reserved_bytes;
    let rest = if explanation.moment == Moment::Peak && wasted > at_end.reserved_bytes / 2 {
        format!(
            "reserved: {} at the peak; when the snapshot was taken {}, of which {} ({}) is cache that \
             torch.cuda.empty_cache() gives back",
            Bytes(reserved),
            Bytes(at_end.reserved_bytes),
            Bytes(at_end.cached_bytes),
            share(at_end.cached_bytes, at_end.reserved_bytes)
        )
    } else if reserved == 0 {
        "reserved: not known, there are no segments".to_owned()
    } else if memory.cached_bytes >= memory.fragmented_bytes && memory.cached_bytes > reserved / 10
    {
        format!(
            "reserved: {}, of which {} ({}) is cache that torch.cuda.empty_cache() gives back",
            Bytes(reserved),
            Bytes(memory.cached_bytes),
            share(memory.cached_bytes, reserved)
        )
    } else if memory.fragmented_bytes > reserved / 10 {
        format!(
            "reserved: {}, of which {} ({}) is free in pieces beside what is live; {EXPANDABLE} may help",
            Bytes(reserved),
            Bytes(memory.fragmented_bytes),
            share(memory.fragmented_bytes, reserved)
        )
    } else {
        format!(
            "reserved: {}, of which {} was in use: little is wasted",
            Bytes(reserved),
            share(in_use, reserved)
        )
    };
    [happened, holds, rest]
}

fn blocks(count: u64) -> String {
    let word = if count == 1 { "block" } else { "blocks" };
    format!("{} {word}", grouped(count))
}

#[expect(clippy::cast_precision_loss, reason = "a percentage for people")]
fn share(part: u64, whole: u64) -> String {
    format!("{:.1} %", part as f64 * 100.0 / whole.max(1) as f64)
}

fn write_text(out: &mut impl Write, explanation: &Explanation) -> Result<(), Failure> {
    let bold = Style::new().bold();
    let summary = summary(explanation);
    let [happened, cause, helps] = summary.each_ref().map(|line| escaped(line));
    writeln!(out, "{bold}{happened}{bold:#}\n{cause}\n{helps}")?;
    let memory = &explanation.memory;
    writeln!(out, "\nmemory at that moment")?;
    let whole = memory
        .reserved_bytes
        .max(memory.live_bytes.saturating_add(memory.pending_bytes));
    let mut line = |name: &str, bytes: u64, meaning: &str| {
        let (size, share) = (Bytes(bytes).to_string(), share(bytes, whole));
        writeln!(out, "  {size:>10}  {share:>7}  {name:<11} {meaning}")
    };
    line(
        "live",
        memory.live_bytes,
        "in blocks that the program holds",
    )?;
    line(
        "pending",
        memory.pending_bytes,
        "freed, waiting for a stream",
    )?;
    line("cached", memory.cached_bytes, "segments without a block")?;
    line(
        "fragmented",
        memory.fragmented_bytes,
        "free in segments that have blocks",
    )?;
    line("reserved", memory.reserved_bytes, "all of these")?;
    writeln!(
        out,
        "  {:>10}           largest hole",
        Bytes(memory.largest_hole_bytes).to_string()
    )?;
    if let Some(free) = memory.device_free_bytes {
        writeln!(
            out,
            "  {:>10}           free on the device",
            Bytes(free).to_string()
        )?;
    }
    match (memory.outside_bytes, memory.device_free_bytes) {
        (Some(outside), _) => writeln!(
            out,
            "  {:>10}           outside: contexts, libraries, other processes",
            Bytes(outside).to_string()
        )?,
        (None, Some(_)) => writeln!(
            out,
            "           ?           outside: --capacity says how large the device is, then it is known"
        )?,
        _ => {}
    }
    if !explanation.holders.is_empty() {
        writeln!(out, "\nheld, by place")?;
        for holder in &explanation.holders {
            writeln!(
                out,
                "  {:>10}  {:>14}  {}",
                Bytes(holder.bytes).to_string(),
                blocks(holder.blocks),
                escaped(&place(&holder.place))
            )?;
        }
    }
    if !explanation.categories.is_empty() {
        writeln!(out, "\nheld, by what the stacks suggest it is for")?;
        for category in &explanation.categories {
            writeln!(
                out,
                "  {:>10}  {:>14}  {}",
                Bytes(category.bytes).to_string(),
                blocks(category.blocks),
                escaped(&category.name)
            )?;
        }
    }
    if !explanation.pins.is_empty() {
        writeln!(out, "\nsegments that are partly free, and what keeps them")?;
        for pin in &explanation.pins {
            writeln!(
                out,
                "  {:>10} free in pieces of {} at most; {} in {} stay, the largest from {}",
                Bytes(pin.free_bytes).to_string(),
                Bytes(pin.largest_hole_bytes),
                Bytes(pin.used_bytes),
                blocks(pin.blocks),
                escaped(&place(&pin.place))
            )?;
        }
    }
    if explanation.contradictions > 0 {
        writeln!(
            out,
            "\nnote: {} entries of the history do not fit the snapshot; what is said of that moment is a \
             guess",
            grouped(explanation.contradictions)
        )?;
    }
    Ok(())
}
