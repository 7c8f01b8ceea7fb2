//! The Python side: an environment of our own, the wheel, and what runs in it.
//!
//! Everything lies under the target folder: `venv/` has the tools and the wheel under test,
//! `wheels/` the wheel, `venv-clean/` an environment with nothing but the wheel.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use crate::command::{Command, command};
use crate::workspace::Workspace;

/// What the tests need beside the wheel, with versions.
const REQUIREMENTS: &str = "python/requirements-test.txt";

/// The lowest Python that the wheel's stable ABI serves.
const LOWEST: &str = "3.11";

/// A wheel is built as tests are, or as it is shipped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Profile {
    Dev,
    Release,
}

/// A Python environment of ours.
#[derive(Debug)]
pub(crate) struct Environment {
    folder: PathBuf,
}

impl Environment {
    /// The environment for tests, with what [`REQUIREMENTS`] names. Made if it is not there yet, or
    /// if the requirements have changed since.
    pub(crate) fn for_tests(workspace: &Workspace) -> Result<Self> {
        let environment = Self {
            folder: workspace.target.join("venv"),
        };
        let wanted = fs::read_to_string(workspace.root.join(REQUIREMENTS))
            .with_context(|| format!("cannot read {REQUIREMENTS}"))?;
        let stamp = environment.folder.join("requirements.txt");
        if fs::read_to_string(&stamp).is_ok_and(|had| had == wanted) {
            println!("    {} is up to date", environment.folder.display());
            return Ok(environment);
        }
        environment.create(workspace)?;
        environment
            .pip(workspace)
            .args(["--requirement", REQUIREMENTS])
            .run()?;
        fs::write(&stamp, wanted).with_context(|| format!("cannot write {}", stamp.display()))?;
        Ok(environment)
    }

    /// An environment for tests that also finds what another one has, and has what `requirements` names as well.
    pub(crate) fn over(
        workspace: &Workspace,
        folder: &Path,
        packages: &Path,
        requirements: &str,
    ) -> Result<Self> {
        let environment = Self {
            folder: folder.to_path_buf(),
        };
        let mut wanted = format!("{}\n", packages.display());
        for name in [REQUIREMENTS, requirements] {
            wanted += &fs::read_to_string(workspace.root.join(name))
                .with_context(|| format!("cannot read {name}"))?;
        }
        let stamp = environment.folder.join("requirements.txt");
        if fs::read_to_string(&stamp).is_ok_and(|had| had == wanted) {
            println!("    {} is up to date", environment.folder.display());
            return Ok(environment);
        }
        environment.create(workspace)?;
        let ask = "import sysconfig; print(sysconfig.get_path('purelib'))";
        let ours = environment
            .program(workspace, "python")
            .args(["-c", ask])
            .quiet_stdout()?;
        let link = Path::new(ours.trim()).join("over.pth");
        fs::write(&link, format!("{}\n", packages.display()))
            .with_context(|| format!("cannot write {}", link.display()))?;
        environment
            .pip(workspace)
            .args(["--requirement", REQUIREMENTS, "--requirement", requirements])
            .run()?;
        fs::write(&stamp, wanted).with_context(|| format!("cannot write {}", stamp.display()))?;
        Ok(environment)
    }

    /// An empty environment in any folder.
    pub(crate) fn create_in(workspace: &Workspace, folder: &Path) -> Result<Self> {
        let environment = Self {
            folder: folder.to_path_buf(),
        };
        environment.create(workspace)?;
        Ok(environment)
    }

    /// An environment as a user has it: empty before the wheel.
    pub(crate) fn clean(workspace: &Workspace) -> Result<Self> {
        let environment = Self {
            folder: workspace.target.join("venv-clean"),
        };
        environment.create(workspace)?;
        Ok(environment)
    }

    fn create(&self, workspace: &Workspace) -> Result<()> {
        command(workspace, interpreter(workspace)?)
            .args(["-m", "venv", "--clear"])
            .args([&self.folder])
            .run()
    }

    /// Builds the wheel and returns its path.
    pub(crate) fn build_wheel(&self, workspace: &Workspace, profile: Profile) -> Result<PathBuf> {
        let folder = workspace.target.join("wheels").join(match profile {
            Profile::Dev => "dev",
            Profile::Release => "release",
        });
        // What an earlier version built must not be taken for this one.
        if folder.exists() {
            fs::remove_dir_all(&folder)
                .with_context(|| format!("cannot empty {}", folder.display()))?;
        }
        bring_standin(workspace, profile)?;
        let mut maturin = self
            .program(workspace, "maturin")
            .args([
                "build",
                "--manifest-path",
                "python/Cargo.toml",
                "--interpreter",
            ])
            .args([self.bin("python")])
            .args(["--out"])
            .args([&folder]);
        maturin = match profile {
            // Only the machine that built it will run it.
            Profile::Dev => maturin.args(["--profile", "dev", "--compatibility", "linux"]),
            Profile::Release => maturin.args(["--release"]),
        };
        maturin.run()?;
        wheel_in(&folder)
    }

    /// Installs a wheel in place of any other build of the same version.
    pub(crate) fn install(&self, workspace: &Workspace, wheel: &Path) -> Result<()> {
        self.pip(workspace)
            .args(["--no-index", "--no-deps", "--force-reinstall"])
            .args([wheel])
            .run()
    }

    /// `python`, not finding the sources instead of the installed package.
    pub(crate) fn python(&self, workspace: &Workspace) -> Command {
        self.program(workspace, "python").env("PYTHONSAFEPATH", "1")
    }

    /// A program that the environment has.
    pub(crate) fn program(&self, workspace: &Workspace, name: &str) -> Command {
        command(workspace, self.bin(name))
    }

    /// `pip install`.
    pub(crate) fn pip(&self, workspace: &Workspace) -> Command {
        self.program(workspace, "python").args([
            "-m",
            "pip",
            "--disable-pip-version-check",
            "--quiet",
            "install",
        ])
    }

    fn bin(&self, name: &str) -> PathBuf {
        self.folder.join("bin").join(name)
    }
}

/// Builds the stand-in and puts it where the wheel takes it from.
fn bring_standin(workspace: &Workspace, profile: Profile) -> Result<()> {
    let mut build =
        command(workspace, "cargo").args(["build", "--locked", "-p", "lastref-standin"]);
    let built = match profile {
        Profile::Dev => "debug",
        Profile::Release => {
            build = build.args(["--release"]);
            "release"
        }
    };
    build.run()?;
    let built = workspace.target.join(built).join("liblastref_standin.so");
    let folder = workspace.root.join("python/lastref/_standin");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let place = folder.join("liblastref_standin.so");
    fs::copy(&built, &place)
        .with_context(|| format!("cannot copy {} to {}", built.display(), place.display()))?;
    Ok(())
}

fn wheel_in(folder: &Path) -> Result<PathBuf> {
    let mut wheels = Vec::new();
    for entry in
        fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?
    {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "whl") {
            wheels.push(path);
        }
    }
    ensure!(
        wheels.len() == 1,
        "{} holds {} wheels where one was built",
        folder.display(),
        wheels.len()
    );
    Ok(wheels.remove(0))
}

/// A Python that can make an environment: the one that LASTREF_PYTHON names, or the first that will do.
pub(crate) fn interpreter(workspace: &Workspace) -> Result<String> {
    let named = std::env::var("LASTREF_PYTHON").ok();
    let candidates = match &named {
        Some(named) => vec![named.as_str()],
        None => vec![
            "python3",
            "python3.11",
            "python3.12",
            "python3.13",
            "python3.14",
        ],
    };
    let asks =
        |program: &str, question: &str| command(workspace, program).args(["-c", question]).works();
    let mut old_or_missing = true;
    for program in &candidates {
        if asks(program, "import sys; sys.exit(sys.version_info < (3, 11))") {
            old_or_missing = false;
            if asks(program, "import venv, ensurepip") {
                return Ok((*program).to_owned());
            }
        }
    }
    let looked = candidates.join(", ");
    if old_or_missing {
        bail!(
            "no Python {LOWEST} or newer (looked for {looked}): install it, for example with \
             `apt-get install python3 python3-venv`, or name one with LASTREF_PYTHON"
        );
    }
    bail!(
        "Python cannot make a virtual environment (looked at {looked}): install its venv module, for \
         example with `apt-get install python3-venv`"
    );
}
