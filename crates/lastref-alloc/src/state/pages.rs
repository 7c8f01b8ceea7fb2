//! Memory from the device: segments, or pages of virtual memory; obtained, moved and given back.
//!
//! # The governor of waste
//!
//! What is reserved but not in use is waste, and mostly it is idle pages in the wrong place: a range
//! that only grows ends up to 8 % above the peak of what was in use, on traces of real programs. So
//! a page is *created* only while what is reserved stays within a slack above the peak in use so
//! far. Past that, idle pages are *moved* to where they are needed, those that were freed longest ago
//! first. Moving is also cheaper (63 us against 230 on an A100, by kvcached's measurements), but
//! unmaps memory that may be asked for again, and work must be done with it: the caller waits for
//! streams first, or creates after all.
//!
//! A full device and a limit are one more reason to move, and there as many pages as must be, those of
//! other pools included.
//! Nothing is moved for an allocation that fails.

use std::time::Instant;

use smallvec::SmallVec;

use lastref_snapshot::TraceAction;

use super::{Miss, Request, State};
use crate::clock::StreamSlot;
use crate::device::{Device, DevicePtr, DeviceResult};
use crate::heap::{Growth, NodeId, RegionKind, State as NodeState, Stretch};
use crate::ladder::Rung;
use crate::stats::PoolKind;

/// Segments of the small pool, where there is no virtual memory. PyTorch's `kSmallBuffer`.
const SMALL_SEGMENT_BYTES: u64 = 2 << 20;
/// Segments of the large pool, unless the request is larger.
const LARGE_SEGMENT_BYTES: u64 = 32 << 20;
/// Larger requests get a segment of their own, rounded up to this.
const SEGMENT_GRANULARITY: u64 = 2 << 20;

/// Addresses are reserved for so many times the device's memory, so that gaps between blocks do not
/// use them up.
const RANGE_FACTOR: u64 = 2;

impl State {
    // ---- growing -----------------------------------------------------------------------------

    /// Whether `bytes` more may be obtained under the limit.
    fn within_limit(&self, bytes: u64) -> bool {
        let limit = self.limit.unwrap_or(u64::MAX);
        self.reserved()
            .checked_add(bytes)
            .is_some_and(|reserved| reserved <= limit)
    }

    pub(super) fn grow_segments(
        &mut self,
        device: &impl Device,
        request: &Request,
    ) -> Result<NodeId, Miss> {
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
                    self.history
                        .push(TraceAction::SegmentAlloc, ptr, bytes, request.stream);
                    let node = self.heap.take(node, request.requested, request.stream);
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

    pub(super) fn grow_range(
        &mut self,
        device: &impl Device,
        request: &Request,
        page_bytes: u64,
        may_wait: bool,
    ) -> Result<NodeId, Miss> {
        let growth = match self.plan(device, request) {
            Some(growth) => growth,
            None => {
                let bytes = self
                    .total_bytes
                    .saturating_mul(RANGE_FACTOR)
                    .max(request.bytes)
                    .next_multiple_of(page_bytes);
                let base = device.reserve_range(bytes)?;
                self.heap.add_range(base.0, bytes);
                self.plan(device, request).ok_or(Miss::Full)?
            }
        };
        let mut claimed = self.heap.claim(&growth);
        let result = self
            .have_pages(device, request, growth.missing, page_bytes, may_wait)
            .and_then(|()| Ok(self.map(device, &mut claimed, request, page_bytes)?));
        if let Err(miss) = result {
            for node in claimed {
                self.heap.abandon(node);
            }
            return Err(miss);
        }
        let node = self
            .heap
            .settle(&growth, &claimed, request.requested, request.stream);
        self.book_alloc(node, request);
        Ok(node)
    }

    /// Sees to it that there are spare pages for `missing` bytes: moved or created.
    fn have_pages(
        &mut self,
        device: &impl Device,
        request: &Request,
        missing: u64,
        page_bytes: u64,
        may_wait: bool,
    ) -> Result<(), Miss> {
        loop {
            let has_asked = self.must_ask(missing.saturating_sub(self.spare_bytes()));
            self.find_pages(device, request, missing, page_bytes, may_wait)?;
            let before = self.spare_pages.len();
            let needed = usize::try_from(missing / page_bytes).unwrap_or(usize::MAX);
            let result = device.create_pages(needed.saturating_sub(before), &mut self.spare_pages);
            let created = (self.spare_pages.len() - before) as u64;
            self.stats.num_device_alloc += created;
            self.expected_free = self.expected_free.saturating_sub(created * page_bytes);
            let Err(error) = result else {
                return Ok(());
            };
            self.destroy_spare_pages(device);
            if has_asked || !error.is_out_of_memory() {
                return Err(error.into());
            }
            // Less was free than expected: others took it. Now the device is asked.
            self.expected_free = 0;
        }
    }

    /// Whether what the device is known to have free is too little to tell.
    const fn must_ask(&self, wanted: u64) -> bool {
        self.expected_free < wanted
    }

    /// How many bytes the device has free, or a part of that. It is asked when half of what it had is
    /// used up: often where little is left, and else hardly ever (asking takes 6 us on an A100, and a
    /// program that grows in small steps would ask a thousand times). None if it does not say.
    fn free_on_device(&mut self, device: &impl Device, wanted: u64) -> Option<u64> {
        if self.must_ask(wanted) {
            let info = device.memory_info().ok()?;
            self.expected_free = info.free_bytes / 2;
            return Some(info.free_bytes);
        }
        Some(self.expected_free)
    }

    /// Whole pages in free blocks of the other pools, and how many of them work may still use. Those
    /// that are kept for graphs do not count.
    fn idle_elsewhere(&self) -> (u64, u64) {
        let (mut with_busy, mut without_busy) = (0, 0);
        for (heap, _, _) in self.pools().skip(1).filter(|(_, _, is_kept)| !is_kept) {
            for (id, stretch) in heap.free_pages() {
                with_busy += stretch.bytes;
                if self.clocks.finished(&heap.node(id).stamps) {
                    without_busy += stretch.bytes;
                }
            }
        }
        (with_busy, without_busy)
    }

    pub(super) fn plan(&self, device: &impl Device, request: &Request) -> Option<Growth> {
        let pool = PoolKind::for_size(request.bytes);
        self.heap.plan(pool, request.bytes, |stamps| {
            self.clocks.covered(device, stamps, request.stream)
        })
    }

    /// How many bytes may be obtained for `request` within the slack.
    fn allowance(&self, request: &Request) -> u64 {
        let peak = self
            .peak_active()
            .max(self.books.active_bytes().current() + request.bytes);
        let slack = u128::from(peak) * u128::from(self.slack_per_mille) / 1000;
        let slack = u64::try_from(slack).unwrap_or(u64::MAX);
        peak.saturating_add(slack).saturating_sub(self.reserved())
    }

    /// The bytes of pages that could be had at the most: new ones, and idle ones of the pool at work.
    pub(super) fn obtainable(&self, device: &impl Device) -> u64 {
        let under_limit = self.limit.unwrap_or(u64::MAX);
        let under_limit = under_limit.saturating_sub(self.reserved());
        let info = device.memory_info();
        let new = info.map_or(under_limit, |info| info.free_bytes.min(under_limit));
        let idle: u64 = self.idle_pages().iter().map(|(_, s)| s.bytes).sum();
        new.saturating_add(self.spare_bytes() + idle)
    }

    /// Whether memory from the device for `request` would put what is reserved over the slack.
    pub(super) fn would_pass_slack(&self, device: &impl Device, request: &Request) -> bool {
        let missing = if self.is_virtual() {
            let growth = self.plan(device, request);
            growth.map_or(request.bytes, |growth| growth.missing)
        } else {
            request.bytes.next_multiple_of(SEGMENT_GRANULARITY)
        };
        missing.saturating_sub(self.spare_bytes()) > self.allowance(request)
    }

    /// Sees to it that `missing` bytes of pages can be had, by moving idle ones where creating all
    /// would put what is reserved over the slack, over the limit or over what the device has.
    fn find_pages(
        &mut self,
        device: &impl Device,
        request: &Request,
        missing: u64,
        page_bytes: u64,
        may_wait: bool,
    ) -> Result<(), Miss> {
        let wanted = missing.saturating_sub(self.spare_bytes());
        if wanted == 0 {
            return Ok(());
        }
        let whole_pages = |bytes: u64| bytes - bytes % page_bytes;
        let reserved = self.reserved();
        let should_create = whole_pages(self.allowance(request));
        let mut can_create = self.limit.unwrap_or(u64::MAX).saturating_sub(reserved);
        // Knowing saves creating pages up to the brim only to destroy them again. If the device does
        // not say, we find out.
        if let Some(free) = self.free_on_device(device, wanted) {
            can_create = can_create.min(free);
        }
        let must_move = wanted.saturating_sub(whole_pages(can_create));
        let should_move = wanted.saturating_sub(should_create).max(must_move);
        if should_move == 0 {
            return Ok(());
        }
        if self.clocks.poll(device, None).is_err() {
            self.stats.num_device_errors += 1;
        }
        let mut idle = self.heap.free_pages();
        let bytes = |idle: &[(NodeId, Stretch)]| -> u64 {
            idle.iter().map(|(_, stretch)| stretch.bytes).sum()
        };
        let with_busy = bytes(&idle);
        idle.retain(|(id, _)| self.clocks.finished(&self.heap.node(*id).stamps));
        let without_busy = bytes(&idle);
        // Other pools give only what cannot be had otherwise.
        let elsewhere = if must_move > without_busy {
            self.idle_elsewhere()
        } else {
            (0, 0)
        };
        let all_without_busy = without_busy + elsewhere.1;
        if must_move > with_busy + elsewhere.0 || must_move > all_without_busy && !may_wait {
            self.note_skipped(
                Rung::MovePages,
                "idle pages are fewer than the request needs",
            );
            return Err(Miss::Full);
        }
        let would_help = without_busy < should_move && without_busy < with_busy;
        if may_wait && (would_help || must_move > all_without_busy) {
            let is_full = must_move > all_without_busy;
            return Err(Miss::Busy { is_full });
        }
        let started = Instant::now();
        let mut moved = self.take_idle_pages(device, idle, should_move, page_bytes);
        if moved < must_move {
            let own = self.at_work();
            self.on_each(|state| {
                if state.at_work() != own && !state.is_kept() {
                    moved += state.move_pages_at_work(device, must_move - moved, page_bytes);
                }
            });
            // A closed pool's last page may have gone: a stream was done with it only now.
            self.remove_closed(device);
        }
        self.stats.num_pages_moved += moved / page_bytes;
        if moved > 0 {
            self.note_tried(Rung::MovePages, started, Ok(moved));
        }
        Ok(())
    }

    /// Unmaps up to `bytes` bytes of pages of the pool at work that are known to be idle.
    fn move_pages_at_work(&mut self, device: &impl Device, bytes: u64, page_bytes: u64) -> u64 {
        let idle = self.idle_pages();
        self.take_idle_pages(device, idle, bytes, page_bytes)
    }

    /// Whole pages of the pool at work that are free, and known to be idle.
    fn idle_pages(&self) -> Vec<(NodeId, Stretch)> {
        let mut idle = self.heap.free_pages();
        idle.retain(|(id, _)| self.clocks.finished(&self.heap.node(*id).stamps));
        idle
    }

    /// Unmaps `bytes` bytes of idle pages, if there are as many, the coldest first. They become
    /// spare. Returns how many bytes.
    fn take_idle_pages(
        &mut self,
        device: &impl Device,
        mut idle: Vec<(NodeId, Stretch)>,
        bytes: u64,
        page_bytes: u64,
    ) -> u64 {
        idle.sort_unstable_by_key(|(id, stretch)| {
            (self.heap.node(*id).stamps.tick(), stretch.addr)
        });
        let mut left = bytes;
        for (id, stretch) in idle {
            let part = stretch.bytes.min(left);
            if part == 0 {
                break;
            }
            let tail = Stretch {
                addr: stretch.addr + stretch.bytes - part,
                bytes: part,
            };
            let (done, _) = self.unmap_pages(device, id, tail, page_bytes);
            left -= done;
        }
        bytes - left
    }

    /// Maps the planned ones of the claimed nodes: all, or none. Then what is claimed no more is
    /// taken off the list.
    fn map(
        &mut self,
        device: &impl Device,
        claimed: &mut SmallVec<[NodeId; 4]>,
        request: &Request,
        page_bytes: u64,
    ) -> DeviceResult<()> {
        let num_pages = |bytes: u64| usize::try_from(bytes / page_bytes).unwrap_or(usize::MAX);
        let mut fresh: SmallVec<[NodeId; 4]> = SmallVec::new();
        let mut result = Ok(());
        // From the first new mapping to the end of the last; what lies between is mapped too.
        let mut mapped: Option<(u64, u64)> = None;
        for at in 0..claimed.len() {
            let node = self.heap.node(claimed[at]);
            if result.is_err() || node.state != NodeState::Planned {
                continue;
            }
            let (ptr, bytes) = (DevicePtr(node.addr), node.bytes);
            let first = self.spare_pages.len() - num_pages(bytes);
            let mut pages = self.spare_pages.split_off(first);
            if let Err((done, error)) = device.map_pages(ptr, &pages) {
                self.spare_pages.extend(pages.drain(done..));
                result = Err(error);
            }
            if !pages.is_empty() {
                let (start, end) = (ptr.0, ptr.0 + pages.len() as u64 * page_bytes);
                mapped = Some(mapped.map_or((start, end), |(first, _)| (first, end)));
                fresh.push(claimed[at]);
                let rest = self.heap.mark_mapped(claimed[at], &pages);
                claimed.extend(rest);
            }
        }
        if let Some((start, end)) = mapped {
            // One call for all of them: it costs more than mapping twenty pages.
            result = result.and_then(|()| device.set_access(DevicePtr(start), end - start));
        }
        if let Err(error) = result {
            claimed.retain(|id| !fresh.contains(id));
            for id in fresh {
                self.unmap_fresh(device, id, page_bytes);
            }
            self.destroy_spare_pages(device);
            return Err(error);
        }
        for id in fresh {
            let node = self.heap.node(id);
            self.history.push(
                TraceAction::SegmentMap,
                DevicePtr(node.addr),
                node.bytes,
                request.stream,
            );
        }
        Ok(())
    }

    /// Undoes a mapping. What cannot be unmapped is stuck until giving back tries again.
    fn unmap_fresh(&mut self, device: &impl Device, id: NodeId, page_bytes: u64) {
        let node = self.heap.node(id);
        let (addr, bytes) = (node.addr, node.bytes);
        let (done, rest) = self.unmap_pages(device, id, Stretch { addr, bytes }, page_bytes);
        if done == 0 {
            self.heap.set_stuck(id);
        } else if let Some(rest) = rest {
            self.heap.set_stuck(rest);
        }
    }

    /// Unmaps pages of a node from the first on, until one cannot be; returns how many bytes were
    /// unmapped, and what is left of the node if it was claimed. Their pages become spare.
    fn unmap_pages(
        &mut self,
        device: &impl Device,
        id: NodeId,
        stretch: Stretch,
        page_bytes: u64,
    ) -> (u64, Option<NodeId>) {
        let node = self.heap.node(id);
        let (region, is_cached) = (node.region, node.state != NodeState::Claimed);
        let count = usize::try_from(stretch.bytes / page_bytes).unwrap_or(usize::MAX);
        let count = match device.unmap_pages(DevicePtr(stretch.addr), count) {
            Ok(()) => count,
            Err((done, _)) => {
                self.stats.num_device_errors += 1;
                done
            }
        };
        let done = count as u64 * page_bytes;
        let addrs = (0..count as u64).map(|number| stretch.addr + number * page_bytes);
        let pages = addrs.filter_map(|addr| self.heap.page_at(region, addr));
        self.spare_pages.extend(pages);
        if done == 0 {
            return (0, None);
        }
        if is_cached {
            let ptr = DevicePtr(stretch.addr);
            self.history
                .push(TraceAction::SegmentUnmap, ptr, done, StreamSlot::DEFAULT);
        }
        let unmapped = Stretch {
            addr: stretch.addr,
            bytes: done,
        };
        (done, self.heap.mark_unmapped(id, unmapped))
    }

    // ---- giving back -------------------------------------------------------------------------

    /// Gives `most` bytes of free memory back to the device, or a little more, as far as all work on
    /// it is known to be done: what was freed longest ago first. Returns how many bytes; the device
    /// calls that failed are counted, their memory stays cached.
    pub(crate) fn release_cached(&mut self, device: &impl Device, most: u64) -> u64 {
        self.release(device, most, None)
    }

    /// Gives no more than `most` bytes of free memory back to the device that was freed last by the
    /// free numbered `oldest`, as far as all work on it is known to be done: what was freed longest ago
    /// first. Returns how many bytes.
    pub(super) fn release_older(&mut self, device: &impl Device, most: u64, oldest: u64) -> u64 {
        let whole = most - most % self.page_bytes.unwrap_or(1);
        self.release(device, whole, Some(oldest))
    }

    fn release(&mut self, device: &impl Device, most: u64, oldest: Option<u64>) -> u64 {
        self.poll_streams(device);
        let before = self.reserved();
        let mut taken = self.spare_bytes();
        self.on_each(|state| {
            if taken < most && !state.is_kept() {
                taken += state.release_at_work(device, most - taken, oldest);
            }
        });
        self.destroy_spare_pages(device);
        self.remove_closed(device);
        self.book_totals();
        before - self.reserved()
    }

    /// Takes `most` bytes of free memory, or a little more, from the pool at work, as far as all work
    /// on it is known to be done. Pages become spare, segments go back to the device. Returns how many
    /// bytes.
    ///
    /// With `oldest`, only what was freed last by the free of that number, and no more than `most`.
    pub(super) fn release_at_work(
        &mut self,
        device: &impl Device,
        most: u64,
        oldest: Option<u64>,
    ) -> u64 {
        match self.page_bytes {
            Some(page_bytes) => {
                let whole = most.checked_next_multiple_of(page_bytes);
                let mut idle = self.idle_pages();
                idle.retain(|(id, _)| self.is_older(*id, oldest));
                self.take_idle_pages(device, idle, whole.unwrap_or(u64::MAX), page_bytes)
            }
            // Freeing a segment waits for the device.
            None if device.is_capturing() => 0,
            None => self.release_segments(device, most, oldest),
        }
    }

    fn is_older(&self, id: NodeId, oldest: Option<u64>) -> bool {
        oldest.is_none_or(|oldest| self.heap.node(id).stamps.tick() <= oldest)
    }

    pub(super) fn destroy_spare_pages(&mut self, device: &impl Device) {
        for page in std::mem::take(&mut self.spare_pages) {
            if device.destroy_page(page).is_ok() {
                self.stats.num_device_free += 1;
            } else {
                self.stats.num_device_errors += 1;
                self.spare_pages.push(page);
            }
        }
    }

    fn release_segments(&mut self, device: &impl Device, most: u64, oldest: Option<u64>) -> u64 {
        let mut idle = self.heap.free_segments();
        idle.retain(|id| self.clocks.finished(&self.heap.node(*id).stamps));
        idle.retain(|id| self.is_older(*id, oldest));
        idle.sort_unstable_by_key(|id| self.heap.node(*id).stamps.tick());
        let mut released = 0;
        for id in idle {
            if released >= most {
                break;
            }
            let node = self.heap.node(id);
            let (ptr, bytes) = (DevicePtr(node.addr), node.bytes);
            if oldest.is_some() && bytes > most - released {
                continue;
            }
            if device.free_segment(ptr).is_ok() {
                released += bytes;
                self.stats.num_device_free += 1;
                self.heap.remove_segment(id);
                self.history
                    .push(TraceAction::SegmentFree, ptr, bytes, StreamSlot::DEFAULT);
            } else {
                self.stats.num_device_errors += 1;
            }
        }
        released
    }

    /// The least that must be given back so that the device and the limit have room for `request`,
    /// where memory comes in segments.
    pub(crate) fn missing_for(&self, device: &impl Device, request: &Request) -> DeviceResult<u64> {
        let needed = request.bytes.next_multiple_of(SEGMENT_GRANULARITY);
        let under_limit = self
            .limit
            .unwrap_or(u64::MAX)
            .saturating_sub(self.reserved());
        Ok(needed.saturating_sub(device.memory_info()?.free_bytes.min(under_limit)))
    }

    /// Bytes that giving back could free at best, work in flight apart.
    pub(crate) fn releasable(&self) -> u64 {
        let mut bytes = self.spare_bytes();
        for (heap, _, _) in self.pools().filter(|(_, _, is_kept)| !is_kept) {
            let pages = heap.free_pages();
            bytes += pages.iter().map(|(_, stretch)| stretch.bytes).sum::<u64>();
            let segments = heap.free_segments();
            bytes += segments.iter().map(|id| heap.node(*id).bytes).sum::<u64>();
        }
        bytes
    }

    /// Gives everything back, live blocks included; what fails is lost with the allocator.
    pub(crate) fn tear_down(&mut self, device: &impl Device) {
        // Errors have nobody left to be told to.
        for event in self.clocks.take_events() {
            let _ = device.destroy_event(event);
        }
        let heaps = self.pools().map(|(heap, _, _)| heap);
        for (_, region) in heaps.flat_map(|heap| heap.regions()) {
            match &region.kind {
                RegionKind::Segment => {
                    let _ = device.free_segment(DevicePtr(region.base));
                }
                RegionKind::Range(pages) => {
                    let page_bytes = self.page_bytes.unwrap_or(0);
                    for (number, page) in pages.iter() {
                        let addr = region.base + number as u64 * page_bytes;
                        let _ = device.unmap_page(DevicePtr(addr));
                        let _ = device.destroy_page(page);
                    }
                    let _ = device.release_range(DevicePtr(region.base), region.bytes);
                }
            }
        }
        for page in self.spare_pages.drain(..) {
            let _ = device.destroy_page(page);
        }
    }
}
