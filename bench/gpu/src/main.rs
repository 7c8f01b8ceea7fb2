//! What lastref does on a GPU, checked and measured, in one program that needs nothing beside itself:
//! `lastref-gpu [--json FILE] [--only PART] [TRACE...]`.
//!
//! Prints a table; the JSON goes to FILE, or after the table. Each part that fails says so and the next
//! one runs; the exit status is 1 then. Over a stand-in for the driver it is a rehearsal: its device's name
//! says so, and kernels compute nothing.

mod calls;
mod parts;
mod peers;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail, ensure};
use lastref_alloc::Device as _;
use lastref_cuda::CudaDevice;
use serde_json::{Map, Value, json};

/// A part: its name, and what measures it.
type Part = (&'static str, fn(&Setting) -> Result<Value>);

const PARTS: &[Part] = &[
    ("contract", parts::contract),
    ("reassign", parts::reassign),
    ("dead_cycles", parts::dead_cycles),
    ("driver_calls", calls::measure),
    ("hot_pair", parts::hot_pair),
    ("replay", parts::replay),
    ("kernel", parts::kernel),
    ("pytorch", peers::pytorch),
    ("sanitizer", peers::sanitizer),
];

/// What the parts share.
pub(crate) struct Setting {
    pub(crate) device: &'static CudaDevice,
    pub(crate) traces: Vec<PathBuf>,
    /// No GPU is used: times mean nothing, and kernels do nothing.
    pub(crate) is_rehearsal: bool,
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            println!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<bool> {
    let (mut file, mut only, mut traces) = (None, None, Vec::new());
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || {
            arguments
                .next()
                .with_context(|| format!("{argument} wants a value"))
        };
        match argument.as_str() {
            "--json" => file = Some(PathBuf::from(value()?)),
            "--only" => only = Some(value()?),
            flag if flag.starts_with('-') => bail!("unknown flag {flag}"),
            path => traces.push(PathBuf::from(path)),
        }
    }
    if let Some(only) = &only {
        ensure!(
            PARTS.iter().any(|(name, _)| name == only),
            "there is no part {only}"
        );
    }
    let devices = lastref_cuda::devices().map_err(|unavailable| anyhow!("{unavailable}"))?;
    let properties = devices[0].properties();
    let is_rehearsal = properties.name.to_lowercase().contains("stand-in");
    let setting = Setting {
        device: &devices[0],
        traces,
        is_rehearsal,
    };
    let mut report = Map::new();
    let device = json!({
        "name": properties.name,
        "devices": devices.len(),
        "total_bytes": properties.total_bytes,
        "page_bytes": properties.page_bytes,
        "cuda_version": lastref_cuda::driver_version().map_err(|error| anyhow!("{error}"))?,
        "rehearsal": is_rehearsal,
    });
    show("device", &device);
    report.insert("device".to_owned(), device);
    let mut all_passed = true;
    for (name, part) in PARTS {
        if only.as_ref().is_some_and(|only| only != name) {
            continue;
        }
        let started = Instant::now();
        let result = catch_unwind(AssertUnwindSafe(|| part(&setting)));
        let result = result.unwrap_or_else(|_| Err(anyhow!("panicked; the text is above")));
        let mut value = result.unwrap_or_else(|error| {
            all_passed = false;
            json!({ "failed": format!("{error:#}") })
        });
        value["seconds"] = json!(rounded(started.elapsed().as_secs_f64()));
        show(name, &value);
        report.insert((*name).to_owned(), value);
    }
    let stats = lastref_cuda::stats();
    report.insert("failed_releases".to_owned(), json!(stats.failed_releases));
    let text = serde_json::to_string_pretty(&Value::Object(report))?;
    match file {
        Some(file) => std::fs::write(&file, text + "\n")
            .with_context(|| format!("cannot write {}", file.display()))?,
        None if only.is_none() => println!("\n{text}"),
        None => {}
    }
    Ok(all_passed)
}

/// A part as rows of a table: its leaves by their path.
fn show(part: &str, value: &Value) {
    fn walk(path: &str, value: &Value) {
        match value {
            Value::Object(fields) => {
                for (name, value) in fields {
                    walk(&format!("{path}.{name}"), value);
                }
            }
            Value::Array(items) if items.len() > 4 => println!("{path:<56} {} items", items.len()),
            Value::String(text) => println!("{path:<56} {text}"),
            other => println!("{path:<56} {other}"),
        }
    }
    walk(part, value);
}

/// Three decimals: more is noise.
pub(crate) fn rounded(number: f64) -> f64 {
    (number * 1000.0).round() / 1000.0
}

/// The median.
pub(crate) fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len() / 2).copied().unwrap_or(f64::NAN)
}
