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
use crate::mechanisms::{self, Summary, row};
use crate::torch;
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
    /// Memory and nanoseconds of PyTorch's own allocator: `cargo xtask bench alloc --torch 2.15.0`
    Torch,
}

impl Part {
    const fn file(self) -> &'static str {
        match self {
            Self::Time => "time.json",
            Self::Mechanisms => "mechanisms.json",
            Self::Torch => "torch.json",
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
            Self::Torch => {
                let bench = to_stderr(|| {
                    torch::alloc::comparison(workspace, torch::VERSIONS[0], &[], true)
                })?;
                bench.quiet_stdout()
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
    torch: Value,
}

impl Data {
    fn read(workspace: &Workspace) -> Result<Self> {
        Ok(Self {
            time: Part::Time.read(workspace)?,
            mechanisms: Part::Mechanisms.read(workspace)?,
            torch: Part::Torch.read(workspace)?,
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
        let builds = ["nothing", "moving pages", "virtual memory"];
        let mut table = "| trace | live at the peak | lastref | pages that stay | segments |\n\
                         |---|---:|---:|---:|---:|\n"
            .to_owned();
        let mut complete = [0; 3];
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
        let mut table = "| trace | live at the peak | lastref | PyTorch, native | PyTorch, expandable segments | saved over native | over expandable |\n\
                         |---|---:|---:|---:|---:|---:|---:|\n"
            .to_owned();
        let mut sums = [0.0; 3];
        let mut worst = [0.0_f64; 3];
        let traces = self.reports("nothing", "given")?;
        for trace in traces {
            let live = number(trace, "peak_live_bytes")?;
            let name = trace["trace"].as_str().unwrap_or_default();
            let theirs = |who: &str| {
                let report = &self.torch["replays"][name][who];
                number(report, "reserved_over_live").with_context(|| format!("{name}, {who}"))
            };
            let ours = number(trace, "reserved_over_live")?;
            let ratios = [ours, theirs("torch_native")?, theirs("torch_expandable")?];
            for (at, ratio) in ratios.iter().enumerate() {
                sums[at] += ratio;
                worst[at] = worst[at].max(*ratio);
            }
            let ratios = ratios.map(|ratio| format!(" {ratio:.4} |")).concat();
            let saved = |ratio: f64| gib((ratio - ours) * live);
            let _ = writeln!(
                table,
                "| {} | {:.2} GiB |{ratios} {:.2} GiB | {:.2} GiB |",
                label(trace),
                gib(live),
                saved(theirs("torch_native")?),
                saved(theirs("torch_expandable")?),
            );
        }
        let means = sums.map(|sum| format!(" {:.4} |", sum / traces.len() as f64));
        let worst = worst.map(|worst| format!(" {worst:.4} |"));
        let _ = writeln!(table, "| **mean** | |{} | |", means.concat());
        let _ = writeln!(table, "| **worst** | |{} | |", worst.concat());
        Ok(table)
    }

    fn nanoseconds(&self) -> Result<String> {
        // By the prefix of their fields, and where they are.
        let peers: [(&str, &Value); 6] = [
            ("", &self.time),
            ("torch_native_", &self.torch),
            ("torch_expandable_", &self.torch),
            ("mimalloc_", &self.time),
            ("offset_allocator_", &self.time),
            ("ordered_sets_", &self.time),
        ];
        let mut table = "| | lastref | PyTorch, native | PyTorch, expandable | mimalloc | offset-allocator | ordered sets |\n\
                         |---|---:|---:|---:|---:|---:|---:|\n"
            .to_owned();
        let mut row = |name: &str, value: &dyn Fn(&str, &Value) -> Option<f64>| {
            let cells = peers.map(|(peer, data)| match value(peer, data) {
                Some(ns) => format!(" {ns:.1} |"),
                None => " |".to_owned(),
            });
            let _ = writeln!(table, "| {name} |{}", cells.concat());
        };
        for bytes in keys(&self.time["hot_pair_ns"])? {
            row(&format!("pair, {}", size(bytes)), &|peer, data| {
                let field = if peer.is_empty() {
                    "hot_pair_ns".to_owned()
                } else {
                    format!("{peer}hot_ns")
                };
                data[field][bytes.to_string()].as_f64()
            });
        }
        row("1000 live, random sizes", &|peer, data| {
            data[format!("{peer}churn_1000_ns")].as_f64()
        });
        for count in keys(&self.time["threads_ns"])? {
            let threads = if count == 1 {
                "1 thread".to_owned()
            } else {
                format!("{count} threads at once")
            };
            row(&format!("4 KiB, {threads}"), &|peer, data| {
                data[format!("{peer}threads_ns")][count.to_string()].as_f64()
            });
        }
        row("1 MiB, from stream to stream", &|peer, data| {
            data["hand_over_ns"].as_f64().filter(|_| peer.is_empty())
        });
        row(
            "Python's `empty(1024, device=\"cuda\")`, and drop",
            &|peer, data| match peer {
                "" => data["python_empty_ns"].as_f64(),
                "torch_native_" => data["torch_empty_ns"].as_f64(),
                _ => None,
            },
        );
        Ok(table)
    }

    fn operations(&self) -> Result<String> {
        let replayed = self.time["replay_ns"]
            .as_object()
            .context("no traces were replayed")?;
        let mut table =
            "| trace | lastref | PyTorch, native | PyTorch, expandable |\n|---|---:|---:|---:|\n"
                .to_owned();
        let mut sums = [0.0; 3];
        for (trace, ns) in replayed {
            let theirs = |who: &str| {
                let report = &self.torch["replays"][trace][who];
                number(report, "nanoseconds_per_operation")
            };
            let times = [
                ns.as_f64().context("a number is expected")?,
                theirs("torch_native")?,
                theirs("torch_expandable")?,
            ];
            for (sum, time) in sums.iter_mut().zip(times) {
                *sum += time;
            }
            let cells = times.map(|time| format!(" {time:.1} |"));
            let _ = writeln!(table, "| `{trace}` |{}", cells.concat());
        }
        let means = sums.map(|sum| format!(" {:.1} |", sum / replayed.len() as f64));
        let _ = writeln!(table, "| **mean** |{}", means.concat());
        Ok(table)
    }

    fn without(&self) -> Result<String> {
        let mut table = "| without | what happens instead | reserved over live, mean | worst | smallest device, mean | worst | device time | host time |\n\
                         |---|---|---:|---:|---:|---:|---:|---:|\n"
            .to_owned();
        for entry in self.mechanisms.as_array().into_iter().flatten() {
            let [reserved, most, smallest, largest, device, host] = row(entry)?;
            let name = entry["name"].as_str().context("a mechanism has a name")?;
            let does = entry["does"].as_str().unwrap_or_default();
            let _ = writeln!(
                table,
                "| {name} | {does} | {reserved:.4} | {most:.4} | {smallest:.4} | {largest:.4} | {device:.0} ms | {host:.0} ns |",
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

    fn theirs(native: f64, expandable: f64) -> Value {
        json!({
            "torch_native": {"nanoseconds_per_operation": native},
            "torch_expandable": {"nanoseconds_per_operation": expandable},
        })
    }

    fn data() -> Data {
        Data {
            time: json!({"replay_ns": {"a": 20.06, "b": 30.0}}),
            mechanisms: json!([]),
            torch: json!({"replays": {
                "a": theirs(200.0, 300.0),
                "b": theirs(400.0, 500.0),
            }}),
        }
    }

    #[test]
    fn a_region_is_replaced_and_what_is_around_it_stays() {
        let text = "before\n<!-- measured: operations -->\nold\n<!-- end -->\nafter\n";
        let written = data().write_into(text).unwrap();
        let table = "| trace | lastref | PyTorch, native | PyTorch, expandable |\n|---|---:|---:|---:|\n\
                     | `a` | 20.1 | 200.0 | 300.0 |\n| `b` | 30.0 | 400.0 | 500.0 |\n| **mean** | 25.0 | 300.0 | 400.0 |\n";
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
