//! `lastref stats`: the figures of a snapshot.

use std::io::Write;
use std::path::PathBuf;

use anstyle::Style;
use clap::Args;
use lastref::alloc::Bytes;
use lastref_snapshot::dump::Setting;
use lastref_snapshot::stats::{DeviceStats, HistoryStats, Stats};

use super::{name_of, read, write_json, write_line};
use crate::Failure;
use crate::escape::escaped;
use crate::numbers::grouped;

#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// The snapshot: a pickle of PyTorch's, its JSON, or an allocation trace; plain or gzip; - reads
    /// standard input
    file: PathBuf,

    /// Print one line of JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &Arguments, out: &mut impl Write) -> Result<(), Failure> {
    let dump = read(&arguments.file)?;
    let stats = Stats::of(&dump);
    if arguments.json {
        return write_json(out, &stats);
    }
    let bold = Style::new().bold();
    let name = name_of(&arguments.file);
    writeln!(out, "{bold}{}{bold:#}", escaped(&name))?;
    for (device, figures) in &stats.devices {
        writeln!(out, "device {device}")?;
        write_device(out, figures)?;
        for history in &stats.history {
            if history.device == *device {
                write_history(out, history)?;
            }
        }
    }
    if stats.devices.is_empty() {
        writeln!(out, "no segments and no history")?;
    }
    if stats.pools.len() > 1 {
        let pools = stats.pools.iter().map(|pool| format!("{pool:?}"));
        let pools: Vec<_> = pools.collect();
        writeln!(out, "pools       {}", pools.join(" "))?;
    }
    if stats.streams.iter().any(|stream| *stream != 0) {
        let streams = stats.streams.iter().map(|stream| format!("0x{stream:x}"));
        let streams: Vec<_> = streams.collect();
        writeln!(out, "streams     {}", streams.join(" "))?;
    }
    if let Some(conf) = stats.alloc_conf() {
        writeln!(out, "settings    {}", escaped(conf))?;
    } else if stats.settings.get("expandable_segments") == Some(&Setting::Bool(true)) {
        writeln!(out, "settings    expandable_segments:True")?;
    }
    for problem in &stats.problems {
        writeln!(out, "problem     {problem}")?;
    }
    Ok(())
}

fn write_device(out: &mut impl Write, figures: &DeviceStats) -> Result<(), Failure> {
    if figures.segments == 0 {
        return Ok(());
    }
    let bytes = |bytes: u64| Bytes(bytes).to_string();
    let segments = format!("in {} segments", grouped(figures.segments));
    write_line(out, "reserved", &bytes(figures.reserved_bytes), &segments)?;
    for (state, name, meaning) in [
        ("active_allocated", "allocated", "held by the program"),
        (
            "active_pending_free",
            "pending",
            "freed, waiting for a stream",
        ),
        ("inactive", "inactive", "free inside segments"),
    ] {
        if let Some(blocks) = figures.blocks_by_state.get(state) {
            let sum = figures.bytes_by_state.get(state).copied().unwrap_or(0);
            let meaning = format!("{meaning}, {} blocks", grouped(*blocks));
            write_line(out, name, &bytes(sum), &meaning)?;
        }
    }
    if figures.wholly_free_segments > 0 {
        let meaning = format!(
            "{} segments that empty_cache() gives back",
            grouped(figures.wholly_free_segments)
        );
        write_line(
            out,
            "wholly free",
            &bytes(figures.wholly_free_bytes),
            &meaning,
        )?;
    }
    let largest = bytes(figures.largest_inactive_bytes);
    Ok(write_line(
        out,
        "largest hole",
        &largest,
        "the longest inactive block",
    )?)
}

fn write_history(out: &mut impl Write, history: &HistoryStats) -> Result<(), Failure> {
    let bytes = |bytes: u64| Bytes(bytes).to_string();
    write_line(out, "history", &grouped(history.entries), "entries")?;
    let meaning = "requested and not freed, before its first entry";
    write_line(
        out,
        "active at its start",
        &bytes(history.active_at_start_bytes),
        meaning,
    )?;
    write_line(
        out,
        "active at its end",
        &bytes(history.active_at_end_bytes),
        "",
    )?;
    let meaning = match u64::try_from(history.peak_entry) {
        Ok(entry) => format!("after entry {}", grouped(entry)),
        Err(_) => "before its first entry".to_owned(),
    };
    write_line(
        out,
        "peak active",
        &bytes(history.peak_active_bytes),
        &meaning,
    )?;
    for failure in &history.out_of_memory {
        let meaning = format!(
            "requested at entry {}, with {} active and {} free on the device",
            grouped(failure.entry),
            Bytes(failure.active_bytes),
            Bytes(failure.device_free_bytes)
        );
        write_line(
            out,
            "out of memory",
            &bytes(failure.requested_bytes),
            &meaning,
        )?;
    }
    Ok(())
}
