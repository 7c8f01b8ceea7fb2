//! The one place that names the standard library's synchronisation types, so that loom can stand
//! in for them: `RUSTFLAGS="--cfg loom" cargo test -p lastref-alloc --test loom --release`.
//!
//! A rule of `cargo xtask lint` forbids naming them elsewhere. `Arc` and `OnceLock` are not in this
//! list: they are used for ownership and set-once values, and take part in no protocol of ours.

#[cfg(not(loom))]
pub(crate) use std::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicU64, Ordering},
};
#[cfg(not(loom))]
pub(crate) use std::{thread::yield_now, thread_local};

#[cfg(loom)]
pub(crate) use loom::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicU64, Ordering},
};
#[cfg(loom)]
pub(crate) use loom::{cell::UnsafeCell, thread::yield_now, thread_local};

/// `std`'s cell with loom's way in.
#[cfg(not(loom))]
#[derive(Debug)]
pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    pub(crate) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}

/// A number that no other call in this process returns. Takes part in no protocol, so that it is
/// `std`'s under loom too.
pub(crate) fn unique() -> u64 {
    static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
}

/// Locks, also after a panic in another holder: what we protect is kept consistent at every point
/// where foreign code can run, so a poisoned lock says nothing about it.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    match mutex.lock() {
        Ok(guard) => guard,
        Err(poisoned) => poisoned.into_inner(),
    }
}
