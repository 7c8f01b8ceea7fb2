//! What is tried, in this order, when the free lists have nothing for a request: the steps before the
//! heap grows, which are the first rungs of the [ladder](crate::ladder).
//!
//! Each step is counted, with what it gave and how long it took, and stays in `State::tried` until the
//! next attempt that comes so far.

use std::time::Instant;

use super::{Miss, Request, State};
use crate::clock::{Stamps, StreamSlot};
use crate::device::Device;
use crate::heap::NodeId;
use crate::ladder::{Rung, RungOutcome, RungReport, microseconds};
use crate::options::StreamWaits;
use crate::state::PoolId;
use crate::stats::PoolKind;

/// What waiting on the device has given.
enum Ordered {
    /// A block.
    Found(NodeId),
    /// Free memory beside which less is missing.
    Less,
    Nothing,
}

impl State {
    /// The steps after the free lists.
    #[inline(never)]
    pub(super) fn attempt_after_miss(
        &mut self,
        device: &impl Device,
        request: &Request,
        may_wait: bool,
    ) -> Result<NodeId, Miss> {
        self.tried.clear();
        self.look_after(device);
        let started = Instant::now();
        // What threads keep is of the default pool.
        let drained = self.on(PoolId::DEFAULT, Self::drain_caches);
        if drained == 0 {
            self.note_skipped(Rung::ThreadCaches, "they are empty");
        } else {
            self.note_tried(Rung::ThreadCaches, started, Ok(drained));
            if let Some(node) = self.search(device, request) {
                return Ok(node);
            }
        }
        if let Some(node) = self.ask_streams(device, request) {
            return Ok(node);
        }
        if self.num_closed > 0 {
            self.drain_closed(device);
        }
        let grown = self.wait_or_grow(device, request, may_wait);
        self.book_totals();
        grown
    }

    /// Asks the device how far the other streams have come, and searches again.
    fn ask_streams(&mut self, device: &impl Device, request: &Request) -> Option<NodeId> {
        if !self.clocks.others_are_behind(request.stream) {
            self.note_skipped(Rung::FinishedEvents, "no other stream uses freed memory");
            return None;
        }
        let started = Instant::now();
        let found = match self.clocks.poll(device, Some(request.stream)) {
            Ok(true) => self.search(device, request),
            Ok(false) => None,
            Err(_) => {
                // Not knowing is not a reason to fail: the memory is taken as still in use.
                self.stats.num_device_errors += 1;
                None
            }
        };
        let given = found.map_or(0, |_| request.bytes);
        self.note_tried(Rung::FinishedEvents, started, Ok(given));
        found
    }

    fn wait_or_grow(
        &mut self,
        device: &impl Device,
        request: &Request,
        may_wait: bool,
    ) -> Result<NodeId, Miss> {
        let mut has_waited = !self.may_wait_on_device(device, request);
        if !has_waited
            && self.stream_waits == StreamWaits::BeforeGrowing
            && self.would_pass_slack(device, request)
        {
            has_waited = true;
            if let Ordered::Found(node) = self.wait_on_device(device, request) {
                return Ok(node);
            }
        }
        let grown = self.grow(device, request, may_wait);
        match grown {
            Err(Miss::Full | Miss::Busy { is_full: true }) if !has_waited => {
                match self.wait_on_device(device, request) {
                    Ordered::Found(node) => Ok(node),
                    Ordered::Less => self.grow(device, request, may_wait),
                    Ordered::Nothing => grown,
                }
            }
            grown => grown,
        }
    }

    fn grow(
        &mut self,
        device: &impl Device,
        request: &Request,
        may_wait: bool,
    ) -> Result<NodeId, Miss> {
        match self.page_bytes {
            Some(page_bytes) => self.grow_range(device, request, page_bytes, may_wait),
            None => self.grow_segments(device, request),
        }
    }

    // ---- waiting on the device -----------------------------------------------------------------

    fn may_wait_on_device(&mut self, device: &impl Device, request: &Request) -> bool {
        let reason = if !self.clocks.others_are_behind(request.stream) {
            "no other stream uses freed memory"
        } else if self.stream_waits == StreamWaits::Never {
            "stream_waits is never"
        } else if device.is_capturing() {
            "work is being captured into a graph"
        } else {
            return true;
        };
        self.note_skipped(Rung::StreamWaits, reason);
        false
    }

    /// Makes the stream of `request` wait for those that use a free block that is large enough: one for
    /// which events are in flight already, if there is one, since their work is the oldest. Else for
    /// those that a pending block of its own was recorded on, else for those that use free memory
    /// beside which less would be missing.
    fn wait_on_device(&mut self, device: &impl Device, request: &Request) -> Ordered {
        let started = Instant::now();
        let (clocks, pool) = (&self.clocks, PoolKind::for_size(request.bytes));
        let can_wait =
            |early| move |stamps: &Stamps| clocks.can_wait(stamps, request.stream, early);
        let found = [true, false]
            .iter()
            .find_map(|early| self.heap.find(pool, request.bytes, can_wait(*early)));
        let pending = self.pending.iter().map(|id| self.heap.node(*id));
        let pending = pending
            .filter(|node| node.pool == pool && node.bytes >= request.bytes)
            .filter(|node| node.stamps.slot() == request.stream && can_wait(false)(&node.stamps))
            .min_by_key(|node| node.bytes);
        let (stamps, given) = if let Some(node) = found {
            (vec![self.heap.node(node).stamps.clone()], request.bytes)
        } else if let Some(node) = pending {
            (vec![node.stamps.clone()], request.bytes)
        } else {
            let missing = self
                .plan(device, request)
                .map_or(0, |growth| growth.missing);
            let growth = self.heap.plan(pool, request.bytes, can_wait(false));
            let growth = growth.filter(|growth| {
                growth.missing < missing && growth.missing <= self.obtainable(device)
            });
            let Some(growth) = growth else {
                const REASON: &str = "no free block of another stream is large enough";
                self.note_skipped(Rung::StreamWaits, REASON);
                return Ordered::Nothing;
            };
            (self.heap.stamps_in(&growth), missing - growth.missing)
        };
        for stamps in &stamps {
            let (count, result) = self.clocks.make_wait(device, stamps, request.stream);
            self.stats.num_stream_waits += count;
            if let Err(error) = result {
                self.stats.num_device_errors += 1;
                self.note_tried(Rung::StreamWaits, started, Err(error.to_string()));
                return Ordered::Nothing;
            }
        }
        self.note_tried(Rung::StreamWaits, started, Ok(given));
        // What was pending for this stream is free for it now.
        self.sweep_pending(device);
        match self.search(device, request) {
            Some(node) => Ordered::Found(node),
            None => Ordered::Less,
        }
    }

    // ---- foreign streams -----------------------------------------------------------------------

    /// Notes that others may destroy this stream without a word: an event is recorded at each free on it
    /// from now on.
    pub(crate) fn set_foreign(&mut self, device: &impl Device, slot: StreamSlot) {
        self.close_caches();
        self.clocks.set_foreign(slot);
        self.look_after(device);
    }

    // ---- counting ------------------------------------------------------------------------------

    /// Counts a rung that ran.
    pub(crate) fn count_rung(
        &mut self,
        rung: Rung,
        started: Instant,
        result: Result<u64, String>,
    ) -> RungReport {
        let time = started.elapsed();
        let totals = self.stats.rungs.entry(rung.clone()).or_default();
        totals.add(result.as_ref().copied(), time);
        let (outcome, bytes_freed) = match result {
            Ok(bytes) => (RungOutcome::Tried, bytes),
            Err(text) => (RungOutcome::Failed(text), 0),
        };
        RungReport {
            rung,
            outcome,
            bytes_freed,
            microseconds: microseconds(time),
        }
    }

    pub(super) fn note_tried(&mut self, rung: Rung, started: Instant, result: Result<u64, String>) {
        let report = self.count_rung(rung, started, result);
        self.tried.push(report);
    }

    pub(super) fn note_skipped(&mut self, rung: Rung, reason: &'static str) {
        self.tried.push(RungReport::skipped(rung, reason));
    }

    /// What the latest attempt tried that found nothing.
    pub(crate) fn take_tried(&mut self) -> Vec<RungReport> {
        std::mem::take(&mut self.tried)
    }
}
