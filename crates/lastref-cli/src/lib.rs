//! The command `lastref`, as a library: [`run`] is the command without the process around it.
//!
//! Standard output carries data and nothing else, as text for people or as JSON; progress, notes
//! and errors go to standard error. Colour appears only on a terminal and obeys `NO_COLOR`.
//!
//! | exit status | meaning |
//! |---|---|
//! | 0 | done |
//! | 1 | the work was done and its answer is no: out of memory, or diverged |
//! | 2 | bad usage or bad input; nothing was done |
#![forbid(unsafe_code)]

mod demo;
mod devices;
#[cfg(target_os = "linux")]
mod elf;
mod numbers;
mod progress;
mod replay;
#[cfg(target_os = "linux")]
mod standin;

use std::ffi::OsString;
use std::io::{self, Write};

use anstyle::{AnsiColor, Style};
use clap::{Parser, Subcommand};

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
    Replay(replay::Arguments),
    /// List the devices that are there
    Devices(devices::Arguments),
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
        Command::Devices(arguments) => devices::run(&arguments, &mut out),
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
    let _ = writeln!(anstream::stderr(), "{red}error{red:#}: {error:#}");
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
