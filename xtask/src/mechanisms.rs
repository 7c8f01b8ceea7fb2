//! What each mechanism of the allocator buys: `cargo xtask bench mechanisms`.
//!
//! `bench/mechanisms/list.json` lists them, each with what switches it off: a setting, or edits of the sources.
//! The allocator is not made more complicated by switches that nobody but this needs: edits are made in a
//! copy, one mechanism at a time, and the copy is built. Then every trace is replayed, on an ample device and
//! on the smallest; made-up ones only with every mechanism on.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::command::{command, to_stderr};
use crate::mutants::copy_sources;
use crate::rules;
use crate::traces;
use crate::workspace::Workspace;

const PROGRAM: &str = "bench/mechanisms";
const LIST: &str = "bench/mechanisms/list.json";

/// One that is switched off; the first entry of the list switches off nothing.
struct Mechanism {
    name: String,
    /// What the allocator does without it.
    does: String,
    /// For `LASTREF_ALLOC_CONF`.
    settings: String,
    edits: Vec<Edit>,
}

struct Edit {
    file: String,
    from: String,
    to: String,
}

/// Every edit can be made in the sources as they are.
pub(crate) fn check(workspace: &Workspace) -> Result<()> {
    let mut broken = Vec::new();
    for mechanism in list(workspace)? {
        for edit in mechanism.edits {
            if let Err(error) = edit.sound(&workspace.root) {
                broken.push(format!("{LIST}: {}: {error:#}", mechanism.name));
            }
        }
    }
    rules::report(&broken)
}

/// Measures, and prints one table, or JSON.
pub(crate) fn bench(workspace: &Workspace, json: bool, part: Option<&str>) -> Result<()> {
    let found = to_stderr(|| measure(workspace, part))?;
    if json {
        println!("{found:#}");
        return Ok(());
    }
    println!(
        "{:<36} {:>8} {:>8} {:>9} {:>9} {:>8} {:>8}",
        "", "reserved", "reserved", "smallest", "smallest", "device", "host"
    );
    println!(
        "{:<36} {:>8} {:>8} {:>9} {:>9} {:>8} {:>8}",
        "without", "mean", "worst", "mean", "worst", "ms", "ns/op"
    );
    for entry in found.as_array().into_iter().flatten() {
        let [reserved, most, smallest, largest, device, host] = row(entry)?;
        println!(
            "{:<36} {reserved:>8.4} {most:>8.4} {smallest:>9.4} {largest:>9.4} {device:>8.0} {host:>8.1}",
            entry["name"].as_str().unwrap_or_default(),
        );
    }
    Ok(())
}

/// Over the given traces without one mechanism: reserved over live, mean and worst; the smallest device,
/// mean and worst; device time in milliseconds and host time in nanoseconds an operation, in the mean.
pub(crate) fn row(entry: &Value) -> Result<[f64; 6]> {
    let of = |field| Summary::of(entry, "given", field);
    let (reserved, smallest) = (of("reserved_over_live")?, of("smallest_over_live")?);
    Ok([
        reserved.mean,
        reserved.worst,
        smallest.mean,
        smallest.worst,
        of("device_microseconds")?.mean / 1e3,
        of("nanoseconds_per_operation")?.mean,
    ])
}

/// A field of the reports of one mechanism.
pub(crate) struct Summary {
    pub(crate) mean: f64,
    pub(crate) worst: f64,
    /// The trace of the worst.
    pub(crate) trace: String,
}

impl Summary {
    /// Over the traces that are `given` or `made_up`.
    pub(crate) fn of(entry: &Value, which: &str, field: &str) -> Result<Self> {
        let reports = entry[which].as_array().context("an entry has reports")?;
        ensure!(!reports.is_empty(), "there are no {which} traces");
        let (mut sum, mut worst, mut trace) = (0.0, f64::NEG_INFINITY, String::new());
        for report in reports {
            let value = traces::number(report, field)?;
            sum += value;
            if value > worst {
                worst = value;
                trace = report["trace"].as_str().unwrap_or_default().to_owned();
            }
        }
        Ok(Self {
            mean: sum / reports.len() as f64,
            worst,
            trace,
        })
    }
}

/// Prints what it is at. For every mechanism, or those with `part` in their name, the reports of every trace without it.
pub(crate) fn measure(workspace: &Workspace, part: Option<&str>) -> Result<Value> {
    let copy = workspace.target.join("mechanisms");
    copy_sources(&workspace.root, &copy)?;
    let traces = traces::all(workspace)?;
    let mut found = Vec::new();
    for mechanism in list(workspace)? {
        if part.is_some_and(|part| !mechanism.name.contains(part)) {
            continue;
        }
        println!("    without {}: {}", mechanism.name, mechanism.does);
        let is_whole = mechanism.edits.is_empty() && mechanism.settings.is_empty();
        let reports = command(workspace, mechanism.build(&copy)?)
            .env("LASTREF_ALLOC_CONF", &mechanism.settings)
            .args(is_whole.then_some("--made-up"))
            .args(&traces)
            .quiet_stdout()
            .with_context(|| format!("without {}", mechanism.name))?;
        let mut entry: Value = serde_json::from_str(&reports)?;
        entry["name"] = mechanism.name.into();
        entry["does"] = mechanism.does.into();
        found.push(entry);
    }
    Ok(Value::Array(found))
}

fn list(workspace: &Workspace) -> Result<Vec<Mechanism>> {
    let list = fs::read_to_string(workspace.root.join(LIST))
        .with_context(|| format!("cannot read {LIST}"))?;
    let list: Vec<Value> = serde_json::from_str(&list).context(LIST)?;
    list.iter().map(Mechanism::read).collect()
}

fn text(entry: &Value, key: &str) -> Result<String> {
    let text = entry[key].as_str().map(str::to_owned);
    text.with_context(|| format!("an entry of {LIST} has no \"{key}\": {entry}"))
}

impl Mechanism {
    fn read(entry: &Value) -> Result<Self> {
        let each = |key: &str| entry[key].as_array().cloned().unwrap_or_default();
        let edits = each("edits").into_iter().map(|edit| {
            Ok(Edit {
                file: text(&edit, "file")?,
                from: text(&edit, "from")?,
                to: text(&edit, "to")?,
            })
        });
        Ok(Self {
            name: text(entry, "name")?,
            does: text(entry, "does")?,
            settings: entry["settings"].as_str().unwrap_or_default().to_owned(),
            edits: edits.collect::<Result<_>>()?,
        })
    }

    /// Makes the edits in the copy, builds the command, and undoes them; returns the program.
    fn build(&self, copy: &Path) -> Result<PathBuf> {
        let mut sound: Vec<(PathBuf, String)> = Vec::new();
        for edit in &self.edits {
            let (file, text) = edit.sound(copy)?;
            fs::write(&file, text.replace(&edit.from, &edit.to))?;
            // The first text of a file is the one without any edit.
            if !sound.iter().any(|(other, _)| *other == file) {
                sound.push((file, text));
            }
        }
        let built = Command::new("cargo")
            .current_dir(copy)
            .args([
                "build",
                "--release",
                "--quiet",
                "--locked",
                "--manifest-path",
            ])
            .arg(Path::new(PROGRAM).join("Cargo.toml"))
            .env("CARGO_TARGET_DIR", copy.join("target"))
            // Warnings of what an edit leaves unused are no news.
            .env("RUSTFLAGS", "--cap-lints allow")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .status();
        for (file, text) in sound {
            fs::write(file, text)?;
        }
        let built = built.context("cannot start cargo")?;
        ensure!(built.success(), "without {} it does not compile", self.name);
        Ok(copy.join("target/release/lastref-bench-mechanisms"))
    }
}

impl Edit {
    /// The file under `root` and its text, in which what is replaced has just one place.
    fn sound(&self, root: &Path) -> Result<(PathBuf, String)> {
        let file = root.join(&self.file);
        let text = fs::read_to_string(&file).with_context(|| self.file.clone())?;
        ensure!(
            text.matches(&self.from).count() == 1,
            "{}: {:?} is not there just once",
            self.file,
            self.from
        );
        Ok((file, text))
    }
}
