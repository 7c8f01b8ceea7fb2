//! What the C++ shim under PyTorch's allocator asks of lastref, as C functions; see
//! `python/lastref/torch/_shim/lastref_torch.cpp`.
//!
//! ```text
//! allocation, device full ──▶ shim, interpreter lock let go of ──▶ here ──▶ collector's thread
//! ```
//!
//! The shim knows no Python and this file no C++: they share [`Hooks`]. The functions may be called on
//! any thread, at any time from [`torch_attach`] on.
//!
//! 1. The shim calls those that wait without the interpreter lock, and all with no lock of PyTorch's held.
//! 2. The shim's library is never unloaded, so that the functions given to [`torch_attach`] stay.
//! 3. Text goes out as memory that [`free_text`] takes back, once.
//! 4. No panic leaves a function: there is nothing to unwind into.

use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use lastref::gc::{self, BeforeOutOfMemory};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::error::{Failure, Outcome};
use crate::gc::{attach, counted, obstacles};

/// What [`Hooks`] looks like; the shim refuses another number.
const ABI: u64 = 1;

/// The functions that the shim calls.
#[repr(C)]
struct Hooks {
    abi: u64,
    /// Says how many bytes PyTorch has in use on a device of a size; returns how many more may come
    /// before the next call.
    in_use: extern "C" fn(device: u32, bytes: u64, capacity: u64) -> u64,
    /// Collects and waits; gives the bytes freed, or one of the `NOT_RUN_*`.
    collect: extern "C" fn(bytes: u64) -> i64,
    /// Runs the user's callback of a number and waits; gives 0, or one of the `NOT_RUN_*`.
    call_back: extern "C" fn(number: u32, device: u32, bytes: u64) -> i64,
    /// Has the text for a final failure made; null if that was not done in time.
    report: extern "C" fn(failure: *const FailureForReport) -> *mut c_char,
    free_text: extern "C" fn(text: *mut c_char),
    /// Whether Python is being left, so that nothing may be asked of it.
    is_exiting: extern "C" fn() -> bool,
}

const NOT_RUN_TIMED_OUT: i64 = -1;
const NOT_RUN_SWITCHED_OFF: i64 = -2;
const NOT_RUN_INSIDE: i64 = -3;
/// There is no callback of that number.
const NOT_RUN_NO_MORE: i64 = -4;

/// A failure as the shim tells it.
#[repr(C)]
struct FailureForReport {
    device: u32,
    /// What [`Hooks::collect`] gave.
    collected: i64,
    requested: u64,
    /// Bytes that each rung freed, and its microseconds.
    rungs: [[u64; 2]; RUNGS.len()],
    /// What can be said without Python.
    summary: *const c_char,
}

/// The rungs of the shim's ladder, in its order.
const RUNGS: [&str; 3] = ["search again", "cycle collection", "callbacks"];

static HOOKS: Hooks = Hooks {
    abi: ABI,
    in_use,
    collect,
    call_back,
    report,
    free_text,
    is_exiting,
};

/// What Python has registered.
struct Registered {
    /// `(number, device, bytes) -> whether there is one of that number`
    call_back: Py<PyAny>,
    /// `(device, bytes, rungs, obstacles, summary) -> str`
    report: Py<PyAny>,
    report_bound: Duration,
}

static REGISTERED: Mutex<Option<Registered>> = Mutex::new(None);
/// The addresses of two functions of the shim's, `uint64_t (uint32_t device)`: bytes in use on a device,
/// and bytes freed on all since the beginning.
static DEVICE_BYTES: AtomicUsize = AtomicUsize::new(0);
static BYTES_FREED: AtomicUsize = AtomicUsize::new(0);

fn registered<R>(look: impl FnOnce(&Registered) -> R) -> Option<R> {
    let registered = REGISTERED.lock().unwrap_or_else(PoisonError::into_inner);
    registered.as_ref().map(look)
}

/// Bytes that PyTorch has in use on a device.
pub(crate) fn device_bytes(device: u32) -> u64 {
    ask(&DEVICE_BYTES, device)
}

/// Bytes that PyTorch has freed on all devices, whoever freed them.
pub(crate) fn bytes_freed() -> u64 {
    ask(&BYTES_FREED, 0)
}

fn ask(address: &AtomicUsize, device: u32) -> u64 {
    let address = address.load(Ordering::Acquire);
    if address == 0 {
        return 0;
    }
    // SAFETY: `torch_attach` was given the addresses of such functions, which stay (invariant 2).
    let function: extern "C" fn(u32) -> u64 = unsafe { std::mem::transmute(address) };
    function(device)
}

/// Runs `body`; what it panics with is not for C++ (invariant 4).
fn guarded<R>(otherwise: R, body: impl FnOnce() -> R) -> R {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or(otherwise)
}

extern "C" fn in_use(device: u32, bytes: u64, capacity: u64) -> u64 {
    guarded(u64::MAX, || {
        if capacity > 0 {
            gc::set_foreign_capacity(device, capacity);
        }
        gc::foreign_bytes_in_use(device, bytes)
    })
}

extern "C" fn collect(bytes: u64) -> i64 {
    guarded(
        NOT_RUN_TIMED_OUT,
        || match gc::collect_before_out_of_memory(bytes) {
            BeforeOutOfMemory::Ran { device_bytes_freed } => {
                i64::try_from(device_bytes_freed).unwrap_or(i64::MAX)
            }
            BeforeOutOfMemory::SwitchedOff => NOT_RUN_SWITCHED_OFF,
            BeforeOutOfMemory::Inside => NOT_RUN_INSIDE,
            _ => NOT_RUN_TIMED_OUT,
        },
    )
}

extern "C" fn call_back(number: u32, device: u32, bytes: u64) -> i64 {
    guarded(NOT_RUN_TIMED_OUT, || {
        let called = gc::on_collector_thread(gc::wait_bound(), move || {
            on_python(|py| {
                let Some(call_back) = registered(|it| it.call_back.clone_ref(py)) else {
                    return false;
                };
                let answer = call_back.call1(py, (number, device, bytes));
                answer
                    .and_then(|answer| answer.extract(py))
                    .unwrap_or_else(|error| {
                        error.write_unraisable(py, Some(call_back.bind(py)));
                        true
                    })
            })
        });
        match called {
            Some(Some(true)) => 0,
            Some(_) => NOT_RUN_NO_MORE,
            None => NOT_RUN_TIMED_OUT,
        }
    })
}

extern "C" fn report(failure: *const FailureForReport) -> *mut c_char {
    guarded(std::ptr::null_mut(), || {
        // SAFETY: the shim passes the address of a failure on its stack.
        let Some(failure) = (unsafe { failure.as_ref() }) else {
            return std::ptr::null_mut();
        };
        let (device, requested) = (failure.device, failure.requested);
        let rungs: Vec<_> = RUNGS
            .iter()
            .zip(failure.rungs)
            .map(|(name, [bytes, microseconds])| (*name, bytes, microseconds))
            .collect();
        // SAFETY: a text of the shim's, which ends with a zero, and stays until this returns.
        let summary = unsafe { CStr::from_ptr(failure.summary) };
        let summary = summary.to_string_lossy().into_owned();
        // A thread that has not ended its collection would not get to a report either.
        let bound = match registered(|it| it.report_bound) {
            Some(bound) if failure.collected != NOT_RUN_TIMED_OUT => bound,
            _ => return std::ptr::null_mut(),
        };
        let text = gc::on_collector_thread(bound, move || {
            on_python(|py| {
                let report = registered(|it| it.report.clone_ref(py))?;
                let (obstacles, _, _) = obstacles(py).unwrap_or_default();
                let text = report.call1(py, (device, requested, rungs, obstacles, summary));
                text.and_then(|text| text.extract::<String>(py))
                    .map_err(|error| error.write_unraisable(py, Some(report.bind(py))))
                    .ok()
            })
            .flatten()
        });
        let text = text.flatten().map(|text| text.replace('\0', " "));
        text.and_then(|text| CString::new(text).ok())
            .map_or(std::ptr::null_mut(), CString::into_raw)
    })
}

extern "C" fn free_text(text: *mut c_char) {
    if !text.is_null() {
        // SAFETY: it came from `report`, and comes back once (invariant 3).
        drop(unsafe { CString::from_raw(text) });
    }
}

extern "C" fn is_exiting() -> bool {
    guarded(true, crate::gc::is_exiting)
}

/// Attaches on the collector's thread, as a run that exit and fork wait for.
fn on_python<R>(work: impl FnOnce(Python<'_>) -> R) -> Option<R> {
    counted(|| attach(work))
}

/// The address of the functions that the shim calls.
#[pyfunction]
pub(crate) fn torch_hooks() -> usize {
    std::ptr::from_ref(&HOOKS).addr()
}

/// Tells where the shim's functions are that say how many bytes a device has in use, and how many were
/// freed, and what to call on a final failure and before it. The addresses must be right; that they
/// are, is the caller's promise.
#[pyfunction]
pub(crate) fn torch_attach(
    device_bytes: usize,
    bytes_freed: usize,
    call_back: Py<PyAny>,
    report: Py<PyAny>,
    report_seconds: f64,
) -> Outcome {
    let report_bound = Duration::try_from_secs_f64(report_seconds).map_err(|_| {
        Failure::Python(PyValueError::new_err(format!(
            "torch_attach: expected seconds, at least 0, not {report_seconds}"
        )))
    })?;
    let registered = Registered {
        call_back,
        report,
        report_bound,
    };
    let before = REGISTERED
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .replace(registered);
    drop(before);
    DEVICE_BYTES.store(device_bytes, Ordering::Release);
    BYTES_FREED.store(bytes_freed, Ordering::Release);
    Ok(())
}

/// Lets go of what [`torch_attach`] registered, when Python is left.
pub(crate) fn detach() {
    let before = REGISTERED
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .take();
    drop(before);
}
