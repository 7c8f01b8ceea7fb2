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
pub(crate) use std::thread_local;

/// `thread_local!` of a constant, which takes less to get at; under loom, whose macro knows none, of
/// any value.
#[cfg(not(loom))]
macro_rules! thread_local_const {
    (static $name:ident: $type:ty = $value:expr;) => {
        std::thread_local! {
            static $name: $type = const { $value };
        }
    };
}
#[cfg(loom)]
macro_rules! thread_local_const {
    (static $name:ident: $type:ty = $value:expr;) => {
        loom::thread_local! {
            static $name: $type = $value;
        }
    };
}
pub(crate) use thread_local_const;

#[cfg(loom)]
pub(crate) use loom::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicU64, Ordering},
};
#[cfg(loom)]
pub(crate) use loom::{cell::UnsafeCell, thread_local};

/// `std`'s cell with loom's way in.
#[cfg(not(loom))]
#[derive(Debug)]
pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    pub(crate) const fn get(&self) -> *mut T {
        self.0.get()
    }

    #[inline]
    pub(crate) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}

/// Whether there are barriers of two kinds: one that costs nothing, and one that makes up for it on
/// every processor that runs this process. Asks for them the first time.
pub(crate) fn has_barriers() -> bool {
    #[cfg(all(not(loom), target_os = "linux"))]
    {
        use rustix::thread::{MembarrierCommand, membarrier};
        static HAS: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
        *HAS.get_or_init(|| membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok())
    }
    #[cfg(all(not(loom), not(target_os = "linux")))]
    {
        false
    }
    #[cfg(loom)]
    {
        true
    }
}

/// Keeps the compiler from moving memory accesses across; the processor is left to [`heavy_barrier`].
#[cfg(not(loom))]
#[inline]
pub(crate) fn light_barrier() {
    std::sync::atomic::compiler_fence(Ordering::SeqCst);
}

/// A full barrier in every running thread of this process, between two instructions of each. A thread
/// that does not run has been through one. Only where [`has_barriers`] said so.
#[cfg(not(loom))]
#[cold]
pub(crate) fn heavy_barrier() {
    #[cfg(target_os = "linux")]
    {
        use rustix::thread::{MembarrierCommand, membarrier};
        // The system promises the same answer until it is restarted, also after a fork. A process that
        // forbids itself the call later has no way to go on: others would touch the memory meanwhile.
        if let Err(error) = membarrier(MembarrierCommand::PrivateExpedited) {
            let said = std::panic::catch_unwind(|| {
                panic!("membarrier is refused: {error}; it was allowed when the allocator was made")
            });
            drop(said);
            std::process::abort();
        }
    }
}

/// Under loom both are the fence that they are together.
#[cfg(loom)]
pub(crate) fn light_barrier() {
    loom::sync::atomic::fence(Ordering::SeqCst);
}

#[cfg(loom)]
pub(crate) fn heavy_barrier() {
    loom::sync::atomic::fence(Ordering::SeqCst);
}

/// Gives way to others after so many tries in vain.
#[cfg(not(loom))]
pub(crate) fn pause(tries: u32) {
    const SPINS: u32 = 32;
    const YIELDS: u32 = 64;
    if tries < SPINS {
        std::hint::spin_loop();
    } else if tries < SPINS + YIELDS {
        std::thread::yield_now();
    } else {
        std::thread::sleep(std::time::Duration::from_micros(20));
    }
}

/// Gives way to others.
#[cfg(loom)]
pub(crate) fn pause(_tries: u32) {
    loom::thread::yield_now();
}

/// A number that no other call in this process returns. Takes part in no protocol, so that it is
/// `std`'s under loom too.
pub(crate) fn unique() -> u64 {
    static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
}

/// A number greater than this one, and than those that the calling thread got here before.
#[inline]
pub(crate) fn next_stamp(after: u64) -> u64 {
    thread_local_const! {
        static LATEST: std::cell::Cell<u64> = std::cell::Cell::new(0);
    }
    LATEST.with(|latest| {
        let next = after.max(latest.get()) + 1;
        latest.set(next);
        next
    })
}

/// A number of the calling thread that no other has, and not 0.
#[inline]
pub(crate) fn thread_number() -> u64 {
    thread_local_const! {
        static NUMBER: std::cell::Cell<u64> = std::cell::Cell::new(0);
    }
    #[cold]
    fn first(number: &std::cell::Cell<u64>) -> u64 {
        number.set(unique() + 1);
        number.get()
    }
    NUMBER.with(|number| match number.get() {
        0 => first(number),
        known => known,
    })
}

/// Locks, also after a panic in another holder: what we protect is kept consistent at every point
/// where foreign code can run, so a poisoned lock says nothing about it.
#[inline]
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    match mutex.lock() {
        Ok(guard) => guard,
        Err(poisoned) => poisoned.into_inner(),
    }
}
