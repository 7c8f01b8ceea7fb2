//! What another process sees of this one's memory, by NVML: the stand-in keeps books for all its processes.

mod common;

use std::ffi::{c_int, c_void};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::Stdio;

use common::standin;
use common::{MIB, bytes_on_gpu};
use lastref::{Tensor, cuda};
use libloading::Library;

/// A program that stops after each step, until it is told to go on.
#[test]
#[ignore = "run by the test below"]
fn program() {
    let step = |name: &str| {
        println!("step {name}");
        let mut line = String::new();
        std::io::stdin().read_line(&mut line).unwrap();
    };
    assert!(cuda::is_available());
    cuda::synchronize(0).unwrap();
    step("started");
    let mut t1 = bytes_on_gpu(100 * MIB).unwrap();
    step("a tensor");
    assert!(t1.is_cuda());
    t1 = Tensor::empty([4, 5]).unwrap();
    step("a new value");
    cuda::empty_cache().unwrap();
    step("emptied");
    drop(t1);
}

/// Prints what NVML says is in use.
#[test]
#[ignore = "run by the test below"]
fn watcher() {
    #[repr(C)]
    #[derive(Default)]
    struct Memory {
        total: u64,
        free: u64,
        used: u64,
    }
    type Init = unsafe extern "C" fn() -> c_int;
    type Handle = unsafe extern "C" fn(u32, *mut *mut c_void) -> c_int;
    type Info = unsafe extern "C" fn(*mut c_void, *mut Memory) -> c_int;
    // SAFETY: the stand-in, or NVIDIA's own library.
    let library = unsafe { Library::new("libnvidia-ml.so.1") }.unwrap();
    // SAFETY: NVML's function has this signature.
    let init = unsafe { library.get::<Init>(b"nvmlInit_v2") }.unwrap();
    // SAFETY: as above.
    let find = unsafe { library.get::<Handle>(b"nvmlDeviceGetHandleByIndex_v2") }.unwrap();
    // SAFETY: as above.
    let info = unsafe { library.get::<Info>(b"nvmlDeviceGetMemoryInfo") }.unwrap();
    let mut device = std::ptr::null_mut();
    let mut memory = Memory::default();
    // SAFETY: it takes nothing.
    assert_eq!(unsafe { init() }, 0);
    // SAFETY: the result is a local.
    assert_eq!(unsafe { find(0, &raw mut device) }, 0);
    // SAFETY: the device was found, and the result is a local.
    assert_eq!(unsafe { info(device, &raw mut memory) }, 0);
    assert_eq!(memory.total, memory.free + memory.used);
    println!("used {}", memory.used);
}

#[test]
fn memory_comes_and_goes_as_another_process_sees_it() {
    let shared =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("shared-{}", std::process::id()));
    let settings = [("MEMORY", "8GiB"), ("SHARED", shared.to_str().unwrap())];
    let folder = standin::folder("standin");
    let used = || -> u64 {
        let output = standin::command("watcher", &folder, &settings)
            .output()
            .unwrap();
        let said = standin::passed(&output);
        let (_, used) = said.split_once("used ").unwrap();
        used.lines().next().unwrap().parse().unwrap()
    };
    let mut program = standin::command("program", &folder, &settings)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(program.stdout.take().unwrap()).lines();
    let mut seen = Vec::new();
    for step in ["started", "a tensor", "a new value", "emptied"] {
        let wanted = format!("step {step}");
        assert!(
            lines.any(|line| line.unwrap().contains(&wanted)),
            "the program ended before {step}"
        );
        seen.push(used());
        program.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    }
    assert!(program.wait().unwrap().success());
    let of_the_program = |at: usize| seen[at] - seen[0];
    assert_eq!(of_the_program(1), 100 << 20, "the tensor");
    assert_eq!(of_the_program(2), 100 << 20, "freed, and cached");
    assert_eq!(of_the_program(3), 0, "given back");
    let _ = std::fs::remove_file(shared);
}
