//! Who may name the standard library's locks and atomics: a crate's `sync.rs`, where it has one.
//!
//! So loom can stand in for all of them, and the locks of the project can be counted. (clippy's
//! `disallowed_types` cannot say this: it sees through the re-export.)

use std::fs;

use anyhow::{Context, Result};
use proc_macro2::{Delimiter, TokenStream, TokenTree};

use super::{report, text};
use crate::workspace::Workspace;

/// What takes part in protocols between threads. `Arc` and `OnceLock` are for ownership.
const LOCKS: [&str; 5] = ["Mutex", "RwLock", "Condvar", "Barrier", "atomic"];

/// Sources beside a `sync.rs` take locks and atomics from it.
pub(super) fn check(workspace: &Workspace) -> Result<()> {
    let files = text::files(workspace)?;
    let sources: Vec<&str> = files
        .iter()
        .filter_map(|path| path.strip_suffix("sync.rs"))
        .filter(|folder| folder.ends_with("/src/"))
        .collect();
    let mut broken = Vec::new();
    for path in &files {
        let beside_sync = sources.iter().any(|folder| path.starts_with(folder));
        // A module may have a `sync.rs` of its own, with loom's stand-ins for its protocol.
        if !beside_sync || !path.ends_with(".rs") || path.ends_with("/sync.rs") {
            continue;
        }
        let source = fs::read_to_string(workspace.root.join(path))
            .with_context(|| format!("cannot read {path}"))?;
        let tokens: TokenStream = source
            .parse()
            .map_err(|error| anyhow::anyhow!("cannot read {path} as Rust: {error}"))?;
        for name in named_from_std(tokens) {
            broken.push(format!(
                "{path} names std's {name}; it comes from crate::sync"
            ));
        }
    }
    report(&broken)
}

/// Those of [`LOCKS`] that follow `std::sync::`, in paths and in lists of imports.
fn named_from_std(tokens: TokenStream) -> Vec<String> {
    let mut found = Vec::new();
    let mut path: Vec<String> = Vec::new();
    for token in tokens {
        match token {
            TokenTree::Ident(ident) => {
                if path == ["std", "sync"] && LOCKS.iter().any(|lock| ident == lock) {
                    found.push(ident.to_string());
                }
                path.push(ident.to_string());
            }
            TokenTree::Punct(punct) if punct.as_char() == ':' => {}
            TokenTree::Group(group) => {
                let list = group.delimiter() == Delimiter::Brace && path == ["std", "sync"];
                if list {
                    found.extend(
                        group
                            .stream()
                            .into_iter()
                            .filter_map(|token| match token {
                                TokenTree::Ident(ident) => Some(ident.to_string()),
                                _ => None,
                            })
                            .filter(|name| LOCKS.contains(&name.as_str())),
                    );
                }
                path.clear();
                found.extend(named_from_std(group.stream()));
            }
            TokenTree::Punct(_) | TokenTree::Literal(_) => path.clear(),
        }
        // `use std::sync` comes after a keyword: the path begins with `std`.
        if path.last().is_some_and(|last| last == "std") {
            path = vec!["std".to_owned()];
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(source: &str) -> Vec<String> {
        named_from_std(source.parse().unwrap())
    }

    #[test]
    fn locks_of_std_are_found_in_imports_and_paths() {
        assert_eq!(named("use std::sync::Mutex;"), ["Mutex"]);
        assert_eq!(
            named("pub(crate) use std::sync::{Arc, RwLock, atomic::{AtomicU64, Ordering}};"),
            ["RwLock", "atomic"]
        );
        assert_eq!(
            named("fn f() { let a = std::sync::atomic::AtomicBool::new(true); }"),
            ["atomic"]
        );
        assert_eq!(named("struct A { lock: std::sync::Mutex<u8> }"), ["Mutex"]);
    }

    #[test]
    fn ours_and_other_things_are_not() {
        for source in [
            "use crate::sync::{Mutex, atomic};",
            "use std::sync::{Arc, OnceLock};",
            "//! std::sync::Mutex\nconst A: &str = \"std::sync::Mutex\";",
            "use std::sync::Arc; use crate::sync::Mutex;",
        ] {
            assert!(named(source).is_empty(), "{source}");
        }
    }
}
