//! A flag of one byte, and what only its holder may touch.
//!
//! Each thread has a cache that it uses for nearly every small block, and that others look into now
//! and then. A mutex would do; this costs one atomic read-modify-write a use instead of two. It is
//! held for some tens of nanoseconds, never over a device call or foreign code, so whoever finds it
//! taken just tries again.
//!
//! # Invariants
//!
//! 1. `taken` is true from the exchange that found it false to the store that follows, by the same
//!    thread. Only between the two is `value` touched.
//! 2. The exchange acquires what the store of the one before released.

use crate::sync::{AtomicBool, Ordering, UnsafeCell, yield_now};

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Owned<T> {
    taken: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: one thread at a time gets to the value (invariant 1), as with a mutex.
unsafe impl<T: Send> Sync for Owned<T> {}

impl<T> Owned<T> {
    pub(crate) fn new(value: T) -> Self {
        Self {
            taken: AtomicBool::new(false),
            value: UnsafeCell::new(value),
        }
    }

    /// Runs `f` on the value, with nobody else at it. `f` must not come back to it.
    #[inline]
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        while !self.try_take() {
            Self::wait();
        }
        let release = Release(&self.taken);
        let result = self.value.with_mut(|value| {
            // SAFETY: invariant 1: the flag is ours until `release` is dropped.
            f(unsafe { &mut *value })
        });
        drop(release);
        result
    }

    /// A swap would do as well, but loom has it read its own `true` again and again.
    #[inline]
    fn try_take(&self) -> bool {
        let (taken, free) = (Ordering::Acquire, Ordering::Relaxed);
        self.taken
            .compare_exchange(false, true, taken, free)
            .is_ok()
    }

    #[cold]
    fn wait() {
        // The holder may have been put to sleep by the scheduler.
        yield_now();
    }
}

/// Gives the flag back, also after a panic.
struct Release<'a>(&'a AtomicBool);

impl Drop for Release<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}
