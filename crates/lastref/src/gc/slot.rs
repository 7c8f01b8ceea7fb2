//! [`Slot`]: the one place where edges may change after a node is shared.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::panic::{RefUnwindSafe, UnwindSafe};

use super::lock::{Held, SlotLock};
use super::sync::{MutPtr, UnsafeCell};
use super::trace::{Mode, Trace, Tracer};

/// A lock around edges that can change: the `Mutex` of [`Gc`](super::Gc) graphs.
///
/// Taking a handle out of one slot and putting it into another changes no count, so a collection
/// that runs beside it could see each edge once and still be wrong. Every lock of a slot therefore
/// moves its version on, and a collection checks that the versions it saw have not moved. A slot
/// that is locked while a collection looks counts as changed: a collection waits for nobody here,
/// and nobody for a collection, but for as long as it takes to read the content.
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
    lock: SlotLock,
    content: UnsafeCell<T>,
}

// SAFETY: the lock gives the content to one thread at a time.
unsafe impl<T: Send> Sync for Slot<T> {}
// SAFETY: whoever has the slot may take the content.
unsafe impl<T: Send> Send for Slot<T> {}

// As a mutex: who comes after a panic sees what was left, and collections leave it alone.
impl<T> UnwindSafe for Slot<T> {}
impl<T> RefUnwindSafe for Slot<T> {}

impl<T> Slot<T> {
    /// A slot that holds `value`.
    #[must_use]
    pub fn new(value: T) -> Self {
        Self {
            lock: SlotLock::new(),
            content: UnsafeCell::new(value),
        }
    }

    /// Locks the slot. Waits for other holders, as a mutex does, in no order, and deadlocks as one
    /// does if this thread holds it already. A panic in a holder is not passed on: the content is
    /// what it was left as. Collections do not look into it from then on.
    pub fn lock(&self) -> SlotGuard<'_, T> {
        self.guard(self.lock.lock())
    }

    fn guard<'a>(&'a self, held: Held<'a>) -> SlotGuard<'a, T> {
        SlotGuard {
            content: self.content.get_mut(),
            _held: held,
        }
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
        match self.lock.try_lock() {
            Some(held) => f.debug_tuple("Slot").field(&*self.guard(held)).finish(),
            None => f.write_str("Slot(<locked>)"),
        }
    }
}

// SAFETY: the content is owned once, and traced once. Handles can be reached only under the lock,
// so what is traced under it is all there is at that moment.
unsafe impl<T: Trace + Default> Trace for Slot<T> {
    fn trace(&self, tracer: &mut Tracer<'_>) {
        if let Mode::Verify(scan, position) = &mut tracer.mode {
            let noted = scan.version(*position);
            if !noted.is_some_and(|noted| self.lock.is_still(noted)) {
                tracer.busy = true;
            }
            *position += 1;
            return;
        }
        let severs = matches!(tracer.mode, Mode::Sever);
        let severed = {
            // If a holder panicked, the content may be half-changed, so nothing is concluded from
            // it. Once its node is known to be garbage by other means, it is emptied like any other.
            let Some(traced) = self.lock.try_trace(severs) else {
                tracer.busy = true;
                return;
            };
            // Ends before `traced`.
            let access = self.content.get_mut();
            // SAFETY: `traced` gives the content to this thread.
            let content = unsafe { &mut *access.with(|content| content) };
            match &mut tracer.mode {
                Mode::Scan(scan) => {
                    // A slot inside a slot changes only under the lock of both: one version tells.
                    let outermost = !std::mem::replace(&mut tracer.in_slot, true);
                    if outermost {
                        scan.add_version(traced.noted());
                    }
                    content.trace(tracer);
                    tracer.in_slot = !outermost;
                    None
                }
                Mode::Sever => Some(std::mem::take(content)),
                Mode::List(_) | Mode::Verify(..) => {
                    content.trace(tracer);
                    None
                }
            }
        };
        drop(severed); // With the lock free again: its destructors may come here.
    }

    fn is_leaf(levels: u32) -> bool {
        T::is_leaf(levels)
    }
}

/// The content of a locked [`Slot`].
pub struct SlotGuard<'a, T> {
    // In this order: the access ends before the lock is free.
    content: MutPtr<T>,
    _held: Held<'a>,
}

// SAFETY: shared, it gives shared access to the content.
unsafe impl<T: Sync> Sync for SlotGuard<'_, T> {}

impl<T> UnwindSafe for SlotGuard<'_, T> {}
impl<T> RefUnwindSafe for SlotGuard<'_, T> {}

impl<T> Deref for SlotGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the lock that is held gives the content to this guard.
        unsafe { &*self.content.with(|content| content) }
    }
}

impl<T> DerefMut for SlotGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above, and the guard is borrowed mutably.
        unsafe { &mut *self.content.with(|content| content) }
    }
}

impl<T: fmt::Debug> fmt::Debug for SlotGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::{Arc, mpsc};
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn threads_that_wait_for_a_holder_all_get_their_turn() {
        const THREADS: u32 = 4;
        const TURNS: u32 = 2000;
        let slot = Arc::new(Slot::new(0_u32));
        let threads: Vec<_> = (0..THREADS)
            .map(|_| {
                let slot = Arc::clone(&slot);
                thread::spawn(move || {
                    for turn in 0..TURNS {
                        let mut content = slot.lock();
                        let before = *content;
                        if turn % 64 == 0 {
                            // Longer than others look before they sleep.
                            thread::sleep(Duration::from_micros(100));
                        }
                        *content = before + 1;
                    }
                })
            })
            .collect();
        threads
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
        assert_eq!(*slot.lock(), THREADS * TURNS);
    }

    #[test]
    fn old_content_may_come_back_to_its_slot() {
        #[derive(Default)]
        struct Comes(Option<(Arc<Slot<Self>>, mpsc::Sender<()>)>);
        impl Drop for Comes {
            fn drop(&mut self) {
                if let Some((slot, done)) = self.0.take() {
                    drop(slot.lock());
                    done.send(()).unwrap();
                }
            }
        }
        // SAFETY: there is nothing to report.
        unsafe impl Trace for Comes {
            fn trace(&self, _: &mut Tracer<'_>) {}
        }
        let (done, came) = mpsc::channel();
        let empty: [fn(&Slot<Comes>); 3] = [
            |slot| slot.set(Comes::default()),
            |slot| drop(slot.take()),
            |slot| slot.trace(&mut Tracer::new(Mode::Sever)),
        ];
        for empty in empty {
            let slot = Arc::new(Slot::<Comes>::default());
            slot.set(Comes(Some((Arc::clone(&slot), done.clone()))));
            thread::spawn(move || empty(&slot));
            let came = came.recv_timeout(Duration::from_secs(20));
            assert!(came.is_ok(), "waits for itself");
        }
    }

    #[test]
    fn a_locked_slot_is_printed_without_waiting() {
        let slot = Slot::new(7);
        assert_eq!(format!("{slot:?}"), "Slot(7)");
        let held = slot.lock();
        assert_eq!(format!("{slot:?} {held:?}"), "Slot(<locked>) 7");
    }

    #[test]
    fn guards_are_shared_between_threads_and_not_sent() {
        trait NotSend<A> {
            fn is_checked() {}
        }
        impl<T> NotSend<()> for T {}
        struct IsSend;
        impl<T: Send> NotSend<IsSend> for T {}
        // Does not compile if both apply.
        <SlotGuard<'_, u8> as NotSend<_>>::is_checked();

        fn is_sync<T: Sync>() {}
        is_sync::<SlotGuard<'_, u8>>();
        is_sync::<Slot<std::cell::Cell<u8>>>();
    }
}
