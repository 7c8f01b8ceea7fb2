//! What the allocator's lock protects: the heap, the clocks, the statistics and the pages.
//!
//! Everything here runs with the lock held and makes device calls that do not wait. Each operation
//! either succeeds or leaves the state as it was; where a device call fails half-way in a clean-up,
//! the memory stays in the books, as a cached page or as a stuck one, and is tried again later.
//!
//! # Invariants
//!
//! 1. `reserved()` is what the device has handed out: mapped bytes of the heap plus spare pages.
//! 2. A block is in `pending` exactly if its node is [`State::Pending`].
//! 3. Statistics of live and pending blocks are the sums over those nodes.

use lastref_snapshot::{
    AllocatorSettings, BlockRecord, BlockState, Segment, SegmentKind, Snapshot, TraceAction,
};

use crate::clock::{Clocks, StreamSlot};
use crate::device::{Device, DeviceError, DevicePtr, DeviceResult, PageId, StreamId};
use crate::heap::{Growth, Heap, NodeId, RegionKind, State as NodeState, Stretch};
use crate::history::History;
use crate::options::AllocatorOptions;
use crate::stats::{MemoryStats, PoolKind};

/// Segments of the small pool, where there is no virtual memory. PyTorch's `kSmallBuffer`.
const SMALL_SEGMENT_BYTES: u64 = 2 << 20;
/// Segments of the large pool, unless the request is larger.
const LARGE_SEGMENT_BYTES: u64 = 32 << 20;
/// Larger requests get a segment of their own, rounded up to this.
const SEGMENT_GRANULARITY: u64 = 2 << 20;

/// An allocation to be made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub(crate) requested: u64,
    /// `requested`, rounded up.
    pub(crate) bytes: u64,
    pub(crate) stream: StreamSlot,
}

/// Why an attempt found no memory.
#[derive(Debug)]
pub(crate) enum Miss {
    /// The device is full, or the limit is reached.
    Full,
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
    pub(crate) heap: Heap,
    pub(crate) clocks: Clocks,
    pub(crate) stats: MemoryStats,
    pub(crate) history: History,
    pub(crate) limit: Option<u64>,
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
    pub(crate) fn new(page_bytes: Option<u64>, total_bytes: u64) -> Self {
        Self {
            heap: Heap::new(page_bytes.unwrap_or(SEGMENT_GRANULARITY)),
            clocks: Clocks::new(),
            stats: MemoryStats::default(),
            history: History::default(),
            limit: None,
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
            self.history.set_max_entries(max_entries);
        }
    }

    pub(crate) const fn is_virtual(&self) -> bool {
        self.page_bytes.is_some()
    }

    /// Bytes obtained from the device.
    pub(crate) fn reserved(&self) -> u64 {
        let mapped: u64 = POOLS
            .iter()
            .map(|pool| self.heap.totals(*pool).mapped_bytes)
            .sum();
        mapped + self.spare_pages.len() as u64 * self.page_bytes.unwrap_or(0)
    }

    /// Bytes given back by callers that a stream may still use.
    pub(crate) fn pending_bytes(&self) -> u64 {
        self.stats.active_bytes.all.current - self.stats.allocated_bytes.all.current
    }

    // ---- allocating --------------------------------------------------------------------------

    /// Looks for memory: in the free lists, then in what streams have finished with, then on the
    /// device.
    pub(crate) fn attempt(
        &mut self,
        device: &impl Device,
        request: &Request,
    ) -> Result<NodeId, Miss> {
        if !self.pending.is_empty() {
            self.complete_pending(device);
        }
        if let Some(node) = self.search(request) {
            return Ok(node);
        }
        match self.clocks.poll(device, Some(request.stream)) {
            Ok(false) => {}
            Ok(true) => {
                if let Some(node) = self.search(request) {
                    return Ok(node);
                }
            }
            // Not knowing is not a reason to fail: the memory is taken as still in use.
            Err(_) => self.stats.num_device_errors += 1,
        }
        let grown = match self.page_bytes {
            Some(page_bytes) => self.grow_range(device, request, page_bytes),
            None => self.grow_segments(device, request),
        };
        self.book_totals();
        grown
    }

    fn search(&mut self, request: &Request) -> Option<NodeId> {
        let clocks = &self.clocks;
        let pool = PoolKind::for_size(request.bytes);
        let node = self
            .heap
            .find(pool, request.bytes, |s| clocks.covered(s, request.stream))?;
        self.heap.take(node, request.bytes);
        self.book_alloc(node, request);
        Some(node)
    }

    /// Books a node that was made live for a caller.
    fn book_alloc(&mut self, node: NodeId, request: &Request) {
        let live = self.heap.node_mut(node);
        live.requested = request.requested;
        live.stream = request.stream;
        let (ptr, bytes) = (DevicePtr(live.addr), live.bytes);
        let pool = PoolKind::for_size(bytes);
        let stats = &mut self.stats;
        stats.allocation.increase(pool, 1);
        stats.active.increase(pool, 1);
        stats.allocated_bytes.increase(pool, bytes);
        stats.active_bytes.increase(pool, bytes);
        stats.requested_bytes.increase(pool, request.requested);
        let stream = self.clocks.stream(request.stream);
        self.history
            .push(TraceAction::Alloc, ptr, request.requested, stream);
        self.book_splits(pool);
    }

    fn book_splits(&mut self, pool: PoolKind) {
        let totals = self.heap.totals(pool);
        self.stats.inactive_split.set(pool, totals.split_nodes);
        self.stats
            .inactive_split_bytes
            .set(pool, totals.split_bytes);
    }

    /// Books what was obtained from the device or given back to it.
    fn book_totals(&mut self) {
        for pool in POOLS {
            let totals = self.heap.totals(pool);
            // Spare pages belong to no pool yet; most are large pages.
            let spare = match pool {
                PoolKind::Small => 0,
                PoolKind::Large => self.spare_pages.len() as u64 * self.page_bytes.unwrap_or(0),
            };
            self.stats
                .reserved_bytes
                .set(pool, totals.mapped_bytes + spare);
            self.stats.segment.set(pool, totals.segments);
            self.book_splits(pool);
        }
    }

    // ---- freeing -----------------------------------------------------------------------------

    /// Takes a block back from its caller.
    pub(crate) fn free(&mut self, id: NodeId) {
        let node = self.heap.node(id);
        let (ptr, bytes, requested) = (DevicePtr(node.addr), node.bytes, node.requested);
        let own = node.stream;
        let stamps = self.clocks.stamp(own, &node.recorded);
        let pool = PoolKind::for_size(bytes);
        self.stats.allocation.decrease(pool, 1);
        self.stats.allocated_bytes.decrease(pool, bytes);
        self.stats.requested_bytes.decrease(pool, requested);
        let stream = self.clocks.stream(own);
        self.history
            .push(TraceAction::FreeRequested, ptr, requested, stream);
        self.heap.node_mut(id).stamps = stamps;
        if self.clocks.covered(&self.heap.node(id).stamps, own) {
            self.complete_free(id);
        } else {
            self.heap.node_mut(id).state = NodeState::Pending;
            self.pending.push(id);
        }
    }

    fn complete_free(&mut self, id: NodeId) {
        let node = self.heap.node_mut(id);
        let stamps = std::mem::take(&mut node.stamps);
        let (ptr, bytes, requested, own) = (
            DevicePtr(node.addr),
            node.bytes,
            node.requested,
            node.stream,
        );
        self.heap.give_back(id, stamps);
        let pool = PoolKind::for_size(bytes);
        self.stats.active.decrease(pool, 1);
        self.stats.active_bytes.decrease(pool, bytes);
        self.book_splits(pool);
        let stream = self.clocks.stream(own);
        self.history
            .push(TraceAction::FreeCompleted, ptr, requested, stream);
    }

    /// Frees pending blocks whose streams are done with them, asking the device first. Does not
    /// wait.
    fn complete_pending(&mut self, device: &impl Device) {
        let mut asked = Vec::new();
        for &id in &self.pending {
            let node = self.heap.node(id);
            for (slot, _) in node.stamps.iter() {
                if slot != node.stream && !asked.contains(&slot) {
                    asked.push(slot);
                }
            }
        }
        for slot in asked {
            if self.clocks.poll_one(device, slot).is_err() {
                self.stats.num_device_errors += 1;
            }
        }
        self.sweep_pending();
    }

    /// Frees pending blocks whose streams are known to be done with them.
    pub(crate) fn sweep_pending(&mut self) {
        let mut at = 0;
        while at < self.pending.len() {
            let id = self.pending[at];
            let node = self.heap.node(id);
            if self.clocks.covered(&node.stamps, node.stream) {
                self.pending.swap_remove(at);
                self.complete_free(id);
            } else {
                at += 1;
            }
        }
    }

    // ---- growing -----------------------------------------------------------------------------

    /// Whether `bytes` more may be obtained under the limit.
    fn within_limit(&self, bytes: u64) -> bool {
        let limit = self.limit.unwrap_or(u64::MAX);
        self.reserved()
            .checked_add(bytes)
            .is_some_and(|reserved| reserved <= limit)
    }

    fn grow_segments(&mut self, device: &impl Device, request: &Request) -> Result<NodeId, Miss> {
        let pool = PoolKind::for_size(request.bytes);
        let usual = match pool {
            PoolKind::Small => SMALL_SEGMENT_BYTES,
            PoolKind::Large => LARGE_SEGMENT_BYTES,
        };
        let exact = request.bytes.next_multiple_of(SEGMENT_GRANULARITY);
        // A full device may still have room for a segment just large enough.
        let mut sizes = vec![usual.max(exact)];
        if exact < usual {
            sizes.push(exact);
        }
        let mut miss = Miss::Full;
        for bytes in sizes {
            if !self.within_limit(bytes) {
                continue;
            }
            match device.alloc_segment(bytes) {
                Ok(ptr) => {
                    self.stats.num_device_alloc += 1;
                    let node = self.heap.add_segment(pool, ptr.0, bytes);
                    let stream = self.clocks.stream(request.stream);
                    self.history
                        .push(TraceAction::SegmentAlloc, ptr, bytes, stream);
                    self.heap.take(node, request.bytes);
                    self.book_alloc(node, request);
                    return Ok(node);
                }
                Err(error) => miss = error.into(),
            }
            if matches!(miss, Miss::Device(_)) {
                break;
            }
        }
        Err(miss)
    }

    fn grow_range(
        &mut self,
        device: &impl Device,
        request: &Request,
        page_bytes: u64,
    ) -> Result<NodeId, Miss> {
        let pool = PoolKind::for_size(request.bytes);
        let growth = match self.plan(request) {
            Some(growth) => growth,
            None => {
                let bytes = self
                    .total_bytes
                    .max(request.bytes)
                    .next_multiple_of(page_bytes);
                let base = device.reserve_range(bytes)?;
                self.heap.add_range(pool, base.0, bytes);
                self.plan(request).ok_or(Miss::Full)?
            }
        };
        let missing: u64 = growth.missing.iter().map(|stretch| stretch.bytes).sum();
        let spare = self.spare_pages.len() as u64 * page_bytes;
        if !self.within_limit(missing.saturating_sub(spare)) {
            return Err(Miss::Full);
        }
        // Asking is cheap beside one page (6 us against 230 on an A100), and saves creating pages
        // up to the brim only to destroy them again. If the device does not say, we find out.
        if device
            .memory_info()
            .is_ok_and(|info| info.free_bytes < missing.saturating_sub(spare))
        {
            return Err(Miss::Full);
        }
        self.map(device, &growth, page_bytes)?;
        let stream = self.clocks.stream(request.stream);
        for stretch in &growth.missing {
            let ptr = DevicePtr(stretch.addr);
            self.history
                .push(TraceAction::SegmentMap, ptr, stretch.bytes, stream);
        }
        let node = self.heap.carve(growth.region, growth.addr, request.bytes);
        self.book_alloc(node, request);
        Ok(node)
    }

    fn plan(&self, request: &Request) -> Option<Growth> {
        let pool = PoolKind::for_size(request.bytes);
        self.heap.plan_growth(pool, request.bytes, |s| {
            self.clocks.covered(s, request.stream)
        })
    }

    /// Maps the pages a growth misses: all, or none.
    fn map(&mut self, device: &impl Device, growth: &Growth, page_bytes: u64) -> DeviceResult<()> {
        let mut fresh = Vec::new();
        for stretch in &growth.missing {
            let mut pages = Vec::new();
            let mut result = self.map_stretch(device, *stretch, page_bytes, &mut pages);
            let mapped = Stretch {
                addr: stretch.addr,
                bytes: pages.len() as u64 * page_bytes,
            };
            if mapped.bytes > 0 {
                fresh.push(self.heap.mark_mapped(growth.region, mapped, pages));
            }
            if result.is_ok() {
                result = device.set_access(DevicePtr(stretch.addr), stretch.bytes);
            }
            if let Err(error) = result {
                for node in fresh {
                    self.unmap_fresh(device, node, page_bytes);
                }
                self.destroy_spare_pages(device);
                return Err(error);
            }
        }
        Ok(())
    }

    fn map_stretch(
        &mut self,
        device: &impl Device,
        stretch: Stretch,
        page_bytes: u64,
        pages: &mut Vec<PageId>,
    ) -> DeviceResult<()> {
        let mut addr = stretch.addr;
        while addr < stretch.addr + stretch.bytes {
            let page = match self.spare_pages.pop() {
                Some(page) => page,
                None => {
                    let page = device.create_page()?;
                    self.stats.num_device_alloc += 1;
                    page
                }
            };
            if let Err(error) = device.map_page(DevicePtr(addr), page) {
                self.spare_pages.push(page);
                return Err(error);
            }
            pages.push(page);
            addr += page_bytes;
        }
        Ok(())
    }

    /// Undoes a mapping. What cannot be unmapped is stuck until giving back tries again.
    fn unmap_fresh(&mut self, device: &impl Device, node: NodeId, page_bytes: u64) {
        let fresh = self.heap.node(node);
        let (region, all) = (
            fresh.region,
            Stretch {
                addr: fresh.addr,
                bytes: fresh.bytes,
            },
        );
        let done = self.unmap_pages(device, node, all, page_bytes);
        if done < all.bytes {
            let rest = all.addr + done;
            let left = self
                .heap
                .nodes_of(region)
                .find(|(_, node)| node.addr == rest);
            if let Some((node, _)) = left {
                self.heap.set_stuck(node);
            }
        }
    }

    /// Unmaps pages of a node from the first on, until one cannot be; returns how many bytes were
    /// unmapped. Their pages become spare.
    fn unmap_pages(
        &mut self,
        device: &impl Device,
        node: NodeId,
        stretch: Stretch,
        page_bytes: u64,
    ) -> u64 {
        let region = self.heap.node(node).region;
        let mut done = 0;
        while done < stretch.bytes {
            let addr = stretch.addr + done;
            let Some(page) = self.heap.page_at(region, addr) else {
                break;
            };
            if device.unmap_page(DevicePtr(addr)).is_err() {
                self.stats.num_device_errors += 1;
                break;
            }
            self.spare_pages.push(page);
            done += page_bytes;
        }
        if done > 0 {
            self.heap.mark_unmapped(
                node,
                Stretch {
                    addr: stretch.addr,
                    bytes: done,
                },
            );
        }
        done
    }

    // ---- giving back -------------------------------------------------------------------------

    /// Gives free memory back to the device, as far as all work on it is known to be done. Returns
    /// how many bytes; the device calls that failed are counted, their memory stays cached.
    pub(crate) fn release_cached(&mut self, device: &impl Device) -> u64 {
        if self.clocks.poll(device, None).is_err() {
            self.stats.num_device_errors += 1;
        }
        let before = self.reserved();
        match self.page_bytes {
            Some(page_bytes) => self.release_pages(device, page_bytes),
            // Freeing a segment waits for the device.
            None if device.is_capturing() => {}
            None => self.release_segments(device),
        }
        self.book_totals();
        before - self.reserved()
    }

    fn release_pages(&mut self, device: &impl Device, page_bytes: u64) {
        for (id, stretch) in self.heap.free_pages() {
            let node = self.heap.node(id);
            if !self.clocks.finished(&node.stamps) {
                continue;
            }
            let done = self.unmap_pages(device, id, stretch, page_bytes);
            if done > 0 {
                let ptr = DevicePtr(stretch.addr);
                self.history
                    .push(TraceAction::SegmentUnmap, ptr, done, StreamId::DEFAULT);
            }
        }
        self.destroy_spare_pages(device);
    }

    fn destroy_spare_pages(&mut self, device: &impl Device) {
        for page in std::mem::take(&mut self.spare_pages) {
            if device.destroy_page(page).is_ok() {
                self.stats.num_device_free += 1;
            } else {
                self.stats.num_device_errors += 1;
                self.spare_pages.push(page);
            }
        }
    }

    fn release_segments(&mut self, device: &impl Device) {
        for id in self.heap.free_segments() {
            let node = self.heap.node(id);
            if !self.clocks.finished(&node.stamps) {
                continue;
            }
            let (ptr, bytes) = (DevicePtr(node.addr), node.bytes);
            if device.free_segment(ptr).is_ok() {
                self.stats.num_device_free += 1;
                self.heap.remove_segment(id);
                self.history
                    .push(TraceAction::SegmentFree, ptr, bytes, StreamId::DEFAULT);
            } else {
                self.stats.num_device_errors += 1;
            }
        }
    }

    /// Bytes that giving back could free at best, work in flight apart.
    pub(crate) fn releasable(&self) -> u64 {
        let pages: u64 = self
            .heap
            .free_pages()
            .iter()
            .map(|(_, stretch)| stretch.bytes)
            .sum();
        let segments = self.heap.free_segments().into_iter();
        let segments: u64 = segments.map(|id| self.heap.node(id).bytes).sum();
        pages + segments + self.spare_pages.len() as u64 * self.page_bytes.unwrap_or(0)
    }

    /// Gives everything back, live blocks included; what fails is lost with the allocator.
    pub(crate) fn tear_down(&mut self, device: &impl Device) {
        // Errors have nobody left to be told to.
        for event in self.clocks.take_events() {
            let _ = device.destroy_event(event);
        }
        let page_bytes = self.page_bytes.unwrap_or(SEGMENT_GRANULARITY);
        for (_, region) in self.heap.regions() {
            match &region.kind {
                RegionKind::Segment => {
                    let _ = device.free_segment(DevicePtr(region.base));
                }
                RegionKind::Range { pages } => {
                    for (at, page) in (0..).zip(pages) {
                        if let Some(page) = page {
                            let _ = device.unmap_page(DevicePtr(region.base + at * page_bytes));
                            let _ = device.destroy_page(*page);
                        }
                    }
                    let _ = device.release_range(DevicePtr(region.base), region.bytes);
                }
            }
        }
        for page in self.spare_pages.drain(..) {
            let _ = device.destroy_page(page);
        }
    }

    /// Bytes obtained again since the last `empty_cache`, as far as it had released them.
    fn refilled(&self) -> u64 {
        let (released, obtained) = self.last_emptied;
        released.min(self.stats.reserved_bytes.all.allocated - obtained)
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
        self.last_emptied = (released, self.stats.reserved_bytes.all.allocated);
    }

    // ---- looking -----------------------------------------------------------------------------

    pub(crate) fn stats(&self) -> MemoryStats {
        let mut stats = self.stats.clone();
        stats.empty_cache.bytes_refilled += self.refilled();
        stats
    }

    pub(crate) fn reset_accumulated_stats(&mut self) {
        self.stats.reset_accumulated();
        self.last_emptied = (0, 0);
    }

    pub(crate) fn snapshot(&self, device: u32) -> Snapshot {
        let mut segments = Vec::new();
        for (id, region) in self.heap.regions() {
            let mut open: Option<Segment> = None;
            for (_, node) in self.heap.nodes_of(id) {
                let state = match node.state {
                    NodeState::Live => BlockState::ActiveAllocated,
                    NodeState::Pending => BlockState::ActivePendingFree,
                    NodeState::Free | NodeState::Fresh | NodeState::Stuck => BlockState::Inactive,
                    NodeState::Unmapped | NodeState::Vacant => {
                        segments.extend(open.take());
                        continue;
                    }
                };
                let segment = open.get_or_insert_with(|| Segment {
                    device,
                    address: node.addr,
                    total_bytes: 0,
                    allocated_bytes: 0,
                    active_bytes: 0,
                    requested_bytes: 0,
                    stream: StreamId::DEFAULT.0,
                    kind: match region.pool {
                        PoolKind::Small => SegmentKind::Small,
                        PoolKind::Large => SegmentKind::Large,
                    },
                    is_expandable: matches!(region.kind, RegionKind::Range { .. }),
                    blocks: Vec::new(),
                });
                let active = state != BlockState::Inactive;
                segment.total_bytes += node.bytes;
                segment.requested_bytes += node.requested;
                segment.active_bytes += if active { node.bytes } else { 0 };
                if state == BlockState::ActiveAllocated {
                    segment.allocated_bytes += node.bytes;
                }
                segment.blocks.push(BlockRecord {
                    address: node.addr,
                    bytes: node.bytes,
                    requested_bytes: node.requested,
                    state,
                });
            }
            segments.extend(open);
        }
        segments.sort_by_key(|segment| segment.address);
        let mut device_traces = vec![Vec::new(); device as usize];
        device_traces.push(self.history.entries().copied().collect());
        Snapshot {
            segments,
            device_traces,
            allocator_settings: AllocatorSettings::new(self.is_virtual(), self.limit),
        }
    }

    /// Checks the sums; with `walk`, every node as well. Says what is wrong.
    pub(crate) fn check(&self, walk: bool) -> Result<(), String> {
        for pool in POOLS {
            let totals = self.heap.totals(pool);
            let by_pool = |stat: &crate::stats::StatByPool| match pool {
                PoolKind::Small => stat.small_pool.current,
                PoolKind::Large => stat.large_pool.current,
            };
            let active = by_pool(&self.stats.active_bytes);
            if active + totals.free_bytes > totals.mapped_bytes {
                return Err(format!(
                    "{pool} pool: active + free is more than what is mapped"
                ));
            }
            if by_pool(&self.stats.inactive_split_bytes) != totals.split_bytes
                || by_pool(&self.stats.inactive_split) != totals.split_nodes
                || by_pool(&self.stats.segment) != totals.segments
            {
                return Err(format!(
                    "{pool} pool: statistics differ from the heap's totals"
                ));
            }
        }
        if self.stats.reserved_bytes.all.current != self.reserved() {
            return Err("statistics of reserved bytes differ from the heap's".into());
        }
        if walk { self.check_nodes() } else { Ok(()) }
    }

    fn check_nodes(&self) -> Result<(), String> {
        self.heap.check()?;
        self.clocks.check()?;
        let (mut live, mut pending) = ([0; 2], [0; 2]);
        let (mut requested, mut stuck) = (0, 0);
        for (region, _) in self.heap.regions() {
            for (id, node) in self.heap.nodes_of(region) {
                match node.state {
                    NodeState::Live => {
                        live[0] += 1;
                        live[1] += node.bytes;
                        requested += node.requested;
                    }
                    NodeState::Pending => {
                        pending[0] += 1;
                        pending[1] += node.bytes;
                        if !self.pending.contains(&id) {
                            return Err(format!("pending node {id} is in no list"));
                        }
                    }
                    NodeState::Stuck => stuck += node.bytes,
                    _ => {}
                }
            }
        }
        let stats = &self.stats;
        let counted = [
            stats.allocation.all.current,
            stats.allocated_bytes.all.current,
        ];
        if counted != live || stats.requested_bytes.all.current != requested {
            return Err(format!(
                "statistics say {counted:?} is live, the nodes say {live:?}"
            ));
        }
        let active = [stats.active.all.current, stats.active_bytes.all.current];
        let walked = [live[0] + pending[0], live[1] + pending[1]];
        if active != walked || pending[0] != self.pending.len() as u64 {
            return Err(format!(
                "statistics say {active:?} is active, the nodes say {walked:?}"
            ));
        }
        let free: u64 = POOLS
            .iter()
            .map(|pool| self.heap.totals(*pool).free_bytes)
            .sum();
        let spare = self.spare_pages.len() as u64 * self.page_bytes.unwrap_or(0);
        if active[1] + free + stuck + spare != self.reserved() {
            return Err("active, free, stuck and spare bytes do not add up to reserved".into());
        }
        Ok(())
    }
}

pub(crate) const POOLS: [PoolKind; 2] = [PoolKind::Small, PoolKind::Large];
