//! Which steps `test`, `test --all`, `lint` and `docs` consist of.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::command::{cargo, command};
use crate::gpu;
use crate::instructions;
use crate::python::{Environment, Profile};
use crate::rules;
use crate::steps::Steps;
use crate::torch;
use crate::traces;
use crate::web;
use crate::workspace::Workspace;

/// The size of the simulated GPU in examples.
const SIMULATED: &str = "8GiB";

/// Built by maturin and tested from Python; cargo would link it against an interpreter.
const PYTHON_CRATE: &str = "lastref-python";

/// What a change must pass, and with `all` what is slow as well.
pub(crate) fn test(workspace: &Workspace, steps: &mut Steps, all: bool) -> Result<()> {
    if all {
        lint(workspace, steps)?;
    }
    quick(workspace, steps)?;
    if all {
        slow(workspace, steps)?;
    }
    Ok(())
}

/// Formatting, clippy, the rules, licences.
pub(crate) fn lint(workspace: &Workspace, steps: &mut Steps) -> Result<()> {
    steps.step("formatting", || {
        cargo(workspace).args(["fmt", "--all", "--check"]).run()
    })?;
    steps.step("Cargo.lock fits the manifests", || {
        cargo(workspace)
            .args(["metadata", "--locked", "--format-version", "1"])
            .stdout()
            .map(drop)
    })?;
    for (name, check) in rules::RULES {
        steps.step(name, || check(workspace))?;
    }
    if cargo(workspace).args(["deny", "--version"]).works() {
        steps.step("licences, sources and bans of dependencies", || {
            cargo(workspace)
                .args([
                    "deny",
                    "--all-features",
                    "check",
                    "bans",
                    "licenses",
                    "sources",
                ])
                .run()
        })?;
    } else {
        steps.skip(
            "licences, sources and bans of dependencies",
            "needs cargo-deny (`cargo install cargo-deny --locked`)",
        );
    }
    steps.step("clippy", || {
        cargo(workspace)
            .args(["clippy", "--workspace", "--all-targets", "--all-features"])
            .args(["--", "--deny", "warnings"])
            .run()
    })
}

/// The documentation builds without a warning.
pub(crate) fn docs(workspace: &Workspace, steps: &mut Steps) -> Result<()> {
    steps.step("documentation", || {
        cargo(workspace)
            .args(["doc", "--workspace", "--no-deps", "--all-features"])
            .env("RUSTDOCFLAGS", "--deny warnings")
            .run()
    })
}

fn quick(workspace: &Workspace, steps: &mut Steps) -> Result<()> {
    steps.step("Rust tests", || {
        let runner = if cargo(workspace).args(["nextest", "--version"]).works() {
            cargo(workspace).args(["nextest", "run"])
        } else {
            cargo(workspace).args(["test"])
        };
        runner
            // Examples have tests too. Doctests are the next step, for both runners.
            .args(["--workspace", "--exclude", PYTHON_CRATE, "--all-targets"])
            .run()
    })?;
    steps.step("doctests", || {
        cargo(workspace)
            .args(["test", "--doc", "--workspace", "--exclude", PYTHON_CRATE])
            .run()
    })?;
    steps.step("Rust examples", || rust_examples(workspace))?;

    let mut environment = None;
    steps.step("Python environment", || {
        environment = Some(Environment::for_tests(workspace)?);
        Ok(())
    })?;
    let environment = environment.context("the step before made it")?;
    steps.step("Python wheel", || {
        let wheel = environment.build_wheel(workspace, Profile::Dev)?;
        environment.install(workspace, &wheel)
    })?;
    steps.step("Python tests", || {
        environment
            .python(workspace)
            .args(["-m", "pytest", "python/tests"])
            .env("PYTHONDEVMODE", "1")
            .run()
    })?;
    steps.step("Python examples", || {
        let example = "python/examples/reassign.py";
        let simulated = environment
            .python(workspace)
            .args([example])
            .env("LASTREF_SIM", SIMULATED)
            .stdout()?;
        expect_lines(&simulated, &["True", "False"])?;
        let without = environment.python(workspace).args([example]).stdout()?;
        expect_lines(&without, &["False", "False"])?;
        let cycles = environment
            .python(workspace)
            .args(["python/examples/dead_cycles.py"])
            .env("LASTREF_SIM", "11000MiB")
            .stdout()?;
        ensure!(
            cycles.contains("left after collect and empty_cache: 0 bytes"),
            "the example of dead cycles printed {cycles:?}"
        );
        let advice = environment
            .python(workspace)
            .args(["python/examples/advise.py"])
            .args(["crates/lastref-cli/testdata/resnet50_prefetch_multiscale.csv.gz"])
            .stdout()?;
        ensure!(
            advice.ends_with("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n"),
            "the example of advice printed {advice:?}"
        );
        Ok(())
    })?;
    steps.step("the command `lastref` that the wheel brings", || {
        let said = environment
            .program(workspace, "lastref")
            .args(["demo"])
            .stdout()?;
        demonstrated(workspace, &said)
    })
}

/// Builds and runs every example; the one that the README shows must print what the README says.
fn rust_examples(workspace: &Workspace) -> Result<()> {
    cargo(workspace)
        .args([
            "build",
            "--workspace",
            "--exclude",
            PYTHON_CRATE,
            "--examples",
        ])
        .run()?;
    for package in workspace.members() {
        for target in package.targets.iter().filter(|target| target.is_example()) {
            let program = workspace.target.join("debug/examples").join(&target.name);
            let simulated = command(workspace, &program)
                .env("LASTREF_SIM", SIMULATED)
                .stdout()?;
            if target.name == "01-reassign" {
                expect_lines(&simulated, &["true", "false"])?;
                let without = command(workspace, &program).stdout()?;
                expect_lines(&without, &["false", "false"])?;
            }
        }
    }
    Ok(())
}

fn expect_lines(said: &str, expected: &[&str]) -> Result<()> {
    let said: Vec<&str> = said.lines().collect();
    ensure!(said == expected, "printed {said:?}, expected {expected:?}");
    Ok(())
}

fn slow(workspace: &Workspace, steps: &mut Steps) -> Result<()> {
    docs(workspace, steps)?;
    steps.step("feature combinations", || feature_combinations(workspace))?;
    steps.step("tests of the feature `holders`", || {
        let holders = || cargo(workspace).args(["test", "-p", "lastref", "--features", "holders"]);
        holders().args(["--test", "holders"]).run()?;
        holders().args(["--doc", "holders"]).run()
    })?;
    steps.step("tests of the feature `cudarc`", || {
        cargo(workspace)
            .args(["test", "-p", "lastref", "--features", "cudarc"])
            .args(["--test", "cudarc"])
            .run()
    })?;
    gpu::rehearse(workspace, steps)?;
    for (package, models) in [("lastref-alloc", "loom"), ("lastref", "gc_loom")] {
        let name = format!("loom: every interleaving of the protocols of {package}");
        steps.step(&name, || {
            cargo(workspace)
                .args(["test", "--release", "--package", package, "--test", models])
                // The flag is for every crate: built beside the rest, each run would rebuild the
                // other.
                .args(["--target-dir"])
                .args([workspace.target.join("loom")])
                .env("RUSTFLAGS", "--cfg loom")
                .run()
        })?;
    }
    steps.step(
        "the reader of snapshots, on random changes to real ones",
        || {
            cargo(workspace)
                .args(["test", "--package", "lastref-snapshot", "--test", "fuzz"])
                .env("LASTREF_FUZZ_SECONDS", "60")
                .run()
        },
    )?;
    steps.step("the collector's long tests", || {
        cargo(workspace)
            .args(["test", "--package", "lastref"])
            .args(["--test", "gc_hard_cases", "--test", "gc_memory_threads"])
            // Ten million nodes instead of one, 20 runs instead of one.
            .env("LASTREF_TEST_ALL", "1")
            .run()
    })?;
    steps.step("the demonstration, as the README runs it", || {
        let said = cargo(workspace)
            .args(["run", "--release", "--", "demo"])
            .stdout()?;
        demonstrated(workspace, &said)
    })?;
    steps.step("replay of every trace, contents checked", || {
        traces::build(workspace)?;
        traces::verify(workspace)
    })?;
    steps.step("packages of the library crates", || {
        let cargo_home = std::env::var_os("CARGO_HOME").map_or_else(
            || std::env::home_dir().unwrap_or_default().join(".cargo"),
            PathBuf::from,
        );
        forget_unpacked(
            &cargo_home,
            workspace.published().map(|member| member.name.as_str()),
        )?;
        let mut package = cargo(workspace).args(["package", "--allow-dirty"]);
        for member in workspace.published() {
            package = package.args(["--package", member.name.as_str()]);
        }
        package.run()
    })?;
    steps.step("the shipped wheel in a clean environment", || {
        let tools = Environment::for_tests(workspace)?;
        let wheel = tools.build_wheel(workspace, Profile::Release)?;
        let clean = Environment::clean(workspace)?;
        clean.install(workspace, &wheel)?;
        let said = clean
            .program(workspace, "lastref")
            .args(["demo"])
            .stdout()?;
        demonstrated(workspace, &said)
    })?;
    web::test(workspace, steps)?;
    torch::test(workspace, steps)?;
    if command(workspace, "valgrind").args(["--version"]).works() {
        steps.step("valgrind on the first example", || valgrind(workspace))?;
        steps.step("instructions of the hot paths", || {
            instructions::check(workspace, false)
        })
    } else {
        for name in [
            "valgrind on the first example",
            "instructions of the hot paths",
        ] {
            steps.skip(name, "needs valgrind (`apt-get install valgrind`)");
        }
        Ok(())
    }
}

/// Removes what earlier runs of `cargo package` unpacked of the crates called `names`.
///
/// Cargo hands the crates of one run to each other through a registry of its own under `target`,
/// and unpacks them in its home under a name made of that path and the version alone: the next run
/// in the same place would build against the sources of the last one. Registries with a host are
/// left alone, since what they hold does not change.
fn forget_unpacked<'a>(cargo_home: &Path, names: impl Iterator<Item = &'a str>) -> Result<()> {
    let prefixes: Vec<String> = names.map(|name| format!("{name}-")).collect();
    let Ok(registries) = fs::read_dir(cargo_home.join("registry").join("src")) else {
        return Ok(());
    };
    for registry in registries {
        let registry = registry?;
        if !registry.file_name().to_string_lossy().starts_with('-') {
            continue;
        }
        for unpacked in fs::read_dir(registry.path())? {
            let unpacked = unpacked?;
            let name = unpacked.file_name();
            let name = name.to_string_lossy();
            if prefixes.iter().any(|prefix| name.starts_with(prefix)) {
                fs::remove_dir_all(unpacked.path())
                    .with_context(|| format!("cannot remove {}", unpacked.path().display()))?;
            }
        }
    }
    Ok(())
}

/// The demonstration came to its end; the files it names are there and in the README, and what the
/// README quotes of it is what it says.
fn demonstrated(workspace: &Workspace, said: &str) -> Result<()> {
    let (_, list) = said
        .split_once("Five files to read")
        .with_context(|| format!("the demonstration did not come to its list of files:\n{said}"))?;
    let readme = fs::read_to_string(workspace.root.join("README.md"))?;
    let files: Vec<&str> = list
        .lines()
        .filter_map(|line| line.split_whitespace().next())
        .filter(|word| workspace.root.join(word).is_file())
        .collect();
    ensure!(
        files.len() == 5,
        "of the five files that the demonstration names, these are there: {files:?}"
    );
    for file in files {
        ensure!(
            readme.contains(&format!("({file})")),
            "the demonstration says to read {file}, and the README does not"
        );
    }
    let (_, quoted) = readme.split_once("<!-- demo -->\n```text\n").context(
        "the README quotes the demonstration in a block of `text` that is marked `demo`",
    )?;
    let (quoted, _) = quoted
        .split_once("```")
        .context("a block in the README does not end")?;
    ensure!(
        without_addresses(said).contains(&without_addresses(quoted)),
        "the demonstration says something else than the README quotes:\n{said}"
    );
    Ok(())
}

/// `text` with each hexadecimal number replaced: addresses are new in every run.
fn without_addresses(text: &str) -> String {
    let mut parts = text.split("0x");
    let mut rest = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        rest += "0x_";
        rest += part.trim_start_matches(|c: char| c.is_ascii_hexdigit());
    }
    rest
}

/// No memory error and nothing definitely lost, seen from outside.
fn valgrind(workspace: &Workspace) -> Result<()> {
    command(workspace, "valgrind")
        .args(["--quiet", "--error-exitcode=99", "--leak-check=full"])
        .args([
            "--show-leak-kinds=definite",
            "--errors-for-leak-kinds=definite",
        ])
        .args([workspace.target.join("debug/examples/01-reassign")])
        .env("LASTREF_SIM", SIMULATED)
        .run()
}

/// Each crate that has features builds with none, the default, each alone, and all.
fn feature_combinations(workspace: &Workspace) -> Result<()> {
    for package in workspace.members() {
        let features = package.features.keys().filter(|name| *name != "default");
        let alone = features.map(|name| vec!["--no-default-features", "--features", name]);
        let mut combinations: Vec<Vec<&str>> = alone.collect();
        if combinations.is_empty() {
            continue;
        }
        combinations.push(vec!["--no-default-features"]);
        combinations.push(vec![]);
        combinations.push(vec!["--all-features"]);
        for combination in combinations {
            cargo(workspace)
                .args(["clippy", "--quiet", "--package", package.name.as_str()])
                .args(combination)
                .args(["--", "--deny", "warnings"])
                .run()?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_are_left_out() {
        assert_eq!(
            without_addresses("a at 0x12ab, b at 0xFF\n"),
            without_addresses("a at 0x9, b at 0x10\n")
        );
        assert_ne!(
            without_addresses("at 0x1, 2"),
            without_addresses("at 0x1, 3")
        );
    }

    #[test]
    fn only_our_crates_in_registries_without_a_host_are_forgotten() {
        let home = std::env::temp_dir().join(format!("xtask-unpacked-{}", std::process::id()));
        let sources = home.join("registry").join("src");
        let kept = [
            "-1a/other-0.1.0",
            "-1a/aardvark-0.1.0",
            "index-2b/ours-0.1.0",
        ];
        let gone = ["-1a/ours-0.1.0", "-1a/ours-core-0.2.0", "-3c/ours-0.1.0"];
        for unpacked in kept.iter().chain(&gone) {
            fs::create_dir_all(sources.join(unpacked).join("src")).unwrap();
        }
        forget_unpacked(&home, ["ours", "ours-core"].into_iter()).unwrap();
        for unpacked in kept {
            assert!(sources.join(unpacked).exists(), "{unpacked} is gone");
        }
        for unpacked in gone {
            assert!(
                !sources.join(unpacked).exists(),
                "{unpacked} is still there"
            );
        }
        fs::remove_dir_all(&home).unwrap();
        forget_unpacked(&home, ["ours"].into_iter()).unwrap();
    }
}
