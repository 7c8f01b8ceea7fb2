//! The numbers and the charts in the documents: `cargo xtask bench docs [PART...]`.
//!
//! ```text
//!  measure ──▶ docs/measured/*.json ──▶ regions of docs/*.md, between `<!-- measured: NAME -->` and `<!-- end -->`
//!                                  └──▶ docs/charts/*.svg (bench/charts)
//! ```
//!
//! Nobody edits a region: a rule compares each with what the measured data say.

use std::fmt::Write as _;
use std::fs;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use serde_json::Value;

use crate::command::{cargo, to_stderr};
use crate::mechanisms::{self, Summary};
use crate::traces::number;
use crate::workspace::Workspace;

const FOLDER: &str = "docs/measured";
const CHARTS: &str = "docs/charts";
const DOCUMENTS: [&str; 2] = ["docs/measurements.md", "docs/fragmentation.md"];
const START: &str = "<!-- measured: ";
const END: &str = "<!-- end -->";
/// A device so much larger than what is live is called hardly larger.
const HARDLY_LARGER: f64 = 1.02;

/// What is measured by one command, into one file.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum, Debug)]
pub(crate) enum Part {
    /// Nanoseconds, beside others: `cargo xtask bench alloc`
    Time,
    /// Memory, with each mechanism switched off: `cargo xtask bench mechanisms`
    Mechanisms,
}

impl Part {
    const fn file(self) -> &'static str {
        match self {
            Self::Time => "time.json",
            Self::Mechanisms => "mechanisms.json",
        }
    }

    fn measure(self, workspace: &Workspace) -> Result<String> {
        match self {
            Self::Time => {
                let arguments = crate::alloc_arguments(workspace, true, Vec::new())?;
                crate::comparison(workspace, "alloc", true, arguments).quiet_stdout()
            }
            Self::Mechanisms => {
                let found = to_stderr(|| mechanisms::measure(workspace, None))?;
                Ok(one_report_a_line(&found))
            }
        }
    }

    fn read(self, workspace: &Workspace) -> Result<Value> {
        let path = workspace.root.join(FOLDER).join(self.file());
        let text =
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        serde_json::from_str(&text).with_context(|| path.display().to_string())
    }
}

/// Measures `parts`, or all; with `draw` nothing. Then writes the documents and the charts.
pub(crate) fn write(workspace: &Workspace, parts: &[Part], draw: bool) -> Result<()> {
    let parts = match parts {
        [] if draw => &[],
        [] => Part::value_variants(),
        parts => parts,
    };
    let folder = workspace.root.join(FOLDER);
    fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    for part in parts {
        let measured = part.measure(workspace)?;
        fs::write(folder.join(part.file()), measured)?;
    }
    let data = Data::read(workspace)?;
    for document in DOCUMENTS {
        let path = workspace.root.join(document);
        let text = fs::read_to_string(&path).with_context(|| document.to_owned())?;
        let written = data
            .write_into(&text)
            .with_context(|| document.to_owned())?;
        fs::write(&path, written)?;
    }
    cargo(workspace)
        .args(["run", "--release", "--quiet", "--locked"])
        .args(["--manifest-path", "bench/charts/Cargo.toml"])
        .args(["--target-dir"])
        .args([workspace.target.join("bench-charts")])
        .args(["--", FOLDER, CHARTS])
        .run()
}

/// Every region says what the data say.
pub(crate) fn check(workspace: &Workspace) -> Result<()> {
    let data = Data::read(workspace)?;
    for document in DOCUMENTS {
        let text = fs::read_to_string(workspace.root.join(document))
            .with_context(|| document.to_owned())?;
        ensure!(
            data.write_into(&text)? == text,
            "{document} has other numbers than {FOLDER}: run `cargo xtask bench docs --draw`, or measure"
        );
    }
    Ok(())
}

/// Lists of reports with one on each line: short enough to be kept, and to see what has changed.
fn one_report_a_line(found: &Value) -> String {
    let mut text = "[".to_owned();
    for (at, entry) in found.as_array().into_iter().flatten().enumerate() {
        text += if at > 0 { ",\n{" } else { "\n{" };
        for (at, (key, value)) in entry.as_object().into_iter().flatten().enumerate() {
            text += if at > 0 { ",\n" } else { "\n" };
            let _ = write!(text, "  \"{key}\": ");
            match value.as_array() {
                Some(reports) => {
                    let lines: Vec<String> = reports.iter().map(Value::to_string).collect();
                    let _ = write!(text, "[\n    {}\n  ]", lines.join(",\n    "));
                }
                None => {
                    let _ = write!(text, "{value}");
                }
            }
        }
        text += "\n}";
    }
    text + "\n]\n"
}

/// What was measured.
struct Data {
    time: Value,
    mechanisms: Value,
}

impl Data {
    fn read(workspace: &Workspace) -> Result<Self> {
        Ok(Self {
            time: Part::Time.read(workspace)?,
            mechanisms: Part::Mechanisms.read(workspace)?,
        })
    }

    /// `text` with every region written anew.
    fn write_into(&self, text: &str) -> Result<String> {
        let mut written = String::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once(START) {
            let (name, after) = after.split_once(" -->").context("a mark does not end")?;
            let (_, after) = after
                .split_once(END)
                .with_context(|| format!("the region {name} does not end"))?;
            let region = self
                .region(name)
                .with_context(|| format!("the region {name}"))?;
            let _ = write!(
                written,
                "{before}{START}{name} -->\n{}\n{END}",
                region.trim_end()
            );
            rest = after;
        }
        Ok(written + rest)
    }

    fn region(&self, name: &str) -> Result<String> {
        match name {
            "errors avoided" => self.errors_avoided(),
            "memory saved" => self.memory_saved(),
            "nanoseconds" => self.nanoseconds(),
            "operations" => self.operations(),
            "mechanisms" => self.without(),
            "made-up traces" => self.made_up(),
            _ => anyhow::bail!("there is no such region"),
        }
    }

    /// The reports of all traces without a mechanism.
    fn without_one(&self, name: &str) -> Result<&Value> {
        let entries = self.mechanisms.as_array().context("a list is expected")?;
        let entry = entries.iter().find(|entry| entry["name"] == name);
        entry.with_context(|| format!("nothing was measured without {name:?}"))
    }

    fn reports(&self, name: &str, which: &str) -> Result<&Vec<Value>> {
        let reports = self.without_one(name)?[which].as_array();
        reports.with_context(|| format!("no reports of {which} traces without {name:?}"))
    }

    fn errors_avoided(&self) -> Result<String> {
        let builds = [
            "nothing",
            "one heap for all streams",
            "moving pages",
            "virtual memory",
        ];
        let mut table = "| trace | live at the peak | lastref | a heap for each stream | pages that stay | segments |\n\
                         |---|---:|---:|---:|---:|---:|\n"
            .to_owned();
        let mut complete = [0; 4];
        let traces = self.reports("nothing", "given")?;
        for (at, trace) in traces.iter().enumerate() {
            let live = number(trace, "peak_live_bytes")?;
            let _ = write!(table, "| {} | {:.2} GiB |", label(trace), gib(live));
            for (build, complete) in builds.iter().zip(&mut complete) {
                let ratio = number(&self.reports(build, "given")?[at], "smallest_over_live")?;
                *complete += usize::from(ratio <= HARDLY_LARGER);
                let _ = write!(table, " {ratio:.4} |");
            }
            table.push('\n');
        }
        let per_cent = (HARDLY_LARGER - 1.0) * 100.0;
        let counts = complete.map(|complete| format!(" {complete} of {} |", traces.len()));
        let _ = writeln!(
            table,
            "| **complete on a device {per_cent:.0} % larger than that** | |{}",
            counts.concat()
        );
        Ok(table)
    }

    fn memory_saved(&self) -> Result<String> {
        let builds = ["nothing", "the governor of waste", "virtual memory"];
        let mut table = "| trace | lastref | without the governor | segments | lastref saves |\n|---|---:|---:|---:|---:|\n".to_owned();
        let traces = self.reports("nothing", "given")?;
        for (at, trace) in traces.iter().enumerate() {
            let live = number(trace, "peak_live_bytes")?;
            let _ = write!(table, "| {} |", label(trace));
            let mut ratios = [0.0; 3];
            for (build, ratio) in builds.iter().zip(&mut ratios) {
                *ratio = number(&self.reports(build, "given")?[at], "reserved_over_live")?;
                let _ = write!(table, " {ratio:.4} |");
            }
            let _ = writeln!(table, " {:.2} GiB |", gib((ratios[2] - ratios[0]) * live));
        }
        for worst in [false, true] {
            let _ = write!(table, "| **{}** |", if worst { "worst" } else { "mean" });
            for build in builds {
                let of = Summary::of(self.without_one(build)?, "given", "reserved_over_live")?;
                let _ = write!(table, " {:.4} |", if worst { of.worst } else { of.mean });
            }
            table += " |\n";
        }
        Ok(table)
    }

    fn nanoseconds(&self) -> Result<String> {
        const PEERS: [&str; 4] = ["", "mimalloc_", "offset_allocator_", "ordered_sets_"];
        let mut table = "| | lastref | mimalloc | offset-allocator | ordered sets |\n|---|---:|---:|---:|---:|\n".to_owned();
        let mut row = |name: &str, value: &dyn Fn(&str) -> Option<f64>| {
            let cells = PEERS.map(|peer| match value(peer) {
                Some(ns) => format!(" {ns:.1} |"),
                None => " |".to_owned(),
            });
            let _ = writeln!(table, "| {name} |{}", cells.concat());
        };
        let time = &self.time;
        let sizes = keys(&time["hot_pair_ns"])?;
        for bytes in &sizes {
            let name = format!("pair, {}", size(*bytes));
            row(&name, &|peer| {
                let field = if peer.is_empty() {
                    "hot_pair_ns".to_owned()
                } else {
                    format!("{peer}hot_ns")
                };
                time[field][bytes.to_string()].as_f64()
            });
        }
        row("1000 live, random sizes", &|peer| {
            time[format!("{peer}churn_1000_ns")].as_f64()
        });
        for count in keys(&time["threads_ns"])? {
            let threads = if count == 1 {
                "1 thread".to_owned()
            } else {
                format!("{count} threads at once")
            };
            row(&format!("4 KiB, {threads}"), &|peer| {
                time[format!("{peer}threads_ns")][count.to_string()].as_f64()
            });
        }
        row("1 MiB, from stream to stream", &|peer| {
            if peer.is_empty() {
                time["hand_over_ns"].as_f64()
            } else {
                None
            }
        });
        row(
            "Python: `lastref.empty(1024, device=\"cuda\")`, and drop",
            &|peer| {
                if peer.is_empty() {
                    time["python_empty_ns"].as_f64()
                } else {
                    None
                }
            },
        );
        Ok(table)
    }

    fn operations(&self) -> Result<String> {
        let replayed = self.time["replay_ns"]
            .as_object()
            .context("no traces were replayed")?;
        let mut table = "| trace | ns an operation |\n|---|---:|\n".to_owned();
        let mut sum = 0.0;
        for (trace, ns) in replayed {
            let ns = ns.as_f64().context("a number is expected")?;
            sum += ns;
            let _ = writeln!(table, "| `{trace}` | {ns:.1} |");
        }
        let _ = writeln!(table, "| **mean** | {:.1} |", sum / replayed.len() as f64);
        Ok(table)
    }

    fn without(&self) -> Result<String> {
        let mut table = "| without | what happens instead | reserved over live, mean | worst | smallest device, mean | worst | device time | host time |\n\
                         |---|---|---:|---:|---:|---:|---:|---:|\n"
            .to_owned();
        for entry in self.mechanisms.as_array().into_iter().flatten() {
            let of = |field| Summary::of(entry, "given", field);
            let (reserved, smallest) = (of("reserved_over_live")?, of("smallest_over_live")?);
            let name = entry["name"].as_str().context("a mechanism has a name")?;
            let does = entry["does"].as_str().unwrap_or_default();
            let _ = writeln!(
                table,
                "| {name} | {does} | {:.4} | {:.4} | {:.4} | {:.4} | {:.0} ms | {:.0} ns |",
                reserved.mean,
                reserved.worst,
                smallest.mean,
                smallest.worst,
                of("device_microseconds")?.mean / 1e3,
                of("nanoseconds_per_operation")?.mean,
            );
        }
        Ok(table)
    }

    fn made_up(&self) -> Result<String> {
        let mut table = "| kind | operations | live at the peak | reserved over live | smallest device | ns an operation |\n\
                         |---|---:|---:|---:|---:|---:|\n"
            .to_owned();
        for report in self.reports("nothing", "made_up")? {
            let _ = writeln!(
                table,
                "| {} | {:.0} | {:.2} GiB | {:.4} | {:.4} | {:.0} |",
                label(report),
                number(report, "operations")?,
                gib(number(report, "peak_live_bytes")?),
                number(report, "reserved_over_live")?,
                number(report, "smallest_over_live")?,
                number(report, "nanoseconds_per_operation")?,
            );
        }
        let own = self.without_one("nothing")?;
        let mut worst = Vec::new();
        for (field, what) in [
            ("reserved_over_live", "reserved over live"),
            ("smallest_over_live", "the smallest device"),
            ("nanoseconds_per_operation", "time"),
        ] {
            worst.push(format!(
                "`{}` in {what}",
                Summary::of(own, "made_up", field)?.trace
            ));
        }
        let _ = writeln!(table, "\nThe worst: {}.", worst.join(", "));
        Ok(table)
    }
}

fn label(report: &Value) -> String {
    format!("`{}`", report["trace"].as_str().unwrap_or_default())
}

fn gib(bytes: f64) -> f64 {
    bytes / f64::from(1 << 30)
}

/// The keys of an object, as numbers in order.
fn keys(object: &Value) -> Result<Vec<u64>> {
    let object = object.as_object().context("an object is expected")?;
    let keys = object.keys().map(|key| key.parse::<u64>());
    let mut keys: Vec<u64> = keys.collect::<Result<_, _>>()?;
    keys.sort_unstable();
    Ok(keys)
}

fn size(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => format!("{} KiB", bytes >> 10),
        _ => format!("{} MiB", bytes >> 20),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn data() -> Data {
        Data {
            time: json!({"replay_ns": {"b": 30.0, "a": 20.06}}),
            mechanisms: json!([]),
        }
    }

    #[test]
    fn a_region_is_replaced_and_what_is_around_it_stays() {
        let text = "before\n<!-- measured: operations -->\nold\n<!-- end -->\nafter\n";
        let written = data().write_into(text).unwrap();
        let table = "| trace | ns an operation |\n|---|---:|\n| `a` | 20.1 |\n| `b` | 30.0 |\n| **mean** | 25.0 |\n";
        assert_eq!(
            written,
            format!("before\n<!-- measured: operations -->\n{table}<!-- end -->\nafter\n")
        );
        assert_eq!(
            data().write_into(&written).unwrap(),
            written,
            "nothing changes again"
        );
    }

    #[test]
    fn an_unknown_region_and_one_without_end_are_refused() {
        for text in [
            "<!-- measured: nonsense -->\n<!-- end -->",
            "<!-- measured: operations -->\n",
        ] {
            assert!(data().write_into(text).is_err(), "{text}");
        }
    }

    #[test]
    fn data_are_kept_with_a_report_on_each_line() {
        let data = json!([{"name": "x", "given": [{"a": 1}, {"a": 2}]}]);
        let text = one_report_a_line(&data);
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), data);
        assert!(text.contains("\n    {\"a\":1},\n    {\"a\":2}\n"), "{text}");
    }
}
