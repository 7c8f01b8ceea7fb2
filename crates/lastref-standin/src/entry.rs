//! What every exported function goes through: the macro that makes one, and the call around its body.
//!
//! A function is named in one place, [`exports!`], and gets from it: its C symbol, its line in the table by which
//! `cuGetProcAddress` and the settings find it, its count of calls, the failures and latencies that settings ask for,
//! and a wall against panics, none of which may reach a C caller.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::time::Instant;

use crate::error::{Code, Outcome};
use crate::settings::{Fault, settings};
use crate::state;
use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering, lock};
use crate::{abi, log};

/// Whose interface a function belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Library {
    Driver,
    Runtime,
    Nvml,
    Cublas,
    /// The stand-in's own, for tests.
    Control,
}

/// An exported function.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) name: &'static str,
    pub(crate) library: Library,
    /// Whether stream 0 is the calling thread's own default stream in it.
    pub(crate) per_thread: bool,
    calls: AtomicU64,
}

impl Entry {
    pub(crate) const fn new(name: &'static str, library: Library, per_thread: bool) -> Self {
        Self {
            name,
            library,
            per_thread,
            calls: AtomicU64::new(0),
        }
    }

    pub(crate) fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }
}

/// A line of the table of functions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Export {
    pub(crate) entry: &'static Entry,
    pub(crate) function: Function,
}

/// A function to be found by name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Function(*const c_void);

// SAFETY: the address of a function, which is code and never changes.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Function {
    pub(crate) const fn new(function: *const c_void) -> Self {
        Self(function)
    }

    pub(crate) fn address(self) -> u64 {
        abi::address_of(self.0)
    }
}

thread_local! {
    /// Whether the call in progress takes stream 0 as the thread's own.
    static PER_THREAD: Cell<bool> = const { Cell::new(false) };
}

pub(crate) fn is_per_thread() -> bool {
    PER_THREAD.get()
}

/// Set in a forked child: CUDA cannot be used there, and neither can the simulated device.
static FORKED: AtomicBool = AtomicBool::new(false);

unsafe extern "C" {
    fn pthread_atfork(
        prepare: Option<extern "C" fn()>,
        parent: Option<extern "C" fn()>,
        child: Option<extern "C" fn()>,
    ) -> c_int;
}

/// From now on, calls in a forked child fail as CUDA's do.
pub(crate) fn watch_forks() {
    extern "C" fn in_child() {
        FORKED.store(true, Ordering::Relaxed);
    }
    // SAFETY: the handler only stores to an atomic, which is allowed after a fork.
    let result = unsafe { pthread_atfork(None, None, Some(in_child)) };
    if result != 0 {
        log::note("the host keeps no note of forks: calls in a forked child are not refused");
    }
}

/// Failures asked for while the program runs.
static FAULTS: Mutex<Vec<Fault>> = Mutex::new(Vec::new());
static ANY_FAULTS: AtomicBool = AtomicBool::new(false);

pub(crate) fn add_fault(fault: Fault) {
    lock(&FAULTS).push(fault);
    ANY_FAULTS.store(true, Ordering::Relaxed);
}

pub(crate) fn clear_faults() {
    lock(&FAULTS).clear();
    ANY_FAULTS.store(false, Ordering::Relaxed);
}

/// Runs the body of an exported function.
pub(crate) fn call(entry: &'static Entry, body: impl FnOnce() -> Outcome) -> c_int {
    entry.calls.fetch_add(1, Ordering::Relaxed);
    let outer = PER_THREAD.replace(entry.per_thread);
    // What the state protects is kept whole at every point where a panic is possible, or given up: the call fails.
    let outcome = catch_unwind(AssertUnwindSafe(|| before(entry).and_then(|()| body())));
    PER_THREAD.set(outer);
    let outcome = outcome.unwrap_or_else(|_| {
        log::say(&format!("{} has panicked, which is a bug", entry.name));
        Err(Code::UNKNOWN)
    });
    let Err(code) = outcome else {
        return 0;
    };
    match entry.library {
        Library::Runtime => {
            state::note_runtime_error(code);
            code.0
        }
        Library::Nvml => nvml_code(code),
        Library::Driver | Library::Cublas | Library::Control => code.0,
    }
}

/// Runs the body of an exported function that returns something else than a result.
pub(crate) fn plain<R>(
    entry: &'static Entry,
    body: impl FnOnce() -> R,
    otherwise: impl FnOnce() -> R,
) -> R {
    entry.calls.fetch_add(1, Ordering::Relaxed);
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| {
        log::say(&format!("{} has panicked, which is a bug", entry.name));
        otherwise()
    })
}

/// What comes before the body: settings, forks, failures on demand, latency.
fn before(entry: &Entry) -> Outcome {
    if entry.library == Library::Control {
        return Ok(());
    }
    let settings = match settings() {
        Ok(settings) => settings,
        Err(reason) => {
            static SAID: OnceLock<()> = OnceLock::new();
            SAID.get_or_init(|| log::say(reason));
            return Err(Code::NO_DEVICE);
        }
    };
    if FORKED.load(Ordering::Relaxed) {
        return Err(Code::NOT_INITIALIZED);
    }
    for (name, time) in &settings.latencies {
        if crate::names::same(name, entry.name) {
            // Busy, as a driver is: sleeping would take longer than what is asked for.
            let start = Instant::now();
            while start.elapsed() < *time {
                std::hint::spin_loop();
            }
        }
    }
    let asked = settings
        .faults
        .iter()
        .find_map(|fault| fault.strike(entry.name));
    let later = || {
        let any = ANY_FAULTS.load(Ordering::Relaxed);
        any.then(|| {
            lock(&FAULTS)
                .iter()
                .find_map(|fault| fault.strike(entry.name))
        })?
    };
    asked.or_else(later).map_or(Ok(()), Err)
}

/// NVML's number for what CUDA numbers otherwise.
fn nvml_code(code: Code) -> c_int {
    match code {
        Code::INVALID_VALUE => 2,
        Code::NOT_SUPPORTED => 3,
        Code::NOT_FOUND | Code::INVALID_DEVICE => 6,
        Code::NOT_INITIALIZED => 1,
        Code::NO_DEVICE => 9,
        // NVML's own: too little room for the answer.
        Code::NVML_INSUFFICIENT_SIZE => 7,
        _ => 999,
    }
}

impl Code {
    /// NVML's result for too little room; CUDA has no such number.
    pub(crate) const NVML_INSUFFICIENT_SIZE: Self = Self(-7);
}

/// Says once that a function is not there, and fails as it should.
pub(crate) fn unsupported(entry: &'static Entry) -> c_int {
    call(entry, || {
        log::note(&format!("{} is not supported", entry.name));
        Err(Code::NOT_SUPPORTED)
    })
}

/// Defines exported functions. A name in brackets is the same function for callers whose stream 0 is their thread's own. A body returns [`Outcome`](crate::error::Outcome).
macro_rules! exports {
    ($library:ident; $(
        fn $([$own:ident])? $name:ident $arguments:tt $body:block
    )+) => {
        $(
            $crate::entry::export!($library, $name, false, $arguments, $body);
            $($crate::entry::export!($library, $own, true, $arguments, $body);)?
        )+

        /// The functions of this module, by name.
        pub(crate) static EXPORTS: &[$crate::entry::Export] = &[$(
            $name::EXPORT,
            $($own::EXPORT,)?
        )+];
    };
}

/// What is kept of an exported function, in a module of its name.
macro_rules! listed {
    ($library:ident, $name:ident, $own:literal) => {
        mod $name {
            pub(super) static ENTRY: $crate::entry::Entry = $crate::entry::Entry::new(
                stringify!($name),
                $crate::entry::Library::$library,
                $own,
            );
            pub(super) const EXPORT: $crate::entry::Export = $crate::entry::Export {
                entry: &ENTRY,
                function: $crate::entry::Function::new(super::$name as *const ::std::ffi::c_void),
            };
        }
    };
}

macro_rules! export {
    (
        $library:ident, $name:ident, $own:literal, ($($argument:ident: $type:ty),* $(,)?), $body:block
    ) => {
        #[unsafe(no_mangle)]
        pub(crate) extern "C" fn $name($($argument: $type),*) -> ::std::ffi::c_int {
            $crate::entry::call(&$name::ENTRY, || $body)
        }

        $crate::entry::listed!($library, $name, $own);
    };
}

/// Defines exported functions that return something else than a result: what is after `or` where the body panics. They
/// do not fail on demand.
macro_rules! plain_exports {
    ($library:ident; $(
        fn $name:ident ($($argument:ident: $type:ty),* $(,)?) -> $returned:ty $body:block or $otherwise:expr;
    )+) => {
        $(
            #[unsafe(no_mangle)]
            pub(crate) extern "C" fn $name($($argument: $type),*) -> $returned {
                $crate::entry::plain(&$name::ENTRY, || $body, || $otherwise)
            }

            $crate::entry::listed!($library, $name, false);
        )+

        /// The functions of this module that return something else than a result, by name.
        pub(crate) static PLAIN_EXPORTS: &[$crate::entry::Export] = &[$($name::EXPORT,)+];
    };
}

/// Defines functions that fail as unsupported and say so once. They take whatever arguments there are: in the calling
/// conventions of our hosts, a function may ignore them.
macro_rules! unsupported_exports {
    ($library:ident; $($name:ident)+) => {
        $(
            #[unsafe(no_mangle)]
            pub(crate) extern "C" fn $name() -> ::std::ffi::c_int {
                $crate::entry::unsupported(&$name::ENTRY)
            }

            $crate::entry::listed!($library, $name, false);
        )+

        /// The functions of this module, by name.
        pub(crate) static EXPORTS: &[$crate::entry::Export] = &[$($name::EXPORT,)+];
    };
}

pub(crate) use {export, exports, listed, plain_exports, unsupported_exports};
