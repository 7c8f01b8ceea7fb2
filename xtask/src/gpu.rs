//! `cargo xtask gpu`: what lastref does on a GPU, checked and measured, by the program in `bench/gpu`.
//!
//! The program needs nothing beside itself, so that it can be carried to a machine that has a GPU and no Rust
//! (`--bundle`). Over the stand-in (`--standin`) it is rehearsed: CI does.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::command::{cargo, command};
use crate::steps::Steps;
use crate::traces;
use crate::workspace::Workspace;

/// Where the report goes, unless another place is named.
const REPORT: &str = "gpu.json";
/// A device that holds every trace, of memory that is taken only when it is touched.
const STANDIN_MEMORY: &str = "16GiB";

/// Builds the program, and runs it here, or puts it into a folder to be carried.
pub(crate) fn run(workspace: &Workspace, on_standin: bool, bundle: Option<&Path>) -> Result<()> {
    let program = build(workspace)?;
    if let Some(folder) = bundle {
        return put(workspace, &program, folder);
    }
    let report = workspace.target.join(REPORT);
    let mut run = command(workspace, &program)
        .args(["--json"])
        .args([&report])
        .args(traces::all(workspace)?);
    if on_standin {
        run = run
            .env("LD_LIBRARY_PATH", standin(workspace)?)
            .env("LASTREF_STANDIN_MEMORY", STANDIN_MEMORY);
    }
    run.run()?;
    println!("the report is in {}", report.display());
    Ok(())
}

/// The rehearsal, as a step of CI.
pub(crate) fn rehearse(workspace: &Workspace, steps: &mut Steps) -> Result<()> {
    steps.step("`cargo xtask gpu`, rehearsed on the stand-in", || {
        run(workspace, true, None)?;
        let report = fs::read_to_string(workspace.target.join(REPORT))?;
        let report: serde_json::Value = serde_json::from_str(&report)?;
        ensure!(
            report["device"]["rehearsal"] == true,
            "a rehearsal must say that it is one: {}",
            report["device"]
        );
        Ok(())
    })
}

fn build(workspace: &Workspace) -> Result<PathBuf> {
    let target = workspace.target.join("bench-gpu");
    cargo(workspace)
        .args(["build", "--release", "--locked"])
        .args(["--manifest-path", "bench/gpu/Cargo.toml", "--target-dir"])
        .args([&target])
        .run()?;
    Ok(target.join("release/lastref-gpu"))
}

/// The program and the traces, to be carried.
fn put(workspace: &Workspace, program: &Path, folder: &Path) -> Result<()> {
    let traces = folder.join("traces");
    fs::create_dir_all(&traces).with_context(|| format!("cannot make {}", traces.display()))?;
    fs::copy(program, folder.join("lastref-gpu"))?;
    for trace in traces::all(workspace)? {
        let name = trace.file_name().context("a trace has a name")?;
        fs::copy(&trace, traces.join(name))?;
    }
    let folder = folder.display();
    println!("there: {folder}/lastref-gpu --json {REPORT} {folder}/traces/*");
    Ok(())
}

/// A folder with the stand-in under the driver's names.
fn standin(workspace: &Workspace) -> Result<PathBuf> {
    cargo(workspace)
        .args(["build", "--package", "lastref-standin"])
        .run()?;
    let folder = workspace.target.join("standin");
    fs::create_dir_all(&folder)?;
    for name in ["libcuda.so", "libcuda.so.1"] {
        let link = folder.join(name);
        let _ = fs::remove_file(&link);
        symlink(workspace.target.join("debug/liblastref_standin.so"), &link)
            .with_context(|| format!("cannot make {}", link.display()))?;
    }
    Ok(folder)
}
