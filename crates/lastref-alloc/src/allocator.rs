//! The caching allocator: public face, and the climb of the out-of-memory ladder.
//!
//! ```text
//!  CachingAllocator ─┐
//!  Block ────────────┼──▶ Shared ── device
//!  Block ────────────┘      ├── Lock<State>: heaps of the pools, clocks, statistics, history
//!                           │    └── caches of threads, each with a flag of its own
//!                           └── Lock<Vec<Reclaimer>>
//! ```
//!
//! # Lock order
//!
//! The two locks are never held together. A cache's flag is taken alone or under the state's lock.
//! The state's lock is held over device calls that do not wait, never while waiting for the device
//! and never while foreign code (a reclaimer) runs.

use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use lastref_snapshot::{Snapshot, TraceAction};
use thiserror::Error;

use crate::anchor::Handle;
use crate::bias::{Held, Lock, lock};
use crate::block::Block;
use crate::clock::StreamSlot;
use crate::device::{BlockObserver, Device, DeviceError, DevicePtr, DeviceResult, StreamId};
use crate::error::{AllocError, InvalidFraction, OutOfMemoryError};
use crate::heap::{NIL, NodeId, rounded};
use crate::ladder::{ReclaimLevel, ReclaimRequest, Reclaimer, ReclaimerId, Rung, RungReport};
use crate::options::{AllocatorOptions, Backing, InvalidOption, Limit};
use crate::pinning::pinned;
use crate::pool::{PoolStats, routed};
use crate::state::{Miss, POOLS, Place, PoolId, Request, State};
use crate::stats::MemoryStats;
use crate::sync::{AtomicU64, Ordering, thread_local, unique};
use crate::thread_cache::{self, Take};

/// No device has more; sizes up to this can be added without overflow.
const MAX_BYTES: u64 = 1 << 60;

thread_local! {
    /// Whether this thread is inside a reclaimer. An allocation made there does not call them.
    #[expect(
        clippy::missing_const_for_thread_local,
        reason = "loom's macro of this name knows no const initializer"
    )]
    static RECLAIMING: Cell<bool> = Cell::new(false);
}

/// How thoroughly [`CachingAllocator::check_invariants`] looks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum CheckLevel {
    /// Sums against sums: cheap enough for every step.
    Counters,
    /// Walks every block, list and page table.
    Structure,
    /// Also asks the device whether it agrees on the bytes in use.
    Device,
}

/// An invariant of the allocator does not hold: a bug in this crate, or memory overwritten.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("allocator invariant broken: {0}")]
pub struct InvariantViolation(String);

/// A caching allocator for the memory of one device.
///
/// Freed memory is kept, since asking the device is slow and the program will likely ask again.
/// [`empty_cache`](Self::empty_cache) gives it back, and the allocator does so itself before it
/// reports out of memory (see [`ladder`](crate::ladder)).
///
/// Cloning makes another handle to the same allocator. All methods may be called from any thread.
/// Sizes are rounded up to 512 bytes. When the last handle and the last block are gone, all memory
/// goes back to the device.
///
/// # Examples
///
/// ```
/// use lastref_alloc::{CachingAllocator, StreamId, sim::{SimDevice, SimOptions}};
///
/// let allocator = CachingAllocator::new(SimDevice::new(SimOptions::new(1 << 30))?);
/// let block = allocator.alloc(1_000_000, StreamId::DEFAULT)?;
/// assert_eq!(allocator.stats().requested_bytes.all.current, 1_000_000);
///
/// drop(block);
/// let stats = allocator.stats();
/// assert_eq!(stats.allocated_bytes.all.current, 0, "freed at once");
/// assert_eq!(stats.reserved_bytes.all.current, 2 << 20, "and kept");
///
/// assert_eq!(allocator.empty_cache()?, 2 << 20);
/// assert_eq!(allocator.stats().reserved_bytes.all.current, 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct CachingAllocator<D: Device> {
    shared: Handle<D>,
}

impl<D: Device> CachingAllocator<D> {
    /// An allocator with the default options.
    #[must_use]
    pub fn new(device: D) -> Self {
        Self::with_options(device, &AllocatorOptions::default())
    }

    /// An allocator set up as `options` say.
    #[must_use]
    pub fn with_options(device: D, options: &AllocatorOptions) -> Self {
        let properties = device.properties();
        let page_bytes = match options.backing.unwrap_or_default() {
            Backing::Auto => properties.page_bytes,
            Backing::Segments => None,
        };
        let id = unique();
        let mut state = State::new(id, page_bytes, properties.total_bytes);
        state.set_options(options);
        let shared = Shared {
            observer: device.block_observer(),
            device,
            id,
            state: Lock::new(state),
            reclaimers: Lock::new(Vec::new()),
            next_reclaimer: AtomicU64::new(0),
            num_scopes: AtomicU64::new(0),
        };
        Self {
            shared: Handle::new(shared),
        }
    }

    pub(crate) const fn handle(&self) -> &Handle<D> {
        &self.shared
    }

    pub(crate) const fn from_handle(shared: Handle<D>) -> Self {
        Self { shared }
    }

    /// The device whose memory this is.
    #[must_use]
    pub fn device(&self) -> &D {
        &self.shared.device
    }

    /// Allocates `bytes` bytes, to be used on `stream`; see [`Block`] for what that means.
    ///
    /// Takes free memory that `stream` may use at once, else memory that other streams are done
    /// with, else asks the device; if that fails, climbs the [ladder](crate::ladder).
    ///
    /// # Errors
    ///
    /// [`AllocError::OutOfMemory`] if the memory is full now and nothing helped,
    /// [`AllocError::TooLarge`] if it could never fit, [`AllocError::Device`] if the device
    /// failed otherwise or there is no such stream. Nothing is held in any of these cases.
    #[inline]
    #[track_caller]
    pub fn alloc(&self, bytes: u64, stream: StreamId) -> Result<Block<D>, AllocError> {
        Shared::alloc_in(&self.shared, routed(&self.shared), bytes, stream)
    }

    /// Gives all cached memory back to the device, where other programs can see it, and returns
    /// how many bytes that was. Waits first for the streams that still use freed memory.
    ///
    /// What is live stays, and with virtual memory so does the rest of a page that a live block
    /// lies in. Does not enlarge what this process can allocate: the allocator gives its cache
    /// back by itself before it fails. While work is captured into a graph it waits for nothing and
    /// gives back only pages that are known to be done with.
    ///
    /// # Errors
    ///
    /// The device's, if waiting failed. Memory whose work is done was given back all the same.
    pub fn empty_cache(&self) -> DeviceResult<u64> {
        // What the caches of threads give back is stamped now, and has to be waited for too.
        lock(&self.shared.state).drain_caches();
        let waited = self.shared.wait_for_streams();
        let mut state = lock(&self.shared.state);
        let released = state.release_cached(&self.shared.device, u64::MAX);
        state.book_empty_cache(released);
        waited.map(|_| released)
    }

    /// Sets the most bytes that may be obtained from the device; `None` lifts the limit. Memory
    /// already obtained is not taken away.
    pub fn set_memory_limit(&self, bytes: Option<u64>) {
        lock(&self.shared.state).limit = bytes;
    }

    /// The limit, if one is set.
    #[must_use]
    pub fn memory_limit(&self) -> Option<u64> {
        lock(&self.shared.state).limit
    }

    /// Sets the limit to a fraction of the device's memory; 1 lifts it.
    ///
    /// # Errors
    ///
    /// [`InvalidFraction`] unless it is a number from 0 to 1.
    pub fn set_memory_fraction(&self, fraction: f64) -> Result<(), InvalidFraction> {
        let total = self.shared.device.properties().total_bytes;
        self.set_memory_limit(Limit::fraction(fraction)?.bytes(total));
        Ok(())
    }

    /// Changes what `options` set and leaves the rest as it is.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`], and nothing is changed, if they set the backing to another than the one
    /// in use.
    ///
    /// # Examples
    ///
    /// ```
    /// use lastref_alloc::{CachingAllocator, sim::{SimDevice, SimOptions}};
    ///
    /// let allocator = CachingAllocator::new(SimDevice::new(SimOptions::new(1 << 30))?);
    /// allocator.change_options(&"memory_limit_mb:512".parse()?)?;
    /// assert_eq!(allocator.memory_limit(), Some(512 << 20));
    /// assert!(allocator.change_options(&"expandable_segments:False".parse()?).is_err());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn change_options(&self, options: &AllocatorOptions) -> Result<(), InvalidOption> {
        let mut state = lock(&self.shared.state);
        let has_pages = self.shared.device.properties().page_bytes.is_some();
        let wanted = match options.backing {
            None => state.is_virtual(),
            Some(Backing::Auto) => has_pages,
            Some(Backing::Segments) => false,
        };
        if wanted != state.is_virtual() {
            return Err(InvalidOption::new(
                "expandable_segments cannot change while the allocator is in use, set it from the \
                 start",
            ));
        }
        state.set_options(options);
        Ok(())
    }

    /// The statistics now.
    #[must_use]
    pub fn stats(&self) -> MemoryStats {
        let mut state = lock(&self.shared.state);
        state.fold_all();
        state.stats()
    }

    /// Sets every peak to the current value.
    pub fn reset_peak_stats(&self) {
        let mut state = lock(&self.shared.state);
        state.fold_all();
        state.reset_peak_stats();
    }

    /// Sets everything that is counted up (allocated, freed, retries, rungs and so on) to zero.
    pub fn reset_accumulated_stats(&self) {
        let mut state = lock(&self.shared.state);
        state.fold_all();
        state.reset_accumulated_stats();
    }

    /// Keeps the latest `max_entries` entries of history from now on; 0 turns it off.
    pub fn record_history(&self, max_entries: usize) {
        lock(&self.shared.state).set_max_history_entries(max_entries);
    }

    /// Everything the allocator holds, as data: segments, blocks, history.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let mut state = lock(&self.shared.state);
        state.drain_caches();
        let active = state.books.active_bytes().current();
        state.history.push(
            TraceAction::Snapshot,
            DevicePtr::NULL,
            active,
            StreamSlot::DEFAULT,
        );
        state.snapshot(self.shared.device.properties().index.0)
    }

    /// Checks that the allocator's books are in order. For tests and for chasing memory bugs.
    ///
    /// # Errors
    ///
    /// [`InvariantViolation`], which says what is wrong. With [`CheckLevel::Device`] also if the
    /// device cannot be asked.
    pub fn check_invariants(&self, level: CheckLevel) -> Result<(), InvariantViolation> {
        let mut state = lock(&self.shared.state);
        state.drain_caches();
        state
            .check(level >= CheckLevel::Structure)
            .map_err(InvariantViolation)?;
        if level >= CheckLevel::Device {
            let info = self.shared.device.memory_info();
            let info = info.map_err(|e| InvariantViolation(e.to_string()))?;
            let in_use = info.total_bytes - info.free_bytes;
            if in_use < state.reserved() {
                let reserved = state.reserved();
                return Err(InvariantViolation(format!(
                    "{reserved} bytes reserved, but the device says {in_use} are in use"
                )));
            }
        }
        Ok(())
    }

    /// Gives freed memory to any stream at once from now on, which is wrong. For tests of what
    /// finds races.
    #[cfg(any(test, feature = "test-util"))]
    #[doc(hidden)]
    pub fn disable_clock_check(&self) {
        lock(&self.shared.state).clocks.disable_check();
    }

    /// Has threads take the flags of their caches as where the system has no barriers. To be called
    /// first. For tests.
    #[cfg(any(test, feature = "test-util"))]
    #[doc(hidden)]
    pub fn disable_barriers(&self) {
        lock(&self.shared.state).disable_barriers();
    }

    /// Adds a reclaimer, to be called before an allocation fails.
    pub fn add_reclaimer(&self, reclaimer: Arc<dyn Reclaimer>) -> ReclaimerId {
        // Only uniqueness matters; the lock below orders the rest.
        let id = ReclaimerId(self.shared.next_reclaimer.fetch_add(1, Ordering::Relaxed));
        let mut reclaimers = lock(&self.shared.reclaimers);
        let level = reclaimer.level();
        let at = reclaimers.partition_point(|(_, other)| other.level() <= level);
        reclaimers.insert(at, (id, reclaimer));
        id
    }

    /// Removes a reclaimer; false if it was not there. A call to it that another thread has begun
    /// may still be running.
    pub fn remove_reclaimer(&self, id: ReclaimerId) -> bool {
        let mut reclaimers = lock(&self.shared.reclaimers);
        let at = reclaimers.iter().position(|(other, _)| *other == id);
        let removed = at.map(|at| reclaimers.remove(at));
        // Its destructor is foreign code: it runs after the lock is gone.
        drop(reclaimers);
        removed.is_some()
    }

    /// Tells the allocator that `stream` is about to be destroyed: records a last event on it, and
    /// allocates on it no more. Blocks used on it stay valid and may be dropped later. To be
    /// called after the last work was submitted and before the stream is destroyed.
    ///
    /// # Errors
    ///
    /// The device's; the stream is then not retired.
    pub fn retire_stream(&self, stream: StreamId) -> DeviceResult<()> {
        let mut state = lock(&self.shared.state);
        state.close_caches();
        state.clocks.retire(&self.shared.device, stream)
    }

    /// Tells the allocator that others own `stream` and may destroy it at any time without a word. From
    /// now on an event is recorded on it at each free of memory that it uses, which costs about a
    /// microsecond, and no thread keeps its blocks. Without this, events are recorded only when another
    /// stream wants the memory, and [`retire_stream`](Self::retire_stream) must be called in time.
    ///
    /// A block may be dropped after such a stream is gone. Its memory is then given to other streams only
    /// after the whole device was waited for.
    ///
    /// # Errors
    ///
    /// [`DeviceError::InvalidArgument`] if there is no such stream.
    pub fn set_foreign_stream(&self, stream: StreamId) -> DeviceResult<()> {
        let mut state = lock(&self.shared.state);
        let slot = state.clocks.slot(&self.shared.device, stream)?;
        state.set_foreign(&self.shared.device, slot);
        Ok(())
    }

    /// Gives cached memory back to the device that was not used for long, as
    /// [`AllocatorOptions::with_idle_trim`] says, and returns how many bytes that was; 0 where nothing is
    /// set. Waits for nothing: what a stream still uses stays.
    ///
    /// The same happens by itself when blocks are allocated and freed. A program that may do neither
    /// for long calls this now and then, from a timer. What threads keep for themselves is freed by it
    /// too, and goes back after the same time.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::{thread::sleep, time::Duration};
    /// use lastref_alloc::{AllocatorOptions, CachingAllocator, StreamId};
    /// use lastref_alloc::sim::{SimDevice, SimOptions};
    ///
    /// let options = AllocatorOptions::new().with_idle_trim(Duration::from_millis(20));
    /// let device = SimDevice::new(SimOptions::new(1 << 30))?;
    /// let allocator = CachingAllocator::with_options(device, &options);
    /// drop(allocator.alloc(64 << 20, StreamId::DEFAULT)?);
    /// assert_eq!(allocator.trim(), 0);
    /// sleep(Duration::from_millis(50));
    /// assert_eq!(allocator.trim(), 64 << 20);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn trim(&self) -> u64 {
        let mut state = lock(&self.shared.state);
        state.drain_caches();
        state.trim(&self.shared.device)
    }

    /// Sets the time that idle memory is judged by, since the age was set. For tests.
    #[cfg(any(test, feature = "test-util"))]
    #[doc(hidden)]
    pub fn set_time(&self, now: std::time::Duration) {
        lock(&self.shared.state).set_time(now);
    }
}

impl<D: Device> Clone for CachingAllocator<D> {
    fn clone(&self) -> Self {
        Self {
            shared: self.shared.clone(),
        }
    }
}

impl<D: Device> fmt::Debug for CachingAllocator<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CachingAllocator")
            .field("device", &self.shared.device.properties().name)
            .field("reserved_bytes", &lock(&self.shared.state).reserved())
            .finish_non_exhaustive()
    }
}

/// What handles and blocks share.
pub(crate) struct Shared<D: Device> {
    pub(crate) device: D,
    /// The device's, if it wants to be told of blocks.
    observer: Option<Arc<dyn BlockObserver>>,
    /// Names it among other allocators.
    pub(crate) id: u64,
    pub(crate) state: Lock<State>,
    /// Sorted by level, then by age.
    reclaimers: Lock<Vec<(ReclaimerId, Arc<dyn Reclaimer>)>>,
    next_reclaimer: AtomicU64,
    /// Open scopes of its pools, on all threads.
    pub(crate) num_scopes: AtomicU64,
}

impl<D: Device> Shared<D> {
    /// What [`CachingAllocator::alloc`] does, in a pool.
    #[inline]
    #[track_caller]
    pub(crate) fn alloc_in(
        shared: &Handle<D>,
        pool: PoolId,
        bytes: u64,
        stream: StreamId,
    ) -> Result<Block<D>, AllocError> {
        // What threads keep is of the default pool, and no block of zero bytes.
        let taken = if pool == PoolId::DEFAULT {
            thread_cache::take(shared.id, bytes, stream)
        } else {
            Take::Miss
        };
        let place = match taken {
            Take::Hit(entry, stamp) if shared.observer.is_none() => {
                (entry.node, DevicePtr(entry.addr), entry.slot, stamp)
            }
            taken => Self::alloc_missed(shared, taken, pool, bytes, stream)?,
        };
        // Here, so that it is made where the caller wants it.
        let anchor = shared.for_block();
        Ok(Block::new(anchor, place, pool, bytes, stream))
    }

    /// The same, where a thread's cache has no block or somebody must be told.
    #[inline(never)]
    #[track_caller]
    fn alloc_missed(
        shared: &Handle<D>,
        taken: Take,
        pool: PoolId,
        bytes: u64,
        stream: StreamId,
    ) -> Result<Place, AllocError> {
        if bytes == 0 {
            lock(&shared.state).add_empty_block();
            return Ok((NIL, DevicePtr::NULL, StreamSlot::DEFAULT, 0));
        }
        let place = match taken {
            Take::Hit(entry, stamp) => (entry.node, DevicePtr(entry.addr), entry.slot, stamp),
            taken => {
                let to_visit = matches!(taken, Take::MissToVisit);
                shared.alloc(pool, bytes, stream, to_visit)?
            }
        };
        if let Some(observer) = &shared.observer {
            observer.allocated(place.1, rounded(bytes), stream, Location::caller());
        }
        Ok(place)
    }

    /// Allocates from the heap; for a small request, visits this thread's cache if that is asked.
    #[inline]
    fn alloc(
        &self,
        pool: PoolId,
        bytes: u64,
        stream: StreamId,
        to_visit: bool,
    ) -> Result<Place, AllocError> {
        let mut state = lock(&self.state);
        if bytes > MAX_BYTES {
            return Err(self.too_large(bytes, &state));
        }
        let slot = if stream == StreamId::DEFAULT {
            StreamSlot::DEFAULT
        } else {
            state.clocks.slot(&self.device, stream)?
        };
        if state.clocks.is_retired(slot) {
            return Err(AllocError::RetiredStream { stream });
        }
        if to_visit {
            state.visit_mine(stream, slot, bytes);
        } else if pool != PoolId::DEFAULT || bytes > thread_cache::MAX_REQUEST {
            state.fold_mine();
        }
        let request = Request {
            requested: bytes,
            bytes: rounded(bytes),
            stream: slot,
            pool,
        };
        if let Some(node) = state.take_free(&self.device, &request) {
            return Ok(state.place(node, &request));
        }
        self.obtain(state, &request)
    }

    /// Allocates what could not be had at once.
    #[cold]
    fn obtain<'a>(
        &'a self,
        mut state: Held<'a, State>,
        request: &Request,
    ) -> Result<Place, AllocError> {
        let pool = request.pool;
        if pool != PoolId::DEFAULT && self.device.is_capturing() {
            state.keep(pool);
        }
        let may_wait = state.wait_before_growing;
        let mut result = state.attempt(&self.device, request, may_wait);
        if matches!(result, Err(Miss::Busy { .. })) {
            state = self.wait_before_growing(state);
            result = state.attempt(&self.device, request, false);
        }
        match result {
            Ok(node) => Ok(state.place(node, request)),
            Err(Miss::Device(error)) => Err(error.into()),
            Err(Miss::Full | Miss::Busy { .. }) => self.climb(state, request),
        }
    }

    #[inline]
    pub(crate) const fn is_observed(&self) -> bool {
        self.observer.is_some()
    }

    /// Tells the observer, if there is one, of a block that is about to be freed. True if streams were
    /// recorded for it on that account.
    #[inline]
    pub(crate) fn observe_free(&self, block: (PoolId, NodeId), ptr: DevicePtr, bytes: u64) -> bool {
        let Some(observer) = &self.observer else {
            return false;
        };
        let unrecorded = observer.freed(ptr, bytes);
        for stream in &unrecorded {
            // Fails for a stream that is gone. The observer has reported it; the caller of a free can
            // be told nothing.
            let _ = self.record_use(block, *stream);
        }
        !unrecorded.is_empty()
    }

    pub(crate) fn record_stream(
        &self,
        block: (PoolId, NodeId),
        ptr: DevicePtr,
        stream: StreamId,
    ) -> DeviceResult<()> {
        self.record_use(block, stream)?;
        if let Some(observer) = &self.observer {
            observer.stream_recorded(ptr, stream);
        }
        Ok(())
    }

    fn record_use(&self, (pool, node): (PoolId, NodeId), stream: StreamId) -> DeviceResult<()> {
        let mut state = lock(&self.state);
        let slot = state.clocks.slot(&self.device, stream)?;
        state.on(pool, |state| state.heap.node_mut(node).stamps.record(slot));
        Ok(())
    }

    // ---- pools ---------------------------------------------------------------------------------

    pub(crate) fn open_pool(&self) -> PoolId {
        lock(&self.state).open_pool()
    }

    pub(crate) fn close_pool(&self, pool: PoolId) {
        lock(&self.state).close_pool(&self.device, pool);
    }

    pub(crate) fn pool_stats(&self, pool: PoolId) -> PoolStats {
        lock(&self.state).pool_stats(pool)
    }

    pub(crate) fn empty_pool(&self, pool: PoolId) -> DeviceResult<u64> {
        let waited = self.wait_for_streams();
        let released = lock(&self.state).empty_pool(&self.device, pool);
        waited.map(|_| released)
    }

    /// Waits for all streams that still use freed memory, with no lock held. Returns the bytes
    /// that became usable by it.
    fn wait_for_streams(&self) -> DeviceResult<u64> {
        let mut state = lock(&self.state);
        let behind = state.clocks.behind();
        if behind.is_empty() || self.device.is_capturing() {
            return Ok(0);
        }
        state.stats.num_sync_all_streams += 1;
        drop(state);
        let mut result = Ok(0);
        let mut reached = Vec::new();
        for stream in &behind {
            match stream.wait(&self.device) {
                Ok(()) => reached.push(stream),
                Err(error) => result = Err(error),
            }
        }
        let mut state = lock(&self.state);
        let pending = state.pending_bytes();
        for stream in reached {
            state.clocks.caught_up(stream);
        }
        state.on_each(|state| state.sweep_pending(&self.device));
        result.map(|_: u64| pending - state.pending_bytes())
    }

    /// Waits for streams, with no lock held, so that pages they use can be moved. That it fails is
    /// no reason to fail: then pages are created.
    fn wait_before_growing<'a>(&'a self, mut state: Held<'a, State>) -> Held<'a, State> {
        state.stats.num_waits_before_growing += 1;
        drop(state);
        let waited = self.wait_for_streams();
        let mut state = lock(&self.state);
        state.stats.num_device_errors += u64::from(waited.is_err());
        state
    }

    // ---- the ladder ----------------------------------------------------------------------------

    /// Climbs the ladder after an attempt that found the memory full.
    fn climb(&self, state: Held<'_, State>, request: &Request) -> Result<Place, AllocError> {
        let most = self.most(&state);
        if request.bytes > most {
            return Err(self.too_large(request.requested, &state));
        }
        let mut state = state;
        let mut climb = Climb {
            shared: self,
            request,
            // The attempt that brought us here was the first rungs.
            rungs: state.take_tried(),
            freed_before: state.books.allocated_bytes.freed(),
        };
        drop(state);
        if let Some(found) = climb.reclaimers(&[ReclaimLevel::Purge])? {
            return Ok(found);
        }
        if let Some(found) = climb.cheap_rungs()? {
            return Ok(found);
        }
        let levels = [ReclaimLevel::Collect, ReclaimLevel::Spill];
        if let Some(found) = climb.reclaimers(&levels)? {
            return Ok(found);
        }
        // Other threads may have freed memory since the last search.
        if let Some(found) = climb.attempt(&mut lock(&self.state))? {
            return Ok(found);
        }
        Err(AllocError::OutOfMemory(Box::new(climb.error()?)))
    }

    /// The most bytes that could be reserved, whatever was freed.
    fn most(&self, state: &State) -> u64 {
        let total = self.device.properties().total_bytes;
        state.limit.map_or(total, |limit| limit.min(total))
    }

    fn too_large(&self, requested: u64, state: &State) -> AllocError {
        let most = self.most(state);
        let properties = self.device.properties();
        let (total, device) = (properties.total_bytes, properties.index);
        AllocError::TooLarge {
            requested,
            most,
            limited: most < total,
            device,
        }
    }
}

impl<D: Device> Drop for Shared<D> {
    fn drop(&mut self) {
        // A device that cannot even wait is beyond being given memory back.
        if self.device.synchronize().is_ok() {
            lock(&self.state).tear_down(&self.device);
        }
    }
}

/// One allocation's way up the ladder.
struct Climb<'a, D: Device> {
    shared: &'a Shared<D>,
    request: &'a Request,
    rungs: Vec<RungReport>,
    /// All bytes that any thread had freed when it was last seen that the request does not fit.
    freed_before: u64,
}

/// How often memory is collected for one allocation while other threads take what was found. They get
/// on meanwhile, and leave garbage in their turn. With four threads, 64 runs in a row went to others
/// once in a million allocations, so that one run goes this thread's way in five.
const MAX_COLLECTIONS: u32 = 1024;

type Found = Option<Place>;

impl<'a, D: Device> Climb<'a, D> {
    fn attempt(&mut self, state: &mut State) -> Result<Found, AllocError> {
        match state.attempt(&self.shared.device, self.request, false) {
            Ok(node) => Ok(Some(state.place(node, self.request))),
            Err(Miss::Full | Miss::Busy { .. }) => {
                self.freed_before = state.books.allocated_bytes.freed();
                let tried = state.take_tried();
                self.rungs
                    .extend(tried.into_iter().filter(RungReport::gave));
                Ok(None)
            }
            Err(Miss::Device(error)) => Err(error.into()),
        }
    }

    /// What is cached, where it is not pages that were moved already; then waiting for streams, then
    /// what is cached again.
    fn cheap_rungs(&mut self) -> Result<Found, AllocError> {
        let shared = self.shared;
        let mut state = lock(&shared.state);
        state.fold_all();
        if self.best_case(&state)? < self.request.bytes {
            let is_virtual = state.is_virtual();
            drop(state);
            const REASON: &str = "all that is free, cached and pending is less than the request";
            if !is_virtual {
                self.skip(Rung::ReleaseCached, REASON);
            }
            self.skip(Rung::WaitForStreams, REASON);
            return Ok(None);
        }
        if state.is_virtual() {
            drop(state);
        } else if state.releasable() == 0 {
            drop(state);
            self.skip(Rung::ReleaseCached, "nothing cached can go back");
        } else if let Some(found) = self.release_and_retry(state)? {
            return Ok(Some(found));
        }
        if lock(&self.shared.state).clocks.behind().is_empty() {
            self.skip(Rung::WaitForStreams, "no stream uses freed memory");
            return Ok(None);
        }
        if self.shared.device.is_capturing() {
            self.skip(Rung::WaitForStreams, "work is being captured into a graph");
            return Ok(None);
        }
        let started = Instant::now();
        let waited = self.shared.wait_for_streams();
        let result = waited
            .as_ref()
            .map(|bytes| *bytes)
            .map_err(ToString::to_string);
        self.report(Rung::WaitForStreams, started, result);
        let mut state = lock(&shared.state);
        if let Some(found) = self.attempt(&mut state)? {
            return Ok(Some(found));
        }
        if state.is_virtual() || state.releasable() == 0 {
            return Ok(None);
        }
        self.release_and_retry(state)
    }

    /// Gives back as many segments as are missing, and tries again; then all of them.
    fn release_and_retry(&mut self, mut state: Held<'a, State>) -> Result<Found, AllocError> {
        let shared = self.shared;
        let missing = state.missing_for(&shared.device, self.request)?;
        state.stats.num_alloc_retries += 1;
        for most in [missing, u64::MAX] {
            let started = Instant::now();
            let released = state.release_cached(&self.shared.device, most);
            let found = self.attempt(&mut state);
            let is_last = state.releasable() == 0 || !matches!(found, Ok(None));
            drop(state);
            self.report(Rung::ReleaseCached, started, Ok(released));
            if is_last {
                return found;
            }
            state = lock(&shared.state);
        }
        Ok(None)
    }

    /// The bytes that releasing and waiting could make available at the very best.
    fn best_case(&self, state: &State) -> Result<u64, DeviceError> {
        let free = self.shared.device.memory_info()?.free_bytes;
        let reserved = state.reserved();
        let under_limit = state.limit.unwrap_or(u64::MAX).saturating_sub(reserved);
        let in_use = state.books.allocated_bytes.current();
        Ok(free.min(under_limit).saturating_add(reserved - in_use))
    }

    fn reclaimers(&mut self, levels: &[ReclaimLevel]) -> Result<Found, AllocError> {
        let mut reclaimers = lock(&self.shared.reclaimers).clone();
        let inside = RECLAIMING.with(Cell::get);
        reclaimers.retain(|(_, reclaimer)| levels.contains(&reclaimer.level()));
        for (_, reclaimer) in reclaimers {
            let rung = Rung::Reclaimer(reclaimer.name().to_owned());
            if inside {
                self.skip(rung, "this thread is inside a reclaimer");
                continue;
            }
            let best_case = self.best_case(&lock(&self.shared.state))?;
            if best_case.saturating_add(reclaimer.at_most()) < self.request.bytes {
                self.skip(
                    rung,
                    "with all that it could give the request would not fit",
                );
                continue;
            }
            let num_rungs = self.rungs.len();
            for round in 0..MAX_COLLECTIONS {
                // The report is of the last round. Each asks for more, since others take of it.
                self.rungs.truncate(num_rungs);
                let bytes_needed = self.request.bytes.saturating_mul(1 << round.min(32));
                let says = self.reclaim(&*reclaimer, &rung, bytes_needed);
                let freed = self.freed_by_anyone();
                if says == 0 && freed == 0 {
                    break;
                }
                if let Some(found) = self.retry_after_reclaim(reclaimer.level())? {
                    return Ok(Some(found));
                }
                // Enough was freed, but other threads took it. They leave garbage in their turn.
                if reclaimer.level() != ReclaimLevel::Collect || freed < self.request.bytes {
                    break;
                }
            }
        }
        Ok(None)
    }

    /// Runs a reclaimer and returns how many bytes it says it gave.
    fn reclaim(&mut self, reclaimer: &dyn Reclaimer, rung: &Rung, bytes_needed: u64) -> u64 {
        let request = ReclaimRequest {
            device: self.shared.device.properties().index,
            bytes_needed,
        };
        let started = Instant::now();
        let guard = Reclaiming::enter();
        let result = catch_unwind(AssertUnwindSafe(|| reclaimer.reclaim(&request)));
        drop(guard);
        let result = result.map_err(|panic| format!("it panicked: {}", panic_text(&*panic)));
        let says = *result.as_ref().unwrap_or(&0);
        self.report(rung.clone(), started, result);
        says
    }

    /// Bytes freed since it was last seen that the request does not fit: a reclaimer may have freed
    /// more than it knows of, or another thread did.
    fn freed_by_anyone(&self) -> u64 {
        let mut state = lock(&self.shared.state);
        state.fold_all();
        let freed = state.books.allocated_bytes.freed();
        freed.wrapping_sub(self.freed_before)
    }

    fn retry_after_reclaim(&mut self, level: ReclaimLevel) -> Result<Found, AllocError> {
        if let Some(found) = self.attempt(&mut lock(&self.shared.state))? {
            return Ok(Some(found));
        }
        if level == ReclaimLevel::Purge {
            // Those come next anyway.
            return Ok(None);
        }
        self.cheap_rungs()
    }

    fn skip(&mut self, rung: Rung, reason: &'static str) {
        self.rungs.push(RungReport::skipped(rung, reason));
    }

    fn report(&mut self, rung: Rung, started: Instant, result: Result<u64, String>) {
        let report = lock(&self.shared.state).count_rung(rung, started, result);
        self.rungs.push(report);
    }

    /// The report, with numbers of one moment.
    fn error(self) -> Result<OutOfMemoryError, AllocError> {
        let Self {
            shared,
            request,
            rungs,
            ..
        } = self;
        let mut state = lock(&shared.state);
        state.fold_all();
        let info = shared.device.memory_info()?;
        state.stats.num_ooms += 1;
        let action = TraceAction::Oom {
            device_free_bytes: info.free_bytes,
        };
        state
            .history
            .push(action, DevicePtr::NULL, request.requested, request.stream);
        let properties = shared.device.properties();
        let allocated = state.books.allocated_bytes.current();
        let pending = state.pending_bytes();
        let reserved = state.reserved();
        let mut error = OutOfMemoryError {
            requested: request.requested,
            rounded: request.bytes,
            device: properties.index,
            device_name: properties.name.clone(),
            capacity: info.total_bytes,
            device_free: info.free_bytes,
            limit: state.limit,
            allocated,
            pending,
            cached: reserved - allocated - pending,
            other: info
                .total_bytes
                .saturating_sub(info.free_bytes)
                .saturating_sub(reserved),
            largest_hole: state.on(request.pool, |state| {
                let largest = POOLS.map(|kind| state.heap.largest_free(kind));
                largest.into_iter().max().unwrap_or(0)
            }),
            pinned: None,
            rungs,
        };
        if error.is_fragmented() {
            let found = state.on(request.pool, |state| {
                pinned(&state.heap, &state.clocks, request.bytes)
            });
            error.pinned = Some(found).filter(|found| !found.blocks.is_empty());
        }
        Ok(error)
    }
}

/// Marks this thread as being inside a reclaimer; unmarks it when dropped, also by a panic.
struct Reclaiming;

impl Reclaiming {
    fn enter() -> Self {
        RECLAIMING.with(|inside| inside.set(true));
        Self
    }
}

impl Drop for Reclaiming {
    fn drop(&mut self) {
        RECLAIMING.with(|inside| inside.set(false));
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}
