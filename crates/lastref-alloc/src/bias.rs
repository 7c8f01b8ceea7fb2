//! The lock of the state, which costs the thread that mostly uses it no atomic read-modify-write.
//!
//! Mostly one thread allocates, and what its cache does not serve goes through the state. An exchange
//! a use is a tenth of what that takes. So a thread that has come often without anybody between
//! becomes the *favourite*: it only says in `inside` that it is there, and whoever else comes makes all
//! processors agree on the order first, as a visitor of a [cache](crate::owner) does:
//!
//! ```text
//!  favourite                               another, who has exchanged `taken`
//!  inside = true                           favoured = nobody
//!  light barrier: the compiler's order     heavy barrier: on every processor that runs us
//!  still favoured? else inside = false,    wait until inside is false
//!  and exchange `taken` like the others
//!  ... the value ...                       ... the value ...
//!  inside = false                          taken = false
//! ```
//!
//! Taking the favour away costs a system call, and so the favourite has to come twice as often before
//! it is favoured again: where threads take turns the lock soon is an ordinary one.
//!
//! # Invariants
//!
//! 1. The value is touched by who has exchanged `taken` and, since, has seen `favoured` nobody, or seen
//!    `inside` false after the heavy barrier that followed storing that; and by the favourite while
//!    `inside` is true and, since the light barrier after it became so, `favoured` was seen to be itself.
//! 2. The heavy barrier falls, on the favourite's processor, between two of its instructions. If the
//!    store to `inside` is before it, the other sees it and waits; else the favourite's look at
//!    `favoured` is after it, and the favourite steps back. They cannot both go on.
//! 3. `favoured` and `Record` change only under `taken`. Only its own thread makes itself favoured, and
//!    only one thread ever, the first that comes often: so `inside` is that thread's alone to write.
//! 4. The favourite has last touched the value itself, since whoever touches it otherwise takes the
//!    favour away first: it needs to acquire nothing. Others acquire from it by `inside`, and it from
//!    them by `taken`.
//! 5. The favourite never has both `taken` and `inside` when others could find it inside: it goes over
//!    from the one to the other. Coming back while it is there, it waits for itself, as in any lock.

//!
//! Where the system has no heavy barrier nobody is favoured.

#[cfg(not(loom))]
use std::marker::PhantomData;
#[cfg(not(loom))]
use std::ops::{Deref, DerefMut};

use crate::owner::{Owned, Release};
use crate::sync::{
    AtomicBool, AtomicU64, Ordering, UnsafeCell, has_barriers, heavy_barrier, light_barrier, pause,
    thread_number,
};

/// Under loom the state has loom's own lock, which it can wait for; this one has models of its own.
#[cfg(loom)]
pub(crate) use crate::sync::{Mutex as Lock, MutexGuard as Held, lock};
#[cfg(not(loom))]
pub(crate) type Lock<T> = Biased<T>;

/// The number of no thread.
const NOBODY: u64 = 0;

#[cfg(not(loom))]
/// How often a thread comes without another between before it is favoured. Taking the favour away
/// takes as long as a few hundred exchanges, up to two thousand on a virtual machine.
const FIRST_RUN: u64 = 512;

/// Who came by exchanging `taken`.
#[derive(Debug)]
struct Record {
    last: u64,
    /// How often, without another between.
    run: u64,
    /// How often it takes to be favoured.
    needed: u64,
    /// The one that was favoured first, and alone may be again.
    favourite: u64,
}

/// See the [module](self).
#[derive(Debug)]
pub struct Biased<T> {
    favoured: AtomicU64,
    inside: AtomicBool,
    owned: Owned<T>,
    record: UnsafeCell<Record>,
    has_barriers: bool,
}

// SAFETY: one thread at a time gets to the value (invariants 1 and 2) and to the record, which is
// touched only under `taken`.
unsafe impl<T: Send> Sync for Biased<T> {}

impl<T> Biased<T> {
    #[cfg(not(loom))]
    pub(crate) fn new(value: T) -> Self {
        Self::favouring_after(FIRST_RUN, value)
    }

    /// Favours the first thread that comes `needed` times without another between.
    pub fn favouring_after(needed: u64, value: T) -> Self {
        Self {
            favoured: AtomicU64::new(NOBODY),
            inside: AtomicBool::new(false),
            owned: Owned::new(value),
            record: UnsafeCell::new(Record {
                last: NOBODY,
                run: 0,
                needed,
                favourite: NOBODY,
            }),
            has_barriers: has_barriers(),
        }
    }

    #[inline]
    fn take(&self) -> Release<'_> {
        let this_thread = thread_number();
        if self.favoured.load(Ordering::Relaxed) == this_thread
            && !self.inside.load(Ordering::Relaxed)
        {
            self.inside.store(true, Ordering::Relaxed);
            let release = Release(&self.inside);
            light_barrier();
            if self.favoured.load(Ordering::Relaxed) == this_thread {
                return release;
            }
            drop(release);
        }
        self.take_by_exchange(this_thread)
    }

    #[inline(never)]
    fn take_by_exchange(&self, this_thread: u64) -> Release<'_> {
        let release = self.owned.take();
        let favoured = self.favoured.load(Ordering::Relaxed);
        if favoured != NOBODY {
            if favoured != this_thread {
                self.favoured.store(NOBODY, Ordering::Relaxed);
                heavy_barrier();
            }
            self.wait_for_favourite();
        }
        if self.has_barriers && self.is_to_be_favoured(this_thread, favoured != NOBODY) {
            self.inside.store(true, Ordering::Relaxed);
            self.favoured.store(this_thread, Ordering::Relaxed);
            drop(release);
            return Release(&self.inside);
        }
        release
    }

    #[cold]
    fn wait_for_favourite(&self) {
        let mut tries = 0;
        while self.inside.load(Ordering::Acquire) {
            pause(tries);
            tries += 1;
        }
    }

    /// Notes that a thread came, and whether it took the favour away. To be called under `taken`.
    fn is_to_be_favoured(&self, this_thread: u64, has_taken_away: bool) -> bool {
        self.record.with_mut(|record| {
            // SAFETY: invariant 3: we have `taken`, and nobody else touches it.
            let record = unsafe { &mut *record };
            if has_taken_away {
                record.needed = record.needed.saturating_mul(2);
            }
            if record.last != this_thread {
                (record.last, record.run) = (this_thread, 0);
            }
            record.run += 1;
            if record.run < record.needed {
                return false;
            }
            if record.favourite == NOBODY {
                record.favourite = this_thread;
            }
            record.run = 0;
            record.favourite == this_thread
        })
    }
}

/// For the models of it.
#[cfg(loom)]
impl<T> Biased<T> {
    /// Runs `f` on the value, with nobody else at it.
    pub fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        let release = self.take();
        let result = self.owned.value.with_mut(|value| {
            // SAFETY: invariant 1: it is ours until `release` is dropped.
            f(unsafe { &mut *value })
        });
        drop(release);
        result
    }
}

/// What a [`Biased`] protects, while it is held.
#[cfg(not(loom))]
pub(crate) struct Held<'a, T> {
    value: &'a UnsafeCell<T>,
    _release: Release<'a>,
    /// It stays on its thread: it may be the favourite's.
    borrowed: PhantomData<*mut T>,
}

/// Holds what is protected until the guard is dropped.
#[cfg(not(loom))]
#[inline]
pub(crate) fn lock<T>(biased: &Biased<T>) -> Held<'_, T> {
    Held {
        _release: biased.take(),
        value: &biased.owned.value,
        borrowed: PhantomData,
    }
}

#[cfg(not(loom))]
impl<T> Deref for Held<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: invariant 1: it is ours until `_release` is dropped, and nobody has a mutable
        // reference, which would borrow this.
        unsafe { &*self.value.get() }
    }
}

#[cfg(not(loom))]
impl<T> DerefMut for Held<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: invariant 1: it is ours until `_release` is dropped, and nobody has another
        // reference, which would borrow this.
        unsafe { &mut *self.value.get() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl<T> Biased<T> {
        fn is_favoured(&self, thread: u64) -> bool {
            self.favoured.load(Ordering::Relaxed) == thread
        }
    }

    fn come(biased: &Biased<u64>, times: u64) {
        for _ in 0..times {
            *lock(biased) += 1;
        }
    }

    #[test]
    fn a_thread_that_comes_often_is_favoured_until_another_comes() {
        let biased = Biased::favouring_after(4, 0);
        let me = thread_number();
        come(&biased, 3);
        assert!(!biased.is_favoured(me));
        come(&biased, 1);
        assert_eq!(biased.is_favoured(me), has_barriers());
        come(&biased, 10);
        std::thread::scope(|scope| scope.spawn(|| come(&biased, 1)).join().unwrap());
        assert!(!biased.is_favoured(me));
        // Twice as often now.
        come(&biased, 7);
        assert!(!biased.is_favoured(me));
        come(&biased, 1);
        assert_eq!(biased.is_favoured(me), has_barriers());
        assert_eq!(*lock(&biased), 3 + 1 + 10 + 1 + 7 + 1);
    }

    #[test]
    fn only_one_thread_is_ever_favoured() {
        let biased = Biased::favouring_after(4, 0);
        come(&biased, 4);
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                come(&biased, 100);
                biased.is_favoured(thread_number())
            });
            assert!(!other.join().unwrap());
        });
    }

    #[test]
    fn who_comes_back_while_there_waits_for_itself() {
        // It never ends, as with any lock.
        let biased = Box::leak(Box::new(Biased::favouring_after(2, 0)));
        let (told, ended) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            come(biased, 2);
            let _held = lock(biased);
            told.send("in").unwrap();
            come(biased, 1);
            told.send("in twice").unwrap();
        });
        assert_eq!(ended.recv(), Ok("in"));
        assert!(
            ended
                .recv_timeout(std::time::Duration::from_millis(50))
                .is_err()
        );
    }

    #[test]
    fn it_is_given_back_after_a_panic() {
        let biased = Biased::favouring_after(2, 0);
        for _ in 0..4 {
            let come = || {
                let _held = lock(&biased);
                panic!("inside");
            };
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(come)).unwrap_err();
        }
        come(&biased, 1);
        std::thread::scope(|scope| scope.spawn(|| come(&biased, 1)).join().unwrap());
        assert_eq!(*lock(&biased), 2);
    }

    #[test]
    fn threads_that_take_turns_lose_nothing() {
        let biased = Biased::favouring_after(8, 0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for round in 0..200 {
                        come(&biased, 50);
                        if round % 10 == 0 {
                            std::thread::yield_now();
                        }
                    }
                });
            }
        });
        assert_eq!(*lock(&biased), 3 * 200 * 50);
    }
}
