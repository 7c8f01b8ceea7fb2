//! lastref's allocator beside PyTorch's own, native and with expandable segments, in one run:
//! `cargo xtask bench alloc --torch ENV [--json] [TRACE...]`.
//!
//! PyTorch runs in processes of its own, on a device that the tests' stand-in plays: `alloc.cpp` for its
//! allocator and `empty.py` for its Python. A row is measured in rounds; in each round everyone has a
//! turn, beginning with another one each time, so that whatever else the machine does meets them all. A
//! result is the median of the rounds. Times are host time: the device's own are left out, and are what
//! its calls would cost by one latency table.

mod replayed;
mod work;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use lastref_bench::work::{SIZES, THREADS};
use lastref_snapshot::trace::Trace;
use serde_json::{Value, json};

use replayed::Replayed;

const ROUNDS: usize = 5;
/// How many times faster than native lastref must be, for [`SIZES`] up to this one.
const FASTER: (f64, u64) = (8.0, 128 << 10);
/// The most that `lastref.empty` may take, in nanoseconds, and how many times faster it must be.
const PYTHON: (f64, f64) = (500.0, 3.0);

/// Who is measured, in the order of the columns.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Who {
    Lastref,
    Native,
    Expandable,
}

const ALL: [Who; 3] = [Who::Lastref, Who::Native, Who::Expandable];

impl Who {
    fn name(self) -> &'static str {
        match self {
            Self::Lastref => "lastref",
            Self::Native => "torch native",
            Self::Expandable => "expandable",
        }
    }

    /// Its name in JSON, before a field's.
    fn key(self) -> &'static str {
        match self {
            Self::Lastref => "lastref",
            Self::Native => "torch_native",
            Self::Expandable => "torch_expandable",
        }
    }
}

/// Where PyTorch is found.
struct Torch {
    /// The folder of the stand-in and of `torch_alloc`.
    standin: PathBuf,
    /// A Python that has torch and lastref.
    python: PathBuf,
}

impl Torch {
    /// A program that finds the stand-in for CUDA's libraries.
    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command
            .env("LD_LIBRARY_PATH", &self.standin)
            .env(
                "LD_PRELOAD",
                self.standin.join("liblastref_standin_cudart.so"),
            )
            .env_remove("PYTORCH_CUDA_ALLOC_CONF")
            .env_remove("PYTORCH_ALLOC_CONF");
        command
    }

    /// What `torch_alloc` says of a work.
    fn alloc(&self, who: Who, capacity: u64, arguments: &[&str]) -> Result<Value> {
        let mut command = self.command(&self.standin.join("torch_alloc"));
        command
            .args(arguments)
            .env("LASTREF_STANDIN_MIB", (capacity >> 20).to_string());
        if who == Who::Expandable {
            command.env("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True");
        }
        answer(command)
    }
}

/// The JSON that a program writes.
fn answer(mut command: Command) -> Result<Value> {
    let output = command
        .output()
        .with_context(|| format!("cannot start {command:?}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(
        output.status.success(),
        "{command:?} ended with {}: {text}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    serde_json::from_str(&text).with_context(|| format!("{command:?} printed no JSON: {text}"))
}

fn number(report: &Value, field: &str) -> Result<f64> {
    report[field]
        .as_f64()
        .with_context(|| format!("no number `{field}` in {report}"))
}

fn main() -> Result<()> {
    let mut json = false;
    let (mut standin, mut python) = (None, None);
    let mut traces = Vec::new();
    let mut arguments = std::env::args_os().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.to_str() {
            Some("--json") => json = true,
            Some("--standin") => standin = arguments.next(),
            Some("--python") => python = arguments.next(),
            Some(flag) if flag.starts_with('-') => bail!("unknown flag {flag}"),
            _ => traces.push(PathBuf::from(argument)),
        }
    }
    let torch = Torch {
        standin: standin.context("no --standin FOLDER")?.into(),
        python: python.context("no --python PROGRAM")?.into(),
    };
    let results = Results::measure(&torch, &traces)?;
    if json {
        println!("{:#}", results.json());
    } else {
        print!("{}", results.tables());
    }
    Ok(())
}

/// Nanoseconds of each.
type Row = BTreeMap<Who, f64>;

struct Results {
    version: String,
    hot: BTreeMap<u64, Row>,
    churn: Row,
    threads: BTreeMap<usize, Row>,
    replayed: BTreeMap<String, BTreeMap<Who, Replayed>>,
    /// `lastref.empty` and `torch.empty`.
    python: (f64, f64),
}

impl Results {
    fn measure(torch: &Torch, traces: &[PathBuf]) -> Result<Self> {
        let row = |ours: &dyn Fn() -> f64, work: &[&str]| {
            rotated(|who| match who {
                Who::Lastref => Ok(ours()),
                _ => number(&torch.alloc(who, 32 << 30, work)?, "nanoseconds"),
            })
        };
        let mut hot = BTreeMap::new();
        for bytes in SIZES {
            let measured = row(&|| work::hot(bytes), &["hot", &bytes.to_string()])?;
            hot.insert(bytes, measured);
        }
        let churn = row(&work::churn, &["churn"])?;
        let mut threads = BTreeMap::new();
        for count in THREADS {
            let measured = row(&|| work::threads(count), &["threads", &count.to_string()])?;
            threads.insert(count, measured);
        }
        let mut replayed = BTreeMap::new();
        for path in traces {
            replayed.insert(name(path), replay(torch, path)?);
        }
        let mut empty = torch.command(&torch.python);
        empty
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("empty.py"))
            .env("LASTREF_SIM", "8GiB")
            .env("PYTHONSAFEPATH", "1");
        let empty = answer(empty)?;
        Ok(Self {
            version: empty["torch"].as_str().unwrap_or_default().to_owned(),
            hot,
            churn,
            threads,
            replayed,
            python: (
                number(&empty, "python_empty_ns")?,
                number(&empty, "torch_empty_ns")?,
            ),
        })
    }
}

fn name(path: &Path) -> String {
    let file = path
        .file_name()
        .unwrap_or(path.as_os_str())
        .to_string_lossy();
    file.split('.').next().unwrap_or(&file).to_owned()
}

/// Measures all in rounds: the medians.
fn rotated(mut measure: impl FnMut(Who) -> Result<f64>) -> Result<Row> {
    let mut samples: BTreeMap<Who, Vec<f64>> = BTreeMap::new();
    for round in 0..ROUNDS {
        for turn in 0..ALL.len() {
            let who = ALL[(turn + round) % ALL.len()];
            samples.entry(who).or_default().push(measure(who)?);
        }
    }
    let medians = samples.into_iter().map(|(who, mut samples)| {
        samples.sort_by(f64::total_cmp);
        (who, samples[samples.len() / 2])
    });
    Ok(medians.collect())
}

/// One trace through each. Only the times differ between rounds.
fn replay(torch: &Torch, path: &Path) -> Result<BTreeMap<Who, Replayed>> {
    let context = || format!("cannot replay {}", path.display());
    let trace = Trace::read(File::open(path).with_context(context)?).with_context(context)?;
    let operations = torch.standin.join("operations");
    replayed::write(&trace, &operations)?;
    let work = operations.to_string_lossy();
    let mut last = BTreeMap::new();
    let times = rotated(|who| {
        let replayed = match who {
            Who::Lastref => replayed::lastref(&trace)?,
            _ => {
                let capacity = replayed::capacity(&trace);
                replayed::torch(&torch.alloc(who, capacity, &["replay", &work])?)?
            }
        };
        let nanoseconds = replayed.nanoseconds;
        last.insert(who, replayed);
        Ok(nanoseconds)
    })
    .with_context(context)?;
    for (who, replayed) in &mut last {
        replayed.nanoseconds = times[who];
    }
    std::fs::remove_file(&operations)?;
    Ok(last)
}

fn ratio(row: &Row, who: Who) -> f64 {
    row[&who] / row[&Who::Lastref]
}

impl Results {
    /// What must hold, how near it is, and whether it does.
    fn checks(&self) -> Vec<(String, String, bool)> {
        let (faster, up_to) = FASTER;
        let small = self.hot.range(..=up_to);
        let least = small
            .map(|(_, row)| ratio(row, Who::Native))
            .fold(f64::INFINITY, f64::min);
        let churn = ratio(&self.churn, Who::Native);
        let mut checks = vec![
            (
                format!(
                    "hot pair up to {}: {faster} times faster than native",
                    size(up_to)
                ),
                format!("{least:.1} times at the least"),
                least >= faster,
            ),
            (
                format!("1000 live, random sizes: {faster} times faster than native"),
                format!("{churn:.1} times"),
                churn >= faster,
            ),
        ];
        if !self.replayed.is_empty() {
            let worse: Vec<String> = self
                .replayed
                .iter()
                .filter_map(|(name, by)| {
                    let (ours, theirs) = (&by[&Who::Lastref], &by[&Who::Expandable]);
                    let more = ours.device_microseconds - theirs.device_microseconds;
                    (more > 0.0).then(|| format!("{name} {:+.1} ms", more / 1e3))
                })
                .collect();
            let found = if worse.is_empty() {
                "on each of them".to_owned()
            } else {
                format!("not on {}", worse.join(", "))
            };
            checks.push((
                "device time of each trace: at most that of expandable segments".to_owned(),
                found,
                worse.is_empty(),
            ));
        }
        let (ours, theirs) = self.python;
        let (most, times) = PYTHON;
        checks.push((
            format!("lastref.empty: at most {most} ns, and {times} times faster than torch.empty"),
            format!("{ours:.0} ns, {:.1} times", theirs / ours),
            ours <= most && theirs / ours >= times,
        ));
        checks
    }

    fn rows(&self) -> Vec<(String, &Row)> {
        let mut rows = Vec::new();
        for (bytes, row) in &self.hot {
            rows.push((format!("alloc and free, {}", size(*bytes)), row));
        }
        rows.push(("1000 live, random sizes".to_owned(), &self.churn));
        for (count, row) in &self.threads {
            rows.push((format!("alloc and free, {count} threads at once"), row));
        }
        rows
    }

    fn tables(&self) -> String {
        let mut out = String::new();
        self.write(&mut out).expect("a string takes all");
        out
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        let [ours, native, expandable] = ALL.map(Who::name);
        writeln!(out, "host nanoseconds, beside torch {}", self.version)?;
        writeln!(
            out,
            "{:<38}{ours:>10}{native:>14}{expandable:>12}{:>22}",
            "", "times ours"
        )?;
        for (name, row) in self.rows() {
            let [ours, native, expandable] = ALL.map(|who| row[&who]);
            let (times, other) = (native / ours, expandable / ours);
            writeln!(
                out,
                "{name:<38}{ours:>10.1}{native:>14.1}{expandable:>12.1}{times:>14.1}{other:>8.1}"
            )?;
        }
        let (ours, theirs) = self.python;
        writeln!(
            out,
            "{:<38}{ours:>10.0}{theirs:>14.0}{:>12}{:>14.1}",
            "Python: empty(1024, device=\"cuda\")",
            "",
            theirs / ours
        )?;
        if !self.replayed.is_empty() {
            self.write_replayed(out)?;
        }
        writeln!(
            out,
            "\nHost time on stand-in devices; a step that waits for the GPU may not change. Device time is what the\n\
             device's calls cost by the table of an A100: of a handle, by its pages of 2 MiB, which is what the\n\
             figures were published for; the last column has a handle cost what one page does, whatever its size.\n"
        )?;
        for (what, found, holds) in self.checks() {
            let holds = if holds { "holds" } else { "FAILS" };
            writeln!(out, "{holds}  {what}: {found}")?;
        }
        Ok(())
    }

    fn write_replayed(&self, out: &mut String) -> std::fmt::Result {
        writeln!(
            out,
            "\n{:<44}{:>10}{:>11}{:>13}{:>11}{:>15}",
            "traces", "reserved", "ns an", "device", "device ms", "ms, if a handle"
        )?;
        writeln!(
            out,
            "{:<44}{:>10}{:>11}{:>13}{:>11}{:>15}",
            "", "over live", "operation", "allocations", "", "cost as a page"
        )?;
        for (name, by) in &self.replayed {
            for (who, replayed) in by {
                let name = if *who == Who::Lastref { name } else { "" };
                write!(
                    out,
                    "{name:<30}{:<14}{:>10.4}{:>11.1}{:>13}{:>11.1}{:>15.1}",
                    who.name(),
                    replayed.reserved_over_live,
                    replayed.nanoseconds,
                    replayed.device_allocations,
                    replayed.device_microseconds / 1e3,
                    replayed.device_microseconds_by_call / 1e3,
                )?;
                match replayed.out_of_memory {
                    None => writeln!(out)?,
                    Some(operation) => writeln!(out, "  out of memory at operation {operation}")?,
                }
            }
        }
        Ok(())
    }

    fn json(&self) -> Value {
        fn of<K: ToString>(rows: &BTreeMap<K, Row>, who: Who) -> Value {
            let pairs = rows
                .iter()
                .map(|(key, row)| (key.to_string(), json!(row[&who])));
            Value::Object(pairs.collect())
        }
        let replays = self.replayed.iter().map(|(name, by)| {
            let by = by
                .iter()
                .map(|(who, replayed)| (who.key().to_owned(), replayed.json()));
            (name.clone(), Value::Object(by.collect()))
        });
        let checks = self
            .checks()
            .into_iter()
            .map(|(what, found, holds)| json!({"what": what, "found": found, "holds": holds}));
        let mut all = json!({
            "torch": self.version,
            "hot_pair_ns": of(&self.hot, Who::Lastref),
            "churn_1000_ns": self.churn[&Who::Lastref],
            "threads_ns": of(&self.threads, Who::Lastref),
            "replays": Value::Object(replays.collect()),
            "python_empty_ns": self.python.0,
            "torch_empty_ns": self.python.1,
            "checks": checks.collect::<Vec<_>>(),
        });
        for who in [Who::Native, Who::Expandable] {
            let key = who.key();
            all[format!("{key}_hot_ns")] = of(&self.hot, who);
            all[format!("{key}_churn_1000_ns")] = json!(self.churn[&who]);
            all[format!("{key}_threads_ns")] = of(&self.threads, who);
        }
        all
    }
}

fn size(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => format!("{} KiB", bytes >> 10),
        _ => format!("{} MiB", bytes >> 20),
    }
}
