//! Which crate may depend on which: the borders of ARCHITECTURE.md.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use anyhow::{Context, Result, ensure};
use cargo_metadata::{DependencyKind, Package};

use super::report;
use crate::workspace::Workspace;

/// Every crate of ours and the crates of ours it may use. A new crate is added here first.
const ALLOWED: &[(&str, &[&str])] = &[
    ("lastref-snapshot", &[]),
    ("lastref-alloc", &["lastref-snapshot"]),
    ("lastref-bench", &["lastref-alloc"]),
    ("lastref-cuda", &["lastref-alloc"]),
    ("lastref-derive", &[]),
    (
        "lastref",
        &["lastref-alloc", "lastref-cuda", "lastref-derive"],
    ),
    ("lastref-standin", &["lastref-alloc"]),
    (
        "lastref-cli",
        &["lastref", "lastref-bench", "lastref-snapshot"],
    ),
    (
        "lastref-python",
        &["lastref", "lastref-snapshot", "lastref-cli"],
    ),
    ("xtask", &[]),
];

/// `lastref-alloc` is to be useful alone, in programs that count what they pull in.
const MOST_DEPENDENCIES_OF_ALLOC: usize = 10;

/// Each crate of ours with the crates of ours that it depends on.
type Arrows = BTreeMap<String, BTreeSet<String>>;

/// No arrow but those allowed.
pub(super) fn check(workspace: &Workspace) -> Result<()> {
    report(&broken(&arrows(&workspace.members()), ALLOWED))
}

/// `lastref-alloc` has at most ten dependencies of its own.
pub(super) fn check_few_dependencies(workspace: &Workspace) -> Result<()> {
    let members = workspace.members();
    let alloc = members
        .iter()
        .find(|package| package.name.as_str() == "lastref-alloc")
        .context("no member is called lastref-alloc")?;
    let names: BTreeSet<&str> = alloc
        .dependencies
        .iter()
        .filter(|dependency| shipped(dependency.kind))
        // The model checker comes in only where a tester asks for it.
        .filter(|dependency| dependency.name != "loom")
        .map(|dependency| dependency.name.as_str())
        .collect();
    ensure!(
        names.len() <= MOST_DEPENDENCIES_OF_ALLOC,
        "lastref-alloc depends on {} crates, at most {MOST_DEPENDENCIES_OF_ALLOC} are allowed: {}",
        names.len(),
        names.into_iter().collect::<Vec<_>>().join(", ")
    );
    Ok(())
}

/// Every dependency, also of tests, has its reason in ARCHITECTURE.md.
pub(super) fn check_reasons(workspace: &Workspace) -> Result<()> {
    let document = fs::read_to_string(workspace.root.join("ARCHITECTURE.md"))
        .context("cannot read ARCHITECTURE.md")?;
    let used = workspace
        .members()
        .into_iter()
        .flat_map(|package| &package.dependencies)
        // Ours have arrows instead.
        .filter(|dependency| dependency.path.is_none())
        .map(|dependency| dependency.name.as_str())
        .collect();
    report(&without_reason(&used, &document))
}

fn without_reason(used: &BTreeSet<&str>, document: &str) -> Vec<String> {
    let first_cells: BTreeSet<&str> = document
        .lines()
        .filter_map(|line| line.strip_prefix("| ")?.split(" | ").next())
        .flat_map(|cell| cell.split(", "))
        .collect();
    used.iter()
        .filter(|name| !first_cells.contains(format!("`{name}`").as_str()))
        .map(|name| format!("ARCHITECTURE.md does not say why {name} is there"))
        .collect()
}

/// Whether a dependency reaches a user's build; those of tests do not.
fn shipped(kind: DependencyKind) -> bool {
    matches!(kind, DependencyKind::Normal | DependencyKind::Build)
}

fn arrows(members: &[&Package]) -> Arrows {
    let ours: BTreeSet<&str> = members
        .iter()
        .map(|package| package.name.as_str())
        .collect();
    members
        .iter()
        .map(|package| {
            let to = package
                .dependencies
                .iter()
                .filter(|dependency| shipped(dependency.kind))
                .map(|dependency| dependency.name.as_str())
                .filter(|name| ours.contains(name))
                .map(str::to_owned)
                .collect();
            (package.name.to_string(), to)
        })
        .collect()
}

fn broken(arrows: &Arrows, allowed: &[(&str, &[&str])]) -> Vec<String> {
    let allowed: BTreeMap<&str, &[&str]> = allowed.iter().copied().collect();
    let mut broken = Vec::new();
    for (from, targets) in arrows {
        let Some(may_use) = allowed.get(from.as_str()) else {
            broken.push(format!(
                "{from} is not in the list of allowed arrows (xtask/src/rules/arrows.rs)"
            ));
            continue;
        };
        for to in targets {
            if !may_use.contains(&to.as_str()) {
                broken.push(format!("{from} -> {to} is not an allowed arrow"));
            }
        }
    }
    broken
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYERS: &[(&str, &[&str])] = &[("bottom", &[]), ("top", &["bottom"])];

    fn graph(arrows: &[(&str, &[&str])]) -> Arrows {
        arrows
            .iter()
            .map(|(from, to)| {
                let to = to.iter().copied().map(str::to_owned).collect();
                ((*from).to_owned(), to)
            })
            .collect()
    }

    #[test]
    fn allowed_arrows_pass_whether_used_or_not() {
        assert!(broken(&graph(&[("bottom", &[]), ("top", &["bottom"])]), LAYERS).is_empty());
        assert!(broken(&graph(&[("bottom", &[]), ("top", &[])]), LAYERS).is_empty());
    }

    #[test]
    fn an_arrow_against_the_layers_is_named() {
        let upward = graph(&[("bottom", &["top"]), ("top", &[])]);
        assert_eq!(
            broken(&upward, LAYERS),
            ["bottom -> top is not an allowed arrow"]
        );
    }

    #[test]
    fn a_new_crate_must_be_listed() {
        let with_new = graph(&[("bottom", &[]), ("new", &[]), ("top", &["bottom"])]);
        let broken = broken(&with_new, LAYERS);
        assert_eq!(broken.len(), 1);
        assert!(broken[0].starts_with("new is not in the list"));
    }

    #[test]
    fn a_dependency_without_a_reason_is_named() {
        let document = "| dependency | why |\n|---|---|\n| `a`, `b` | of use, like `c` |\n";
        assert_eq!(
            without_reason(&BTreeSet::from(["a", "b", "c"]), document),
            ["ARCHITECTURE.md does not say why c is there"]
        );
    }

    #[test]
    fn the_graph_of_this_workspace_is_read_from_its_manifests() {
        let workspace = Workspace::load().unwrap();
        let arrows = arrows(&workspace.members());
        assert!(arrows["lastref"].contains("lastref-alloc"));
        assert!(arrows["lastref-snapshot"].is_empty());
        // Were the list shorter by one, the check would say so.
        let mut fewer = ALLOWED.to_vec();
        fewer.retain_mut(|(from, to)| {
            if *from == "lastref" {
                *to = &["lastref-cuda", "lastref-derive"];
            }
            true
        });
        assert_eq!(
            broken(&arrows, &fewer),
            ["lastref -> lastref-alloc is not an allowed arrow"]
        );
    }
}
