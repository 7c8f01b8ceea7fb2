//! `lastref bench`: what an allocation costs on this host, beside mimalloc.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::time::Duration;

use anstyle::Style;
use anyhow::anyhow;
use clap::Args;
use lastref::alloc::DeviceError;
use lastref_bench::{Lastref, Limits, Measured, Measures, Mimalloc, Peer, Work};
use serde::Serialize;

use crate::Failure;
use crate::progress::Progress;

/// More rounds would change little.
const ROUNDS: usize = 9;

#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Stop after so many seconds; one round is always measured
    #[arg(long, value_name = "N", default_value_t = 30)]
    seconds: u64,

    /// Print one line of JSON
    #[arg(long)]
    json: bool,
}

/// What `--json` prints: nanoseconds. Keys of the maps are bytes, and numbers of threads.
#[derive(Serialize)]
struct Json {
    hot_pair_ns: BTreeMap<u64, f64>,
    mimalloc_hot_ns: BTreeMap<u64, f64>,
    churn_1000_ns: f64,
    mimalloc_churn_1000_ns: f64,
    threads_ns: BTreeMap<usize, f64>,
    mimalloc_threads_ns: BTreeMap<usize, f64>,
    rounds: usize,
}

type Key = (Work, &'static str);

pub(crate) fn run(arguments: &Arguments, out: &mut impl Write) -> Result<(), Failure> {
    let limits = Limits {
        rounds: ROUNDS,
        time: Duration::from_secs(arguments.seconds),
    };
    let measured = measure(limits)
        .map_err(|error| Failure::No(anyhow!(error).context("cannot simulate a device")))?;
    if arguments.json {
        serde_json::to_writer(&mut *out, &json(&measured)).map_err(io::Error::from)?;
        writeln!(out)?;
    } else {
        write_table(out, &measured)?;
    }
    Ok(())
}

fn measure(limits: Limits) -> Result<Measured<Key>, DeviceError> {
    let mut measures = Measures::new();
    for work in Work::all() {
        measures.add((work, Lastref::NAME), move || work.measure::<Lastref>());
        measures.add((work, Mimalloc::NAME), move || work.measure::<Mimalloc>());
    }
    let mut bar = Progress::measurements(measures.count(limits) as u64);
    measures.run(limits, |done| bar.set(done as u64))
}

fn json(measured: &Measured<Key>) -> Json {
    let hot_pair = |peer| {
        let medians = measured.medians.iter();
        let pairs = medians.filter_map(move |((work, name), ns)| match work {
            Work::HotPair(bytes) if *name == peer => Some((*bytes, *ns)),
            _ => None,
        });
        pairs.collect()
    };
    let threads = |peer| {
        let medians = measured.medians.iter();
        let pairs = medians.filter_map(move |((work, name), ns)| match work {
            Work::Threads(count) if *name == peer => Some((*count, *ns)),
            _ => None,
        });
        pairs.collect()
    };
    Json {
        hot_pair_ns: hot_pair(Lastref::NAME),
        mimalloc_hot_ns: hot_pair(Mimalloc::NAME),
        churn_1000_ns: measured.medians[&(Work::Churn, Lastref::NAME)],
        mimalloc_churn_1000_ns: measured.medians[&(Work::Churn, Mimalloc::NAME)],
        threads_ns: threads(Lastref::NAME),
        mimalloc_threads_ns: threads(Mimalloc::NAME),
        rounds: measured.rounds,
    }
}

fn write_table(out: &mut impl Write, measured: &Measured<Key>) -> io::Result<()> {
    let (bold, dim) = (Style::new().bold(), Style::new().dimmed());
    writeln!(
        out,
        "{bold}an allocation and its free, in nanoseconds of host time on a simulated device{bold:#}"
    )?;
    writeln!(
        out,
        "{dim}lastref keeps statistics and a history of a million entries meanwhile; medians of {} rounds, {:.0} s{dim:#}\n",
        measured.rounds,
        measured.time.as_secs_f64()
    )?;
    writeln!(
        out,
        "{:<28}{:>9}{:>10}{:>8}",
        "",
        Lastref::NAME,
        Mimalloc::NAME,
        "ratio"
    )?;
    for work in Work::all() {
        let [ours, theirs] =
            [Lastref::NAME, Mimalloc::NAME].map(|peer| measured.medians[&(work, peer)]);
        writeln!(
            out,
            "{:<28}{ours:>9.1}{theirs:>10.1}{:>8.2}",
            work.to_string(),
            ours / theirs
        )?;
    }
    writeln!(
        out,
        "\n{dim}The GPU's own work is not in this: a step that waits for the GPU takes as long as before.{dim:#}"
    )
}
