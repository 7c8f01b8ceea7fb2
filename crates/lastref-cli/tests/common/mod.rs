//! What tests of the command share: running it, and the snapshots of lastref-snapshot.

use std::path::Path;
use std::process::{Command, Output, Stdio};

/// The command, with nothing on standard input.
pub(crate) fn lastref() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lastref"));
    command.env_remove("CLICOLOR_FORCE").stdin(Stdio::null());
    command
}

pub(crate) fn run(arguments: &[&str]) -> Output {
    lastref().args(arguments).output().unwrap()
}

/// What the command prints, which must end well.
#[track_caller]
pub(crate) fn text(arguments: &[&str]) -> String {
    let done = run(arguments);
    assert!(done.status.success(), "{done:?}");
    String::from_utf8(done.stdout).unwrap()
}

pub(crate) fn snapshot(name: &str) -> String {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let path = here.join("../lastref-snapshot/testdata").join(name);
    path.to_str().unwrap().to_owned()
}
