//! Where unsafe code may be: the files that docs/unsafe.md lists, and no others.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use proc_macro2::{TokenStream, TokenTree};

use super::{report, text};
use crate::workspace::Workspace;

/// Crates that read untrusted input or talk to people, and touch no device memory.
const WITHOUT_UNSAFE: &[&str] = &["lastref-snapshot", "lastref-cli", "xtask"];

/// The list in docs/unsafe.md is exactly the files that say `unsafe`.
pub(super) fn check_listed(workspace: &Workspace) -> Result<()> {
    let list = fs::read_to_string(workspace.root.join("docs/unsafe.md"))
        .context("cannot read docs/unsafe.md")?;
    let mut found = BTreeSet::new();
    for path in text::files(workspace)? {
        if path.ends_with(".rs") {
            let source = fs::read_to_string(workspace.root.join(&path))
                .with_context(|| format!("cannot read {path}"))?;
            if says_unsafe(&source).with_context(|| format!("cannot read {path} as Rust"))? {
                found.insert(path);
            }
        }
    }
    report(&differences(&found, &listed(&list)))
}

/// The crates that need no unsafe code have the compiler refuse it.
pub(super) fn check_forbidden(workspace: &Workspace) -> Result<()> {
    let mut broken = Vec::new();
    for package in workspace.members() {
        if !WITHOUT_UNSAFE.contains(&package.name.as_str()) {
            continue;
        }
        for target in &package.targets {
            if !(target.is_lib() || target.is_bin()) {
                continue;
            }
            let path = Path::new(target.src_path.as_str());
            let source = fs::read_to_string(path)
                .with_context(|| format!("cannot read {}", path.display()))?;
            if !source.contains("#![forbid(unsafe_code)]") {
                let path = path.strip_prefix(&workspace.root).unwrap_or(path);
                broken.push(format!("{} lacks #![forbid(unsafe_code)]", path.display()));
            }
        }
    }
    report(&broken)
}

fn differences(found: &BTreeSet<String>, listed: &BTreeSet<String>) -> Vec<String> {
    let new = found
        .difference(listed)
        .map(|path| format!("{path} has unsafe code, and docs/unsafe.md does not list it"));
    let gone = listed
        .difference(found)
        .map(|path| format!("{path} has no unsafe code, and docs/unsafe.md lists it"));
    new.chain(gone).collect()
}

/// The first cells of the table: rows that begin with a path in code quotes.
fn listed(document: &str) -> BTreeSet<String> {
    document
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once('`'))
        .map(|(path, _)| path.to_owned())
        .collect()
}

/// Whether the keyword stands in the code, comments and strings apart.
fn says_unsafe(source: &str) -> Result<bool> {
    fn walk(tokens: TokenStream) -> bool {
        tokens.into_iter().any(|token| match token {
            TokenTree::Group(group) => walk(group.stream()),
            TokenTree::Ident(ident) => ident == "unsafe",
            TokenTree::Punct(_) | TokenTree::Literal(_) => false,
        })
    }
    let tokens: TokenStream = source.parse().map_err(|error| anyhow::anyhow!("{error}"))?;
    Ok(walk(tokens))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_keyword_counts_and_its_mentions_do_not() {
        assert!(says_unsafe("fn f() { unsafe { g() } }").unwrap());
        assert!(says_unsafe("unsafe impl Send for A {}").unwrap());
        let mentions =
            "//! unsafe\n#![deny(unsafe_code)]\n/* unsafe */ const A: &str = \"unsafe\";";
        assert!(!says_unsafe(mentions).unwrap());
    }

    #[test]
    fn the_list_must_match_both_ways() {
        let listed =
            listed("# Unsafe\n\n| file | why |\n|---|---|\n| `a.rs` | x |\n| `b.rs` | y |\n");
        let found = BTreeSet::from(["b.rs".to_owned(), "c.rs".to_owned()]);
        assert_eq!(
            differences(&found, &listed),
            [
                "c.rs has unsafe code, and docs/unsafe.md does not list it",
                "a.rs has no unsafe code, and docs/unsafe.md lists it",
            ]
        );
    }
}
