//! Tests over the stand-in: each runs in a process of its own, which finds the stand-in as its driver.
//!
//! A driver is found by its name on a path that is read when a process starts, and its settings are
//! read once. So a test here runs another one, marked `ignore`, of the same program.
#![allow(
    dead_code,
    clippy::allow_attributes,
    reason = "each test file uses a part"
)]
#![expect(clippy::unwrap_used, reason = "an error here is a failed test")]

use std::ffi::{CString, c_char, c_int};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use libloading::Library;

/// The stand-in's shared object, which Cargo builds beside the program of a test.
pub(crate) fn shared_object() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let path = program.with_file_name("liblastref_standin.so");
    assert!(path.is_file(), "there is no {}", path.display());
    path
}

/// A folder of this name with the stand-in under the driver's names.
pub(crate) fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::create_dir_all(&folder).unwrap();
    for library in ["libcuda.so", "libcuda.so.1", "libnvidia-ml.so.1"] {
        put(&shared_object(), &folder.join(library));
    }
    folder
}

/// A link to `target`, where another test may be making the same.
fn put(target: &Path, link: &Path) {
    if fs::read_link(link).is_ok_and(|there| there == target) {
        return;
    }
    let own = link.with_extension(format!("{}", std::process::id()));
    let _ = fs::remove_file(&own);
    symlink(target, &own).unwrap();
    fs::rename(&own, link).unwrap();
}

/// The test `name` of this program in a process of its own, with drivers from `folder` only.
pub(crate) fn command(name: &str, folder: &Path, settings: &[(&str, &str)]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args([
            "--exact",
            name,
            "--ignored",
            "--nocapture",
            "--test-threads=1",
        ])
        .env("LD_LIBRARY_PATH", folder)
        .env("LASTREF_STANDIN_QUIET", "1")
        .env_remove("LASTREF_SIM");
    for (name, value) in settings {
        if *name == "CUDA_VISIBLE_DEVICES" {
            command.env(name, value);
        } else {
            command.env(format!("LASTREF_STANDIN_{name}"), value);
        }
    }
    command
}

/// Runs a test over the stand-in and returns what it wrote.
#[track_caller]
pub(crate) fn run(name: &str, settings: &[(&str, &str)]) -> String {
    passed(
        &command(name, &folder("standin"), settings)
            .output()
            .unwrap(),
    )
}

#[track_caller]
pub(crate) fn passed(output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{}\n{said}\n{errors}",
        output.status
    );
    said
}

// ---- in the process that runs on the stand-in ----------------------------------------------

/// The stand-in's own functions.
pub(crate) struct Standin(Library);

impl Standin {
    pub(crate) fn new() -> Self {
        // SAFETY: the stand-in is this process's driver already.
        Self(unsafe { Library::new("libcuda.so.1") }.unwrap())
    }

    /// Makes the `n`-th call of `name` from now fail with `code`.
    pub(crate) fn fail(&self, name: &str, n: u64, code: i32) {
        type Fail = unsafe extern "C" fn(*const c_char, u64, c_int) -> c_int;
        let name = CString::new(name).unwrap();
        // SAFETY: the function is the stand-in's, with this signature.
        let fail = unsafe { self.0.get::<Fail>(b"lastref_standin_fail") }.unwrap();
        // SAFETY: the name is valid for the call.
        assert_eq!(unsafe { fail(name.as_ptr(), n, code) }, 0);
    }

    /// No call fails any more.
    pub(crate) fn clear(&self) {
        type Clear = unsafe extern "C" fn() -> c_int;
        // SAFETY: the function is the stand-in's, with this signature.
        let clear = unsafe { self.0.get::<Clear>(b"lastref_standin_clear_faults") }.unwrap();
        // SAFETY: it takes nothing.
        assert_eq!(unsafe { clear() }, 0);
    }

    /// Makes events recorded from now on wait, and all work behind them, until something waits for them;
    /// or no longer.
    pub(crate) fn delay_events(&self, late: bool) {
        type Delay = unsafe extern "C" fn(u32) -> c_int;
        // SAFETY: the function is the stand-in's, with this signature.
        let delay = unsafe { self.0.get::<Delay>(b"lastref_standin_delay_events") }.unwrap();
        // SAFETY: it takes a number.
        assert_eq!(unsafe { delay(u32::from(late)) }, 0);
    }

    /// Bytes of a device that this process holds.
    pub(crate) fn used(&self, device: i32) -> u64 {
        type Used = unsafe extern "C" fn(c_int) -> u64;
        // SAFETY: the function is the stand-in's, with this signature.
        let used = unsafe { self.0.get::<Used>(b"lastref_standin_used") }.unwrap();
        // SAFETY: it takes a number.
        unsafe { used(device) }
    }

    /// How often `name` was called; `*` stands for all functions.
    pub(crate) fn calls(&self, name: &str) -> u64 {
        type Calls = unsafe extern "C" fn(*const c_char) -> u64;
        let name = CString::new(name).unwrap();
        // SAFETY: the function is the stand-in's, with this signature.
        let calls = unsafe { self.0.get::<Calls>(b"lastref_standin_calls") }.unwrap();
        // SAFETY: the name is valid for the call.
        let calls = unsafe { calls(name.as_ptr()) };
        assert!(calls > 0 || name.as_bytes() != b"*", "something was called");
        calls
    }
}
