//! Reading snapshots: a large one, measured.

use std::fs;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::command::{cargo, command};
use crate::traces;
use crate::workspace::Workspace;

/// The snapshot is grown to this size.
const BYTES: u64 = 1_000_000_000;
/// It must be summarised in less than this.
const MOST_TIME: Duration = Duration::from_secs(10);
/// And with no more memory than this.
const MOST_KIB: u64 = 3 << 20;

/// Makes a snapshot of a gigabyte and has the command, as it is shipped, print its figures.
pub(crate) fn bench(workspace: &Workspace) -> Result<()> {
    traces::build(workspace)?;
    cargo(workspace)
        .args(["build", "--release", "--package", "lastref-snapshot"])
        .args(["--example", "grow"])
        .run()?;
    let big = workspace.target.join("big.pickle");
    let real = "crates/lastref-snapshot/testdata/transformer-training.pickle.gz";
    command(workspace, workspace.target.join("release/examples/grow"))
        .args([workspace.root.join(real), big.clone()])
        .args([BYTES.to_string()])
        .run()?;
    let size = fs::metadata(&big)?.len();

    let start = Instant::now();
    let mut child = Command::new(workspace.target.join("release/lastref"))
        .args(["stats", "--json"])
        .arg(&big)
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start `lastref stats`")?;
    let mut most_kib = 0;
    let status = loop {
        most_kib = most_kib.max(peak_kib(&child).unwrap_or(0));
        if let Some(status) = child.try_wait()? {
            break status;
        }
        thread::sleep(Duration::from_millis(5));
    };
    let took = start.elapsed();
    fs::remove_file(&big)?;
    ensure!(status.success(), "`lastref stats` ended with {status}");
    println!(
        "lastref stats: {size} bytes in {:.2} s, {} MiB of memory at most",
        took.as_secs_f64(),
        most_kib >> 10
    );
    ensure!(took <= MOST_TIME, "it took more than {MOST_TIME:?}");
    ensure!(most_kib <= MOST_KIB, "it took more than {MOST_KIB} KiB");
    Ok(())
}

/// The most memory that a process had so far.
fn peak_kib(child: &Child) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse().ok()
}
