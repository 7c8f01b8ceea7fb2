//! One child process: its line is shown before it runs, and its failure is an error.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command as Process, ExitStatus, Stdio};

use anyhow::{Context, Result, ensure};

use crate::workspace::Workspace;

/// A child process to be. It runs in the workspace's root and reads no standard input.
pub(crate) struct Command {
    process: Process,
    line: String,
}

/// `cargo`, the one that runs us.
pub(crate) fn cargo(workspace: &Workspace) -> Command {
    let mut command = command(
        workspace,
        std::env::var_os("CARGO").unwrap_or("cargo".into()),
    );
    command.line = "cargo".to_owned();
    command
}

/// Runs `body` with everything that it and its children write to standard output going to standard error
/// instead, so that a program can read what comes after.
///
/// # Errors
///
/// `body`'s, or that the streams cannot be exchanged.
pub(crate) fn to_stderr<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    use rustix::stdio::{dup2_stdout, stderr, stdout};
    let saved = rustix::io::dup(stdout()).context("cannot keep standard output")?;
    dup2_stdout(stderr()).context("cannot redirect standard output")?;
    let result = body();
    dup2_stdout(&saved).context("cannot restore standard output")?;
    result
}

/// Any other program.
pub(crate) fn command(workspace: &Workspace, program: impl AsRef<OsStr>) -> Command {
    let program = program.as_ref();
    let mut process = Process::new(program);
    process.current_dir(&workspace.root).stdin(Stdio::null());
    // `cargo run` describes xtask to its child. A cargo further down must not read that as its own.
    for (name, _) in std::env::vars_os() {
        let ours = name.to_str().is_some_and(|name| {
            [
                "CARGO_PKG_",
                "CARGO_MANIFEST_",
                "CARGO_BIN_",
                "CARGO_CRATE_",
            ]
            .iter()
            .any(|prefix| name.starts_with(prefix))
        });
        if ours {
            process.env_remove(name);
        }
    }
    // Whether a simulated GPU stands in is each step's own choice, not the caller's shell's.
    process.env_remove("LASTREF_SIM");
    let line = shown(workspace, program);
    Command { process, line }
}

impl Command {
    /// Adds arguments.
    pub(crate) fn args<A: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        for arg in args {
            self.line += " ";
            self.line += &arg.as_ref().to_string_lossy();
            self.process.arg(arg);
        }
        self
    }

    /// Sets a variable of the environment.
    pub(crate) fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.line = format!(
            "{name}='{}' {}",
            value.as_ref().to_string_lossy(),
            self.line
        );
        self.process.env(name, value);
        self
    }

    /// Runs with our own standard output and error.
    ///
    /// # Errors
    ///
    /// The program could not be started, or did not exit with 0.
    pub(crate) fn run(mut self) -> Result<()> {
        println!("    $ {}", self.line);
        let status = self
            .process
            .status()
            .with_context(|| format!("cannot start `{}`", self.line))?;
        self.check(status)
    }

    /// Runs and returns what was written to standard output.
    ///
    /// # Errors
    ///
    /// As [`Command::run`]; what was written is then printed.
    pub(crate) fn stdout(self) -> Result<String> {
        println!("    $ {}", self.line);
        self.quiet_stdout()
    }

    /// As [`Command::stdout`], for questions that are no part of the report.
    ///
    /// # Errors
    ///
    /// As [`Command::run`]; what was written is then printed.
    pub(crate) fn quiet_stdout(mut self) -> Result<String> {
        let output = self
            .process
            .stderr(Stdio::inherit())
            .output()
            .with_context(|| format!("cannot start `{}`", self.line))?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        if !output.status.success() {
            print!("{text}");
        }
        self.check(output.status)?;
        Ok(text)
    }

    /// Whether the program is there and exits with 0. Shows nothing.
    pub(crate) fn works(mut self) -> bool {
        self.process
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success())
    }

    fn check(&self, status: ExitStatus) -> Result<()> {
        ensure!(status.success(), "`{}` ended with {status}", self.line);
        Ok(())
    }
}

/// A program's path as a reader would type it in the root.
fn shown(workspace: &Workspace, program: &OsStr) -> String {
    Path::new(program)
        .strip_prefix(&workspace.root)
        .unwrap_or(Path::new(program))
        .display()
        .to_string()
}
