//! Allocation traces: where they are, and what replaying them must give.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::command::{cargo, command};
use crate::workspace::Workspace;

/// The most that may be reserved over what is live at the peak: the slack of 0.4 %, and partly used pages.
const MOST_RESERVED_OVER_LIVE: f64 = 1.01;

/// Where traces are: the folder that LASTREF_TRACES names, else `shared/traces` beside the checkout, else
/// those that come with the sources.
fn folder(workspace: &Workspace) -> PathBuf {
    if let Some(named) = std::env::var_os("LASTREF_TRACES") {
        return named.into();
    }
    let beside = workspace.root.join("../shared/traces");
    if beside.is_dir() {
        beside
    } else {
        workspace.root.join("crates/lastref-cli/testdata")
    }
}

/// Every trace there is, by name.
pub(crate) fn all(workspace: &Workspace) -> Result<Vec<PathBuf>> {
    let folder = folder(workspace);
    let mut traces = Vec::new();
    for entry in
        fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))?
    {
        let path = entry?.path();
        if name(&path) != path.file_name().unwrap_or_default().to_string_lossy() {
            traces.push(path);
        }
    }
    traces.sort();
    ensure!(!traces.is_empty(), "{} has no trace", folder.display());
    Ok(traces)
}

/// A trace's file name without its ending; the whole name of what is no trace.
fn name(path: &Path) -> String {
    let file = path.file_name().unwrap_or_default().to_string_lossy();
    file.strip_suffix(".csv.gz")
        .or_else(|| file.strip_suffix(".csv"))
        .unwrap_or(&file)
        .to_owned()
}

/// Builds the command as it is shipped. Writes nothing to standard output, which `bench --json` keeps clean.
pub(crate) fn build(workspace: &Workspace) -> Result<()> {
    cargo(workspace)
        .args(["build", "--release", "--package", "lastref-cli"])
        .quiet_stdout()
        .map(drop)
}

/// Replays one trace with [`build`]'s command.
fn replay(workspace: &Workspace, trace: &Path, options: &[&str]) -> Result<Value> {
    let report = command(workspace, workspace.target.join("release/lastref"))
        .args(["replay", "--json"])
        .args(options)
        .args([trace])
        .quiet_stdout()?;
    serde_json::from_str(&report)
        .with_context(|| format!("`lastref replay --json` printed no JSON: {report}"))
}

/// Made-up traces, one of each kind that `lastref generate` knows.
fn made_up(workspace: &Workspace) -> Result<Vec<PathBuf>> {
    let folder = workspace.target.join("made-up");
    fs::create_dir_all(&folder)?;
    let generate =
        || command(workspace, workspace.target.join("release/lastref")).args(["generate"]);
    let kinds = generate().quiet_stdout()?;
    let kinds = kinds.lines().filter_map(|line| line.split(' ').next());
    kinds
        .map(|kind| {
            let trace = folder.join(kind).with_extension("csv");
            fs::write(&trace, generate().args([kind]).quiet_stdout()?)?;
            Ok(trace)
        })
        .collect()
}

pub(crate) fn number(report: &Value, field: &str) -> Result<f64> {
    report[field]
        .as_f64()
        .with_context(|| format!("the report has no number `{field}`: {report}"))
}

/// Every trace completes with its blocks' contents intact, in little more memory than it needs: at full
/// size with some words of each block written and checked, and made smaller with every byte of it.
pub(crate) fn verify(workspace: &Workspace) -> Result<()> {
    println!(
        "    {:<32} {:>12} {:>12}",
        "reserved over live", "full size", "1:64"
    );
    for trace in all(workspace)? {
        let full = replay(workspace, &trace, &["--verify"])?;
        let scaled = replay(workspace, &trace, &["--verify", "--scale", "64"])?;
        let ratio = number(&full, "reserved_over_live")?;
        println!(
            "    {:<32} {ratio:>12.4} {:>12.4}",
            name(&trace),
            number(&scaled, "reserved_over_live")?
        );
        ensure!(
            ratio <= MOST_RESERVED_OVER_LIVE,
            "{} reserves {ratio:.4} times its live bytes at the peak, at most \
             {MOST_RESERVED_OVER_LIVE} is allowed",
            trace.display()
        );
    }
    Ok(())
}

/// What [`bench()`] is to do.
#[derive(Clone, Copy, Default)]
pub(crate) struct Options {
    /// Print JSON.
    pub(crate) json: bool,
    /// Made-up traces too.
    pub(crate) made_up: bool,
    /// Find the smallest device of each.
    pub(crate) smallest: bool,
}

/// Replays traces and prints one table, or the reports as JSON.
pub(crate) fn bench(workspace: &Workspace, traces: &[PathBuf], options: Options) -> Result<()> {
    build(workspace)?;
    let mut traces = if traces.is_empty() {
        all(workspace)?
    } else {
        traces.to_vec()
    };
    if options.made_up {
        traces.extend(made_up(workspace)?);
    }
    if !options.json {
        println!(
            "{:<32} {:>10} {:>10} {:>10} {:>10} {:>12} {:>10} {:>8}",
            "trace", "operations", "peak live", "reserved", "smallest", "device", "device", "host"
        );
        println!(
            "{:<32} {:>10} {:>10} {:>10} {:>10} {:>12} {:>10} {:>8}",
            "", "", "GiB", "over live", "over live", "allocations", "ms", "ns/op"
        );
    }
    let mut reports = Vec::new();
    for trace in &traces {
        let report = measure(workspace, trace, options.smallest)?;
        if !options.json {
            let smallest = report["smallest_over_live"].as_f64();
            println!(
                "{:<32} {:>10.0} {:>10.2} {:>10.4} {:>10} {:>12.0} {:>10.1} {:>8.1}",
                name(trace),
                number(&report, "operations")?,
                number(&report, "peak_live_bytes")? / f64::from(1 << 30),
                number(&report, "reserved_over_live")?,
                smallest.map_or_else(String::new, |ratio| format!("{ratio:.4}")),
                number(&report, "device_allocations")?,
                number(&report, "device_microseconds")? / 1e3,
                number(&report, "nanoseconds_per_operation")?,
            );
        }
        reports.push(report);
    }
    if options.json {
        println!("{:#}", Value::Array(reports));
    } else {
        println!(
            "\nreserved over live: peak bytes the device counts as taken, over peak bytes requested and live. \
             Device time is the simulated device's table, host time is measured."
        );
    }
    Ok(())
}

/// The report of one trace, under its name: on an ample device, and with `smallest` also the smallest device.
fn measure(workspace: &Workspace, trace: &Path, smallest: bool) -> Result<Value> {
    let mut report = replay(workspace, trace, &[])?;
    report["trace"] = name(trace).into();
    if smallest {
        let found = replay(workspace, trace, &["--smallest"])?;
        report["smallest_over_live"] = number(&found, "smallest_over_live")?.into();
    }
    Ok(report)
}
