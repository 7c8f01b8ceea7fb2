//! `lastref standin`: runs a program where a stand-in plays the GPU.
//!
//! The stand-in is one shared object. Its functions of CUDA's runtime are found because it is preloaded; those of the
//! driver and of NVML because a folder with symbolic links, by the names of NVIDIA's libraries, is put before all others.
//! The loader takes links to one file for one library, so that a process has one of it.
//!
//! The folder is kept in the cache and made once for each build: `standin/KEY` under the folder that `LASTREF_CACHE` names,
//! else under `~/.cache/lastref`. Beside it, `standin/sessions` has a file for each command that runs, by which its
//! processes see each other's memory; files of commands that have ended go with the next one.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::UNIX_EPOCH;

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;

use crate::Failure;
use crate::elf;
use crate::replay::capacity;

/// The shared object's name.
const LIBRARY: &str = "liblastref_standin.so";
/// Names a shared object that lies elsewhere; the Python package sets it to the one that it brings.
const LIBRARY_VARIABLE: &str = "LASTREF_STANDIN_LIBRARY";
/// What it is linked as.
const NAMES: [&str; 3] = ["libcuda.so", "libcuda.so.1", "libnvidia-ml.so.1"];

#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Memory of each device, such as 11000MiB or 80GiB [default: 80GiB]
    #[arg(long, value_name = "SIZE", value_parser = capacity)]
    memory: Option<u64>,
    /// How many devices there are [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=64))]
    devices: Option<u32>,
    /// Functions of the driver or of NVML that are not there, as with an old driver
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    missing: Vec<String>,
    /// Print the variables that the program would get, one a line, and run nothing
    #[arg(long, conflicts_with = "program")]
    env: bool,
    /// The program and its arguments, after `--`
    #[arg(last = true, required_unless_present = "env", value_name = "PROGRAM")]
    program: Vec<OsString>,
}

pub(crate) fn run(arguments: &Arguments, out: &mut impl Write) -> Result<(), Failure> {
    let variables = variables(arguments).map_err(Failure::BadInput)?;
    if arguments.env {
        for (name, value) in &variables {
            writeln!(out, "{name}={}", value.display())?;
        }
        return Ok(());
    }
    let Some((program, rest)) = arguments.program.split_first() else {
        return Err(Failure::BadInput(anyhow!("name a program after `--`")));
    };
    out.flush()?;
    // Returns only if it failed.
    let error = Command::new(program).args(rest).envs(variables).exec();
    let failed = anyhow::Error::from(error).context(format!("cannot run {}", program.display()));
    Err(Failure::BadInput(failed))
}

/// What the program's environment gets, in the order of names.
fn variables(arguments: &Arguments) -> Result<Vec<(&'static str, OsString)>> {
    let cache = cache()?.join("standin");
    let (preload, folder) = install(&library()?, &cache, &arguments.missing)?;
    let mut variables = vec![
        (
            "LD_LIBRARY_PATH",
            before("LD_LIBRARY_PATH", folder.as_os_str()),
        ),
        ("LD_PRELOAD", before("LD_PRELOAD", preload.as_os_str())),
    ];
    if let Some(memory) = arguments.memory {
        variables.push(("LASTREF_STANDIN_MEMORY", memory.to_string().into()));
    }
    if let Some(devices) = arguments.devices {
        variables.push(("LASTREF_STANDIN_DEVICES", devices.to_string().into()));
    }
    if !arguments.missing.is_empty() {
        variables.push((
            "LASTREF_STANDIN_MISSING",
            arguments.missing.join(",").into(),
        ));
    }
    // A command inside another takes part in the session of that. What is printed may be used for long.
    if std::env::var_os("LASTREF_STANDIN_SHARED").is_none() && !arguments.env {
        let file = session(&cache.join("sessions"))?;
        variables.push(("LASTREF_STANDIN_SHARED", file.into()));
    }
    variables.sort();
    Ok(variables)
}

/// A list of paths with one more before it.
fn before(variable: &str, path: &OsStr) -> OsString {
    let mut list = path.to_owned();
    if let Some(rest) = std::env::var_os(variable).filter(|rest| !rest.is_empty()) {
        list.push(":");
        list.push(rest);
    }
    list
}

/// The shared object: where the variable says, or beside this program, as Cargo builds it.
fn library() -> Result<PathBuf> {
    if let Some(named) = std::env::var_os(LIBRARY_VARIABLE).filter(|named| !named.is_empty()) {
        let named = PathBuf::from(named);
        return named
            .canonicalize()
            .with_context(|| format!("{LIBRARY_VARIABLE} names {}", named.display()));
    }
    let program = std::env::current_exe().context("cannot find this program")?;
    let folders = program.ancestors().skip(1).take(2);
    let places: Vec<PathBuf> = folders.map(|folder| folder.join(LIBRARY)).collect();
    if let Some(found) = places.iter().find(|place| place.is_file()) {
        return Ok(found.clone());
    }
    bail!(
        "the stand-in, {LIBRARY}, is not beside {}; `cargo build -p lastref-standin` builds it there, the Python \
         package brings it, and {LIBRARY_VARIABLE} can name one",
        program.display()
    )
}

/// The folder for what can be made anew.
fn cache() -> Result<PathBuf> {
    if let Some(named) = std::env::var_os("LASTREF_CACHE").filter(|named| !named.is_empty()) {
        return std::path::absolute(PathBuf::from(named)).context("LASTREF_CACHE is no path");
    }
    let home = std::env::home_dir()
        .context("no home folder to keep links in: name one with LASTREF_CACHE")?;
    Ok(home.join(".cache/lastref"))
}

/// Makes the folder with the links, unless it is there. Returns what to preload, and the folder.
fn install(library: &Path, cache: &Path, missing: &[String]) -> Result<(PathBuf, PathBuf)> {
    let about =
        fs::metadata(library).with_context(|| format!("cannot look at {}", library.display()))?;
    let built = about
        .modified()
        .ok()
        .and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    let built = built.unwrap_or_default().as_nanos();
    let named = format!(
        "{}\0{}\0{built}\0{}",
        library.display(),
        about.len(),
        missing.join(",")
    );
    let folder = cache.join(format!("{:016x}", fnv(named.as_bytes())));
    let preload = if missing.is_empty() {
        library.to_path_buf()
    } else {
        folder.join(LIBRARY)
    };
    if folder.is_dir() {
        return Ok((preload, folder));
    }
    // Made whole under another name: others may make it at the same time.
    let scratch = cache.join(format!("unfinished-{}", std::process::id()));
    fs::create_dir_all(&scratch).with_context(|| format!("cannot make {}", scratch.display()))?;
    let fill = || -> Result<()> {
        if !missing.is_empty() {
            let mut bytes = fs::read(library).context("cannot read the stand-in")?;
            for name in missing {
                elf::hide(&mut bytes, name)?;
            }
            fs::write(scratch.join(LIBRARY), bytes).context("cannot write the stand-in")?;
        }
        for name in NAMES {
            symlink(&preload, scratch.join(name)).context("cannot make a link")?;
        }
        Ok(())
    };
    let filled = fill().and_then(|()| match fs::rename(&scratch, &folder) {
        Err(error) if !folder.is_dir() => Err(error).context("cannot rename the folder of links"),
        _ => Ok(()),
    });
    if filled.is_err() || scratch.is_dir() {
        // It is in nobody's way.
        let _ = fs::remove_dir_all(&scratch);
    }
    filled.map(|()| (preload, folder))
}

/// A new file for the processes of this command, which keeps its number when it becomes the program.
fn session(folder: &Path) -> Result<PathBuf> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let process = name.to_str().and_then(|name| name.parse::<u32>().ok());
        if process.is_some_and(|process| !Path::new(&format!("/proc/{process}")).exists()) {
            // Another command may have removed it.
            let _ = fs::remove_file(entry.path());
        }
    }
    let file = folder.join(std::process::id().to_string());
    match fs::remove_file(&file) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", file.display()))
        }
        _ => Ok(file),
    }
}

/// The hash of Fowler, Noll and Vo: tells builds apart, and guards against nothing.
fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
