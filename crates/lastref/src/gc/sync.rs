//! The synchronisation types of the collector, or loom's stand-ins for them.
#[cfg(not(loom))]
mod imp {
    pub(crate) use std::sync::atomic::{
        AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering,
    };
    pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
    pub(crate) use std::thread::yield_now;

    /// Content that a lock of ours guards, with as much of loom's interface as is used.
    pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

    /// An access to the content.
    pub(crate) struct MutPtr<T>(*mut T);

    impl<T> UnsafeCell<T> {
        pub(crate) const fn new(value: T) -> Self {
            Self(std::cell::UnsafeCell::new(value))
        }

        pub(crate) const fn get_mut(&self) -> MutPtr<T> {
            MutPtr(self.0.get())
        }
    }

    impl<T> MutPtr<T> {
        pub(crate) fn with<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
            f(self.0)
        }
    }

    /// Lets others run, for a thread that waits for something short and calls this again and again,
    /// `turn` counting up. In the end it sleeps: what it waits for may be a thread of lower priority.
    pub(crate) fn give_way(turn: u32) {
        if turn < 20 {
            yield_now();
        } else {
            std::thread::sleep(std::time::Duration::from_micros(50));
        }
    }

    /// A variable of each thread, which is there without being made.
    macro_rules! const_thread_local {
        ($($(#[$attr:meta])* static $name:ident: $type:ty = $init:expr;)+) => {
            std::thread_local! { $($(#[$attr])* static $name: $type = const { $init };)+ }
        };
    }
    pub(crate) use const_thread_local as thread_local;

    /// A variable that exists once, made on first use.
    macro_rules! global {
        ($(#[$attr:meta])* $vis:vis static $name:ident: $type:ty = $init:expr;) => {
            $(#[$attr])*
            $vis static $name: std::sync::LazyLock<$type> = std::sync::LazyLock::new(|| $init);
        };
    }
    pub(crate) use global;
}

#[cfg(loom)]
mod imp {
    pub(crate) use loom::cell::{MutPtr, UnsafeCell};
    pub(crate) use loom::sync::atomic::{
        AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering,
    };
    pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};
    pub(crate) use loom::thread::yield_now;
    pub(crate) use loom::thread_local;

    pub(crate) fn give_way(_: u32) {
        yield_now();
    }

    macro_rules! global {
        ($(#[$attr:meta])* pub(super) static $name:ident: $type:ty = $init:expr;) => {
            loom::lazy_static! {
                $(#[$attr])*
                pub(super) static ref $name: $type = $init;
            }
        };
        ($(#[$attr:meta])* static $name:ident: $type:ty = $init:expr;) => {
            loom::lazy_static! {
                $(#[$attr])*
                static ref $name: $type = $init;
            }
        };
    }
    pub(crate) use global;
}

pub(crate) use imp::*;

/// Atomics that are loom's under no circumstances: switches, sums and settings, which take part in
/// no protocol, and are statics.
pub(crate) mod plain {
    pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
}

/// Locks, also after a panic in another holder: nothing here is left half-changed by one.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    match mutex.lock() {
        Ok(guard) => guard,
        Err(poisoned) => poisoned.into_inner(),
    }
}

/// Waits for a notification.
pub(crate) fn wait<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    match condvar.wait(guard) {
        Ok(guard) => guard,
        Err(poisoned) => poisoned.into_inner(),
    }
}

/// Waits for a notification, at most as long as `time`.
pub(crate) fn wait_timeout<'a, T>(
    condvar: &Condvar,
    guard: MutexGuard<'a, T>,
    time: std::time::Duration,
) -> MutexGuard<'a, T> {
    match condvar.wait_timeout(guard, time) {
        Ok((guard, _)) => guard,
        Err(poisoned) => poisoned.into_inner().0,
    }
}
