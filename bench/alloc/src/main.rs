//! lastref's allocator beside others, in one run: `cargo xtask bench alloc [--json] [TRACE...]`.
//!
//! What is measured, and how, is in the crate `lastref-bench`; here are more peers and more rows. With
//! `--python PROGRAM`, a Python that has lastref installed, its `empty` is a row too.

mod peers;

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use lastref_alloc::CachingAllocator;
use lastref_alloc::replay::{ReplayOptions, replay};
use lastref_alloc::sim::{SimDevice, SimOptions};
use lastref_bench::{Lastref, Limits, Measured, Measures, Mimalloc, Peer, Work, work};
use lastref_snapshot::trace::Trace;
use serde_json::{Value, json};

use peers::{Offset, Ordered};

const LIMITS: Limits = Limits {
    rounds: 5,
    time: Duration::from_secs(300),
};
const PEERS: [&str; 4] = [Lastref::NAME, Mimalloc::NAME, Offset::NAME, Ordered::NAME];
/// The device of a replay, or twice the peak of live bytes.
const REPLAY_CAPACITY: u64 = 80 << 30;

/// A row of the table.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Row {
    Work(Work),
    HandOver,
    PythonEmpty,
    Replay(String),
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Work(work) => work.fmt(f),
            Self::HandOver => f.write_str("1 MiB, from stream to stream"),
            Self::PythonEmpty => f.write_str("Python: lastref.empty(1024), and drop"),
            Self::Replay(trace) => write!(f, "operation of {trace}"),
        }
    }
}

type Key = (Row, &'static str);

fn main() -> Result<()> {
    let (mut as_json, mut python, mut traces) = (false, None, Vec::new());
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--json" => as_json = true,
            "--python" => python = Some(arguments.next().context("--python names a program")?),
            flag if flag.starts_with('-') => {
                bail!("unknown flag {flag}, there are --json and --python")
            }
            path => traces.push(PathBuf::from(path)),
        }
    }
    let traces: Vec<(String, Trace)> = traces
        .iter()
        .map(|path| read(path))
        .collect::<Result<_>>()?;

    let mut measures = Measures::new();
    for work in Work::all() {
        add::<Lastref>(&mut measures, work);
        add::<Mimalloc>(&mut measures, work);
        add::<Offset>(&mut measures, work);
        add::<Ordered>(&mut measures, work);
    }
    measures.add((Row::HandOver, Lastref::NAME), || Ok(work::hand_over()?));
    if let Some(python) = &python {
        measures.add((Row::PythonEmpty, Lastref::NAME), || python_empty(python));
    }
    for (name, trace) in &traces {
        let key = (Row::Replay(name.clone()), Lastref::NAME);
        measures.add(key, || replayed(trace).with_context(|| name.clone()));
    }
    let measured = measures.run(LIMITS, |_| {})?;
    if as_json {
        println!("{:#}", json(&measured));
    } else {
        print(&measured);
    }
    Ok(())
}

fn add<P: Peer>(measures: &mut Measures<'_, Key, anyhow::Error>, work: Work) {
    let key = (Row::Work(work), P::NAME);
    measures.add(key, move || Ok(work.measure::<P>()?));
}

fn read(path: &Path) -> Result<(String, Trace)> {
    let context = || format!("cannot read the trace {}", path.display());
    let trace = Trace::read(File::open(path).with_context(context)?).with_context(context)?;
    let name = path.file_name().unwrap_or(path.as_os_str());
    let name = name.to_string_lossy();
    Ok((name.split('.').next().unwrap_or(&name).to_owned(), trace))
}

/// Nanoseconds an operation, device time apart.
fn replayed(trace: &Trace) -> Result<f64> {
    let capacity = (trace.peak_live_bytes() * 2).max(REPLAY_CAPACITY);
    let allocator = CachingAllocator::new(SimDevice::new(SimOptions::new(capacity).with_contents(false))?);
    let report = replay(&allocator, trace, ReplayOptions::default())?;
    ensure!(
        report.out_of_memory.is_none(),
        "out of memory on {capacity} bytes"
    );
    Ok(report.nanoseconds_per_operation())
}

/// Nanoseconds that Python takes for a tensor of 1024 numbers on the device, and for letting it go.
fn python_empty(python: &str) -> Result<f64> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("empty.py");
    let output = Command::new(python)
        .arg(&script)
        .env("LASTREF_SIM", "8GiB")
        .env("PYTHONSAFEPATH", "1")
        .output()
        .with_context(|| format!("cannot start {python}"))?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(
        output.status.success(),
        "{python} {} ended with {}: {}",
        script.display(),
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    said.trim()
        .parse()
        .with_context(|| format!("printed {said:?}"))
}

fn print(measured: &Measured<Key>) {
    let mut rows: BTreeMap<&Row, BTreeMap<&str, f64>> = BTreeMap::new();
    for ((row, peer), ns) in &measured.medians {
        rows.entry(row).or_default().insert(peer, *ns);
    }
    println!(
        "{:<44}{}",
        format!("nanoseconds, medians of {} rounds", measured.rounds),
        PEERS.map(|peer| format!("{peer:>18}")).concat()
    );
    for (row, by_peer) in rows {
        let cells = PEERS.map(|peer| match by_peer.get(peer) {
            Some(ns) => format!("{ns:>18.1}"),
            None => format!("{:>18}", ""),
        });
        println!("{:<44}{}", row.to_string(), cells.concat());
    }
}

fn json(measured: &Measured<Key>) -> Value {
    let get = |row: Row, peer| measured.medians.get(&(row, peer)).copied();
    let hot = |peer| {
        let pairs = work::SIZES.map(|bytes| {
            let ns = get(Row::Work(Work::HotPair(bytes)), peer);
            (bytes.to_string(), json!(ns))
        });
        Value::Object(pairs.into_iter().collect())
    };
    let churn = |peer| get(Row::Work(Work::Churn), peer);
    let threads = |peer| {
        let pairs = work::THREADS.map(|count| {
            let ns = get(Row::Work(Work::Threads(count)), peer);
            (count.to_string(), json!(ns))
        });
        Value::Object(pairs.into_iter().collect())
    };
    let replayed = measured
        .medians
        .iter()
        .filter_map(|((row, _), ns)| match row {
            Row::Replay(trace) => Some((trace.clone(), json!(ns))),
            _ => None,
        });
    json!({
        "rounds": measured.rounds,
        "hot_pair_ns": hot(Lastref::NAME),
        "mimalloc_hot_ns": hot(Mimalloc::NAME),
        "offset_allocator_hot_ns": hot(Offset::NAME),
        "ordered_sets_hot_ns": hot(Ordered::NAME),
        "churn_1000_ns": churn(Lastref::NAME),
        "mimalloc_churn_1000_ns": churn(Mimalloc::NAME),
        "offset_allocator_churn_1000_ns": churn(Offset::NAME),
        "ordered_sets_churn_1000_ns": churn(Ordered::NAME),
        "threads_ns": threads(Lastref::NAME),
        "mimalloc_threads_ns": threads(Mimalloc::NAME),
        "offset_allocator_threads_ns": threads(Offset::NAME),
        "ordered_sets_threads_ns": threads(Ordered::NAME),
        "hand_over_ns": get(Row::HandOver, Lastref::NAME),
        "python_empty_ns": get(Row::PythonEmpty, Lastref::NAME),
        "replay_ns": Value::Object(replayed.collect()),
    })
}
