//! Private pools: memory of its own for a part of a program.
//!
//! ```text
//!  MemPool ──┐
//!  MemPool ──┼──▶ Handle ──▶ Shared ── State ── pools: a heap each
//!  PoolScope ┘                  thread's scopes ── innermost first: which pool an allocation goes to
//! ```
//!
//! A pool is a heap beside the default one: its blocks share no page and no segment with others, and
//! its cache serves its own allocations only. Everything else is the allocator's: clocks, statistics,
//! limit, ladder, spare pages.
//!
//! # Invariants
//!
//! 1. A pool's number is not given to another pool while a handle on it, a block of it, or memory in
//!    it is left.
//! 2. Scopes belong to a thread: they are opened, used and closed on it.
//! 3. `num_scopes` of an allocator is the number of its open scopes on all threads. A thread sees at
//!    least its own, so that where it reads 0 none of its scopes is open.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use crate::allocator::{CachingAllocator, Shared};
use crate::anchor;
use crate::block::Block;
use crate::device::{Device, DeviceResult, StreamId};
use crate::error::AllocError;
use crate::state::PoolId;
use crate::stats::Stat;
use crate::sync::{Ordering, thread_local};

/// An open scope of this thread.
#[derive(Clone, Copy)]
struct Scope {
    /// The number of the allocator.
    allocator: u64,
    pool: PoolId,
    /// Tells this scope from all others of the thread.
    token: u64,
}

thread_local! {
    #[expect(
        clippy::missing_const_for_thread_local,
        reason = "loom's macro of this name knows no const initializer"
    )]
    static SCOPES: RefCell<Vec<Scope>> = RefCell::new(Vec::new());
    #[expect(
        clippy::missing_const_for_thread_local,
        reason = "loom's macro of this name knows no const initializer"
    )]
    static NEXT_TOKEN: Cell<u64> = Cell::new(0);
}

/// The pool that allocations of this thread go to.
pub(crate) fn routed<D: Device>(shared: &Shared<D>) -> PoolId {
    // Only the thread's own scopes matter, and it sees those (invariant 3).
    if shared.num_scopes.load(Ordering::Relaxed) == 0 {
        return PoolId::DEFAULT;
    }
    let allocator = shared.id;
    SCOPES.with(|scopes| {
        let scopes = scopes.borrow();
        let mut innermost_first = scopes.iter().rev();
        innermost_first
            .find(|scope| scope.allocator == allocator)
            .map_or(PoolId::DEFAULT, |scope| scope.pool)
    })
}

/// What a private pool holds. Bytes or counts as in [`MemoryStats`](crate::MemoryStats), peaks and sums
/// since the pool was made.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct PoolStats {
    /// Number of blocks held by callers.
    pub allocation: Stat,
    /// Bytes in blocks held by callers, rounding included.
    pub allocated_bytes: Stat,
    /// Bytes in blocks held by callers or still used by a stream.
    pub active_bytes: Stat,
    /// Bytes obtained from the device.
    pub reserved_bytes: Stat,
}

/// A handle on a pool of its own; the last one to go closes it.
struct Handle<D: Device> {
    shared: anchor::Handle<D>,
    pool: PoolId,
}

impl<D: Device> Drop for Handle<D> {
    fn drop(&mut self) {
        self.shared.close_pool(self.pool);
    }
}

/// A private pool of an allocator's memory, as for a CUDA graph or for a part of a program whose
/// blocks should not lie among others.
///
/// Blocks of a pool share no page and no segment with blocks of another, and what is free in it
/// serves its own allocations only. Limits and statistics of the allocator count it in. Under
/// pressure, before an out-of-memory error anywhere on the device, what is free in it goes back to
/// the device like all cached memory; [`empty_cache`](CachingAllocator::empty_cache) gives it back
/// too. Only a pool from which blocks were allocated while work was captured keeps its memory as long
/// as a handle is left: a graph uses its addresses when it is launched.
///
/// Cloning makes another handle. When the last one and the last scope are gone the pool is closed:
/// its free memory goes back to the device, and its blocks stay valid and do so when they are freed.
///
/// # Examples
///
/// ```
/// use lastref_alloc::{CachingAllocator, StreamId, sim::{SimDevice, SimOptions}};
///
/// let allocator = CachingAllocator::new(SimDevice::new(SimOptions::new(1 << 30))?);
/// let pool = allocator.create_pool();
/// let block = {
///     let _scope = pool.enter();
///     allocator.alloc(40 << 20, StreamId::DEFAULT)? // on this thread, from the pool
/// };
/// let other = allocator.alloc(40 << 20, StreamId::DEFAULT)?; // not
/// assert_eq!(pool.stats().allocated_bytes.current, 40 << 20);
/// drop(pool);
/// drop(block); // safe: an allocation outlives its pool
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct MemPool<D: Device> {
    handle: Arc<Handle<D>>,
}

impl<D: Device> MemPool<D> {
    /// Its number among the pools of its allocator, from 1. Used again after the pool and all its
    /// blocks are gone.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.handle.pool.number()
    }

    /// The allocator it belongs to.
    #[must_use]
    pub fn allocator(&self) -> CachingAllocator<D> {
        CachingAllocator::from_handle(self.handle.shared.clone())
    }

    /// Allocates from this pool, whatever scopes are open. Otherwise as
    /// [`CachingAllocator::alloc`].
    ///
    /// # Errors
    ///
    /// As [`CachingAllocator::alloc`].
    #[track_caller]
    pub fn alloc(&self, bytes: u64, stream: StreamId) -> Result<Block<D>, AllocError> {
        Shared::alloc_in(&self.handle.shared, self.handle.pool, bytes, stream)
    }

    /// Sends the allocations that this thread makes from the pool's allocator to the pool, until the
    /// scope is dropped. Of several open scopes of one allocator the innermost, the one entered last,
    /// counts. Other threads are not concerned.
    #[must_use = "allocations go to the pool until the scope is dropped"]
    pub fn enter(&self) -> PoolScope<D> {
        let shared = &self.handle.shared;
        let token = NEXT_TOKEN.with(|next| next.replace(next.get() + 1));
        let scope = Scope {
            allocator: shared.id,
            pool: self.handle.pool,
            token,
        };
        SCOPES.with(|scopes| scopes.borrow_mut().push(scope));
        // Relaxed: only this thread's own view of it matters (invariant 3).
        shared.num_scopes.fetch_add(1, Ordering::Relaxed);
        PoolScope {
            pool: self.clone(),
            token,
            on_thread: PhantomData,
        }
    }

    /// Whether a block was allocated from this pool. One of zero bytes is from none.
    #[must_use]
    pub fn owns(&self, block: &Block<D>) -> bool {
        block.is_from(&self.handle.shared, self.handle.pool)
    }

    /// What it holds.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        self.handle.shared.pool_stats(self.handle.pool)
    }

    /// Gives what is free in this pool back to the device, and returns how many bytes that was.
    /// Otherwise as [`CachingAllocator::empty_cache`]. Of a pool that was captured into a graph
    /// nothing goes back.
    ///
    /// # Errors
    ///
    /// The device's, if waiting failed.
    pub fn empty_cache(&self) -> DeviceResult<u64> {
        self.handle.shared.empty_pool(self.handle.pool)
    }
}

impl<D: Device> Clone for MemPool<D> {
    fn clone(&self) -> Self {
        Self {
            handle: Arc::clone(&self.handle),
        }
    }
}

impl<D: Device> fmt::Debug for MemPool<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemPool")
            .field("id", &self.id())
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

impl<D: Device> CachingAllocator<D> {
    /// Makes a private pool. It takes no memory until something is allocated from it.
    #[must_use]
    pub fn create_pool(&self) -> MemPool<D> {
        let shared = self.handle().clone();
        let pool = shared.open_pool();
        MemPool {
            handle: Arc::new(Handle { shared, pool }),
        }
    }
}

/// While it lives, allocations of this thread go to its pool. See [`MemPool::enter`].
///
/// It stays on its thread:
///
/// ```compile_fail
/// fn send(_: impl Send) {}
/// let device = lastref_alloc::sim::SimDevice::new(lastref_alloc::sim::SimOptions::new(1 << 30));
/// send(lastref_alloc::CachingAllocator::new(device.unwrap()).create_pool().enter());
/// ```
pub struct PoolScope<D: Device> {
    pool: MemPool<D>,
    token: u64,
    /// A scope is of no use on another thread (invariant 2).
    on_thread: PhantomData<*const ()>,
}

impl<D: Device> PoolScope<D> {
    /// The pool.
    #[must_use]
    pub const fn pool(&self) -> &MemPool<D> {
        &self.pool
    }
}

impl<D: Device> Drop for PoolScope<D> {
    fn drop(&mut self) {
        // Scopes that are dropped out of turn are taken from where they are. At the end of the
        // thread the list may be gone already.
        let _ = SCOPES.try_with(|scopes| {
            scopes
                .borrow_mut()
                .retain(|scope| scope.token != self.token);
        });
        self.pool
            .handle
            .shared
            .num_scopes
            .fetch_sub(1, Ordering::Relaxed);
    }
}

impl<D: Device> fmt::Debug for PoolScope<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PoolScope").field(&self.pool).finish()
    }
}

#[cfg(all(test, target_os = "linux", target_pointer_width = "64", not(loom)))]
mod tests {
    use super::*;
    use crate::sim::{SimDevice, SimOptions};

    /// Threads without scopes then need not look for one.
    #[test]
    fn open_scopes_are_counted() {
        let allocator = CachingAllocator::new(SimDevice::new(SimOptions::new(1 << 30)).unwrap());
        let pool = allocator.create_pool();
        let open = || allocator.handle().num_scopes.load(Ordering::Relaxed);
        let (one, two) = (pool.enter(), pool.enter());
        assert_eq!(open(), 2);
        drop(one);
        assert_eq!(open(), 1);
        drop(two);
        assert_eq!(open(), 0);
        SCOPES.with(|scopes| assert!(scopes.borrow().is_empty()));
    }
}
