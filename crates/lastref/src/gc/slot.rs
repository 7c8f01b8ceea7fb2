//! [`Slot`]: the one place where edges may change after a node is shared.

use std::fmt;
use std::ops::{Deref, DerefMut};

use super::sync::{AtomicU64, Mutex, MutexGuard, Ordering, TryLockError, lock};
use super::trace::{Mode, Trace, Tracer};

/// A lock around edges that can change: the `Mutex` of [`Gc`](super::Gc) graphs.
///
/// Taking a handle out of one slot and putting it into another changes no count, so a collection
/// that runs beside it could see each edge once and still be wrong. Every lock of a slot therefore
/// moves its version on, and a collection checks that the versions it saw have not moved. A slot
/// that is locked while a collection looks counts as changed: nobody ever waits for a collection
/// here, nor does it wait for anybody.
///
/// Every cycle has a slot in it, since a handle can be made only of a finished value (see
/// [`Gc::new_cyclic`](super::Gc::new_cyclic)). Emptying the slots of a dead cycle is how it is
/// broken: a slot's content is replaced by its [`Default`], which must hold no handle.
///
/// # Examples
///
/// ```
/// use lastref::gc::{Gc, Slot};
///
/// let leaves: Slot<Vec<Gc<u32>>> = Slot::default();
/// leaves.lock().push(Gc::new(7));
/// assert_eq!(leaves.lock().len(), 1);
/// ```
pub struct Slot<T> {
    /// Moves on, under the lock, each time it is taken.
    version: AtomicU64,
    value: Mutex<T>,
}

impl<T> Slot<T> {
    /// A slot that holds `value`.
    #[must_use]
    pub fn new(value: T) -> Self {
        Self {
            version: AtomicU64::new(0),
            value: Mutex::new(value),
        }
    }

    /// Locks the slot. Waits for other holders, as a mutex does, and deadlocks as one does if this
    /// thread holds it already. A panic in a holder is not passed on: the content is what it was
    /// left as.
    pub fn lock(&self) -> SlotGuard<'_, T> {
        let guard = lock(&self.value);
        // Under the lock, which orders it: no other writer, and readers take the lock too.
        self.version
            .store(self.version.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        SlotGuard(guard)
    }

    /// Replaces the content and returns the old one. The lock is free again when the old content
    /// is dropped.
    pub fn replace(&self, value: T) -> T {
        std::mem::replace(&mut *self.lock(), value)
    }

    /// Replaces the content. The lock is free again when the old content is dropped.
    pub fn set(&self, value: T) {
        drop(self.replace(value));
    }

    /// A clone of the content.
    #[must_use]
    pub fn get(&self) -> T
    where
        T: Clone,
    {
        self.lock().clone()
    }

    /// Replaces the content by its default and returns it.
    pub fn take(&self) -> T
    where
        T: Default,
    {
        self.replace(T::default())
    }
}

impl<T: Default> Default for Slot<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T: fmt::Debug> fmt::Debug for Slot<T> {
    /// Does not wait: a graph with cycles is printed only as far as its slots are free.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.value.try_lock() {
            Ok(guard) => f.debug_tuple("Slot").field(&*guard).finish(),
            Err(_) => f.write_str("Slot(<locked>)"),
        }
    }
}

// SAFETY: the content is owned once, and traced once. Handles can be reached only under the lock,
// so what is traced under it is all there is at that moment.
unsafe impl<T: Trace + Default> Trace for Slot<T> {
    fn trace(&self, tracer: &mut Tracer<'_>) {
        let mut guard = match self.value.try_lock() {
            Ok(guard) => guard,
            // A holder panicked: the content may be half-changed, so nothing is concluded from it.
            // Once its node is known to be garbage by other means, it is emptied like any other.
            Err(TryLockError::Poisoned(poisoned)) if matches!(tracer.mode, Mode::Sever) => {
                poisoned.into_inner()
            }
            Err(_) => {
                tracer.busy = true;
                return;
            }
        };
        let version = self.version.load(Ordering::Relaxed);
        match &mut tracer.mode {
            Mode::Scan(scan) => {
                // A slot inside a slot changes only under the lock of both: one version tells.
                let outermost = !std::mem::replace(&mut tracer.in_slot, true);
                if outermost {
                    scan.add_version(version);
                }
                guard.trace(tracer);
                tracer.in_slot = !outermost;
            }
            Mode::Verify(scan, position) => {
                if scan.version(*position) != Some(version) {
                    tracer.busy = true;
                }
                *position += 1;
            }
            Mode::Sever => {
                let content = std::mem::take(&mut *guard);
                drop(guard);
                drop(content);
            }
            Mode::List(_) => guard.trace(tracer),
        }
    }

    fn is_leaf(levels: u32) -> bool {
        T::is_leaf(levels)
    }
}

/// The content of a locked [`Slot`].
pub struct SlotGuard<'a, T>(MutexGuard<'a, T>);

impl<T> Deref for SlotGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> DerefMut for SlotGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

impl<T: fmt::Debug> fmt::Debug for SlotGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}
