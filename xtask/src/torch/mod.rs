//! Real PyTorch, for the tests and benchmarks of `lastref.torch`.
//!
//! Torch is large, so it is installed once for all clones, in a cache: `torch/VERSION` under the folder that
//! LASTREF_CACHE names, else under `~/.cache/lastref`. The tests' own environments lie in the target folder, are light,
//! and find torch in the cache through a `.pth` file.
//!
//! 1. An installation in the cache is whole: it is made under another name and then renamed.
//! 2. Whoever installs holds the lock of the cache; others wait for it. Nobody writes to what is installed.

pub(crate) mod alloc;
mod class;
mod policy;

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use rustix::fs::{FlockOperation, flock};

use crate::command::{Command, command};
use crate::python::{Environment, Profile, interpreter};
use crate::steps::{Steps, nothing_is_skipped};
use crate::workspace::Workspace;

pub(crate) use self::class::changes;

/// The versions that the shim knows and the tests run on, the newest first. That one is installed with all that it
/// asks for.
pub(crate) const VERSIONS: [&str; 3] = ["2.15.0", "2.14.1", "2.13.0"];

/// What the newest brings no longer and the others need; and the part of CUDA's headers that torch leaves to triton.
const CUDA_EXTRAS: [&str; 2] = ["nvidia-cuda-crt==13.5.37", "nvidia-curand==10.4.5.25"];

/// What torch imports, but for CUDA's libraries: the older versions use those of the newest.
const IMPORTED: [&str; 8] = [
    "filelock==4.3.1",
    "fsspec==2026.9.0",
    "jinja2==3.1.6",
    "networkx==3.6.1",
    "numpy==2.4.6",
    "setuptools==84.2.1",
    "sympy==1.14.0",
    "typing_extensions==4.16.0",
];

/// What the tests need, beside torch and what all tests need.
const REQUIREMENTS: &str = "python/requirements-torch.txt";

/// Runs the tests under PyTorch: all of them on the newest version, those of the guard on the others.
pub(crate) fn test(workspace: &Workspace, steps: &mut Steps) -> Result<()> {
    let mut bases = Vec::new();
    let mut missing = None;
    steps.step("installations of PyTorch", || {
        for version in VERSIONS {
            match installed(workspace, version, bases.first().map(PathBuf::as_path)) {
                Ok(base) => bases.push(base),
                Err(error) if !nothing_is_skipped() => {
                    println!("    torch {version} is not there: {error:#}");
                    missing = Some(version);
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    })?;
    // One wheel for all: it knows no torch.
    let mut wheel = None;
    for (version, base) in VERSIONS.iter().zip(&bases) {
        let newest = *version == VERSIONS[0];
        let policy = format!("PyTorch's policy, as modelled and in PyTorch {version}");
        steps.step(&policy, || {
            policy::compare(workspace, version, base, newest)
        })?;
        let name = if newest {
            format!("tests under PyTorch {version}")
        } else {
            format!("the guard under PyTorch {version}")
        };
        steps.step(&name, || {
            let environment = environment(workspace, version, base, &mut wheel)?;
            let tests = environment
                .python(workspace)
                // Most of the time is PyTorch's import, in a process for each test.
                .args(["-m", "pytest", "--durations=5"])
                .args(["--numprocesses=auto", "--dist=loadfile"]);
            if newest {
                class::check_recorded(workspace, &headers(base)?)?;
                // All the rounds, and nothing skipped.
                tests
                    .args(["python/tests/torch"])
                    .env("LASTREF_TEST_ALL", "1")
                    .run()
            } else {
                let guard = ["test_guard.py", "test_guard_threads.py"];
                tests
                    .args(guard.map(|file| format!("python/tests/torch/{file}")))
                    .run()
            }
        })?;
    }
    if let Some(version) = missing {
        steps.skip(
            &format!("tests under PyTorch {version} and older"),
            "torch could not be installed, which needs the network once (and 9 GB in the cache); see above",
        );
    }
    Ok(())
}

/// Runs the benchmark of the guard on the newest version, with a device that the tests' stand-in plays.
pub(crate) fn bench(workspace: &Workspace) -> Result<()> {
    let base = installed(workspace, VERSIONS[0], None)?;
    let environment = environment(workspace, VERSIONS[0], &base, &mut None)?;
    let standin = workspace.target.join("torch-standin");
    environment
        .python(workspace)
        .args(["python/tests/torch/standin/build.py"])
        .args([&standin])
        .quiet_stdout()?;
    let mut bench = environment
        .python(workspace)
        .args(["bench/torch/guard.py"])
        .env("LD_LIBRARY_PATH", &standin);
    let preload = standin.join("liblastref_standin_cudart.so");
    bench = bench.env("LD_PRELOAD", &preload);
    bench.run()
}

/// The folder under which torch's versions are installed.
fn cache() -> Result<PathBuf> {
    if let Some(named) = std::env::var_os("LASTREF_CACHE") {
        return Ok(PathBuf::from(named).join("torch"));
    }
    let home = std::env::home_dir()
        .context("no home folder to keep PyTorch in: name one with LASTREF_CACHE")?;
    Ok(home.join(".cache/lastref/torch"))
}

/// The installation of a version, made first if it is not in the cache. `newest` lends CUDA's libraries.
fn installed(workspace: &Workspace, version: &str, newest: Option<&Path>) -> Result<PathBuf> {
    let cache = cache()?;
    fs::create_dir_all(&cache).with_context(|| format!("cannot make {}", cache.display()))?;
    let python = interpreter(workspace)?;
    let ask = "import sys; print('%d.%d' % sys.version_info[:2])";
    let minor = command(workspace, &python)
        .args(["-c", ask])
        .quiet_stdout()?
        .trim()
        .to_owned();
    // Of another Python, it is no use to this one.
    let plain = cache.join(version);
    let fits = |folder: &Path| folder.join("lib").join(format!("python{minor}")).is_dir();
    let folder = if fits(&plain) || !plain.exists() {
        plain
    } else {
        cache.join(format!("{version}-python{minor}"))
    };
    let lock = File::create(cache.join("lock")).context("cannot make the lock of the cache")?;
    flock(&lock, FlockOperation::LockExclusive).context("cannot lock the cache")?;
    if fits(&folder) {
        println!("    torch {version} is in {}", folder.display());
        return Ok(folder);
    }
    let unfinished = cache.join(format!("{version}.unfinished"));
    if unfinished.exists() {
        fs::remove_dir_all(&unfinished)
            .with_context(|| format!("cannot remove {}", unfinished.display()))?;
    }
    let environment = Environment::create_in(workspace, &unfinished)?;
    let torch = format!("torch=={version}");
    if let Some(newest) = newest {
        environment
            .pip(workspace)
            .args(["--no-deps", &torch])
            .run()?;
        environment.pip(workspace).args(IMPORTED).run()?;
        let theirs = site_packages(newest)?.join("nvidia");
        let ours = site_packages(&unfinished)?.join("nvidia");
        std::os::unix::fs::symlink(&theirs, &ours)
            .with_context(|| format!("cannot link {}", ours.display()))?;
    } else {
        environment
            .pip(workspace)
            .args([torch.as_str()])
            .args(CUDA_EXTRAS)
            .run()?;
    }
    fs::rename(&unfinished, &folder)
        .with_context(|| format!("cannot rename to {}", folder.display()))?;
    Ok(folder)
}

/// The environment of our own over an installation in the cache.
fn over(workspace: &Workspace, version: &str, base: &Path) -> Result<Environment> {
    Environment::over(
        workspace,
        &workspace.target.join("venv-torch").join(version),
        &site_packages(base)?,
        REQUIREMENTS,
    )
}

/// As [`over`], with the wheel.
fn environment(
    workspace: &Workspace,
    version: &str,
    base: &Path,
    wheel: &mut Option<PathBuf>,
) -> Result<Environment> {
    let environment = over(workspace, version, base)?;
    if wheel.is_none() {
        *wheel = Some(environment.build_wheel(workspace, Profile::Dev)?);
    }
    if let Some(wheel) = wheel {
        environment.install(workspace, wheel)?;
    }
    Ok(environment)
}

/// The folder of a Python environment's packages.
fn site_packages(environment: &Path) -> Result<PathBuf> {
    let lib = environment.join("lib");
    let entries = fs::read_dir(&lib).with_context(|| format!("cannot read {}", lib.display()))?;
    let mut found = Vec::new();
    for entry in entries {
        let packages = entry?.path().join("site-packages");
        if packages.is_dir() {
            found.push(packages);
        }
    }
    ensure!(found.len() == 1, "{} is no environment", lib.display());
    Ok(found.remove(0))
}

/// The folder of an installation's C++ headers.
fn headers(base: &Path) -> Result<PathBuf> {
    Ok(site_packages(base)?.join("torch/include"))
}

/// The headers of a version: from the cache, or from its wheel, which is then downloaded and not installed.
fn headers_of(workspace: &Workspace, version: &str) -> Result<PathBuf> {
    let cache = cache()?;
    let entries = fs::read_dir(&cache).into_iter().flatten().flatten();
    let mut installed: Vec<PathBuf> = entries
        .map(|entry| entry.path())
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name == version || name.starts_with(&format!("{version}-python"))
        })
        .collect();
    installed.sort();
    if let Some(base) = installed.first() {
        return headers(base);
    }
    let kept = cache.join("headers").join(version);
    if kept.is_dir() {
        return Ok(kept);
    }
    println!("    downloading the wheel of torch {version} for its headers");
    let scratch = workspace.target.join("torch-wheel");
    if scratch.exists() {
        fs::remove_dir_all(&scratch)
            .with_context(|| format!("cannot empty {}", scratch.display()))?;
    }
    python(workspace)?
        .args(["-m", "pip", "--disable-pip-version-check", "--quiet"])
        .args(["download", "--no-deps", "--only-binary", ":all:", "--dest"])
        .args([&scratch])
        .args([format!("torch=={version}")])
        .run()?;
    let unpack = "import glob, sys, zipfile\n\
                  (wheel,) = glob.glob(sys.argv[1] + '/*.whl')\n\
                  names = ['torch/include/' + name for name in sys.argv[3:]]\n\
                  zipfile.ZipFile(wheel).extractall(sys.argv[2], names)";
    let unpacked = scratch.join("unpacked");
    python(workspace)?
        .args(["-c", unpack])
        .args([&scratch, &unpacked])
        .args(class::HEADERS)
        .run()?;
    fs::create_dir_all(cache.join("headers"))?;
    fs::rename(unpacked.join("torch/include"), &kept)
        .or_else(|_| copy_headers(&unpacked.join("torch/include"), &kept))
        .with_context(|| format!("cannot keep the headers in {}", kept.display()))?;
    fs::remove_dir_all(&scratch).with_context(|| format!("cannot remove {}", scratch.display()))?;
    Ok(kept)
}

/// For a cache on another file system.
fn copy_headers(from: &Path, to: &Path) -> std::io::Result<()> {
    for header in class::HEADERS {
        let to = to.join(header);
        fs::create_dir_all(to.parent().unwrap_or(Path::new("/")))?;
        fs::copy(from.join(header), to)?;
    }
    Ok(())
}

fn python(workspace: &Workspace) -> Result<Command> {
    Ok(command(workspace, interpreter(workspace)?))
}
