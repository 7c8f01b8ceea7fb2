//! lastref's allocator and Python beside PyTorch's own.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use rustix::io::dup;
use rustix::stdio::{dup2_stdout, stderr, stdout};

use super::{REQUIREMENTS, VERSIONS, installed, site_packages};
use crate::command::cargo;
use crate::python::{Environment, Profile};
use crate::traces;
use crate::workspace::Workspace;

/// Measures beside the PyTorch of `torch`: a version that is kept in the cache, or the folder of a Python environment.
pub(crate) fn bench(
    workspace: &Workspace,
    torch: &str,
    traces: &[PathBuf],
    json: bool,
) -> Result<()> {
    // What is said meanwhile is no part of the JSON.
    let told = json.then(|| dup(stdout())).transpose()?;
    if json {
        dup2_stdout(stderr())?;
    }
    let base = base(workspace, torch)?;
    let environment = Environment::over(
        workspace,
        &workspace.target.join("venv-bench-torch"),
        &site_packages(&base)?,
        REQUIREMENTS,
    )?;
    // As it is shipped: what users have is measured.
    let wheel = environment.build_wheel(workspace, Profile::Release)?;
    environment.install(workspace, &wheel)?;
    let standin = workspace.target.join("bench-torch-standin");
    environment
        .python(workspace)
        .args(["bench/torch/build.py"])
        .args([&standin])
        .quiet_stdout()
        .context("the harness over PyTorch's allocator needs a C and a C++ compiler")?;
    let traces = if traces.is_empty() {
        traces::all(workspace)?
    } else {
        traces.to_vec()
    };
    if let Some(told) = told {
        dup2_stdout(told)?;
    }
    let bench = cargo(workspace)
        .args(["run", "--release", "--quiet", "--locked"])
        .args(["--manifest-path", "bench/torch/Cargo.toml"])
        .args(["--target-dir"])
        .args([workspace.target.join("bench-torch")])
        .args(["--", "--standin"])
        .args([&standin])
        .args(["--python"])
        .args([environment.bin("python")])
        .args(json.then_some("--json"))
        .args(traces);
    if json {
        print!("{}", bench.quiet_stdout()?);
        Ok(())
    } else {
        bench.run()
    }
}

/// The folder of the environment that has PyTorch.
fn base(workspace: &Workspace, torch: &str) -> Result<PathBuf> {
    if VERSIONS.contains(&torch) {
        let newest = (torch != VERSIONS[0])
            .then(|| installed(workspace, VERSIONS[0], None))
            .transpose()?;
        return installed(workspace, torch, newest.as_deref());
    }
    let folder = Path::new(torch);
    if !folder.join("lib").is_dir() {
        bail!(
            "--torch {torch}: neither a version of the cache ({}) nor the folder of a Python environment",
            VERSIONS.join(", ")
        );
    }
    Ok(folder.to_path_buf())
}
