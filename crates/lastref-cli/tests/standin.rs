//! `lastref standin`: what a program finds under it. The program is this test again.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "tests")]

use std::ffi::c_int;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use libloading::Library;

const CHILD: &str = "STANDIN_CHILD";

/// The command, with a cache of its own and the library that Cargo built for this test.
fn lastref(cache: &Path) -> Command {
    let test = std::env::current_exe().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_lastref"));
    command
        .arg("standin")
        .env(
            "LASTREF_STANDIN_LIBRARY",
            test.parent().unwrap().join("liblastref_standin.so"),
        )
        .env("LASTREF_CACHE", cache)
        .env("LASTREF_STANDIN_QUIET", "1");
    for name in [
        "LD_PRELOAD",
        "LD_LIBRARY_PATH",
        "LASTREF_STANDIN_SHARED",
        "CUDA_VISIBLE_DEVICES",
    ] {
        command.env_remove(name);
    }
    command
}

fn cache(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&folder);
    folder
}

/// Runs the test `name` of this file as the program.
fn run(command: &mut Command, name: &str) -> Output {
    let test = std::env::current_exe().unwrap();
    command
        .env(CHILD, name)
        .arg("--")
        .arg(test)
        .args(["--exact", name, "--nocapture"])
        .output()
        .unwrap()
}

fn is_child(name: &str) -> bool {
    std::env::var(CHILD).is_ok_and(|child| child == name)
}

fn check(output: &Output) {
    let (said, errors) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{said}\n{errors}"
    );
}

fn open(name: &str) -> Library {
    // SAFETY: the stand-in runs no code of its own when it is loaded.
    unsafe { Library::new(name) }.unwrap()
}

/// Calls a function that takes a number.
fn call(library: &Library, name: &str, number: u64) -> Option<c_int> {
    type Function = unsafe extern "C" fn(u64) -> c_int;
    // SAFETY: the functions that are asked for here take a number, or nothing.
    let function = unsafe { library.get::<Function>(format!("{name}\0").as_bytes()) };
    let function = function.ok()?;
    // SAFETY: as above.
    Some(unsafe { function(number) })
}

fn number(library: &Library, name: &str) -> u64 {
    let mut out = 0_u64;
    let place = std::ptr::from_mut(&mut out) as u64;
    assert_eq!(call(library, name, place), Some(0), "{name}");
    out
}

#[test]
fn a_program_finds_all_libraries_over_one_state() {
    let name = "a_program_finds_all_libraries_over_one_state";
    if is_child(name) {
        let (driver, nvml) = (open("libcuda.so.1"), open("libnvidia-ml.so.1"));
        let runtime = Library::from(libloading::os::unix::Library::this());
        assert_eq!(call(&driver, "cuInit", 0), Some(0));
        assert_eq!(number(&driver, "cuDeviceGetCount"), 2);
        assert_eq!(number(&runtime, "cudaGetDeviceCount"), 2);
        assert_eq!(number(&nvml, "nvmlDeviceGetCount_v2"), 2);
        let mut total = [0_u64; 2];
        type Function = unsafe extern "C" fn(*mut u64, *mut u64) -> c_int;
        // SAFETY: that is its type.
        let function = unsafe { runtime.get::<Function>(b"cudaMemGetInfo\0") }.unwrap();
        let [free, all] = &mut total;
        // SAFETY: both numbers have a place.
        let result = unsafe { function(free, all) };
        assert_eq!((result, total[1]), (0, 96 << 20));
        assert!(std::env::var_os("LASTREF_STANDIN_SHARED").is_some());
        return;
    }
    let cache = cache(name);
    for _ in 0..2 {
        check(&run(
            lastref(&cache).args(["--memory", "96MiB", "--devices", "2"]),
            name,
        ));
    }
    // One folder for both, and the session of the one before is gone.
    assert_eq!(std::fs::read_dir(cache.join("standin")).unwrap().count(), 2);
    assert_eq!(
        std::fs::read_dir(cache.join("standin/sessions"))
            .unwrap()
            .count(),
        1
    );
}

#[test]
fn a_function_can_be_missing() {
    let name = "a_function_can_be_missing";
    if is_child(name) {
        let driver = open("libcuda.so");
        assert_eq!(call(&driver, "cuInit", 0), Some(0));
        for gone in [
            "cuMemCreate",
            "cuMemAlloc_v2",
            "cuStreamSynchronize",
            "cuStreamSynchronize_ptsz",
        ] {
            assert_eq!(call(&driver, gone, 0), None, "{gone}");
        }
        assert!(call(&driver, "cuMemRelease", 0).is_some());
        return;
    }
    let cache = cache(name);
    let missing = [
        "--missing",
        "cuMemCreate,cuMemAlloc",
        "--missing",
        "cuStreamSynchronize",
    ];
    check(&run(lastref(&cache).args(missing), name));
    let refused = run(lastref(&cache).args(["--missing", "cuFancy"]), name);
    assert_eq!(refused.status.code(), Some(2));
    let errors = String::from_utf8_lossy(&refused.stderr);
    assert!(errors.contains("there is no function cuFancy"), "{errors}");
}

#[test]
fn variables_can_be_printed() {
    let output = lastref(&cache("variables_can_be_printed"))
        .args(["--env", "--memory", "1GiB"])
        .output()
        .unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    let names: Vec<&str> = said
        .lines()
        .map(|line| line.split_once('=').unwrap().0)
        .collect();
    assert_eq!(
        names,
        ["LASTREF_STANDIN_MEMORY", "LD_LIBRARY_PATH", "LD_PRELOAD"]
    );
}

#[test]
fn settings_are_checked_before_the_program_runs() {
    let cache = cache("settings_are_checked_before_the_program_runs");
    for wrong in [["--memory", "much"], ["--memory", "3"], ["--devices", "65"]] {
        let output = lastref(&cache)
            .args(wrong)
            .args(["--", "true"])
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(
            String::from_utf8_lossy(&output.stderr).contains(wrong[0]),
            "{output:?}"
        );
    }
}

#[test]
fn what_cannot_be_run_is_said() {
    let cache = cache("what_cannot_be_run_is_said");
    let output = lastref(&cache)
        .args(["--", "/no/such/program"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("cannot run /no/such/program"), "{errors}");
    let output = lastref(&cache)
        .env("LASTREF_STANDIN_LIBRARY", "/no/such/file")
        .arg("--env")
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        errors.contains("LASTREF_STANDIN_LIBRARY names /no/such/file"),
        "{errors}"
    );
}
