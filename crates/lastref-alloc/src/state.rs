//! What the allocator's lock protects: the heap, the clocks, the statistics and the pages (in
//! `pages.rs`, with everything that asks the device for memory).
//!
//! Everything here runs with the lock held and makes device calls that do not wait. Each operation
//! either succeeds or leaves the state as it was; where a device call fails half-way in a clean-up,
//! the memory stays in the books, as a cached page or as a stuck one, and is tried again later.
//!
//! # Invariants
//!
//! 1. `reserved()` is what the device has handed out: mapped bytes of the heap plus spare pages.
//! 2. A block is in `pending` exactly if its node is [`State::Pending`].
//! 3. Statistics of live and pending blocks are the sums over those nodes, once the caches are empty and
//!    `freed_last` is: what is in those is live for the heap, and booked as free.

use lastref_snapshot::{
    AllocatorSettings, BlockRecord, BlockState, Segment, SegmentKind, Snapshot, TraceAction,
};

use crate::clock::{Clocks, StreamSlot};
use crate::device::{Device, DeviceError, DevicePtr, PageId, StreamId};
use crate::heap::{Heap, NodeId, RegionKind, State as NodeState};
use crate::history::{self, History};
use crate::ladder::RungReport;
use crate::options::{AllocatorOptions, StreamWaits};
use crate::stats::{Books, MemoryStats, PoolKind};
use crate::sync::has_barriers;
use crate::thread_cache::{self, Entry, Inner, Put, ThreadCache};

mod pages;
mod pools;
mod steps;
mod trim;

use self::pools::Pool;
pub(crate) use self::pools::PoolId;
use self::trim::Trim;

/// An allocation to be made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub(crate) requested: u64,
    /// `requested`, rounded up.
    pub(crate) bytes: u64,
    pub(crate) stream: StreamSlot,
    pub(crate) pool: PoolId,
}

/// Where a block is: its node, its address, its stream, and the stamp of its allocation.
pub(crate) type Place = (NodeId, DevicePtr, StreamSlot, u64);

/// Why an attempt found no memory.
#[derive(Debug)]
pub(crate) enum Miss {
    /// The device is full, or the limit is reached.
    Full,
    /// Growing would pass the slack, or what there is, and there are idle pages, but work still uses
    /// them. Only where waiting was allowed.
    Busy {
        /// Nothing but those pages would do.
        is_full: bool,
    },
    /// A device call failed for another reason.
    Device(DeviceError),
}

impl From<DeviceError> for Miss {
    fn from(error: DeviceError) -> Self {
        if error.is_out_of_memory() {
            Self::Full
        } else {
            Self::Device(error)
        }
    }
}

#[derive(Debug)]
pub(crate) struct State {
    /// Of the pool at work, as is `pending`; see `pools.rs`.
    pub(crate) heap: Heap,
    private_pools: Vec<Option<Box<Pool>>>,
    at_work: PoolId,
    num_closed: usize,
    /// What other pools changed of what is in use while the pool at work was; see [`State::on`].
    counted_elsewhere: [u64; 3],
    pub(crate) clocks: Clocks,
    pub(crate) books: Books,
    /// What is counted beside the books. Its families are not kept.
    pub(crate) stats: MemoryStats,
    pub(crate) history: History,
    /// The caches of all threads, also of those that have ended.
    caches: Vec<ThreadCache>,
    /// Whether those are visited by barriers; see [`owner`](crate::owner).
    has_barriers: bool,
    /// A block of the default pool that was freed last, on the one stream that used it. As with those
    /// in the caches of threads, the heap does not know yet: often the next request is for the same.
    freed_last: Option<NodeId>,
    /// Names this allocator among others.
    id: u64,
    /// Handles there are.
    num_handles: u64,
    /// Blocks of zero bytes there are: they are in no books.
    num_empty_blocks: u64,
    pub(crate) limit: Option<u64>,
    /// By how many thousandths what is reserved may pass the peak of what was in use, before idle
    /// pages are moved instead of creating new ones.
    pub(crate) slack_per_mille: u32,
    /// Whether an allocation may wait for streams rather than pass the slack.
    pub(crate) wait_before_growing: bool,
    stream_waits: StreamWaits,
    trim: Option<Box<Trim>>,
    idle_keep: u64,
    /// What the latest attempt tried, after the free lists.
    tried: Vec<RungReport>,
    /// The most bytes in blocks that were in use at once, pending ones included, before the last reset
    /// of peaks.
    peak_before: u64,
    /// What the device had free when it was asked last, by half, less what was created since.
    expected_free: u64,
    /// Blocks given back that a stream may still use.
    pending: Vec<NodeId>,
    /// Physical pages mapped nowhere: left when a device call failed half-way, or about to be
    /// mapped. They are used before new ones are created.
    spare_pages: Vec<PageId>,
    /// Page size, where memory comes as pages of virtual memory and not as segments.
    page_bytes: Option<u64>,
    total_bytes: u64,
    /// What the last `empty_cache` released, and the bytes obtained from the device before it.
    last_emptied: (u64, u64),
}

impl State {
    pub(crate) fn new(id: u64, page_bytes: Option<u64>, total_bytes: u64) -> Self {
        Self {
            heap: Heap::new(page_bytes),
            private_pools: Vec::new(),
            at_work: PoolId::DEFAULT,
            num_closed: 0,
            counted_elsewhere: [0; 3],
            clocks: Clocks::new(),
            books: Books::default(),
            stats: MemoryStats::default(),
            history: History::default(),
            caches: Vec::new(),
            has_barriers: has_barriers(),
            freed_last: None,
            id,
            num_handles: 1,
            num_empty_blocks: 0,
            limit: None,
            slack_per_mille: AllocatorOptions::DEFAULT_SLACK_PER_MILLE,
            wait_before_growing: true,
            stream_waits: StreamWaits::default(),
            trim: None,
            idle_keep: 0,
            tried: Vec::new(),
            peak_before: 0,
            expected_free: 0,
            pending: Vec::new(),
            spare_pages: Vec::new(),
            page_bytes,
            total_bytes,
            last_emptied: (0, 0),
        }
    }

    /// Takes over what `options` set, the backing apart.
    pub(crate) fn set_options(&mut self, options: &AllocatorOptions) {
        if let Some(limit) = options.limit {
            self.limit = limit.bytes(self.total_bytes);
        }
        if let Some(max_entries) = options.max_history_entries {
            self.set_max_history_entries(max_entries);
        }
        if let Some(slack) = options.slack_per_mille {
            self.slack_per_mille = slack;
        }
        if let Some(wait) = options.wait_before_growing {
            self.wait_before_growing = wait;
        }
        if let Some(waits) = options.stream_waits {
            self.stream_waits = waits;
        }
        if let Some(age) = options.idle_trim {
            self.set_idle_trim(age);
        }
        if let Some(bytes) = options.idle_keep {
            self.idle_keep = bytes;
        }
    }

    pub(crate) const fn is_virtual(&self) -> bool {
        self.page_bytes.is_some()
    }

    /// Bytes obtained from the device.
    pub(crate) fn reserved(&self) -> u64 {
        let mapped: u64 = POOLS
            .iter()
            .map(|kind| self.totals(*kind).mapped_bytes)
            .sum();
        mapped + self.spare_bytes()
    }

    fn spare_bytes(&self) -> u64 {
        self.spare_pages.len() as u64 * self.page_bytes.unwrap_or(0)
    }

    /// Bytes given back by callers that a stream may still use.
    pub(crate) fn pending_bytes(&self) -> u64 {
        self.books.pending_bytes()
    }

    // ---- allocating --------------------------------------------------------------------------

    /// Takes free memory of the default pool, if there is some and nothing has to be looked after first.
    #[inline]
    pub(crate) fn take_free(&mut self, device: &impl Device, request: &Request) -> Option<NodeId> {
        if request.pool != self.at_work || !self.pending.is_empty() {
            return None;
        }
        if let Some(node) = self.freed_last.take() {
            if self.heap.take_live(node, request.requested, request.stream) {
                self.book_alloc(node, request);
                return Some(node);
            }
            self.give_back_last(Some(node));
        }
        self.search(device, request)
    }

    /// Looks for memory: in the free lists, then in what streams have finished with, then on the
    /// device. With `may_wait` it answers [`Miss::Busy`] where waiting for streams first would save
    /// memory.
    pub(crate) fn attempt(
        &mut self,
        device: &impl Device,
        request: &Request,
        may_wait: bool,
    ) -> Result<NodeId, Miss> {
        let on_pool = |state: &mut Self| state.attempt_at_work(device, request, may_wait);
        self.on(request.pool, on_pool)
    }

    fn attempt_at_work(
        &mut self,
        device: &impl Device,
        request: &Request,
        may_wait: bool,
    ) -> Result<NodeId, Miss> {
        if !self.pending.is_empty() {
            self.complete_pending(device);
        }
        if let Some(node) = self.search(device, request) {
            return Ok(node);
        }
        self.attempt_after_miss(device, request, may_wait)
    }

    // ---- what keeps the allocator alive -------------------------------------------------------

    pub(crate) const fn add_handle(&mut self) {
        self.num_handles += 1;
    }

    pub(crate) fn drop_handle(&mut self) {
        self.num_handles -= 1;
        if self.num_handles == 0 {
            // From here on the books are exact.
            self.close_caches();
        }
    }

    pub(crate) const fn add_empty_block(&mut self) {
        self.num_empty_blocks += 1;
    }

    pub(crate) fn drop_empty_block(&mut self) {
        self.num_empty_blocks -= 1;
    }

    /// Whether neither a handle nor a block is left.
    #[inline]
    pub(crate) fn is_unused(&self) -> bool {
        self.num_handles == 0 && self.num_empty_blocks == 0 && self.books.allocation.current() == 0
    }

    /// Where the block is that an attempt for `request` has just made.
    #[inline]
    pub(crate) fn place(&mut self, node: NodeId, request: &Request) -> Place {
        let addr = self.on(request.pool, |state| state.heap.node(node).addr);
        (node, DevicePtr(addr), request.stream, self.history.clock())
    }

    // ---- the caches of threads -----------------------------------------------------------------

    /// Has caches visited as where the system has no barriers. Before there are any.
    #[cfg(any(test, feature = "test-util"))]
    pub(crate) const fn disable_barriers(&mut self) {
        self.has_barriers = false;
    }

    /// Gives the calling thread a cache, if it has none, that may keep blocks of `stream`; adds what
    /// the cache has counted to the books.
    pub(crate) fn visit_mine(&mut self, stream: StreamId, slot: StreamSlot, requested: u64) {
        let id = self.id;
        let visit = |this: &mut Self| {
            thread_cache::visit_mine(id, (stream, slot), requested, |inner| {
                this.fold(inner);
                // What is freed on a foreign stream must be stamped at once.
                !this.clocks.is_foreign(slot)
            })
        };
        if !visit(self) {
            let left = self.caches.iter().find_map(ThreadCache::own);
            let cache = left.or_else(|| {
                let inner = Inner::new(self.history.max_entries());
                let cache = ThreadCache::new(inner, self.has_barriers);
                self.caches.push(cache);
                self.caches.last().and_then(ThreadCache::own)
            });
            if let Some(cache) = cache {
                thread_cache::attach(id, cache);
            }
            visit(self);
        }
    }

    /// Adds what the calling thread's cache has counted to the books, so that a peak is one of all.
    pub(crate) fn fold_mine(&mut self) {
        thread_cache::look_at_mine_if_due(self.id, |inner| self.fold(inner));
    }

    /// Adds what a cache has counted to the books. What either history says after this comes after
    /// what the other has said.
    fn fold(&mut self, inner: &mut Inner) {
        let flow = std::mem::take(&mut inner.flow);
        self.books.fold(&flow);
        // It has served as many blocks as it has counted in.
        self.stats.num_thread_cache_hits += flow.blocks.added();
        self.history.pass(inner.history.clock());
        inner.history.pass(self.history.clock());
    }

    /// Runs `f` on every thread's cache.
    fn visit_all(&mut self, mut f: impl FnMut(&mut Self, &mut Inner)) {
        let mut caches = std::mem::take(&mut self.caches);
        ThreadCache::visit_all(&mut caches, |inner| f(self, inner));
        self.caches = caches;
    }

    /// Adds what all caches have counted to the books. To be called with the default pool at work.
    pub(crate) fn fold_all(&mut self) {
        self.visit_all(Self::fold);
        self.free_last();
    }

    /// Empties all caches into the heap. Returns the bytes that were in them.
    pub(crate) fn drain_caches(&mut self) -> u64 {
        let mut entries = Vec::new();
        self.visit_all(|this, inner| {
            this.fold(inner);
            inner.drain_to(0, &mut entries);
        });
        let kept = entries.iter().chain(&self.freed_last);
        let bytes = kept.map(|id| self.heap.node(*id).bytes).sum();
        self.free_last();
        for node in &entries {
            self.free_entry(*node);
        }
        bytes
    }

    /// Empties all caches, and keeps nothing in them until the next allocation on a stream.
    pub(crate) fn close_caches(&mut self) {
        self.visit_all(|_, inner| inner.forbid_all());
        self.drain_caches();
    }

    pub(crate) fn set_max_history_entries(&mut self, max_entries: usize) {
        self.history.set_max_entries(max_entries);
        self.visit_all(|_, inner| inner.history.set_max_entries(max_entries));
    }

    /// Frees a small block that found no room in the calling thread's cache. It is kept there all
    /// the same, and older ones make room, if the cache may keep blocks of its stream.
    pub(crate) fn free_small(&mut self, entry: &Entry, stamp: u64) {
        let mut evicted = Vec::new();
        let mut is_kept = false;
        thread_cache::look_at_mine(self.id, |inner| {
            self.fold(inner);
            inner.make_room(entry, &mut evicted);
            is_kept = inner.put(entry, stamp) == Put::Kept;
        });
        for node in &evicted {
            self.free_entry(*node);
        }
        // What it has counted by this is added now too: nothing tells the thread of it.
        thread_cache::look_at_mine(self.id, |inner| self.fold(inner));
        if !is_kept {
            self.history.pass(stamp);
            self.free(entry.node);
        }
    }

    /// Makes the block that was freed last free in the heap too.
    fn free_last(&mut self) {
        let last = self.freed_last.take();
        self.give_back_last(last);
    }

    /// Makes what was the block that was freed last free in the heap too. It is stamped and booked.
    #[inline]
    fn give_back_last(&mut self, last: Option<NodeId>) {
        if let Some(id) = last {
            let pool = self.heap.node(id).pool;
            self.give_back(id, pool);
        }
    }

    /// Makes what was in a cache free in the heap too. For the books it already is.
    fn free_entry(&mut self, id: NodeId) {
        let node = self.heap.node_mut(id);
        let pool = node.pool;
        self.clocks.stamp(&mut node.stamps);
        self.give_back(id, pool);
    }

    // ---- allocating from the heap ------------------------------------------------------------

    #[inline]
    fn search(&mut self, device: &impl Device, request: &Request) -> Option<NodeId> {
        let clocks = &self.clocks;
        let pool = PoolKind::for_size(request.bytes);
        let node = self.heap.find(pool, request.bytes, |s| {
            clocks.covered(device, s, request.stream)
        })?;
        let node = self.heap.take(node, request.requested, request.stream);
        self.book_alloc(node, request);
        self.book_splits(pool);
        Some(node)
    }

    /// Books a node that was made live for a caller.
    #[inline]
    fn book_alloc(&mut self, node: NodeId, request: &Request) {
        let pool = PoolKind::for_size(request.bytes);
        let addr = self.heap.node(node).addr;
        self.books.allocate(pool, request.bytes, request.requested);
        self.history
            .push_alloc(addr, request.requested, request.stream);
    }

    #[inline]
    fn book_splits(&mut self, pool: PoolKind) {
        let (split_nodes, split_bytes) = self.splits(pool);
        self.books.inactive_split.set(pool, split_nodes);
        self.books.inactive_split_bytes.set(pool, split_bytes);
    }

    /// Books what was obtained from the device or given back to it.
    fn book_totals(&mut self) {
        for pool in POOLS {
            let totals = self.totals(pool);
            // Spare pages belong to no pool yet; most are large pages.
            let spare = match pool {
                PoolKind::Small => 0,
                PoolKind::Large => self.spare_bytes(),
            };
            self.books
                .reserved_bytes
                .set(pool, totals.mapped_bytes + spare);
            self.books.segment.set(pool, totals.segments);
            self.book_splits(pool);
        }
    }

    // ---- freeing -----------------------------------------------------------------------------

    /// Takes a block back from its caller.
    pub(crate) fn free(&mut self, id: NodeId) {
        let node = self.heap.node(id);
        let (ptr, bytes, requested) = (DevicePtr(node.addr), node.bytes, node.requested());
        let (own, _, is_alone) = node.stamps.first();
        let pool = PoolKind::for_size(bytes);
        self.books.free(pool, bytes, requested);
        if is_alone {
            self.history.push_free(ptr.0, requested, own);
            // Stamped now: what is recorded or waited for from now on covers this.
            self.clocks.stamp(&mut self.heap.node_mut(id).stamps);
            if self.at_work == PoolId::DEFAULT {
                let before = self.freed_last.replace(id);
                self.give_back_last(before);
            } else {
                self.give_back(id, pool);
            }
        } else {
            self.free_recorded(id, pool);
        }
    }

    /// Takes a block back, which is booked as free, that was recorded on other streams.
    #[cold]
    fn free_recorded(&mut self, id: NodeId, pool: PoolKind) {
        let node = self.heap.node_mut(id);
        let (ptr, bytes, requested) = (DevicePtr(node.addr), node.bytes, node.requested());
        let own = node.stamps.slot();
        self.clocks.stamp(&mut node.stamps);
        if self.clocks.others_are_done(&node.stamps, own) {
            self.history.push_free(ptr.0, requested, own);
            self.complete_free(id, pool);
        } else {
            self.history
                .push(TraceAction::FreeRequested, ptr, requested, own);
            self.heap.node_mut(id).state = NodeState::Pending;
            self.books.begin_pending(pool, bytes);
            self.pending.push(id);
        }
    }

    fn complete_free(&mut self, id: NodeId, pool: PoolKind) {
        let clocks = &self.clocks;
        // Those that are not done come before what its own stream does from now on, and no other.
        let stamps = &mut self.heap.node_mut(id).stamps;
        stamps.forget_finished(|slot, tick| clocks.is_done(slot, tick));
        self.give_back(id, pool);
    }

    /// Makes a stamped node free in the heap.
    #[inline]
    fn give_back(&mut self, id: NodeId, pool: PoolKind) {
        let clocks = &self.clocks;
        self.heap
            .give_back(id, |slot, tick| clocks.is_done(slot, tick));
        self.book_splits(pool);
    }

    /// Frees pending blocks whose streams are done with them, asking the device first. Does not
    /// wait.
    fn complete_pending(&mut self, device: &impl Device) {
        let mut asked = Vec::new();
        for &id in &self.pending {
            let node = self.heap.node(id);
            let own = node.stamps.slot();
            if self.clocks.covered(device, &node.stamps, own) {
                continue;
            }
            for (slot, _) in node.stamps.iter() {
                if slot != own && !asked.contains(&slot) {
                    asked.push(slot);
                }
            }
        }
        for slot in asked {
            if self.clocks.poll_one(device, slot).is_err() {
                self.stats.num_device_errors += 1;
            }
        }
        self.sweep_pending(device);
    }

    /// Asks the device how far each stream is, and frees the pending blocks that they are done with.
    /// Does not wait.
    fn poll_streams(&mut self, device: &impl Device) {
        if self.clocks.poll(device, None).is_err() {
            self.stats.num_device_errors += 1;
        }
        self.on_each(|state| state.sweep_pending(device));
    }

    /// Frees pending blocks whose streams are known to be done with them, or to be done before what the
    /// blocks' own streams do from now on.
    pub(crate) fn sweep_pending(&mut self, device: &impl Device) {
        let mut at = 0;
        while at < self.pending.len() {
            let id = self.pending[at];
            let node = self.heap.node(id);
            if self
                .clocks
                .covered(device, &node.stamps, node.stamps.slot())
            {
                self.pending.swap_remove(at);
                let (ptr, requested) = (DevicePtr(node.addr), node.requested());
                let (own, bytes) = (node.stamps.slot(), node.bytes);
                self.history
                    .push(TraceAction::FreeCompleted, ptr, requested, own);
                let pool = PoolKind::for_size(bytes);
                self.books.end_pending(pool, bytes);
                self.complete_free(id, pool);
            } else {
                at += 1;
            }
        }
    }

    /// Bytes obtained again since the last `empty_cache`, as far as it had released them.
    fn refilled(&self) -> u64 {
        let (released, obtained) = self.last_emptied;
        released.min(self.books.reserved_bytes.allocated() - obtained)
    }

    /// Books what a user's `empty_cache` released.
    pub(crate) fn book_empty_cache(&mut self, released: u64) {
        let refilled = self.refilled();
        let stats = &mut self.stats.empty_cache;
        stats.bytes_refilled += refilled;
        if released > 0 {
            stats.num_calls += 1;
            stats.bytes_released += released;
        }
        self.last_emptied = (released, self.books.reserved_bytes.allocated());
    }

    /// The most bytes that were in use at once since the start.
    fn peak_active(&self) -> u64 {
        self.peak_before.max(self.books.active_bytes().peak())
    }

    pub(crate) fn reset_peak_stats(&mut self) {
        self.peak_before = self.peak_active();
        self.books.reset_peaks();
    }

    // ---- looking -----------------------------------------------------------------------------

    pub(crate) fn stats(&self) -> MemoryStats {
        let mut stats = self.books.read(&self.stats);
        stats.empty_cache.bytes_refilled += self.refilled();
        stats
    }

    pub(crate) fn reset_accumulated_stats(&mut self) {
        self.stats.reset_accumulated();
        self.books.reset_accumulated();
        self.last_emptied = (0, 0);
    }

    pub(crate) fn snapshot(&mut self, device: u32) -> Snapshot {
        let mut segments = Vec::new();
        let heaps = self.pools().map(|(heap, _, _)| heap);
        let regions = heaps.flat_map(|heap| heap.regions().map(move |region| (heap, region)));
        for (heap, (id, region)) in regions {
            let mut open: Option<Segment> = None;
            for (_, node) in heap.nodes_of(id) {
                let state = match node.state {
                    NodeState::Live => BlockState::ActiveAllocated,
                    NodeState::Pending => BlockState::ActivePendingFree,
                    NodeState::Free | NodeState::Claimed | NodeState::Stuck => BlockState::Inactive,
                    NodeState::Unmapped | NodeState::Planned | NodeState::Vacant => {
                        segments.extend(open.take());
                        continue;
                    }
                };
                let kind = match node.pool {
                    PoolKind::Small => SegmentKind::Small,
                    PoolKind::Large => SegmentKind::Large,
                };
                if open.as_ref().is_some_and(|segment| segment.kind != kind) {
                    segments.extend(open.take());
                }
                let segment = open.get_or_insert_with(|| Segment {
                    device,
                    address: node.addr,
                    total_bytes: 0,
                    allocated_bytes: 0,
                    active_bytes: 0,
                    requested_bytes: 0,
                    stream: StreamId::DEFAULT.0,
                    kind,
                    is_expandable: matches!(region.kind, RegionKind::Range(_)),
                    blocks: Vec::new(),
                });
                let active = state != BlockState::Inactive;
                segment.total_bytes += node.bytes;
                segment.requested_bytes += node.requested();
                segment.active_bytes += if active { node.bytes } else { 0 };
                if state == BlockState::ActiveAllocated {
                    segment.allocated_bytes += node.bytes;
                }
                segment.blocks.push(BlockRecord {
                    address: node.addr,
                    bytes: node.bytes,
                    requested_bytes: node.requested(),
                    state,
                });
            }
            segments.extend(open);
        }
        segments.sort_by_key(|segment| segment.address);
        let mut device_traces = vec![Vec::new(); device as usize];
        let mut parts = Vec::new();
        self.visit_all(|_, inner| parts.push(inner.history.part()));
        parts.push(self.history.part());
        let max_entries = self.history.max_entries();
        device_traces.push(history::read(parts, max_entries, |slot| {
            self.clocks.stream(slot)
        }));
        Snapshot {
            segments,
            device_traces,
            allocator_settings: AllocatorSettings::new(self.is_virtual(), self.limit),
        }
    }

    /// Checks the sums; with `walk`, every node as well. Says what is wrong.
    pub(crate) fn check(&self, walk: bool) -> Result<(), String> {
        for pool in POOLS {
            let totals = self.totals(pool);
            let active = self.books.active_bytes().current_in(pool);
            if active + totals.free_bytes > totals.mapped_bytes {
                return Err(format!(
                    "{pool} pool: active + free is more than what is mapped"
                ));
            }
            if self.books.inactive_split_bytes.current_in(pool) != totals.split_bytes
                || self.books.inactive_split.current_in(pool) != totals.split_nodes
                || self.books.segment.current_in(pool) != totals.segments
            {
                return Err(format!(
                    "{pool} pool: statistics differ from the heap's totals"
                ));
            }
        }
        if self.books.reserved_bytes.current() != self.reserved() {
            return Err("statistics of reserved bytes differ from the heap's".into());
        }
        if walk { self.check_nodes() } else { Ok(()) }
    }

    fn check_nodes(&self) -> Result<(), String> {
        self.check_pools()?;
        self.clocks.check()?;
        let (mut live, mut pending) = ([0; 2], [0; 2]);
        let (mut requested, mut stuck) = (0, 0);
        let mut num_pending = 0;
        for (heap, in_list, _) in self.pools() {
            heap.check()?;
            num_pending += in_list.len() as u64;
            for (id, node) in heap.regions().flat_map(|(region, _)| heap.nodes_of(region)) {
                match node.state {
                    NodeState::Live => {
                        live[0] += 1;
                        live[1] += node.bytes;
                        if node.stamps.iter().any(|(_, tick)| tick > 0) {
                            return Err(format!("live node {id} is stamped as freed"));
                        }
                        requested += node.requested();
                    }
                    NodeState::Pending => {
                        pending[0] += 1;
                        pending[1] += node.bytes;
                        if !in_list.contains(&id) {
                            return Err(format!("pending node {id} is in no list"));
                        }
                    }
                    NodeState::Stuck => stuck += node.bytes,
                    _ => {}
                }
            }
        }
        let books = &self.books;
        let counted = [books.allocation.current(), books.allocated_bytes.current()];
        if counted != live || books.requested_bytes.current() != requested {
            return Err(format!(
                "statistics say {counted:?} is live, the nodes say {live:?}"
            ));
        }
        let active = [books.active().current(), books.active_bytes().current()];
        let walked = [live[0] + pending[0], live[1] + pending[1]];
        if active != walked || pending[0] != num_pending {
            return Err(format!(
                "statistics say {active:?} is active, the nodes say {walked:?}"
            ));
        }
        let free: u64 = POOLS.iter().map(|kind| self.totals(*kind).free_bytes).sum();
        if active[1] + free + stuck + self.spare_bytes() != self.reserved() {
            return Err("active, free, stuck and spare bytes do not add up to reserved".into());
        }
        Ok(())
    }
}

pub(crate) const POOLS: [PoolKind; 2] = [PoolKind::Small, PoolKind::Large];
