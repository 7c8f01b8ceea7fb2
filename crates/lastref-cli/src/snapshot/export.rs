//! `lastref export`: a snapshot in the forms that other tools read.
//!
//! | form | for |
//! |---|---|
//! | `chrome` | Perfetto and chrome://tracing: levels over time, failures, annotations |
//! | `csv` | DuckDB, pandas, spreadsheets: one line an entry of the history, with the levels after it |
//! | `folded` | tools that draw flame graphs: one line a stack, with the bytes it holds |
//! | `flamegraph` | a browser: the same drawn as SVG |
//! | `timeline` | a browser: memory in use over the history, by place, drawn as SVG |
//! | `pickle` | PyTorch's tools |
//!
//! Levels are as in `stats`: `active` is what was requested and not freed. Stacks are those of the
//! blocks at the moment that `explain` speaks of.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::PathBuf;

use anyhow::{Context, anyhow};
use clap::{Args, ValueEnum};
use lastref::alloc::Bytes;
use lastref_snapshot::Dump;
use lastref_snapshot::dump::{Action, Entry, History};
use lastref_snapshot::explain::{place, state_at_moment};
use lastref_snapshot::stats::{active_at_start, active_change};
use serde_json::json;

use super::{flame, not_csv, read, timeline};
use crate::Failure;

#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// The snapshot or trace
    file: PathBuf,

    /// The form
    #[arg(long, value_enum)]
    format: Format,

    /// Where to write it [default: standard output]
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Format {
    /// Perfetto and chrome://tracing
    Chrome,
    /// One line an entry of the history
    Csv,
    /// One line a stack, with its bytes
    Folded,
    /// A flame graph, as SVG
    Flamegraph,
    /// Memory in use over the history, by place, as SVG
    Timeline,
    /// PyTorch's own form
    Pickle,
}

pub(crate) fn run(arguments: &Arguments, out: &mut impl Write) -> Result<(), Failure> {
    let dump = read(&arguments.file)?;
    if arguments.format == Format::Timeline && !timeline::has_history(&dump) {
        return Err(Failure::BadInput(anyhow!(
            "{} has no history to draw: torch.cuda.memory._record_memory_history() turns it on",
            arguments.file.display()
        )));
    }
    let Some(path) = &arguments.output else {
        return Ok(write(&dump, arguments.format, out)?);
    };
    let written = File::create(path).and_then(|file| {
        let mut file = BufWriter::new(file);
        write(&dump, arguments.format, &mut file)?;
        file.flush()
    });
    written
        .with_context(|| format!("cannot write {}", path.display()))
        .map_err(Failure::BadInput)
}

fn write(dump: &Dump, format: Format, out: &mut impl Write) -> io::Result<()> {
    match format {
        Format::Chrome => chrome(dump, out),
        Format::Csv => csv(dump, out),
        Format::Folded => {
            for (stack, bytes) in folded(dump) {
                writeln!(out, "{} {bytes}", stack.join(";"))?;
            }
            Ok(())
        }
        Format::Flamegraph => flame::draw(&folded(dump), out),
        Format::Timeline => timeline::draw(dump, out),
        Format::Pickle => dump.write(out),
    }
}

/// Levels after each entry of a history.
struct Levels {
    active: i128,
    reserved: i128,
}

impl Levels {
    fn before(dump: &Dump, history: &History) -> Self {
        let segments = dump.segments_of(history.device).iter();
        let at_end: i128 = segments
            .map(|segment| i128::from(segment.total_bytes))
            .sum();
        let change: i128 = dump.entries_of(history).iter().map(reserved_change).sum();
        Self {
            active: active_at_start(dump, history),
            reserved: at_end - change,
        }
    }

    fn add(&mut self, entry: &Entry) {
        self.active += active_change(entry);
        self.reserved += reserved_change(entry);
    }
}

fn reserved_change(entry: &Entry) -> i128 {
    match entry.action {
        Action::SegmentAlloc | Action::SegmentMap => i128::from(entry.bytes),
        Action::SegmentFree | Action::SegmentUnmap => -i128::from(entry.bytes),
        _ => 0,
    }
}

fn chrome(dump: &Dump, out: &mut impl Write) -> io::Result<()> {
    write!(out, "{{\"displayTimeUnit\":\"ns\",\"traceEvents\":[")?;
    let mut is_first = true;
    let mut event = |out: &mut dyn Write, event: serde_json::Value| -> io::Result<()> {
        let comma = if std::mem::take(&mut is_first) {
            ""
        } else {
            ","
        };
        write!(out, "{comma}\n{event}")
    };
    for history in dump.histories() {
        let device = history.device;
        let name = json!({"name": format!("cuda:{device}")});
        event(
            out,
            json!({"ph": "M", "name": "process_name", "pid": device, "args": name}),
        )?;
        let mut levels = Levels::before(dump, history);
        for (index, entry) in (0u64..).zip(dump.entries_of(history)) {
            levels.add(entry);
            // Where no clock was read, the order stands for time.
            let time = if entry.time_us == 0 {
                index
            } else {
                entry.time_us
            };
            if entry.action == Action::Oom {
                let name = format!("out of memory: {}", Bytes(entry.bytes));
                let free = json!({"device_free_bytes": entry.address});
                event(
                    out,
                    json!({"ph": "i", "s": "p", "name": name, "ts": time, "pid": device, "tid": 0, "args": free}),
                )?;
            } else if active_change(entry) != 0 || reserved_change(entry) != 0 {
                let level = |level: i128| u64::try_from(level.max(0)).unwrap_or(u64::MAX);
                let levels =
                    json!({"active": level(levels.active), "reserved": level(levels.reserved)});
                event(
                    out,
                    json!({"ph": "C", "name": "memory", "ts": time, "pid": device, "args": levels}),
                )?;
            }
        }
    }
    for annotation in dump.annotations() {
        let kind = match dump.text(annotation.stage) {
            "START" => "B",
            "END" => "E",
            _ => "i",
        };
        let name = dump.text(annotation.name);
        let (time, device) = (annotation.time_us, annotation.device);
        event(
            out,
            json!({"ph": kind, "name": name, "ts": time, "pid": device, "tid": 1}),
        )?;
    }
    writeln!(out, "\n]}}")
}

fn csv(dump: &Dump, out: &mut impl Write) -> io::Result<()> {
    let mut writer = ::csv::Writer::from_writer(out);
    writer
        .write_record([
            "device",
            "entry",
            "action",
            "address",
            "bytes",
            "stream",
            "time_us",
            "active_bytes",
            "reserved_bytes",
            "place",
        ])
        .map_err(not_csv)?;
    for history in dump.histories() {
        let mut levels = Levels::before(dump, history);
        for (index, entry) in dump.entries_of(history).iter().enumerate() {
            levels.add(entry);
            let frames = place(dump, entry.stack).into_iter();
            let frames: Vec<_> = frames
                .map(|frame| dump.frame_text(frame).to_string())
                .collect();
            writer
                .write_record([
                    history.device.to_string(),
                    index.to_string(),
                    entry.action.as_str().to_owned(),
                    entry.address.to_string(),
                    entry.bytes.to_string(),
                    entry.stream.to_string(),
                    entry.time_us.to_string(),
                    levels.active.to_string(),
                    levels.reserved.to_string(),
                    frames.join(" < "),
                ])
                .map_err(not_csv)?;
        }
    }
    writer.flush()
}

/// The stacks of what is held, outermost frame first, with their bytes; sorted, each once.
fn folded(dump: &Dump) -> Vec<(Vec<String>, u64)> {
    let mut stacks = std::collections::BTreeMap::<Vec<String>, u64>::new();
    for device in dump.devices() {
        for block in state_at_moment(dump, device).blocks {
            let frames = dump.stack(block.stack).iter().rev();
            let mut stack = vec![format!("cuda:{device}")];
            // A semicolon parts frames.
            stack.extend(frames.map(|frame| dump.frame_text(*frame).to_string().replace(';', ",")));
            if stack.len() == 1 {
                stack.push("(no stack recorded)".to_owned());
            }
            let sum = stacks.entry(stack).or_default();
            *sum = sum.saturating_add(block.bytes);
        }
    }
    stacks.into_iter().collect()
}
