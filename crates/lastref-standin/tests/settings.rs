//! One test for each setting.

#[macro_use]
mod support;

use std::ffi::{c_char, c_int};
use std::time::{Duration, Instant};

use support::{alloc, alone, mem_info, start};

const MIB: u64 = 1 << 20;
const MEMORY: (&str, &str) = ("LASTREF_STANDIN_MEMORY", "64MiB");

fn try_alloc() -> c_int {
    let mut ptr = 0;
    call!(cuMemAlloc_v2(&mut ptr => *mut u64, 1 => u64))
}

fn proc_address(name: &std::ffi::CStr) -> (u64, c_int) {
    let (mut address, mut status) = (7, -1);
    let result = call!(cuGetProcAddress_v2(
        name.as_ptr() => *const c_char, &mut address => *mut u64, 13_020 => c_int, 0 => u64,
        &mut status => *mut c_int
    ));
    assert_eq!(result, 0);
    (address, status)
}

#[test]
fn a_setting_that_cannot_be_read_is_said_once_and_there_is_no_device() {
    let name = "a_setting_that_cannot_be_read_is_said_once_and_there_is_no_device";
    let errors = alone(name, &[("LASTREF_STANDIN_MEMORY", "11G")], || {
        assert_eq!(call!(cuInit(0 => u32)), 100);
        assert_eq!(call!(cuInit(0 => u32)), 100);
        let mut count = 7;
        assert_eq!(call!(cudaGetDeviceCount(&mut count => *mut c_int)), 100);
    });
    if let Some(errors) = errors {
        let wanted =
            "lastref stand-in: LASTREF_STANDIN_MEMORY=11G: unknown unit \"G\", expected a size";
        assert_eq!(errors.matches(wanted).count(), 1, "{errors}");
    }
}

#[test]
fn quiet_says_nothing() {
    let errors = alone(
        "quiet_says_nothing",
        &[MEMORY, ("LASTREF_STANDIN_QUIET", "1")],
        || {
            start(0);
        },
    );
    if let Some(errors) = errors {
        assert!(!errors.contains("stand-in"), "{errors}");
    }
}

#[test]
fn no_devices() {
    alone("no_devices", &[("LASTREF_STANDIN_DEVICES", "0")], || {
        assert_eq!(call!(cuInit(0 => u32)), 100);
        let mut count = 7;
        assert_eq!(call!(cudaGetDeviceCount(&mut count => *mut c_int)), 100);
        assert_eq!(count, 0);
    });
}

#[test]
fn memory_of_others_is_not_free() {
    alone(
        "memory_of_others_is_not_free",
        &[MEMORY, ("LASTREF_STANDIN_OTHER_MEMORY", "60MiB")],
        || {
            start(0);
            assert_eq!(mem_info().0, 4 * MIB);
            alloc(4 * MIB);
            assert_eq!(try_alloc(), 2);
        },
    );
}

#[test]
fn calls_fail_on_demand() {
    let faults = ("LASTREF_STANDIN_FAIL", "cuMemAlloc:2,cuStreamCreate:1=719");
    alone("calls_fail_on_demand", &[MEMORY, faults], || {
        start(0);
        assert_eq!((try_alloc(), try_alloc(), try_alloc()), (0, 2, 0));
        let mut stream = 0;
        assert_eq!(
            call!(cuStreamCreate(&mut stream => *mut u64, 0 => u32)),
            719
        );
        assert_eq!(call!(cuStreamCreate(&mut stream => *mut u64, 0 => u32)), 0);
        // And while the program runs.
        let fail = |name: &std::ffi::CStr| call!(lastref_standin_fail(name.as_ptr() => *const c_char, 2 => u64, 0 => c_int));
        assert_eq!((fail(c"cuFancy"), fail(c"*")), (1, 0));
        assert_eq!((try_alloc(), try_alloc(), try_alloc()), (0, 2, 0));
        assert_eq!(fail(c"cuMemAlloc"), 0);
        assert_eq!(call!(lastref_standin_clear_faults()), 0);
        assert_eq!((try_alloc(), try_alloc()), (0, 0));
    });
}

#[test]
fn calls_take_time_on_demand() {
    alone(
        "calls_take_time_on_demand",
        &[MEMORY, ("LASTREF_STANDIN_LATENCY", "cuMemAlloc=20000")],
        || {
            start(0);
            let begun = Instant::now();
            assert_eq!(try_alloc(), 0);
            assert!(begun.elapsed() >= Duration::from_millis(20));
        },
    );
}

#[test]
fn an_old_driver_has_no_virtual_memory() {
    alone(
        "an_old_driver_has_no_virtual_memory",
        &[MEMORY, ("LASTREF_STANDIN_VIRTUAL_MEMORY", "0")],
        || {
            start(0);
            let mut value = 9;
            assert_eq!(
                call!(cuDeviceGetAttribute(&mut value => *mut c_int, 102 => c_int, 0 => c_int)),
                0
            );
            assert_eq!(value, 0);
            let mut ptr = 0_u64;
            assert_eq!(
                call!(cuMemAddressReserve(&mut ptr => *mut u64, 2 * MIB => u64, 0 => u64, 0 => u64, 0 => u64)),
                801
            );
            let prop = [1_i32, 0, 1, 0, 0, 0, 0, 0];
            assert_eq!(
                call!(cuMemCreate(&mut ptr => *mut u64, 2 * MIB => u64, prop.as_ptr() => *const i32, 0 => u64)),
                801
            );
            assert_eq!(try_alloc(), 0);
        },
    );
}

#[test]
fn a_missing_function_is_not_found_by_name() {
    alone(
        "a_missing_function_is_not_found_by_name",
        &[MEMORY, ("LASTREF_STANDIN_MISSING", "cuMemCreate")],
        || {
            assert_eq!(proc_address(c"cuMemCreate"), (0, 1));
            assert_ne!(proc_address(c"cuMemMap").0, 0);
            let (mut address, mut status) = (7_u64, -1);
            let result = call!(cudaGetDriverEntryPointByVersion(
                c"cuMemCreate".as_ptr() => *const c_char, &mut address => *mut u64, 13_000 => u32, 0 => u64,
                &mut status => *mut c_int
            ));
            assert_eq!((result, address, status), (0, 0, 1));
        },
    );
}

#[test]
fn the_driver_may_be_of_another_version() {
    alone(
        "the_driver_may_be_of_another_version",
        &[MEMORY, ("LASTREF_STANDIN_DRIVER", "11.1")],
        || {
            let mut version = 0;
            assert_eq!(call!(cuDriverGetVersion(&mut version => *mut c_int)), 0);
            assert_eq!(version, 11_010);
            assert_eq!(
                proc_address(c"cuMemAllocAsync"),
                (0, 2),
                "it came with 11.2"
            );
            assert_eq!(
                call!(nvmlSystemGetCudaDriverVersion_v2(&mut version => *mut c_int)),
                0
            );
            assert_eq!(version, 11_010);
        },
    );
}

#[test]
fn processes_of_a_session_see_each_other() {
    let name = "processes_of_a_session_see_each_other";
    let file = std::env::temp_dir().join(format!("lastref-session-{}", std::process::id()));
    let shared = ("LASTREF_STANDIN_SHARED", file.to_str().unwrap());
    const OTHER: &str = "STANDIN_TEST_OTHER";
    alone(name, &[MEMORY, shared], || {
        start(0);
        if std::env::var_os(OTHER).is_some() {
            // The other process: it sees what the first holds, and holds more while the first looks.
            assert_eq!(mem_info().0, 48 * MIB);
            alloc(16 * MIB);
            println!("holding");
            std::io::stdin().read_line(&mut String::new()).unwrap();
            return;
        }
        use std::io::{BufRead as _, Write as _};
        use std::process::{Command, Stdio};
        alloc(16 * MIB);
        assert_eq!(mem_info().0, 48 * MIB);
        let mut other = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env(OTHER, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = std::io::BufReader::new(other.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap() == "holding"));
        assert_eq!(mem_info().0, 32 * MIB);
        let mut ptr = 0;
        assert_eq!(
            call!(cuMemAlloc_v2(&mut ptr => *mut u64, 34 * MIB => u64)),
            2
        );
        let mut device = 0_u64;
        assert_eq!(
            call!(nvmlDeviceGetHandleByIndex_v2(0 => u32, &mut device => *mut u64)),
            0
        );
        let mut found = [(0_u32, 0_u32, 0_u64); 4];
        let mut room = 4;
        let listed = call!(nvmlDeviceGetComputeRunningProcesses(
            device => u64, &mut room => *mut u32, found.as_mut_ptr().cast() => *mut u8
        ));
        assert_eq!((listed, room), (0, 2));
        let mut bytes = [0_u64; 3];
        assert_eq!(
            call!(nvmlDeviceGetMemoryInfo(device => u64, bytes.as_mut_ptr() => *mut u64)),
            0
        );
        assert_eq!(bytes[2], 32 * MIB);
        writeln!(other.stdin.take().unwrap()).unwrap();
        assert!(other.wait().unwrap().success());
        assert_eq!(mem_info().0, 48 * MIB, "what a process held goes with it");
    });
    let _ = std::fs::remove_file(file);
}

#[test]
fn forked_children_are_refused() {
    alone("forked_children_are_refused", &[MEMORY], || {
        start(0);
        // SAFETY: the child calls what is tested and ends at once.
        unsafe extern "C" {
            fn fork() -> c_int;
            fn waitpid(pid: c_int, status: *mut c_int, options: c_int) -> c_int;
            fn _exit(status: c_int) -> !;
        }
        // SAFETY: as above.
        let child = unsafe { fork() };
        if child == 0 {
            let result = try_alloc();
            // SAFETY: as above.
            unsafe { _exit(result) };
        }
        let mut status = 0;
        // SAFETY: the child was started above.
        unsafe { waitpid(child, &mut status, 0) };
        assert_eq!(status >> 8, 3, "not initialised");
        assert_eq!(try_alloc(), 0);
    });
}
