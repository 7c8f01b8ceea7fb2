//! Python's cycle collector, run by lastref's, and what `lastref.gc` calls.
//!
//! A cycle of Python objects is freed by Python's `gc` alone, which counts objects and knows of no
//! device bytes. So lastref's collector runs it too: when the bytes in use have grown, and before an
//! allocation fails. It does so on its own thread, where finalizers interrupt nobody's operation.
//!
//! ```text
//! allocation, device full ──▶ waits, detached ──▶ collector's thread ──▶ attaches ──▶ gc.collect
//! ```
//!
//! 1. Nobody waits for the collector's thread while attached to the interpreter, since that thread
//!    must attach: see [`without_lock_if_full`].
//! 2. What is called is the function that `gc.collect` was at import. `PyGC_Collect` would do
//!    nothing after `gc.disable()`.
//! 3. Every run is counted in [`GATE`] from before it attaches until it is over. When the interpreter
//!    begins to exit, the gate is closed and runs in progress are waited for: none attaches later.
//!    Around a fork it holds runs back, so that a child never begins in the middle of one.
//!
//! Lock order: the interpreter lock, then one of the locks here, each held for some instructions
//! only.

use std::cell::Cell;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lastref::gc::{self, CollectionReport, ForeignCollector, Phase, Reason};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;

use crate::device::CudaIndex;
use crate::error::{Failure, Outcome};

/// How long a run before an out-of-memory error waits for a collection of Python's own that is in
/// progress on another thread: `gc.collect` does nothing meanwhile.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long `lastref.gc.collect`, a fork and the exit of the interpreter wait for runs in progress on
/// other threads.
const IDLE_BOUND: Duration = Duration::from_secs(5);

/// Runs `make` and keeps the interpreter lock, unless the device is full: then it lets go of it and
/// tries again, for now the collector is waited for (invariant 1).
pub(crate) fn without_lock_if_full<T: Send>(
    py: Python<'_>,
    make: impl Fn() -> lastref::Result<T> + Send + Sync,
) -> lastref::Result<T> {
    match gc::without_waiting(&make) {
        Err(error) if error.is_out_of_memory() => py.detach(make),
        result => result,
    }
}

// ---- Python's collector ------------------------------------------------------------------------------

/// Functions of Python's module `gc`, as they were at import.
struct PythonGc {
    collect: Py<PyAny>,
    is_enabled: Py<PyAny>,
    get_stats: Py<PyAny>,
    get_freeze_count: Py<PyAny>,
    get_debug: Py<PyAny>,
    saveall: u32,
    /// Objects that were frozen at import: CPython 3.12 and later freeze some at their start.
    frozen_at_import: u64,
}

static PYTHON_GC: PyOnceLock<PythonGc> = PyOnceLock::new();

impl PythonGc {
    fn new(py: Python<'_>) -> PyResult<Self> {
        let module = py.import("gc")?;
        let get = |name| PyResult::Ok(module.getattr(name)?.unbind());
        Ok(Self {
            collect: get("collect")?,
            is_enabled: get("isenabled")?,
            get_stats: get("get_stats")?,
            get_freeze_count: get("get_freeze_count")?,
            get_debug: get("get_debug")?,
            saveall: module.getattr("DEBUG_SAVEALL")?.extract()?,
            frozen_at_import: module.call_method0("get_freeze_count")?.extract()?,
        })
    }

    /// Collections that Python has run.
    fn num_collections(&self, py: Python<'_>) -> PyResult<u64> {
        let generations = self.get_stats.call0(py)?;
        generations.bind(py).try_iter()?.try_fold(0, |sum, stats| {
            Ok(sum + stats?.get_item("collections")?.extract::<u64>()?)
        })
    }

    /// Collects and returns how many objects were found to be unreachable.
    fn collect(&self, py: Python<'_>, generation: u32, reason: Reason) -> PyResult<u64> {
        let is_automatic = reason == Reason::Bytes;
        if is_automatic && !self.is_enabled.call0(py)?.is_truthy(py)? {
            return Ok(0);
        }
        // Only the last of the three runs before an error waits for another one of Python's.
        let waits = reason == Reason::OutOfMemory && generation == 2;
        let until = Instant::now() + PATIENCE;
        loop {
            let before = self.num_collections(py)?;
            // The interpreter lock is held, so that what PyTorch frees now, this thread frees: but for
            // threads of PyTorch's own.
            let torch_freed = crate::torch::bytes_freed();
            let found: u64 = self.collect.call1(py, (generation,))?.extract(py)?;
            gc::foreign_bytes_freed(crate::torch::bytes_freed().saturating_sub(torch_freed));
            let has_run = found > 0 || self.num_collections(py)? > before;
            if has_run || !waits || Instant::now() >= until {
                return Ok(found);
            }
            py.detach(|| std::thread::sleep(Duration::from_millis(1)));
        }
    }
}

/// What lastref's collector calls.
struct PythonCollector;

impl ForeignCollector for PythonCollector {
    fn collect(&self, generation: u32, reason: Reason) -> u64 {
        // The candidates that are counted and timed are Rust's, and say nothing about Python.
        if matches!(reason, Reason::Count | Reason::Time) {
            return 0;
        }
        attach(|py| {
            let found = PYTHON_GC
                .get(py)
                .map_or(Ok(0), |gc| gc.collect(py, generation, reason));
            found.unwrap_or_else(|error| {
                error.write_unraisable(py, None);
                0
            })
        })
        .unwrap_or(0)
    }

    fn device_bytes(&self, device: u32) -> u64 {
        crate::torch::device_bytes(device)
    }
}

/// Attaches within a run, unless the interpreter is exiting (invariant 3).
pub(crate) fn attach<R>(work: impl FnOnce(Python<'_>) -> R) -> Option<R> {
    if lock(&GATE.state).closed {
        return None;
    }
    Python::try_attach(work)
}

/// Does `work` as a run that exit and fork wait for (invariant 3).
pub(crate) fn counted<R>(work: impl FnOnce() -> R) -> R {
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            GATE.leave();
        }
    }
    GATE.enter();
    let _leave = Leave;
    work()
}

/// Whether the interpreter is exiting.
pub(crate) fn is_exiting() -> bool {
    lock(&GATE.state).closed
}

/// What Python's collector was not able or not allowed to do before an out-of-memory error, in words
/// for its text; and the number of objects frozen since import, and whether garbage is saved.
pub(crate) fn obstacles(py: Python<'_>) -> PyResult<(Vec<String>, u64, bool)> {
    let Some(python) = PYTHON_GC.get(py) else {
        return Ok((Vec::new(), 0, false));
    };
    let frozen: u64 = python.get_freeze_count.call0(py)?.extract(py)?;
    let frozen = frozen.saturating_sub(python.frozen_at_import);
    let debug: u32 = python.get_debug.call0(py)?.extract(py)?;
    let saves_all = debug & python.saveall != 0;
    let mut texts = Vec::new();
    if !gc::runs_before_out_of_memory() {
        texts.push(
            "was not run, since lastref.gc.set_before_out_of_memory(False) was called".to_owned(),
        );
    }
    if frozen > 0 {
        texts.push(format!(
            "holds {frozen} frozen objects, which it does not collect: gc.unfreeze() lets it"
        ));
    }
    if saves_all {
        let garbage = py.import("gc")?.getattr("garbage")?.len()?;
        texts.push(format!(
            "keeps what it finds in gc.garbage, {garbage} objects now, since gc.DEBUG_SAVEALL is set"
        ));
    }
    Ok((texts, frozen, saves_all))
}

// ---- exit and fork -----------------------------------------------------------------------------------

/// Counts the runs in progress, and holds new ones back; see invariant 3.
struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

struct GateState {
    /// Runs in progress, on all threads.
    running: usize,
    /// Threads that are about to fork.
    forking: usize,
    /// Whether the interpreter is exiting.
    closed: bool,
}

static GATE: Gate = Gate {
    state: Mutex::new(GateState {
        running: 0,
        forking: 0,
        closed: false,
    }),
    changed: Condvar::new(),
};

thread_local! {
    /// Runs in progress on this thread: a finalizer may start another one.
    static RUNNING_HERE: Cell<usize> = const { Cell::new(0) };
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Gate {
    fn enter(&self) {
        let mut state = lock(&self.state);
        // The thread that forks waits for a run that has begun, so that one must be able to end.
        while state.forking > 0 && RUNNING_HERE.get() == 0 {
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        state.running += 1;
        RUNNING_HERE.set(RUNNING_HERE.get() + 1);
    }

    fn leave(&self) {
        lock(&self.state).running -= 1;
        RUNNING_HERE.set(RUNNING_HERE.get() - 1);
        self.changed.notify_all();
    }

    /// Changes the state, then waits, detached, for the runs of other threads.
    fn change_and_wait(&self, py: Python<'_>, change: impl FnOnce(&mut GateState) + Send) {
        let here = RUNNING_HERE.get();
        py.detach(|| {
            let until = Instant::now() + IDLE_BOUND;
            let mut state = lock(&self.state);
            change(&mut state);
            while state.running > here {
                let left = until.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                (state, _) = self
                    .changed
                    .wait_timeout(state, left)
                    .unwrap_or_else(PoisonError::into_inner);
            }
        });
    }
}

#[pyfunction]
fn at_exit(py: Python<'_>) {
    GATE.change_and_wait(py, |state| state.closed = true);
    gc::set_foreign_collector(None);
    lock(&CALLBACKS).clear();
    crate::torch::detach();
}

#[pyfunction]
fn before_fork(py: Python<'_>) {
    GATE.change_and_wait(py, |state| state.forking += 1);
}

#[pyfunction]
fn after_fork_in_parent() {
    lock(&GATE.state).forking -= 1;
    GATE.changed.notify_all();
}

#[pyfunction]
fn after_fork_in_child() {
    // This thread is the only one.
    let mut state = lock(&GATE.state);
    state.running = RUNNING_HERE.get();
    state.forking = 0;
}

/// Makes lastref's collector run Python's from now until the interpreter exits.
pub(crate) fn register(py: Python<'_>) -> PyResult<()> {
    PYTHON_GC.get_or_try_init(py, || PythonGc::new(py))?;
    gc::add_callback(observe);
    gc::set_foreign_collector(Some(Arc::new(PythonCollector)));
    py.import("atexit")?
        .call_method1("register", (wrap_pyfunction!(at_exit, py)?,))?;
    let hooks = PyDict::new(py);
    hooks.set_item("before", wrap_pyfunction!(before_fork, py)?)?;
    hooks.set_item(
        "after_in_parent",
        wrap_pyfunction!(after_fork_in_parent, py)?,
    )?;
    hooks.set_item("after_in_child", wrap_pyfunction!(after_fork_in_child, py)?)?;
    py.import("os")?
        .call_method("register_at_fork", (), Some(&hooks))?;
    Ok(())
}

// ---- what runs did -----------------------------------------------------------------------------------

/// The reasons, in the order in which `lastref.gc.stats` gives them.
const REASONS: [Reason; 5] = [
    Reason::Manual,
    Reason::Bytes,
    Reason::Count,
    Reason::Time,
    Reason::OutOfMemory,
];

/// Sums over the runs of one reason.
#[derive(Clone, Copy)]
struct Totals {
    runs: u64,
    objects: u64,
    device_bytes_freed: u64,
    microseconds: u64,
}

static TOTALS: Mutex<[Totals; REASONS.len()]> = Mutex::new(
    [Totals {
        runs: 0,
        objects: 0,
        device_bytes_freed: 0,
        microseconds: 0,
    }; REASONS.len()],
);
static CALLBACKS: Mutex<Vec<Py<PyAny>>> = Mutex::new(Vec::new());

/// Sees the beginning and the end of every run, on the thread where it happens.
fn observe(phase: Phase, report: &CollectionReport) {
    if phase == Phase::Start {
        GATE.enter();
    } else if let Some(at) = REASONS.iter().position(|reason| *reason == report.reason) {
        let sums = &mut lock(&TOTALS)[at];
        sums.runs += 1;
        sums.objects += report.objects;
        sums.device_bytes_freed += report.device_bytes_freed;
        sums.microseconds += report.microseconds;
    }
    if !lock(&CALLBACKS).is_empty() {
        attach(|py| {
            if let Err(error) = call_back(py, phase, report) {
                error.write_unraisable(py, None);
            }
        });
    }
    if phase == Phase::Stop {
        GATE.leave();
    }
}

fn call_back(py: Python<'_>, phase: Phase, report: &CollectionReport) -> PyResult<()> {
    let phase = if phase == Phase::Start {
        "start"
    } else {
        "stop"
    };
    let info = PyDict::new(py);
    info.set_item("reason", report.reason.as_str())?;
    info.set_item("generation", report.generation)?;
    info.set_item("objects", report.objects)?;
    info.set_item("device_bytes_freed", report.device_bytes_freed)?;
    info.set_item("microseconds", report.microseconds)?;
    let callbacks: Vec<_> = lock(&CALLBACKS)
        .iter()
        .map(|callback| callback.clone_ref(py))
        .collect();
    for callback in callbacks {
        if let Err(error) = callback.call1(py, (phase, &info)) {
            error.write_unraisable(py, Some(callback.bind(py)));
        }
    }
    Ok(())
}

// ---- behind `lastref.gc` -------------------------------------------------------------------------------

#[pyfunction]
pub(crate) fn gc_collect(py: Python<'_>, generation: i64) -> Outcome<u64> {
    // While another thread collects, Python's function does nothing.
    GATE.change_and_wait(py, |_| ());
    let run = |generation| py.detach(|| gc::collect_with_foreign(generation)).ok();
    let report = u32::try_from(generation).ok().and_then(run);
    report.map(|report| report.objects).ok_or_else(|| {
        Failure::Python(PyValueError::new_err(format!(
            "collect: there are generations 0, 1 and 2, not {generation}"
        )))
    })
}

#[pyfunction]
pub(crate) fn gc_enable() {
    gc::enable();
}

#[pyfunction]
pub(crate) fn gc_disable() {
    gc::disable();
}

#[pyfunction]
pub(crate) fn gc_is_enabled() -> bool {
    gc::is_enabled()
}

#[pyfunction]
pub(crate) fn gc_set_byte_threshold(num_bytes: Option<u64>, device: CudaIndex) {
    gc::set_byte_threshold(index(device), num_bytes);
}

#[pyfunction]
pub(crate) fn gc_get_byte_threshold(device: CudaIndex) -> u64 {
    gc::get_byte_threshold(index(device))
}

fn index(device: CudaIndex) -> u32 {
    device.0.unwrap_or_else(lastref::cuda::current_device)
}

#[pyfunction]
pub(crate) fn gc_set_before_out_of_memory(runs: bool) {
    gc::set_before_out_of_memory(runs);
}

#[pyfunction]
pub(crate) fn gc_get_before_out_of_memory() -> bool {
    gc::runs_before_out_of_memory()
}

#[pyfunction]
pub(crate) fn gc_set_wait_bound(seconds: f64) -> Outcome {
    let bound = Duration::try_from_secs_f64(seconds).map_err(|_| {
        Failure::Python(PyValueError::new_err(format!(
            "set_wait_bound: expected seconds, at least 0, not {seconds}"
        )))
    })?;
    gc::set_wait_bound(bound);
    Ok(())
}

#[pyfunction]
pub(crate) fn gc_get_wait_bound() -> f64 {
    gc::wait_bound().as_secs_f64()
}

#[pyfunction]
pub(crate) fn gc_stats() -> Vec<(&'static str, u64, u64, u64, u64)> {
    let totals = *lock(&TOTALS);
    REASONS
        .iter()
        .zip(totals)
        .map(|(reason, sums)| {
            (
                reason.as_str(),
                sums.runs,
                sums.objects,
                sums.device_bytes_freed,
                sums.microseconds,
            )
        })
        .collect()
}

#[pyfunction]
pub(crate) fn gc_add_callback(callback: Py<PyAny>) {
    lock(&CALLBACKS).push(callback);
}

#[pyfunction]
pub(crate) fn gc_remove_callback(callback: &Bound<'_, PyAny>) -> Outcome {
    let py = callback.py();
    let callbacks: Vec<_> = lock(&CALLBACKS)
        .iter()
        .map(|other| other.clone_ref(py))
        .collect();
    // Comparing runs code of the user's, so it is done without the lock.
    for other in callbacks {
        if !other.bind(py).eq(callback)? {
            continue;
        }
        let mut callbacks = lock(&CALLBACKS);
        if let Some(at) = callbacks.iter().position(|callback| callback.is(&other)) {
            let removed = callbacks.remove(at);
            drop(callbacks);
            drop(removed);
            return Ok(());
        }
    }
    Err(Failure::Python(PyValueError::new_err(
        "remove_callback: it is not among the callbacks",
    )))
}
