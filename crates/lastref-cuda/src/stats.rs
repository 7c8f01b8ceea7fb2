//! What went wrong where nobody could be told: in destructors, and after the driver's end.

use std::sync::OnceLock;

use crate::driver::{self, Life};
use crate::raw::Failure;
use crate::sync::{AtomicU64, Mutex, Ordering, lock};

static FAILED: AtomicU64 = AtomicU64::new(0);
static LEFT: AtomicU64 = AtomicU64::new(0);
static STAGED_BYTES: AtomicU64 = AtomicU64::new(0);

fn latest() -> &'static Mutex<Option<String>> {
    static LATEST: OnceLock<Mutex<Option<String>>> = OnceLock::new();
    LATEST.get_or_init(Mutex::default)
}

/// Counts of this process, for all devices together. See [`stats`].
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CudaStats {
    /// Calls that were to give something back to the driver, in a destructor, and failed. Each was
    /// logged too.
    pub failed_releases: u64,
    /// The latest of them: call, code and text.
    pub latest_failure: Option<String>,
    /// Things left to the system rather than given back to a driver that is not to be called any
    /// more: in a forked child, or while the process exits.
    pub left_to_the_system: u64,
    /// Bytes that copies between host slices and devices moved through pinned memory.
    pub staged_bytes: u64,
    /// Pinned host memory that is held, whether in use or cached, in bytes.
    pub pinned_bytes: u64,
    /// The part of it that is cached.
    pub pinned_cached_bytes: u64,
}

/// What this process has counted so far.
#[must_use]
pub fn stats() -> CudaStats {
    let (pinned_bytes, pinned_cached_bytes) = crate::pinned::held_and_cached();
    CudaStats {
        failed_releases: FAILED.load(Ordering::Relaxed),
        latest_failure: lock(latest()).clone(),
        left_to_the_system: LEFT.load(Ordering::Relaxed),
        staged_bytes: STAGED_BYTES.load(Ordering::Relaxed),
        pinned_bytes,
        pinned_cached_bytes,
    }
}

/// Whether a destructor may call the driver; counts what is left if not.
pub(crate) fn may_release() -> bool {
    if driver::life() == Life::On {
        return true;
    }
    LEFT.fetch_add(1, Ordering::Relaxed);
    false
}

/// Whether the driver may be called.
pub(crate) fn may_call() -> bool {
    driver::life() == Life::On
}

/// Takes note of a failure that has nobody to be returned to.
pub(crate) fn failed_in_drop(failure: Failure) {
    FAILED.fetch_add(1, Ordering::Relaxed);
    let (call, code, text) = (failure.call, failure.code(), failure.text());
    log::error!("lastref-cuda: {call}: error {code}, {text}; what it was to give back is lost");
    *lock(latest()) = Some(format!("{call}: error {code}, {text}"));
}

pub(crate) fn staged(bytes: usize) {
    STAGED_BYTES.fetch_add(bytes as u64, Ordering::Relaxed);
}
