//! How many instructions the hot paths take: `cargo xtask bench instructions [--renew]`.
//!
//! Valgrind counts them, in a build of its own (`bench/instructions`), so that the gate says the same on a
//! busy machine as on an idle one. Each work is run with two numbers of times; the difference, divided, is the
//! price of one, without what is done once. What it may be is in [`LIMITS`], with a margin; the counts hold
//! for the compiler that is named there.

use std::collections::BTreeMap;
use std::fs;
use std::process::{Command as Process, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::command::{cargo, command};
use crate::workspace::Workspace;

/// The limits, written by `--renew`.
const LIMITS: &str = "bench/instructions/limits.json";
/// What to run after a change that is meant.
const RENEW: &str = "cargo xtask bench instructions --renew";
/// By how much a count may pass its limit. A path that takes a tenth more must not pass.
const MARGIN_PERCENT: f64 = 5.0;
const FEW: u32 = 5_000;
const MANY: u32 = 25_000;

/// Counts, and compares with the limits or, with `renew`, makes new ones of them.
pub(crate) fn check(workspace: &Workspace, renew: bool) -> Result<()> {
    let program = workspace
        .target
        .join("bench-instructions/release/lastref-bench-instructions");
    cargo(workspace)
        .args(["build", "--release", "--quiet", "--locked"])
        .args(["--manifest-path", "bench/instructions/Cargo.toml"])
        .args(["--target-dir"])
        .args([workspace.target.join("bench-instructions")])
        .run()?;
    let works = command(workspace, &program).quiet_stdout()?;
    let mut counts = BTreeMap::new();
    for work in works.lines() {
        let run = |times: u32| {
            let mut valgrind = Process::new("valgrind");
            valgrind
                .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
                .arg(&program)
                .args([work, &times.to_string()]);
            collected(&mut valgrind)
        };
        let (few, many) = (run(FEW)?, run(MANY)?);
        counts.insert(work.to_owned(), (many - few) / f64::from(MANY - FEW));
    }
    let compiler = command(workspace, "rustc")
        .args(["--version"])
        .quiet_stdout()?;
    let compiler = compiler.trim();
    let path = workspace.root.join(LIMITS);
    if renew {
        // A tenth is as much as there is to say.
        let rounded =
            |(work, count): (&String, &f64)| (work.clone(), json!((count * 10.0).round() / 10.0));
        let limits = json!({
            "compiler": compiler,
            "instructions": Value::Object(counts.iter().map(rounded).collect()),
        });
        fs::write(&path, format!("{limits:#}\n"))
            .with_context(|| format!("cannot write {LIMITS}"))?;
    }
    let limits =
        fs::read_to_string(&path).with_context(|| format!("cannot read {LIMITS}: {RENEW}"))?;
    let limits: Value = serde_json::from_str(&limits).with_context(|| LIMITS.to_owned())?;
    println!(
        "    {:<24} {:>12} {:>12}",
        "instructions", "counted", "limit"
    );
    for (work, count) in &counts {
        let limit = limits["instructions"][work].as_f64();
        println!(
            "    {work:<24} {count:>12.1} {:>12.1}",
            limit.unwrap_or(f64::NAN)
        );
    }
    let broken = broken(&counts, &limits);
    ensure!(
        broken.is_empty(),
        "\n  {}\nThe limits are of {}, this is {compiler}. If more is meant: {RENEW}",
        broken.join("\n  "),
        limits["compiler"].as_str().unwrap_or("an unknown compiler"),
    );
    Ok(())
}

/// What valgrind says it counted.
fn collected(valgrind: &mut Process) -> Result<f64> {
    let output = valgrind
        .stdin(Stdio::null())
        .output()
        .context("cannot start valgrind (`apt-get install valgrind`)")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "valgrind ended with {}:\n{said}",
        output.status
    );
    said.lines()
        .find_map(|line| line.split_once("Collected :")?.1.trim().parse().ok())
        .with_context(|| format!("valgrind counted nothing:\n{said}"))
}

/// What takes more than its limit and the margin, what has no limit, and what is there no more.
fn broken(counts: &BTreeMap<String, f64>, limits: &Value) -> Vec<String> {
    let mut broken = Vec::new();
    for (work, count) in counts {
        match limits["instructions"][work].as_f64() {
            Some(limit) if *count <= limit * (1.0 + MARGIN_PERCENT / 100.0) => {}
            Some(limit) => broken.push(format!(
                "{work} takes {count:.1} instructions, {:.1} % more than its limit of {limit:.1}; \
                 {MARGIN_PERCENT} % are allowed",
                (count / limit - 1.0) * 100.0
            )),
            None => broken.push(format!(
                "{work} takes {count:.1} instructions and has no limit"
            )),
        }
    }
    let known = limits["instructions"].as_object();
    let gone = known.into_iter().flat_map(|limits| limits.keys());
    broken.extend(
        gone.filter(|work| !counts.contains_key(*work))
            .map(|work| format!("{work} has a limit and is not counted")),
    );
    broken
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(count: f64) -> Vec<String> {
        let limits = json!({"compiler": "x", "instructions": {"pair": 100.0}});
        broken(&BTreeMap::from([("pair".to_owned(), count)]), &limits)
    }

    #[test]
    fn a_tenth_more_is_refused_with_its_numbers_and_less_is_not() {
        for fine in [50.0, 100.0, 104.9] {
            assert!(judged(fine).is_empty(), "{fine}");
        }
        let said = judged(110.0);
        assert_eq!(said.len(), 1);
        assert!(
            said[0].contains("110.0 instructions, 10.0 % more than its limit of 100.0"),
            "{said:?}"
        );
    }

    #[test]
    fn works_and_limits_are_the_same_ones() {
        let limits = json!({"instructions": {"pair": 100.0}});
        let said = broken(&BTreeMap::from([("other".to_owned(), 1.0)]), &limits);
        assert_eq!(said.len(), 2, "{said:?}");
        assert!(
            said[0].contains("other") && said[1].contains("pair"),
            "{said:?}"
        );
    }
}
