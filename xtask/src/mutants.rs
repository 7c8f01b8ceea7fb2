//! Mutations of the allocator, each of which some test must notice: `cargo xtask mutants`.
//!
//! `crates/lastref-alloc/tests/mutants.json` lists them: in which file, what is replaced by what, and
//! which tests must fail then. They are made in a copy, one at a time. One that does not compile, or
//! that no test notices, is an error.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::rules;
use crate::workspace::Workspace;

const CRATE: &str = "crates/lastref-alloc";
/// What a test may take. One that hangs has noticed, too.
const TIMEOUT: Duration = Duration::from_secs(180);

struct Mutant {
    file: String,
    what: String,
    from: String,
    to: String,
    tests: String,
}

/// Makes every mutant, or those with `part` in their description, and runs their tests.
pub(crate) fn run(workspace: &Workspace, part: Option<&str>) -> Result<()> {
    let copy = workspace.target.join("mutants");
    copy_sources(&workspace.root, &copy)?;
    let mut survivors = Vec::new();
    let mut count = 0;
    for mutant in list(workspace)? {
        if part.is_some_and(|part| !mutant.what.contains(part)) {
            continue;
        }
        count += 1;
        let (file, sound) = mutant.make(&copy)?;
        let seen = mutant.is_noticed(&copy);
        fs::write(file, sound)?;
        let seen = seen?;
        println!(
            "{} {}: {}",
            if seen { "seen " } else { "ALIVE" },
            mutant.file,
            mutant.what
        );
        if !seen {
            survivors.push(mutant.what);
        }
    }
    ensure!(
        survivors.is_empty(),
        "no test notices: {}",
        survivors.join("; ")
    );
    println!("{count} mutants, each noticed by its tests");
    Ok(())
}

fn list(workspace: &Workspace) -> Result<Vec<Mutant>> {
    let list = fs::read_to_string(workspace.root.join(CRATE).join("tests/mutants.json"))?;
    let list: Vec<Value> = serde_json::from_str(&list).context("mutants.json")?;
    list.iter().map(Mutant::read).collect()
}

/// Every mutation can be made in the sources as they are. Whether tests notice takes too long here.
pub(crate) fn check(workspace: &Workspace) -> Result<()> {
    let mut broken = Vec::new();
    for mutant in list(workspace)? {
        if let Err(error) = mutant.read_sound(&workspace.root) {
            broken.push(format!("{error:#}"));
        }
    }
    rules::report(&broken)
}

/// Copies what git knows of.
pub(crate) fn copy_sources(root: &Path, copy: &Path) -> Result<()> {
    let listed = Command::new("git")
        .args([
            "ls-files",
            "Cargo.*",
            "clippy.toml",
            "bench/mechanisms",
            "crates",
            "python",
            "xtask",
        ])
        .current_dir(root)
        .output()
        .context("cannot start git")?;
    ensure!(
        listed.status.success(),
        "git ls-files ended with {}",
        listed.status
    );
    for name in String::from_utf8(listed.stdout)?.lines() {
        let to = copy.join(name);
        if let Some(folder) = to.parent() {
            fs::create_dir_all(folder)?;
        }
        // Written only if it differs, so that cargo does not build everything again.
        let source = fs::read(root.join(name)).with_context(|| name.to_owned())?;
        if fs::read(&to).ok().as_ref() != Some(&source) {
            fs::write(to, source)?;
        }
    }
    Ok(())
}

impl Mutant {
    fn read(entry: &Value) -> Result<Self> {
        let text = |key: &str| {
            let text = entry[key].as_str().map(str::to_owned);
            text.with_context(|| format!("an entry of mutants.json has no \"{key}\""))
        };
        Ok(Self {
            file: text("file")?,
            what: text("what")?,
            from: text("from")?,
            to: text("to")?,
            tests: text("tests")?,
        })
    }

    /// The file under `root` and what it is without the mutation, which has just one place there.
    fn read_sound(&self, root: &Path) -> Result<(PathBuf, String)> {
        let file = root.join(CRATE).join(&self.file);
        let sound = fs::read_to_string(&file).with_context(|| self.file.clone())?;
        if sound.matches(&self.from).count() != 1 {
            bail!("{}: {:?} is not there just once", self.file, self.from);
        }
        Ok((file, sound))
    }

    /// Makes the mutation in the copy; returns the file and what it was.
    fn make(&self, copy: &Path) -> Result<(PathBuf, String)> {
        let (file, sound) = self.read_sound(copy)?;
        fs::write(&file, sound.replace(&self.from, &self.to))?;
        Ok((file, sound))
    }

    /// Whether the mutant's tests fail. They must compile.
    fn is_noticed(&self, copy: &Path) -> Result<bool> {
        let built = self.cargo(copy, true).status()?;
        ensure!(built.success(), "\"{}\" does not compile", self.what);
        let mut tests = self.cargo(copy, false).spawn()?;
        let started = Instant::now();
        loop {
            if let Some(status) = tests.try_wait()? {
                return Ok(!status.success());
            }
            if started.elapsed() > TIMEOUT {
                tests.kill()?;
                tests.wait()?;
                return Ok(true);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn cargo(&self, copy: &Path, build_only: bool) -> Command {
        let mut cargo = Command::new("cargo");
        cargo
            .current_dir(copy)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .env("RUST_BACKTRACE", "0")
            .args(["test", "--quiet", "-p", "lastref-alloc"]);
        match self.tests.as_str() {
            "loom" => cargo
                .args(["--release", "--test", "loom"])
                .env("RUSTFLAGS", "--cfg loom")
                .env("CARGO_TARGET_DIR", copy.join("target-loom")),
            "lib" => cargo
                .args(["--lib"])
                .env("CARGO_TARGET_DIR", copy.join("target")),
            name => cargo
                .args(["--test", name])
                .env("CARGO_TARGET_DIR", copy.join("target")),
        };
        // Warnings of what a mutation leaves unused are no news, nor is how the tests fail.
        cargo.stderr(Stdio::null());
        if build_only {
            cargo.arg("--no-run");
        }
        cargo
    }
}
