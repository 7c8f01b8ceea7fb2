//! The one place that names the standard library's synchronisation types, so that loom can stand
//! in for them: `RUSTFLAGS="--cfg loom" cargo test -p lastref-alloc --test loom --release`.
//!
//! A rule of `cargo xtask lint` forbids naming them elsewhere. `Arc` and `OnceLock` are not in this
//! list: they are used for ownership and set-once values, and take part in no protocol of ours.

#[cfg(not(loom))]
pub(crate) use std::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicU64, Ordering},
};
#[cfg(not(loom))]
pub(crate) use std::thread_local;

#[cfg(loom)]
pub(crate) use loom::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicU64, Ordering},
};
#[cfg(loom)]
pub(crate) use loom::thread_local;

/// Locks, also after a panic in another holder: what we protect is kept consistent at every point
/// where foreign code can run, so a poisoned lock says nothing about it.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    match mutex.lock() {
        Ok(guard) => guard,
        Err(poisoned) => poisoned.into_inner(),
    }
}
