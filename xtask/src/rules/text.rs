//! What no file and no commit message may hold: places on one person's machine, unfinished work.

use std::fs;

use anyhow::{Context, Result};

use super::report;
use crate::command::command;
use crate::workspace::Workspace;

/// Top folders under which a machine keeps what is its own. A path into one of them means nothing to
/// another reader.
const MACHINE_FOLDERS: [&str; 5] = ["home", "root", "tmp", "work", "Users"];

/// Texts that mark work as unfinished, in two halves so that this file passes its own check.
const UNFINISHED: [(&str, &str); 5] = [
    ("todo", "!("),
    ("unimplemented", "!("),
    ("FIX", "ME"),
    ("<<<<", "<<< "),
    (">>>>", ">>> "),
];

/// The files that git tracks, as paths from the root. What lies about untracked is nobody's business.
pub(super) fn files(workspace: &Workspace) -> Result<Vec<String>> {
    let listed = command(workspace, "git")
        .args(["ls-files"])
        .quiet_stdout()
        .context("the rules read the files that git lists")?;
    Ok(listed
        .lines()
        // A file may be deleted in the working tree and not yet in the index.
        .filter(|path| workspace.root.join(path).is_file())
        .map(str::to_owned)
        .collect())
}

/// Every text file is clean.
pub(super) fn check_files(workspace: &Workspace) -> Result<()> {
    let mut broken = Vec::new();
    for path in files(workspace)? {
        let bytes =
            fs::read(workspace.root.join(&path)).with_context(|| format!("cannot read {path}"))?;
        // What is not text is data, and has its own checks.
        let Ok(text) = String::from_utf8(bytes) else {
            continue;
        };
        for (number, line) in text.lines().enumerate() {
            for fault in faults(line) {
                broken.push(format!("{path}:{}: {fault}", number + 1));
            }
        }
        if !text.is_empty() && !text.ends_with('\n') {
            broken.push(format!("{path}: the last line does not end"));
        }
    }
    report(&broken)
}

/// Every commit message is clean.
pub(super) fn check_commits(workspace: &Workspace) -> Result<()> {
    let log = command(workspace, "git")
        .args(["log", "--format=%h %B"])
        .quiet_stdout()?;
    let broken: Vec<String> = log
        .lines()
        .flat_map(|line| {
            machine_paths(line)
                .into_iter()
                .map(move |path| format!("`{line}` names {path}"))
        })
        .collect();
    report(&broken)
}

fn faults(line: &str) -> Vec<String> {
    let mut faults: Vec<String> = machine_paths(line)
        .into_iter()
        .map(|path| format!("{path} is a place on one machine"))
        .collect();
    for (first, second) in UNFINISHED {
        let mark = format!("{first}{second}");
        if line.contains(&mark) {
            faults.push(format!("`{mark}` marks unfinished work"));
        }
    }
    if line.ends_with([' ', '\t']) {
        faults.push("the line ends in a blank".to_owned());
    }
    faults
}

/// The absolute paths in `line` that begin in one of [`MACHINE_FOLDERS`].
fn machine_paths(line: &str) -> Vec<String> {
    let is_name = |c: char| c.is_alphanumeric() || "._-~".contains(c);
    let mut found = Vec::new();
    for (at, _) in line.match_indices('/') {
        let starts_here = !line[..at].ends_with(|c: char| is_name(c) || "/*)}$>".contains(c));
        let folder: String = line[at + 1..].chars().take_while(|&c| is_name(c)).collect();
        if starts_here && MACHINE_FOLDERS.contains(&folder.as_str()) {
            found.push(format!("/{folder}"));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absolute_paths_of_a_machine_are_found() {
        // Written in halves, as above.
        for (line, path) in [
            (format!("see {}home/me/notes", '/'), "home"),
            (format!("`{}tmp`", '/'), "tmp"),
            (format!("\"{}work/a\"", '/'), "work"),
        ] {
            assert_eq!(
                faults(&line),
                [format!("/{path} is a place on one machine")]
            );
        }
    }

    #[test]
    fn other_paths_and_words_are_not() {
        for line in [
            "target/tmp/x",
            "../work/x",
            "https://a.example/home/x",
            "alloc/free, requested/work",
            "/usr/bin/env bash",
            "$HOME/root",
        ] {
            assert!(faults(line).is_empty(), "{line}");
        }
    }

    #[test]
    fn unfinished_work_and_blanks_are_found() {
        assert_eq!(faults(&format!("    todo{}", "!()")).len(), 1);
        assert_eq!(faults("text ").len(), 1);
    }
}
