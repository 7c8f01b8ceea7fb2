//! Flags of one byte, and what only their holder may touch.
//!
//! Each thread has a cache that it uses for nearly every small block, and that others look into now
//! and then; everything else goes through the state, whose lock is [another](crate::bias).
//!
//! # The flag: [`Owned`]
//!
//! A mutex would do; this costs one atomic read-modify-write a use instead of two, since a holder does
//! not look whether somebody waits. It is held for some tens of nanoseconds as a rule, but also over
//! device calls that do not wait. Whoever finds it taken tries again: at once for a while, then after
//! others had their turn, then now and then.
//!
//! 1. `taken` is true from the exchange that found it false to the store that follows, by whoever made
//!    the exchange. Only between the two is `value` touched, and only by that one.
//! 2. The exchange acquires what the store of the one before released.
//!
//! # A cache: [`Owner`] and [`Visitor`]
//!
//! There is one [`Visitor`] of it, and at most one [`Owner`]; both are borrowed mutably to get to the
//! value, so that there are never more than two at it. The owner comes often and the visitor seldom: two
//! atomic read-modify-writes would be a quarter of what a block costs, allocated and freed. So the owner
//! only says in `taken` that it is there, and the visitor makes all processors agree on the order:
//!
//! ```text
//!  owner                                   visitor
//!  taken = true                            asked = true
//!  light barrier: the compiler's order     heavy barrier: on every processor that runs us
//!  asked? taken = false, wait, once more   wait until taken is false
//!  ... the value ...                       ... the value ...
//!  taken = false                           asked = false
//! ```
//!
//! 3. The owner touches the value only while `taken` is true and, since the light barrier after it
//!    became so, `asked` was seen false. The visitor touches it only while `asked` is true and, since
//!    the heavy barrier after it became so, `taken` was seen false.
//! 4. The heavy barrier falls, on the owner's processor, between two of its instructions. If the store
//!    to `taken` is before it, the visitor sees it and waits; else the owner's look at `asked` is after
//!    it, and the owner steps back. They cannot both go on.
//! 5. Each look that lets one go on acquires what the other's store released. An owner acquires from
//!    the owner before it, and the visitor from the last owner, by `owner`.
//! 6. `owner` is the number of the thread that has the owner, who never leaves that thread, or 0. Nobody
//!    becomes the owner during a visit: for both one borrows the visitor.
//!
//! A visitor on the owner's own thread, and one of what has no owner, needs neither `asked` nor the
//! barrier: where one thread allocates, visits cost nothing. It looks at `taken` all the same, and so
//! would wait for itself if the owner's `f` came back.
//!
//! Where the system has no heavy barrier, or refuses it, owner and visitor exchange `taken` as the
//! state's holders do. Which of the two it is, is said once, when the cache is made.

use std::marker::PhantomData;
use std::sync::Arc;

use crate::sync::{
    AtomicBool, AtomicU64, Ordering, UnsafeCell, heavy_barrier, light_barrier, pause, thread_number,
};

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Owned<T> {
    taken: AtomicBool,
    pub(crate) value: UnsafeCell<T>,
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

    #[inline]
    pub(crate) fn take(&self) -> Release<'_> {
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
pub(crate) struct Release<'a>(pub(crate) &'a AtomicBool);

impl Drop for Release<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// What a thread uses and others visit: see the [module](self).
#[derive(Debug)]
struct Visited<T> {
    owned: Owned<T>,
    asked: AtomicBool,
    owner: AtomicU64,
    /// Whether there are barriers. Else `asked` stays false.
    has_barriers: bool,
}

impl<T> Visited<T> {
    #[inline]
    fn take_as_owner(&self) -> Release<'_> {
        if !self.has_barriers {
            return self.owned.take();
        }
        loop {
            self.owned.taken.store(true, Ordering::Relaxed);
            let release = Release(&self.owned.taken);
            light_barrier();
            if !self.asked.load(Ordering::Acquire) {
                return release;
            }
            drop(release);
            self.wait_for_visitor();
        }
    }

    #[cold]
    fn wait_for_visitor(&self) {
        let mut tries = 0;
        while self.asked.load(Ordering::Relaxed) {
            pause(tries);
            tries += 1;
        }
    }

    /// After `asked` and the heavy barrier.
    fn wait_for_owner(&self) {
        let mut tries = 0;
        while self.owned.taken.load(Ordering::Acquire) {
            pause(tries);
            tries += 1;
        }
    }
}

/// The number of no thread.
const NOBODY: u64 = 0;

/// The one that uses it often, from one thread.
#[derive(Debug)]
pub(crate) struct Owner<T>(Arc<Visited<T>>, PhantomData<*mut T>);

impl<T> Owner<T> {
    /// Runs `f` on the value, with nobody else at it. `f` must not visit it.
    #[inline]
    pub(crate) fn with<R>(&mut self, f: impl FnOnce(&mut T) -> R) -> R {
        let release = self.0.take_as_owner();
        let result = self.0.owned.value.with_mut(|value| {
            // SAFETY: invariant 3, or 1 without barriers: it is ours until `release` is dropped. There
            // is one owner, who is borrowed.
            f(unsafe { &mut *value })
        });
        drop(release);
        result
    }

    /// Whether there is still somebody to visit it.
    pub(crate) fn has_visitor(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }
}

impl<T> Drop for Owner<T> {
    fn drop(&mut self) {
        self.0.owner.store(NOBODY, Ordering::Release);
    }
}

/// The one that looks at it seldom.
#[derive(Debug)]
pub(crate) struct Visitor<T>(Arc<Visited<T>>);

impl<T> Visitor<T> {
    /// Nobody owns it yet.
    pub(crate) fn new(value: T, has_barriers: bool) -> Self {
        Self(Arc::new(Visited {
            owned: Owned::new(value),
            asked: AtomicBool::new(false),
            owner: AtomicU64::new(NOBODY),
            has_barriers,
        }))
    }

    /// The calling thread as the owner, if there is none now.
    pub(crate) fn own(&self) -> Option<Owner<T>> {
        let (owned, not) = (Ordering::Acquire, Ordering::Relaxed);
        let before = self
            .0
            .owner
            .compare_exchange(NOBODY, thread_number(), owned, not);
        before
            .is_ok()
            .then(|| Owner(Arc::clone(&self.0), PhantomData))
    }

    /// Runs `f` on every value, one after the other, with no owner at any. There is one heavy barrier
    /// for all of them. `f` must not come back to them.
    pub(crate) fn visit_all(all: &mut [Self], mut f: impl FnMut(&mut T)) {
        let visit = Visit(all);
        if visit.ask() {
            heavy_barrier();
        }
        for Self(visited) in visit.0.iter() {
            let release = if visited.has_barriers {
                visited.wait_for_owner();
                None
            } else {
                Some(visited.owned.take())
            };
            visited.owned.value.with_mut(|value| {
                // SAFETY: invariant 3 or 6, or 1 without barriers: it is ours until `visit`, or
                // `release`, is dropped. There is one visitor, who is borrowed.
                f(unsafe { &mut *value });
            });
            drop(release);
        }
    }
}

/// Lets the owners go on when it is over, also after a panic.
struct Visit<'a, T>(&'a mut [Visitor<T>]);

impl<T> Visit<'_, T> {
    /// Says that the values are asked for, where an owner on another thread must be told. True if there
    /// is one, for whom it takes a heavy barrier.
    fn ask(&self) -> bool {
        let this_thread = thread_number();
        let mut is_asked = false;
        for Visitor(visited) in self.0.iter().filter(|visitor| visitor.0.has_barriers) {
            let owner = visited.owner.load(Ordering::Acquire);
            if owner != NOBODY && owner != this_thread {
                visited.asked.store(true, Ordering::Relaxed);
                is_asked = true;
            }
        }
        is_asked
    }
}

impl<T> Drop for Visit<'_, T> {
    fn drop(&mut self) {
        for Visitor(visited) in self.0.iter() {
            visited.asked.store(false, Ordering::Release);
        }
    }
}
