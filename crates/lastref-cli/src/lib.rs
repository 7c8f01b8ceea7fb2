//! The command `lastref`, as a library: [`run`] is the command without the process around it, and
//! [`advise`] what one of its subcommands does, for a program.
//!
//! Standard output carries data and nothing else, as text for people or as JSON; progress, notes
//! and errors go to standard error. Text from files is escaped (`escape.rs`) where people read it. Colour appears only on a terminal and obeys `NO_COLOR`.
//!
//! | exit status | meaning |
//! |---|---|
//! | 0 | done |
//! | 1 | the work was done and its answer is no: out of memory, or diverged; or some of a folder's files cannot be read |
//! | 2 | bad usage or bad input; nothing was done |
#![forbid(unsafe_code)]

mod advise;
mod bench;
mod demo;
mod devices;
#[cfg(target_os = "linux")]
mod elf;
mod escape;
mod generate;
mod numbers;
mod policy;
mod program;
mod progress;
mod replay;
mod snapshot;
#[cfg(target_os = "linux")]
mod standin;
mod view;

use std::ffi::OsString;
use std::io::{self, Write};

use anstyle::{AnsiColor, Style};
use clap::{Parser, Subcommand};

pub use advise::{AdviseError, AdviseOptions, advise};

/// GPU memory that comes back when the last reference goes.
#[derive(Parser, Debug)]
#[command(name = "lastref", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Show, step by step, when a variable's GPU memory is freed, cached and given back
    Demo(demo::Arguments),
    /// Run an allocation trace through the allocator on a simulated device
    Replay(Box<replay::Arguments>),
    /// Measure what an allocation costs on this host, beside mimalloc
    Bench(bench::Arguments),
    /// Print a made-up allocation trace, of a kind that is hard on allocators
    Generate(generate::Arguments),
    /// Try a program's allocations under other settings of PyTorch's allocator, and name the best
    Advise(advise::Arguments),
    /// Print the figures of a memory snapshot
    Stats(snapshot::stats::Arguments),
    /// Say what holds the memory of a snapshot, and why an allocation failed
    Explain(snapshot::explain::Arguments),
    /// Say what grew from one snapshot to another
    Diff(snapshot::diff::Arguments),
    /// Write a snapshot in a form for other tools: Perfetto, tables, flame graphs
    Export(snapshot::export::Arguments),
    /// List the devices that are there
    Devices(devices::Arguments),
    /// Look at a memory snapshot: timeline, segments, stacks
    View(view::Arguments),
    /// Run a program where a stand-in plays the GPU: real memory and copies, kernels that compute nothing
    #[cfg(target_os = "linux")]
    Standin(standin::Arguments),
}

/// Why a command did not end with status 0.
#[derive(Debug)]
enum Failure {
    /// The answer is no. Status 1.
    No(anyhow::Error),
    /// Bad usage or bad input. Status 2.
    BadInput(anyhow::Error),
    /// Standard output failed. Status 2, or 0 if the reader has gone: then nobody wants to know.
    Output(io::Error),
}

// `?` on writes to standard output. Reading inputs never converts by itself.
impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Output(error)
    }
}

impl From<lastref::gc::InvalidGeneration> for Failure {
    fn from(error: lastref::gc::InvalidGeneration) -> Self {
        Self::No(error.into())
    }
}

impl From<lastref::Error> for Failure {
    fn from(error: lastref::Error) -> Self {
        let setting = matches!(error, lastref::Error::InvalidSetting { .. });
        if setting {
            Self::BadInput(error.into())
        } else {
            Self::No(error.into())
        }
    }
}

/// Runs the command with these arguments, the first being the command's own name, and returns the
/// exit status. See the [crate](self) for the statuses.
///
/// Never ends the process and never panics on bad input, so that it can be called from another
/// program.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let cli = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        Err(error) => {
            // Nothing is left to be done if standard error is closed.
            let _ = error.print();
            return u8::try_from(error.exit_code()).unwrap_or(2);
        }
    };
    let mut out = anstream::stdout().lock();
    let result = match cli.command {
        Command::Demo(arguments) => demo::run(&arguments, &mut out),
        Command::Replay(arguments) => replay::run(&arguments, &mut out),
        Command::Bench(arguments) => bench::run(&arguments, &mut out),
        Command::Generate(arguments) => generate::run(&arguments, &mut out),
        Command::Advise(arguments) => advise::run(&arguments, &mut out),
        Command::Stats(arguments) => snapshot::stats::run(&arguments, &mut out),
        Command::Explain(arguments) => snapshot::explain::run(&arguments, &mut out),
        Command::Diff(arguments) => snapshot::diff::run(&arguments, &mut out),
        Command::Export(arguments) => snapshot::export::run(&arguments, &mut out),
        Command::Devices(arguments) => devices::run(&arguments, &mut out),
        Command::View(arguments) => view::run(&arguments, &mut out),
        #[cfg(target_os = "linux")]
        Command::Standin(arguments) => standin::run(&arguments, &mut out),
    };
    let (status, error) = match result.and_then(|()| Ok(out.flush()?)) {
        Ok(()) => return 0,
        Err(Failure::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => return 0,
        Err(Failure::Output(error)) => (
            2,
            anyhow::Error::from(error).context("cannot write to standard output"),
        ),
        Err(Failure::No(error)) => (1, error),
        Err(Failure::BadInput(error)) => (2, error),
    };
    let red = Style::new().fg_color(Some(AnsiColor::Red.into())).bold();
    // As above.
    let error = format!("{error:#}");
    let error = escape::escaped_lines(&error);
    let _ = writeln!(anstream::stderr(), "{red}error{red:#}: {error}");
    status
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory as _;
        Cli::command().debug_assert();
    }
}
