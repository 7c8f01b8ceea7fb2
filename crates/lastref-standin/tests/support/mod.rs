//! Calls the shared object as a C program does, each test in a process of its own: the settings are read once, and the
//! state is the process's.

#![allow(dead_code, unused_macros, reason = "each test uses a part")]
#![expect(clippy::unwrap_used, reason = "only tests come here")]

use std::ffi::{CStr, c_char, c_int};
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

use libloading::Library;

/// Set in the process that runs a test.
const CHILD: &str = "STANDIN_TEST";

/// The shared object that Cargo built for this test.
pub(crate) fn library_path() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let path = test.parent().unwrap().join("liblastref_standin.so");
    assert!(path.is_file(), "{} is not there", path.display());
    path
}

pub(crate) fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    // SAFETY: loading it runs no code of its own.
    LIBRARY.get_or_init(|| unsafe { Library::new(library_path()) }.unwrap())
}

/// A function of the library, as the type that the caller knows it to have.
pub(crate) fn symbol<F: Copy>(name: &str) -> F {
    let name = format!("{name}\0");
    // SAFETY: the caller names the type that the header has.
    let found = unsafe { library().get::<F>(name.as_bytes()) };
    *found.unwrap()
}

/// Calls a function that returns a result: `call!(cuMemFree_v2(ptr => u64))`.
macro_rules! call {
    ($name:ident($($argument:expr => $type:ty),* $(,)?)) => {{
        type Called = unsafe extern "C" fn($($type),*) -> std::ffi::c_int;
        let function: Called = $crate::support::symbol(stringify!($name));
        // SAFETY: the test says what the header says.
        unsafe { function($($argument),*) }
    }};
}

/// Runs the test `name` in a process of its own with these variables, `body` being what it does there. Returns what that
/// printed on standard error, or `None` in that process.
pub(crate) fn alone(name: &str, variables: &[(&str, &str)], body: impl FnOnce()) -> Option<String> {
    if std::env::var(CHILD).is_ok_and(|child| child == name) {
        body();
        return None;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture", "--test-threads=1"]);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("LASTREF_") || name == "CUDA_VISIBLE_DEVICES" {
            command.env_remove(name);
        }
    }
    let output = command
        .env(CHILD, name)
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{name}:\n{said}\n{errors}");
    assert!(said.contains("1 passed"), "there is no test {name}");
    Some(errors)
}

pub(crate) fn text(pointer: *const c_char) -> String {
    assert!(!pointer.is_null());
    // SAFETY: the library's texts end with a zero.
    unsafe { CStr::from_ptr(pointer) }
        .to_str()
        .unwrap()
        .to_owned()
}

/// `cuInit`, and the primary context of a device made current.
pub(crate) fn start(device: c_int) -> u64 {
    assert_eq!(call!(cuInit(0 => u32)), 0);
    let mut context = 0;
    assert_eq!(
        call!(cuDevicePrimaryCtxRetain(&mut context => *mut u64, device => c_int)),
        0
    );
    assert_eq!(call!(cuCtxSetCurrent(context => u64)), 0);
    context
}

pub(crate) fn alloc(bytes: u64) -> u64 {
    let mut ptr = 0;
    assert_eq!(call!(cuMemAlloc_v2(&mut ptr => *mut u64, bytes => u64)), 0);
    ptr
}

/// Free and total bytes of the current device.
pub(crate) fn mem_info() -> (u64, u64) {
    let (mut free, mut total) = (0, 0);
    assert_eq!(
        call!(cuMemGetInfo_v2(&mut free => *mut u64, &mut total => *mut u64)),
        0
    );
    (free, total)
}
