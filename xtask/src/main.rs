//! The project's chores, one command each: `cargo xtask demo | test | bench | gpu | mutants | lint | docs | torch`.
//!
//! | module | what it is |
//! |---|---|
//! | [`steps`] | named steps: announced, timed, counted, stopped at the first that fails |
//! | [`command`] | one child process: its line is shown, its failure is an error |
//! | [`workspace`] | where things are: root, target folder, members and their manifests |
//! | [`suite`] | which steps `test`, `test --all`, `lint` and `docs` consist of |
//! | [`rules`] | what the sources must obey: arrows between crates, unsafe files, text |
//! | [`python`] | the environment of our own, the wheel, the Python tests |
//! | [`torch`] | real PyTorch: installations in a cache, the tests on them, the class that the shim wraps |
//! | [`instructions`] | instructions that the hot paths take, and their limits |
//! | [`mechanisms`] | the allocator with one mechanism gone at a time, on traces |
//! | [`measured`] | the numbers and charts in the documents, written by the measurements |
//! | [`snapshots`] | reading a large snapshot, measured |
//! | [`gpu`] | the program that checks and measures a GPU, and its rehearsal |
//! | [`web`] | the page of `lastref view`: checked, built and driven in a browser |
//! | [`traces`] | where allocation traces are, and what replaying them must give |
//!
//! Nothing here is shared with the shipped crates: xtask calls what a user would call.
#![forbid(unsafe_code)]
#![expect(
    clippy::print_stdout,
    reason = "a command for people: its report goes to stdout"
)]

mod command;
mod gpu;
mod instructions;
mod measured;
mod mechanisms;
mod mutants;
mod python;
mod rules;
mod snapshots;
mod steps;
mod suite;
mod torch;
mod traces;
mod web;
mod workspace;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::command::{Command, cargo};
use crate::python::Environment;
use crate::steps::Steps;
use crate::workspace::Workspace;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "The project's chores")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Run the demonstration, as `cargo run --release -- demo` does
    Demo,
    /// Run what a change must pass: Rust, examples, the Python package
    Test {
        /// Add what is slow: lints, features, loom, traces, packaging; what CI runs
        #[arg(long)]
        all: bool,
        /// Only the tests under real PyTorch, which it installs first
        #[arg(long, conflicts_with = "all")]
        torch: bool,
    },
    /// Replay every trace and print one table
    #[command(args_conflicts_with_subcommands = true)]
    Bench {
        #[command(subcommand)]
        of: Option<Comparison>,
        /// Print the reports as JSON instead
        #[arg(long)]
        json: bool,
        /// Replay made-up traces too
        #[arg(long)]
        made_up: bool,
        /// Find the smallest device of each, too
        #[arg(long)]
        smallest: bool,
        /// The traces to replay [default: all there are]
        traces: Vec<PathBuf>,
    },
    /// Check and measure what lastref does on this machine's GPU
    Gpu {
        /// Rehearse it on the stand-in for the driver
        #[arg(long)]
        standin: bool,
        /// Put the program and the traces into this folder, to be carried to a machine with a GPU
        #[arg(long, conflicts_with = "standin")]
        bundle: Option<PathBuf>,
    },
    /// Break the allocator in one place after the other, and see that its tests notice
    Mutants {
        /// Only those with this in their description
        part: Option<String>,
    },
    /// Formatting, clippy, the rules of this workspace, licences
    Lint,
    /// Build the documentation; a warning is an error
    Docs,
    /// Say what a version of PyTorch has changed in the class that the shim wraps
    Torch {
        /// Such as 2.15.0. Its wheel is downloaded if the version is not installed in the cache
        version: String,
    },
}

/// What is compared with others, in a workspace of its own under `bench/`.
#[derive(Subcommand)]
enum Comparison {
    /// The cycle collector beside Arc, other crates and CPython
    Gc {
        /// Print JSON instead
        #[arg(long)]
        json: bool,
        /// Only rows with this in their name
        row: Option<String>,
    },
    /// PyTorch's allocations under `lastref.torch.guard` beside those without
    Torch,
    /// The allocator beside mimalloc, the offset-allocator crate and ordered sets, or beside PyTorch
    /// The figures of a snapshot of a gigabyte: time and memory
    Snapshot,
    Alloc {
        /// Beside the real PyTorch, native and with expandable segments, and Python's `empty` beside torch's: a
        /// version such as 2.15.0, or the folder of a Python environment that has torch
        #[arg(long, value_name = "ENV")]
        torch: Option<String>,
        /// Print JSON instead
        #[arg(long)]
        json: bool,
        /// Leave out the row that needs the Python package
        #[arg(long, conflicts_with = "torch")]
        no_python: bool,
        /// The traces to replay too [default: all there are]
        traces: Vec<PathBuf>,
    },
    /// Instructions that the hot paths take, against their limits; under valgrind
    Instructions {
        /// Make what is counted now the limits
        #[arg(long)]
        renew: bool,
    },
    /// The allocator with one mechanism gone at a time, on every trace
    Mechanisms {
        /// Print JSON instead
        #[arg(long)]
        json: bool,
        /// Only those with this in their name
        part: Option<String>,
    },
    /// Measure, and rewrite the numbers and the charts in the documents
    Docs {
        /// What to measure [default: everything]
        #[arg(value_enum)]
        parts: Vec<measured::Part>,
        /// Measure nothing, and rewrite from what was measured last
        #[arg(long, conflicts_with = "parts")]
        draw: bool,
    },
}

fn main() -> ExitCode {
    match run(Arguments::parse().task) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> Result<()> {
    let workspace = Workspace::load()?;
    match task {
        Task::Demo => cargo(&workspace)
            .args(["run", "--release", "--", "demo"])
            .run(),
        Task::Test { torch: true, .. } => Steps::run(|steps| torch::test(&workspace, steps)),
        Task::Test { all, .. } => Steps::run(|steps| suite::test(&workspace, steps, all)),
        Task::Bench {
            of: None,
            json,
            made_up,
            smallest,
            traces,
        } => {
            let options = traces::Options {
                json,
                made_up,
                smallest,
            };
            traces::bench(&workspace, &traces, options)
        }
        Task::Bench {
            of: Some(Comparison::Gc { json, row }),
            ..
        } => compare(&workspace, "gc", json, row.into_iter().map(PathBuf::from)),
        Task::Bench {
            of:
                Some(Comparison::Alloc {
                    torch: Some(torch),
                    json,
                    traces,
                    ..
                }),
            ..
        } => torch::alloc::bench(&workspace, &torch, &traces, json),
        Task::Bench {
            of:
                Some(Comparison::Alloc {
                    torch: None,
                    json,
                    no_python,
                    traces,
                }),
            ..
        } => alloc(&workspace, json, !no_python, traces),
        Task::Bench {
            of: Some(Comparison::Instructions { renew }),
            ..
        } => instructions::check(&workspace, renew),
        Task::Bench {
            of: Some(Comparison::Mechanisms { json, part }),
            ..
        } => mechanisms::bench(&workspace, json, part.as_deref()),
        Task::Bench {
            of: Some(Comparison::Docs { parts, draw }),
            ..
        } => measured::write(&workspace, &parts, draw),
        Task::Bench {
            of: Some(Comparison::Snapshot),
            ..
        } => snapshots::bench(&workspace),
        Task::Bench {
            of: Some(Comparison::Torch),
            ..
        } => torch::bench(&workspace),
        Task::Gpu { standin, bundle } => gpu::run(&workspace, standin, bundle.as_deref()),
        Task::Torch { version } => torch::changes(&workspace, &version),
        Task::Mutants { part } => mutants::run(&workspace, part.as_deref()),
        Task::Lint => Steps::run(|steps| suite::lint(&workspace, steps)),
        Task::Docs => Steps::run(|steps| suite::docs(&workspace, steps)),
    }
}

/// The allocator beside others, on all traces if none is named.
fn alloc(workspace: &Workspace, json: bool, python: bool, traces: Vec<PathBuf>) -> Result<()> {
    let arguments = alloc_arguments(workspace, python, traces)?;
    compare(workspace, "alloc", json, arguments)
}

/// What the benchmark is told. Builds and installs the Python package first, if that is to be measured.
fn alloc_arguments(
    workspace: &Workspace,
    python: bool,
    traces: Vec<PathBuf>,
) -> Result<Vec<PathBuf>> {
    let mut arguments = Vec::new();
    if python {
        let python = command::to_stderr(|| Environment::with_release(workspace))?;
        arguments.extend(["--python".into(), python]);
    }
    if traces.is_empty() {
        arguments.extend(traces::all(workspace)?);
    }
    arguments.extend(traces);
    Ok(arguments)
}

/// Builds and runs one of the workspaces under `bench/`, whose target folder lies in ours.
fn compare(
    workspace: &Workspace,
    name: &str,
    json: bool,
    arguments: impl IntoIterator<Item = PathBuf>,
) -> Result<()> {
    let bench = comparison(workspace, name, json, arguments);
    if json {
        print!("{}", bench.quiet_stdout()?);
        Ok(())
    } else {
        bench.run()
    }
}

fn comparison(
    workspace: &Workspace,
    name: &str,
    json: bool,
    arguments: impl IntoIterator<Item = PathBuf>,
) -> Command {
    cargo(workspace)
        .args(["run", "--release", "--quiet", "--locked"])
        .args(["--manifest-path", &format!("bench/{name}/Cargo.toml")])
        .args(["--target-dir"])
        .args([workspace.target.join(format!("bench-{name}"))])
        .args(["--"])
        .args(json.then_some("--json"))
        .args(arguments)
}
