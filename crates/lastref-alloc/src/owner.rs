//! A flag of one byte, and what only its holder may touch.
//!
//! Each thread has a cache that it uses for nearly every small block, and that others look into now
//! and then; everything else goes through the state, which mostly one thread uses at a time. A mutex
//! would do; this costs one atomic read-modify-write a use instead of two, since a holder does not
//! look whether somebody waits. A cache's is held for some tens of nanoseconds; the state's is so too
//! as a rule, but also over device calls that do not wait. Whoever finds it taken tries again: at once
//! for a while, then after others had their turn, then now and then.
//!
//! # Invariants
//!
//! 1. `taken` is true from the exchange that found it false to the store that follows, by whoever made
//!    the exchange. Only between the two is `value` touched, and only by that one.
//! 2. The exchange acquires what the store of the one before released.

#[cfg(not(loom))]
use std::marker::PhantomData;
#[cfg(not(loom))]
use std::ops::{Deref, DerefMut};

use crate::sync::{AtomicBool, Ordering, UnsafeCell, pause};

/// Under loom its own lock, which it can wait for. The models of an [`Owned`] are those of the caches.
#[cfg(loom)]
pub(crate) use crate::sync::{Mutex as Lock, MutexGuard as Held, lock};
#[cfg(not(loom))]
pub(crate) type Lock<T> = Owned<T>;

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
        let release = self.take();
        let result = self.value.with_mut(|value| {
            // SAFETY: invariant 1: the flag is ours until `release` is dropped.
            f(unsafe { &mut *value })
        });
        drop(release);
        result
    }

    #[inline]
    fn take(&self) -> Release<'_> {
        if !self.try_take() {
            self.wait();
        }
        Release(&self.taken)
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
    fn wait(&self) {
        let mut tries = 0;
        while !self.try_take() {
            // The holder may have been put to sleep by the scheduler, or be in a device call.
            pause(tries);
            tries += 1;
        }
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

/// What an [`Owned`] protects, while it is held.
#[cfg(not(loom))]
pub(crate) struct Held<'a, T> {
    owned: &'a Owned<T>,
    _release: Release<'a>,
    /// Shared between threads only if the value may be.
    value: PhantomData<&'a mut T>,
}

/// Holds what is protected until the guard is dropped.
#[cfg(not(loom))]
#[inline]
pub(crate) fn lock<T>(owned: &Owned<T>) -> Held<'_, T> {
    Held {
        _release: owned.take(),
        owned,
        value: PhantomData,
    }
}

#[cfg(not(loom))]
impl<T> Deref for Held<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        let value = self.owned.value.get();
        // SAFETY: invariant 1: the flag is ours until `_release` is dropped, and nobody has a
        // mutable reference, which would borrow this.
        unsafe { &*value }
    }
}

#[cfg(not(loom))]
impl<T> DerefMut for Held<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        let value = self.owned.value.get();
        // SAFETY: invariant 1: the flag is ours until `_release` is dropped, and nobody has another
        // reference, which would borrow this.
        unsafe { &mut *value }
    }
}
