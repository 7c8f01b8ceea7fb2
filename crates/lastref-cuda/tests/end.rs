//! When the driver must not be called any more, and what happens to errors that nobody is told of.
#![cfg(all(target_os = "linux", target_pointer_width = "64"))]
#![expect(clippy::unwrap_used, reason = "an error here is a failed test")]

mod common;

use std::sync::{Mutex, OnceLock};

use common::{Standin, run};
use cudarc::driver::result;
use lastref_alloc::{CachingAllocator, Device, DeviceError, FillValue, StreamId};
use lastref_cuda::{CudaDevice, stats};

const MIB: u64 = 1 << 20;
const DEFAULT: StreamId = StreamId::DEFAULT;

fn device(index: usize) -> &'static CudaDevice {
    &lastref_cuda::devices().unwrap()[index]
}

fn code(error: &DeviceError) -> i32 {
    match error {
        DeviceError::Driver { code, .. } => *code,
        other => panic!("{other}"),
    }
}

/// Every call that the trait has a name for, with arguments that would do.
fn calls(device: &CudaDevice) -> Vec<(&'static str, Result<(), DeviceError>)> {
    let mut host = [0; 16];
    vec![
        ("memory_info", device.memory_info().map(drop)),
        ("alloc_segment", device.alloc_segment(MIB).map(drop)),
        ("create_page", device.create_page().map(drop)),
        ("create_stream", device.create_stream(0).map(drop)),
        ("create_event", device.create_event().map(drop)),
        ("synchronize", device.synchronize()),
        ("query_stream", device.query_stream(DEFAULT).map(drop)),
        ("alloc_pinned", device.alloc_pinned(64).map(drop)),
        (
            "copy_to_host",
            device.copy_to_host(&mut host, lastref_alloc::DevicePtr(4096), DEFAULT),
        ),
    ]
}

// ---- fork ---------------------------------------------------------------------------------

#[test]
fn a_forked_child_is_told_and_leaves_the_driver_alone() {
    run("forked", &[("MEMORY", "1GiB")]);
}

#[test]
#[ignore = "run by the others"]
fn forked() {
    let device = device(0);
    let standin = Standin::new();
    let allocator = CachingAllocator::new(device.clone());
    let kept = allocator.alloc(3 * MIB, DEFAULT).unwrap();
    let pinned = device.alloc_pinned(1000).unwrap();
    let event = device.create_event().unwrap();
    let before = standin.calls("*");
    // SAFETY: the child calls only what is tested here, and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let as_it_should = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for (call, result) in calls(device) {
                let error = result.unwrap_err();
                assert_eq!(code(&error), 3, "{call}");
                let text = error.to_string();
                assert!(text.contains("before this process was forked"), "{text}");
            }
            assert!(!device.is_capturing());
            assert!(device.destroy_event(event).is_err());
            drop(pinned);
            drop(kept);
            assert!(allocator.empty_cache().is_err());
            drop(allocator);
            assert_eq!(standin.calls("*"), before, "the driver was called");
        }));
        // SAFETY: ends this process at once.
        unsafe { libc::_exit(i32::from(as_it_should.is_err())) };
    }
    let mut status = 0;
    // SAFETY: the status is a local.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child says what failed");
    // The parent goes on.
    drop(kept);
    allocator.empty_cache().unwrap();
    assert_eq!(standin.used(0), 0);
}

// ---- exit ---------------------------------------------------------------------------------

#[test]
fn nothing_is_called_while_the_process_exits() {
    let said = run("exiting", &[("MEMORY", "1GiB")]);
    assert!(said.contains("at exit: all as it should be"), "{said}");
}

type Held = (CachingAllocator<CudaDevice>, lastref_cuda::PinnedBuffer);
static HELD: OnceLock<Mutex<Option<Held>>> = OnceLock::new();

extern "C" fn late() {
    let as_it_should = std::panic::catch_unwind(|| {
        let standin = Standin::new();
        let before = standin.calls("*");
        let (allocator, pinned) = HELD.get().unwrap().lock().unwrap().take().unwrap();
        for (call, result) in calls(allocator.device()) {
            assert_eq!(code(&result.unwrap_err()), 4, "{call}");
        }
        assert!(allocator.empty_cache().is_err());
        drop(allocator);
        drop(pinned);
        assert_eq!(standin.calls("*"), before, "the driver was called");
    });
    let says: &[u8] = if as_it_should.is_ok() {
        b"at exit: all as it should be\n"
    } else {
        b"at exit: FAILED\n"
    };
    // SAFETY: the bytes are static; the harness has closed nothing.
    unsafe { libc::write(1, says.as_ptr().cast(), says.len()) };
}

#[test]
#[ignore = "run by the others"]
fn exiting() {
    // Before the driver is started, so that it runs after the driver's own handlers.
    // SAFETY: the handler is a function of this program.
    assert_eq!(unsafe { libc::atexit(late) }, 0);
    let device = device(0);
    let allocator = CachingAllocator::new(device.clone());
    drop(allocator.alloc(3 * MIB, DEFAULT).unwrap());
    let pinned = device.alloc_pinned(1000).unwrap();
    *HELD.get_or_init(Mutex::default).lock().unwrap() = Some((allocator, pinned));
}

// ---- a context that is gone, and one that is lost ------------------------------------------

#[test]
fn a_destroyed_context_is_left_alone() {
    run("destroyed", &[("MEMORY", "1GiB"), ("DEVICES", "2")]);
}

#[test]
#[ignore = "run by the others"]
fn destroyed() {
    let (first, second) = (device(0), device(1));
    let standin = Standin::new();
    let held = first.alloc_segment(MIB).unwrap();
    standin.fail("cuCtxSynchronize", 1, 709);
    let error = first.synchronize().unwrap_err();
    assert_eq!(code(&error), 709);
    assert!(
        error
            .to_string()
            .contains("cuCtxSynchronize: error 709, CUDA_ERROR_CONTEXT_IS_DESTROYED")
    );
    let before = standin.calls("*");
    for (call, result) in calls(first) {
        let error = result.unwrap_err();
        assert_eq!(code(&error), 709, "{call}");
        assert!(
            error.to_string().contains("its memory went with it"),
            "{error}"
        );
    }
    assert!(first.free_segment(held).is_err());
    assert_eq!(standin.calls("*"), before, "the driver was called");
    let other = second.alloc_segment(MIB).unwrap();
    second.free_segment(other).unwrap();
}

#[test]
fn an_error_of_earlier_work_says_so_and_concerns_one_device() {
    run("sticky", &[("MEMORY", "1GiB"), ("DEVICES", "2")]);
}

#[test]
#[ignore = "run by the others"]
fn sticky() {
    let (first, second) = (device(0), device(1));
    let standin = Standin::new();
    let allocator = CachingAllocator::new(first.clone());
    let block = allocator.alloc(3 * MIB, DEFAULT).unwrap();
    standin.fail("cuMemsetD8Async", 1, 700);
    let error = first
        .fill(block.ptr(), FillValue::U8(1), 64, DEFAULT)
        .unwrap_err();
    let text = error.to_string();
    assert!(
        text.starts_with("cuMemsetD8Async: error 700, CUDA_ERROR_ILLEGAL_ADDRESS: "),
        "{text}"
    );
    assert!(
        text.ends_with("(by work submitted earlier; this device is lost to this process)"),
        "{text}"
    );
    // Nothing is poisoned: locks, the other device, and what the first still allows.
    let other = second.alloc_segment(MIB).unwrap();
    second.fill(other, FillValue::U8(1), 64, DEFAULT).unwrap();
    second.free_segment(other).unwrap();
    drop(block);
    allocator.empty_cache().unwrap();
    assert_eq!(standin.used(0), 0);
}

// ---- errors that nobody is told of ---------------------------------------------------------

struct Logger;
static LOGGED: Mutex<Vec<String>> = Mutex::new(Vec::new());

impl log::Log for Logger {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }
    fn log(&self, record: &log::Record<'_>) {
        LOGGED.lock().unwrap().push(record.args().to_string());
    }
    fn flush(&self) {}
}

#[test]
fn errors_in_destructors_are_counted_and_logged() {
    run("in_drop", &[("MEMORY", "1GiB")]);
}

#[test]
#[ignore = "run by the others"]
fn in_drop() {
    log::set_logger(&Logger).unwrap();
    log::set_max_level(log::LevelFilter::Trace);
    let device = device(0);
    let standin = Standin::new();
    let mut pinned = device.alloc_pinned(5000).unwrap();
    pinned.record_stream(device, DEFAULT).unwrap();
    drop(pinned);
    assert_eq!(stats().pinned_cached_bytes, 8192);
    standin.fail("cuMemFreeHost", 1, 999);
    standin.fail("cuEventDestroy", 1, 1);
    device.synchronize().unwrap();
    device.trim_pinned().unwrap();
    let stats = stats();
    assert_eq!(stats.failed_releases, 2);
    let logged = LOGGED.lock().unwrap();
    assert_eq!(logged.len(), 2, "{logged:?}");
    for call in ["cuMemFreeHost: error 999, ", "cuEventDestroy: error 1, "] {
        assert!(logged.iter().any(|line| line.contains(call)), "{logged:?}");
    }
    let latest = stats.latest_failure.unwrap();
    assert!(logged[1].contains(&latest), "{latest}");
}

// ---- what a call leaves behind -------------------------------------------------------------

#[test]
fn a_call_leaves_the_current_context_as_it_was() {
    run("context", &[("MEMORY", "1GiB"), ("DEVICES", "2")]);
}

#[test]
#[ignore = "run by the others"]
fn context() {
    let current = || result::ctx::get_current().unwrap();
    let (first, second) = (device(0), device(1));
    assert!(current().is_none(), "devices are found without a context");
    first.memory_info().unwrap();
    assert!(current().is_none());
    // SAFETY: device 1 is there.
    let context = unsafe { result::primary_ctx::retain(result::device::get(1).unwrap()) }.unwrap();
    // SAFETY: a context of the driver's.
    unsafe { result::ctx::set_current(context) }.unwrap();
    for device in [first, second] {
        for (call, result) in calls(device) {
            drop(result);
            assert_eq!(current(), Some(context), "{call}");
        }
        device.alloc_segment(0).unwrap_err();
        assert_eq!(current(), Some(context));
    }
}

// ---- pinned memory -------------------------------------------------------------------------

#[test]
fn pinned_memory_is_used_again_when_its_work_is_done() {
    run("pinned", &[("MEMORY", "1GiB")]);
}

#[test]
#[ignore = "run by the others"]
fn pinned() {
    let device = device(0);
    let standin = Standin::new();
    let mut first = device.alloc_pinned(100_000).unwrap();
    assert_eq!((first.len(), first.pinned_bytes()), (100_000, 106_496));
    assert!(first.iter().all(|byte| *byte == 0));
    first.fill(7);
    let address = first.as_ptr();
    drop(first);
    let again = device.alloc_pinned(101_000).unwrap();
    assert_eq!(again.as_ptr(), address, "the same class");
    assert_eq!(again.len(), 101_000);

    let mut busy = again;
    standin.delay_events(true);
    busy.record_stream(device, DEFAULT).unwrap();
    standin.delay_events(false);
    drop(busy);
    let other = device.alloc_pinned(100_000).unwrap();
    assert_ne!(other.as_ptr(), address, "work may use it still");
    assert_eq!(device.trim_pinned().unwrap(), 0);
    device.synchronize().unwrap();
    let third = device.alloc_pinned(100_000).unwrap();
    assert_eq!(third.as_ptr(), address);
    drop((other, third));
    let before = stats();
    assert_eq!(before.pinned_bytes, 2 * 106_496);
    assert_eq!(device.trim_pinned().unwrap(), 2 * 106_496);
    assert_eq!(stats().pinned_bytes, 0);
}

#[test]
fn host_copies_of_many_steps_arrive() {
    run("host_copies", &[("MEMORY", "1GiB")]);
}

#[test]
#[ignore = "run by the others"]
fn host_copies() {
    let device = device(0);
    let bytes = 37 * MIB + 13;
    let ptr = device.alloc_segment(bytes).unwrap();
    let byte = |i: u64| (i * 7 + i / 255).to_le_bytes()[0];
    let sent: Vec<u8> = (0..bytes).map(byte).collect();
    let side = device.create_stream(-1).unwrap();
    let mut read = vec![0; sent.len()];
    for stream in [DEFAULT, side] {
        device.fill(ptr, FillValue::U8(0), bytes, stream).unwrap();
        device.copy_from_host(ptr, &sent, stream).unwrap();
        device.copy_to_host(&mut read, ptr, stream).unwrap();
        assert!(read == sent);
    }
    let stats = stats();
    assert_eq!(stats.staged_bytes, 4 * bytes);
    assert!(stats.pinned_bytes <= 9 * 4 * MIB, "{stats:?}");
}
