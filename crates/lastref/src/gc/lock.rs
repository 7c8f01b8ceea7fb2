//! The lock of a [`Slot`](super::Slot): one word that says who holds it, and how often it was taken.
//!
//! ```text
//!  63                                   4  3  2  1  0
//! ┌──────────────────────────────────────┬──┬──┬──┬──┐
//! │ version (60): times it was taken     │PO│WA│TR│HE│
//! └──────────────────────────────────────┴──┴──┴──┴──┘
//! ```
//!
//! | flag | set by | while it is set |
//! |---|---|---|
//! | `HELD` | a thread that takes the lock | it has the content for as long as it likes |
//! | `TRACED` | a trace that takes the lock | it has the content for as long as it takes to read it |
//! | `WAITED` | a thread that waits for `HELD` to clear | the holder wakes those who wait |
//! | `POISONED` | a holder that panics | for good: traces leave the content alone, but to empty it |
//!
//! # Invariants
//!
//! 1. `HELD` and `TRACED` are never both set, and each is cleared only by who set it: between the two
//!    the content is that thread's alone. Taking the lock acquires what its last holder released.
//! 2. The version moves on in the step that takes the lock. So a word that is the same at two looks,
//!    without a flag, means that nobody had the content between them. One load is such a look: of two
//!    loads by one thread the later one sees what the first saw, or something newer, and all that
//!    happened before it.
//! 3. `WAITED` is set only beside `HELD`, so that nobody but the trace changes a word with `TRACED`:
//!    it can end by a store.
//! 4. `WAITED` is set and waited for under the lock of the place where its slot's threads wait, and
//!    whoever clears it takes that lock before it wakes them: no wake comes in between.
//!
//! Waiting is not in turn: who comes when the lock is free has it. Nothing is taken under the lock of
//! a place.

use std::marker::PhantomData;

use super::sync::{AtomicU64, Condvar, Mutex, Ordering, give_way, global, lock, wait};

const HELD: u64 = 1;
const TRACED: u64 = 1 << 1;
const WAITED: u64 = 1 << 2;
const POISONED: u64 = 1 << 3;
const FLAGS: u64 = HELD | TRACED | WAITED | POISONED;
const ONE_VERSION: u64 = 1 << 4;

/// See the [module](self).
pub(super) struct SlotLock(AtomicU64);

impl SlotLock {
    pub(super) fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Takes the lock, after waiting for whoever has it.
    #[inline]
    pub(super) fn lock(&self) -> Held<'_> {
        let mut turn = 0;
        loop {
            if let Some(held) = self.try_lock() {
                return held;
            }
            self.wait(turn);
            turn += 1;
        }
    }

    /// Takes the lock if nobody has it.
    #[inline]
    pub(super) fn try_lock(&self) -> Option<Held<'_>> {
        let word = self.take(HELD, POISONED)?;
        Some(Held {
            lock: self,
            word,
            was_panicking: std::thread::panicking(),
            of_this_thread: PhantomData,
        })
    }

    /// Takes the lock to read the content, if nobody has it and no holder has panicked; with
    /// `also_poisoned`, even then.
    #[inline]
    pub(super) fn try_trace(&self, also_poisoned: bool) -> Option<Traced<'_>> {
        let word = self.take(TRACED, if also_poisoned { POISONED } else { 0 })?;
        Some(Traced { lock: self, word })
    }

    /// Whether nobody has had the lock since a trace that noted this.
    #[inline]
    pub(super) fn is_still(&self, noted: u64) -> bool {
        self.0.load(Ordering::Relaxed) == noted
    }

    /// Sets `flag` and moves the version on (invariant 2), if no flag is set but those of `allowed`.
    /// Returns the new word.
    #[inline]
    fn take(&self, flag: u64, allowed: u64) -> Option<u64> {
        let mut word = self.0.load(Ordering::Relaxed);
        while word & FLAGS & !allowed == 0 {
            let taken = word.wrapping_add(ONE_VERSION) | flag;
            match self
                .0
                .compare_exchange_weak(word, taken, Ordering::Acquire, Ordering::Relaxed)
            {
                Ok(_) => return Some(taken),
                Err(now) => word = now,
            }
        }
        None
    }

    /// Waits until there is hope. `turn` says how often it has been waited.
    #[cold]
    fn wait(&self, turn: u32) {
        if turn < SPINS {
            std::hint::spin_loop();
            return;
        }
        let word = self.0.load(Ordering::Relaxed);
        if word & TRACED != 0 {
            give_way(turn - SPINS);
            return;
        }
        let place = &PLACES[self.place()];
        let guard = lock(&place.lock);
        let word = self.0.load(Ordering::Relaxed);
        if word & HELD == 0 {
            return;
        }
        let waited = word | WAITED;
        if self
            .0
            .compare_exchange(word, waited, Ordering::Relaxed, Ordering::Relaxed)
            .is_ok()
        {
            drop(wait(&place.changed, guard));
        }
    }

    /// Where threads wait for this lock.
    fn place(&self) -> usize {
        (std::ptr::from_ref(self).addr() / size_of::<Self>()) % NUM_PLACES
    }
}

/// Looks before a thread waits at a place: most holders only move a pointer.
const SPINS: u32 = if cfg!(loom) { 0 } else { 100 };

/// Where threads wait for the locks of slots: slots share them by their addresses, and each thread
/// that is woken looks at its own.
struct Place {
    lock: Mutex<()>,
    changed: Condvar,
}

/// Under loom, addresses must not decide anything.
const NUM_PLACES: usize = if cfg!(loom) { 1 } else { 31 };

global! {
    static PLACES: [Place; NUM_PLACES] = std::array::from_fn(|_| Place {
        lock: Mutex::new(()),
        changed: Condvar::new(),
    });
}

/// A lock that a thread has. Given back by that thread, as its panics decide on `POISONED`.
pub(super) struct Held<'a> {
    lock: &'a SlotLock,
    word: u64,
    was_panicking: bool,
    of_this_thread: PhantomData<*const ()>,
}

impl Drop for Held<'_> {
    #[inline]
    fn drop(&mut self) {
        let mut free = self.word & !HELD;
        if !self.was_panicking && std::thread::panicking() {
            free |= POISONED;
        }
        if self.lock.0.swap(free, Ordering::Release) & WAITED != 0 {
            wake(self.lock.place());
        }
    }
}

#[cold]
fn wake(place: usize) {
    let place = &PLACES[place];
    drop(lock(&place.lock)); // Invariant 4.
    place.changed.notify_all();
}

/// A lock that a trace has.
pub(super) struct Traced<'a> {
    lock: &'a SlotLock,
    word: u64,
}

impl Traced<'_> {
    /// What [`SlotLock::is_still`] compares later: the word when the trace has ended.
    pub(super) fn noted(&self) -> u64 {
        self.word & !TRACED
    }
}

impl Drop for Traced<'_> {
    #[inline]
    fn drop(&mut self) {
        self.lock.0.store(self.noted(), Ordering::Release); // Invariant 3.
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_still_until_somebody_takes_the_lock() {
        let lock = SlotLock::new();
        let noted = lock.try_trace(false).unwrap().noted();
        assert!(lock.is_still(noted));
        let held = lock.lock();
        assert!(!lock.is_still(noted), "held");
        assert!(lock.try_lock().is_none() && lock.try_trace(true).is_none());
        drop(held);
        assert!(!lock.is_still(noted), "was held");

        let traced = lock.try_trace(false).unwrap();
        let noted = traced.noted();
        assert!(!lock.is_still(noted), "is being traced");
        assert!(lock.try_lock().is_none() && lock.try_trace(true).is_none());
        drop(traced);
        assert!(lock.is_still(noted));
        drop(lock.try_trace(false));
        assert!(!lock.is_still(noted), "a trace may have emptied it");
    }

    #[test]
    fn a_holder_that_panics_leaves_the_lock_poisoned_and_free() {
        let lock = SlotLock::new();
        let panics = || {
            let _held = lock.lock();
            panic!("while it holds the lock");
        };
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).is_err());
        assert!(lock.try_trace(false).is_none());
        assert!(lock.try_trace(true).is_some());
        assert!(lock.try_lock().is_some());
        drop(lock.lock());
        assert!(lock.try_trace(false).is_none(), "for good");
    }

    #[test]
    fn a_destructor_that_runs_in_a_panic_poisons_nothing() {
        struct Locks<'a>(&'a SlotLock);
        impl Drop for Locks<'_> {
            fn drop(&mut self) {
                drop(self.0.lock());
            }
        }
        let lock = SlotLock::new();
        let panics = || {
            let _locks = Locks(&lock);
            panic!("elsewhere");
        };
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).is_err());
        assert!(lock.try_trace(false).is_some());
    }
}
