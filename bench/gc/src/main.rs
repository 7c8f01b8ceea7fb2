//! lastref's cycle collector beside others, in one run: `cargo xtask bench gc [--json]`.
//!
//! Every implementation does the same work (`work.rs`) on the same kind of node (`heaps.rs`), with
//! automatic collections off. A row is measured in rounds; in each round every implementation has
//! its turn, beginning with another one each time, so that whatever else the machine does meets
//! them all. A result is the median of the rounds, and a ratio the median of the ratios within
//! them. CPython does the same in `cpython.py`.
//!
//! Some of the others recurse into a graph as deep as it is: all of it runs on a large stack.
#![forbid(unsafe_code)]

mod heaps;
mod report;
mod work;

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::Value;

use heaps::{BaconRajan, DumpsterSync, DumpsterUnsync, Heap, Lastref, RustCc, Std};
use report::{Measured, Row, Target};

/// Rounds of a row that takes nanoseconds or a short time; and of one that takes seconds.
const ROUNDS: usize = 11;
const LONG_ROUNDS: usize = 5;
const STACK: usize = 4 << 30;

type Measure = fn() -> f64;

fn main() -> Result<()> {
    let mut json = false;
    let mut wanted = None;
    for argument in std::env::args().skip(1) {
        match argument.as_str() {
            "--json" => json = true,
            row if !row.starts_with('-') => wanted = Some(row.to_owned()),
            other => bail!("unknown argument {other}, there are --json and a part of a row's name"),
        }
    }
    let measured = std::thread::Builder::new()
        .stack_size(STACK)
        .spawn(move || rows(wanted.as_deref()))?
        .join()
        .map_err(|_| anyhow!("a measurement panicked"))?;
    let rows = measured?;
    if json {
        println!("{:#}", report::json(&rows));
    } else {
        print!("{}", report::table(&rows));
    }
    Ok(())
}

/// One work on every implementation.
macro_rules! everywhere {
    ($work:ident, [$($heap:ident),*]) => {
        vec![$((<$heap as Heap>::NAME, work::$work::<$heap> as Measure)),*]
    };
}

fn rows(wanted: Option<&str>) -> Result<Vec<Row>> {
    Lastref::no_automatic_collections();
    RustCc::no_automatic_collections();
    DumpsterUnsync::no_automatic_collections();
    DumpsterSync::no_automatic_collections();

    let is_wanted = |name: &str| wanted.is_none_or(|wanted| name.contains(wanted));
    let mut rows = Vec::new();
    let mut row = |name, unit, target, rounds, measures: Vec<(&'static str, Measure)>| {
        if is_wanted(name) {
            rows.push(rotated(name, unit, target, rounds, &measures));
        }
    };
    row(
        "clone + drop",
        "ns",
        Target::Ratio("Arc", 1.7),
        ROUNDS,
        everywhere!(
            clone_drop,
            [
                Lastref,
                Std,
                RustCc,
                DumpsterUnsync,
                DumpsterSync,
                BaconRajan
            ]
        ),
    );
    row(
        "alloc + drop, in no cycle",
        "ns",
        Target::Ratio("Arc", 1.5),
        ROUNDS,
        everywhere!(
            alloc_drop,
            [
                Lastref,
                Std,
                RustCc,
                DumpsterUnsync,
                DumpsterSync,
                BaconRajan
            ]
        ),
    );
    row(
        "deref + read",
        "ns",
        // Equal, but for what is measured of equal things.
        Target::Ratio("Arc", 1.05),
        ROUNDS,
        everywhere!(
            read,
            [
                Lastref,
                Std,
                RustCc,
                DumpsterUnsync,
                DumpsterSync,
                BaconRajan
            ]
        ),
    );
    row(
        "collect 1e6 dead in pairs",
        "ms",
        Target::AtMost(100.0),
        LONG_ROUNDS,
        everywhere!(
            pairs,
            [Lastref, RustCc, DumpsterUnsync, DumpsterSync, BaconRajan]
        ),
    );
    row(
        "collect a dead ring of 1e6",
        "ms",
        Target::AtMost(100.0),
        LONG_ROUNDS,
        everywhere!(
            ring,
            [Lastref, RustCc, DumpsterUnsync, DumpsterSync, BaconRajan]
        ),
    );
    row(
        "1000 dead pairs, 1e6 live",
        "ms",
        Target::AtMost(1.0),
        LONG_ROUNDS,
        everywhere!(
            beside_live,
            [Lastref, RustCc, DumpsterUnsync, DumpsterSync, BaconRajan]
        ),
    );
    if is_wanted("longest op meanwhile") {
        rows.push(longest_operation());
    }
    cpython(&mut rows)?;
    Ok(rows)
}

/// Measures one row in rounds.
fn rotated(
    name: &'static str,
    unit: &'static str,
    target: Target,
    rounds: usize,
    measures: &[(&'static str, Measure)],
) -> Row {
    let mut samples = vec![Vec::new(); measures.len()];
    for (_, measure) in measures {
        measure(); // Memory is there, and the processor awake.
    }
    for round in 0..rounds {
        for turn in 0..measures.len() {
            let at = (turn + round) % measures.len();
            samples[at].push(measures[at].1());
        }
    }
    let measured = measures
        .iter()
        .zip(samples)
        .map(|((peer, _), samples)| Measured {
            peer: (*peer).to_owned(),
            samples,
        })
        .collect();
    Row {
        name,
        unit,
        target,
        measured,
    }
}

/// The longest operation of one thread while another collects, beside what it is without a
/// collector.
fn longest_operation() -> Row {
    let (mut ours, mut control, mut dumpster) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let (longest, time) = work::longest_while_collecting::<Lastref>();
        ours.push(longest);
        let time = Duration::from_secs_f64(time / 1e3);
        control.push(work::longest_while_spinning::<Std>(time));
        dumpster.push(work::longest_while_collecting::<DumpsterSync>().0);
    }
    let measured = [
        ("lastref", ours),
        ("Arc", control),
        ("dumpster sync", dumpster),
    ]
    .into_iter()
    .map(|(peer, samples)| Measured {
        peer: peer.to_owned(),
        samples,
    });
    Row {
        name: "longest op meanwhile",
        unit: "ms",
        target: Target::Ratio("Arc", 4.0),
        measured: measured.collect(),
    }
}

/// Adds what CPython takes for the same, where there is a `python3`.
fn cpython(rows: &mut [Row]) -> Result<()> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("cpython.py");
    let Ok(output) = Command::new("python3")
        .arg(script)
        .arg(LONG_ROUNDS.to_string())
        .args(rows.iter().map(|row| row.name))
        .output()
    else {
        return Ok(()); // The column stays empty.
    };
    ensure!(
        output.status.success(),
        "cpython.py ended with {}: {}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    let found: Value = serde_json::from_slice(&output.stdout).context("cpython.py prints JSON")?;
    for row in rows {
        if let Some(samples) = found[row.name].as_array() {
            row.measured.push(Measured {
                peer: "CPython".to_owned(),
                samples: samples.iter().filter_map(Value::as_f64).collect(),
            });
        }
    }
    Ok(())
}
