//! What the sources must obey. Each rule is a function that names every place that breaks it.
//!
//! `cargo xtask lint` runs them, and so do xtask's own tests, on the real workspace.

mod arrows;
mod sync;
mod text;
mod unsafety;

use anyhow::{Result, bail};

use crate::workspace::Workspace;

/// A rule's name and its check.
pub(crate) type Rule = (&'static str, fn(&Workspace) -> Result<()>);

/// Every rule.
pub(crate) const RULES: [Rule; 11] = [
    ("crates depend on each other only as allowed", arrows::check),
    (
        "lastref-alloc has few dependencies",
        arrows::check_few_dependencies,
    ),
    ("dependencies have a reason", arrows::check_reasons),
    (
        "docs/unsafe.md lists the files with unsafe code",
        unsafety::check_listed,
    ),
    (
        "crates without unsafe code forbid it",
        unsafety::check_forbidden,
    ),
    ("locks and atomics come from sync.rs", sync::check),
    ("mutations fit the sources", crate::mutants::check),
    (
        "mechanisms can be switched off in the sources",
        crate::mechanisms::check,
    ),
    (
        "numbers in documents are those that were measured",
        crate::measured::check,
    ),
    ("files hold clean text", text::check_files),
    ("commit messages hold clean text", text::check_commits),
];

/// An error that lists what breaks a rule, if anything does.
pub(crate) fn report(broken: &[String]) -> Result<()> {
    if !broken.is_empty() {
        bail!("\n  {}", broken.join("\n  "));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_workspace_obeys_every_rule() {
        let workspace = Workspace::load().unwrap();
        for (name, check) in RULES {
            if let Err(error) = check(&workspace) {
                panic!("{name}: {error:#}");
            }
        }
    }
}
