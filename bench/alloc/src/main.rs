//! lastref's allocator beside others, in one run: `cargo xtask bench alloc [--json] [TRACE...]`.
//!
//! A row is measured in rounds; in each round every implementation has its turn, beginning with
//! another one each time, so that whatever else the machine does meets them all. A result is the
//! median of the rounds. Times are host time on a simulated device: the device's own are left out.

mod peers;
mod work;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use lastref_snapshot::trace::Trace;
use serde_json::{Value, json};

use peers::{Lastref, Mimalloc, Offset, Ordered, Peer};

const ROUNDS: usize = 5;
const SIZES: [u64; 9] = [
    512,
    4 << 10,
    64 << 10,
    128 << 10,
    256 << 10,
    1 << 20,
    4 << 20,
    16 << 20,
    64 << 20,
];
const THREADS: [usize; 3] = [1, 2, 4];

/// What every peer took for one work, in nanoseconds: the median of the rounds.
type Row = BTreeMap<&'static str, f64>;
type Measure<'a> = (&'static str, Box<dyn Fn() -> f64 + 'a>);

fn main() -> Result<()> {
    let mut json = false;
    let mut traces = Vec::new();
    for argument in std::env::args().skip(1) {
        match argument.as_str() {
            "--json" => json = true,
            flag if flag.starts_with('-') => bail!("unknown flag {flag}, there is --json"),
            path => traces.push(PathBuf::from(path)),
        }
    }
    let results = measure(&traces)?;
    if json {
        println!("{:#}", results.json());
    } else {
        results.print();
    }
    Ok(())
}

struct Results {
    hot: BTreeMap<u64, Row>,
    churn: Row,
    threads: BTreeMap<usize, Row>,
    hand_over: Row,
    replayed: BTreeMap<String, Row>,
}

macro_rules! everywhere {
    ($work:ident $(, $argument:expr)?) => {
        rotated(&[
            (Lastref::NAME, Box::new(|| work::$work::<Lastref>($($argument)?))),
            (Mimalloc::NAME, Box::new(|| work::$work::<Mimalloc>($($argument)?))),
            (Offset::NAME, Box::new(|| work::$work::<Offset>($($argument)?))),
            (Ordered::NAME, Box::new(|| work::$work::<Ordered>($($argument)?))),
        ])
    };
}

fn measure(traces: &[PathBuf]) -> Result<Results> {
    let hot = SIZES.map(|bytes| (bytes, everywhere!(hot_pair, bytes)));
    let threads = THREADS.map(|count| (count, everywhere!(threads, count)));
    let mut replayed = BTreeMap::new();
    for path in traces {
        let trace = read(path)?;
        let name = path.file_name().unwrap_or(path.as_os_str());
        let name = name.to_string_lossy();
        let name = name.split('.').next().unwrap_or(&name).to_owned();
        let row = rotated(&[(Lastref::NAME, Box::new(|| work::replayed(&trace)))]);
        replayed.insert(name, row);
    }
    Ok(Results {
        hot: hot.into(),
        churn: everywhere!(churn),
        threads: threads.into(),
        hand_over: rotated(&[(Lastref::NAME, Box::new(work::hand_over))]),
        replayed,
    })
}

fn read(path: &Path) -> Result<Trace> {
    let context = || format!("cannot read the trace {}", path.display());
    let file = File::open(path).with_context(context)?;
    Trace::read(file).with_context(context)
}

/// Measures one row in rounds.
fn rotated(measures: &[Measure<'_>]) -> Row {
    let mut samples = vec![Vec::new(); measures.len()];
    for round in 0..ROUNDS {
        for turn in 0..measures.len() {
            let at = (turn + round) % measures.len();
            samples[at].push(measures[at].1());
        }
    }
    let medians = samples.into_iter().map(|mut samples| {
        samples.sort_by(f64::total_cmp);
        samples[ROUNDS / 2]
    });
    measures
        .iter()
        .map(|(name, _)| *name)
        .zip(medians)
        .collect()
}

impl Results {
    fn rows(&self) -> Vec<(String, &Row)> {
        let size = |bytes: u64| match bytes {
            0..1024 => format!("{bytes} B"),
            1024..1_048_576 => format!("{} KiB", bytes >> 10),
            _ => format!("{} MiB", bytes >> 20),
        };
        let hot = self.hot.iter();
        let mut rows: Vec<_> = hot
            .map(|(bytes, row)| (format!("hot pair, {}", size(*bytes)), row))
            .collect();
        rows.push(("1000 live, random sizes".to_owned(), &self.churn));
        let threads = self.threads.iter();
        rows.extend(
            threads.map(|(count, row)| (format!("hot pair, {count} threads at once"), row)),
        );
        rows.push(("pair, from stream to stream".to_owned(), &self.hand_over));
        let replayed = self.replayed.iter();
        rows.extend(replayed.map(|(name, row)| (format!("operation of {name}"), row)));
        rows
    }

    fn print(&self) {
        let peers = [Lastref::NAME, Mimalloc::NAME, Offset::NAME, Ordered::NAME];
        println!(
            "{:<44}{}",
            "nanoseconds",
            peers.map(|peer| format!("{peer:>18}")).concat()
        );
        for (name, row) in self.rows() {
            let cells = peers.map(|peer| match row.get(peer) {
                Some(ns) => format!("{ns:>18.1}"),
                None => format!("{:>18}", ""),
            });
            println!("{name:<44}{}", cells.concat());
        }
    }

    fn json(&self) -> Value {
        fn of<K: ToString>(rows: &BTreeMap<K, Row>, peer: &str) -> Value {
            let pairs = rows
                .iter()
                .map(|(key, row)| (key.to_string(), json!(row.get(peer))));
            Value::Object(pairs.collect())
        }
        json!({
            "hot_pair_ns": of(&self.hot, Lastref::NAME),
            "mimalloc_hot_ns": of(&self.hot, Mimalloc::NAME),
            "offset_allocator_hot_ns": of(&self.hot, Offset::NAME),
            "ordered_sets_hot_ns": of(&self.hot, Ordered::NAME),
            "churn_1000_ns": self.churn.get(Lastref::NAME),
            "mimalloc_churn_1000_ns": self.churn.get(Mimalloc::NAME),
            "offset_allocator_churn_1000_ns": self.churn.get(Offset::NAME),
            "ordered_sets_churn_1000_ns": self.churn.get(Ordered::NAME),
            "threads_ns": of(&self.threads, Lastref::NAME),
            "mimalloc_threads_ns": of(&self.threads, Mimalloc::NAME),
            "hand_over_ns": self.hand_over.get(Lastref::NAME),
            "replay_ns": of(&self.replayed, Lastref::NAME),
        })
    }
}
