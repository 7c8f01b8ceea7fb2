//! When freed memory may be used again: stamps and stream clocks.
//!
//! Work on a stream is done in order, so memory freed on stream *s* may be given to stream *s* at
//! once: whatever the new owner submits comes later. Another stream must know first that *s* has
//! passed the point of the free. Each free takes a number from one counter (the tick) and stamps
//! the memory with *(stream, tick)*; each stream's clock says up to which tick its work is known to
//! be done. A stamp is *covered* for stream *t* if it names *t* itself or its clock has passed it.
//!
//! Clocks advance by events, recorded lazily: one on the old stream, only when somebody else wants
//! the memory, never at a free. An event recorded at tick *n* covers every stamp up to *n*. While
//! work is captured into a graph nothing is recorded, queried or waited for: clocks stand still.
//!
//! # Invariants
//!
//! 1. `done <= tick` for every clock, and an event's tick lies between `done` and the counter.
//! 2. A retired stream (one about to be destroyed) takes no stamp past the tick of its retirement:
//!    no work can have been submitted to it later.
//! 3. Slots are never used again, as stream identifiers are not.

use std::collections::HashMap;

use smallvec::SmallVec;

use crate::device::{Device, DeviceResult, EventId, StreamId};

/// A stream's position in [`Clocks`].
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct StreamSlot(u32);

impl StreamSlot {
    /// The slot of [`StreamId::DEFAULT`].
    pub(crate) const DEFAULT: Self = Self(0);

    pub(crate) const fn index(self) -> u32 {
        self.0
    }
}

/// The streams that use a piece of memory, and up to which tick.
///
/// Of memory that is held: the stream it was allocated on, first, and those it was recorded on, all
/// at tick 0. Of memory that is free: the latest free on each stream, the latest of all first.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub(crate) struct Stamps {
    slot: StreamSlot,
    tick: u64,
    /// Rarely any. A pointer, not to make every node of the heap larger.
    #[expect(clippy::box_collection, reason = "a node must fit a cache line")]
    others: Option<Box<Vec<(StreamSlot, u64)>>>,
}

impl Stamps {
    /// Of memory held for `slot`.
    pub(crate) const fn held(slot: StreamSlot) -> Self {
        Self {
            slot,
            tick: 0,
            others: None,
        }
    }

    /// The first stream: of memory held or pending, the one it was allocated on.
    pub(crate) const fn slot(&self) -> StreamSlot {
        self.slot
    }

    /// When memory was freed last, roughly: finished frees may have been forgotten. 0 for memory
    /// that never was in use.
    pub(crate) const fn tick(&self) -> u64 {
        self.tick
    }

    /// Adds a stream that uses the memory while it is held.
    pub(crate) fn record(&mut self, slot: StreamSlot) {
        if !self.iter().any(|(other, _)| other == slot) {
            self.others.get_or_insert_default().push((slot, 0));
        }
    }

    /// Forgets all but the first stream.
    pub(crate) fn forget_others(&mut self) {
        self.others = None;
    }

    /// The first stream, its tick, and whether there are no others.
    #[inline]
    pub(crate) const fn first(&self) -> (StreamSlot, u64, bool) {
        (self.slot, self.tick, self.others.is_none())
    }

    /// Adds a stamp of the first stream. False, and nothing is done, if it is of another.
    #[inline]
    pub(crate) fn merge_same(&mut self, (slot, tick): (StreamSlot, u64)) -> bool {
        let is_same = slot == self.slot;
        if is_same {
            self.tick = self.tick.max(tick);
        }
        is_same
    }

    /// Adds a stamp; of two of one stream the later one stays. A stamp that is `finished` says
    /// nothing, and is not kept beside others: it would go with the memory for ever.
    fn add(
        &mut self,
        (slot, tick): (StreamSlot, u64),
        finished: &impl Fn(StreamSlot, u64) -> bool,
    ) {
        let others = self.others.iter_mut().flat_map(|others| others.iter_mut());
        let own = std::iter::once((self.slot, &mut self.tick));
        let mut all = own.chain(others.map(|(slot, tick)| (*slot, tick)));
        if let Some((_, latest)) = all.find(|(other, _)| *other == slot) {
            *latest = tick.max(*latest);
        } else if tick > 0 && finished(self.slot, self.tick) {
            (self.slot, self.tick) = (slot, tick);
        } else if tick > 0 && !finished(slot, tick) {
            self.others.get_or_insert_default().push((slot, tick));
        }
    }

    /// Adds all of another's stamps, as merging two blocks does.
    pub(crate) fn merge(&mut self, other: &Self, finished: &impl Fn(StreamSlot, u64) -> bool) {
        for stamp in other.iter() {
            self.add(stamp, finished);
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (StreamSlot, u64)> + '_ {
        let others = self.others.iter().flat_map(|others| others.iter().copied());
        std::iter::once((self.slot, self.tick)).chain(others)
    }
}

/// A stream that has work of freed memory in flight.
#[derive(Clone, Debug)]
pub(crate) struct Behind {
    slot: StreamSlot,
    stream: StreamId,
    last_event: Option<(EventId, u64)>,
    tick: u64,
}

impl Behind {
    /// Waits on the device. To be called with no lock held; then [`Clocks::caught_up`].
    pub(crate) fn wait(&self, device: &impl Device) -> DeviceResult<()> {
        match self.last_event {
            Some((event, _)) => device.synchronize_event(event),
            None => device.synchronize_stream(self.stream),
        }
    }
}

#[derive(Debug)]
struct Clock {
    stream: StreamId,
    /// Every stamp of this stream up to this tick is known to be done.
    done: u64,
    /// The latest stamp given out for this stream.
    stamped: u64,
    /// The event in flight on this stream, and the tick at which it was recorded.
    event: Option<(EventId, u64)>,
    /// The tick at which the stream was retired.
    retired: Option<u64>,
}

/// All streams of one device, and the counter.
#[derive(Debug)]
pub(crate) struct Clocks {
    tick: u64,
    clocks: Vec<Clock>,
    slots: HashMap<StreamId, StreamSlot>,
    /// Finished events, kept since making one costs a device call.
    idle_events: Vec<EventId>,
    /// For tests of what finds races: every stamp counts as covered.
    #[cfg(any(test, feature = "test-util"))]
    unchecked: bool,
}

impl Clocks {
    pub(crate) fn new() -> Self {
        let mut clocks = Self {
            tick: 0,
            clocks: Vec::new(),
            slots: HashMap::new(),
            idle_events: Vec::new(),
            #[cfg(any(test, feature = "test-util"))]
            unchecked: false,
        };
        clocks.insert(StreamId::DEFAULT);
        clocks
    }

    fn insert(&mut self, stream: StreamId) -> StreamSlot {
        let slot = StreamSlot(u32::try_from(self.clocks.len()).expect("under 2^32 streams exist"));
        self.clocks.push(Clock {
            stream,
            done: 0,
            stamped: 0,
            event: None,
            retired: None,
        });
        self.slots.insert(stream, slot);
        slot
    }

    /// The slot of `stream`. A stream seen for the first time is looked up on the device, so that
    /// one that does not exist is refused here and not at some later free.
    #[inline]
    pub(crate) fn slot(
        &mut self,
        device: &impl Device,
        stream: StreamId,
    ) -> DeviceResult<StreamSlot> {
        if stream == StreamId::DEFAULT {
            return Ok(StreamSlot::DEFAULT);
        }
        if let Some(slot) = self.slots.get(&stream) {
            return Ok(*slot);
        }
        // While work is captured nothing may be asked; the stream is taken on trust.
        if !device.is_capturing() {
            device.query_stream(stream)?;
        }
        Ok(self.insert(stream))
    }

    pub(crate) fn stream(&self, slot: StreamSlot) -> StreamId {
        self.clock(slot).stream
    }

    #[inline]
    fn clock(&self, slot: StreamSlot) -> &Clock {
        &self.clocks[slot.0 as usize]
    }

    #[inline]
    fn clock_mut(&mut self, slot: StreamSlot) -> &mut Clock {
        &mut self.clocks[slot.0 as usize]
    }

    /// Stamps memory that is freed now with the streams that use it.
    #[inline]
    pub(crate) fn stamp(&mut self, uses: &mut Stamps) {
        self.tick += 1;
        uses.tick = self.stamp_one(uses.slot);
        for (slot, tick) in uses.others.iter_mut().flat_map(|others| others.iter_mut()) {
            *tick = self.stamp_one(*slot);
        }
    }

    #[inline]
    fn stamp_one(&mut self, slot: StreamSlot) -> u64 {
        let now = self.tick;
        let clock = self.clock_mut(slot);
        let tick = clock.retired.unwrap_or(now);
        clock.stamped = clock.stamped.max(tick);
        tick
    }

    /// Whether the work of `slot` up to `tick` is known to be done.
    #[inline]
    pub(crate) fn is_done(&self, slot: StreamSlot, tick: u64) -> bool {
        self.clock(slot).done >= tick
    }

    /// Takes every stamp as covered from now on.
    #[cfg(any(test, feature = "test-util"))]
    pub(crate) const fn disable_check(&mut self) {
        self.unchecked = true;
    }

    /// Whether memory with these stamps may be given to `slot` now.
    #[inline]
    pub(crate) fn covered(&self, stamps: &Stamps, slot: StreamSlot) -> bool {
        #[cfg(any(test, feature = "test-util"))]
        if self.unchecked {
            return true;
        }
        if stamps.others.is_none() && stamps.slot == slot {
            return true;
        }
        stamps
            .iter()
            .all(|(user, tick)| user == slot || self.clock(user).done >= tick)
    }

    /// Whether all work on memory with these stamps is known to be done.
    pub(crate) fn finished(&self, stamps: &Stamps) -> bool {
        stamps
            .iter()
            .all(|(user, tick)| self.clock(user).done >= tick)
    }

    /// Streams whose stamps are not all known to be done, and how to wait for each.
    pub(crate) fn behind(&self) -> SmallVec<[Behind; 4]> {
        let behind = self
            .clocks
            .iter()
            .enumerate()
            .filter(|(_, clock)| clock.done < clock.stamped);
        behind
            .map(|(slot, clock)| {
                #[expect(
                    clippy::cast_possible_truncation,
                    reason = "`insert` checked the count"
                )]
                let slot = StreamSlot(slot as u32);
                // A retired stream may be gone; its last event is in flight until it is done.
                let last_event = clock.event.filter(|_| clock.retired.is_some());
                Behind {
                    slot,
                    stream: clock.stream,
                    last_event,
                    tick: clock.stamped,
                }
            })
            .collect()
    }

    /// Notes that [`Behind::wait`] has returned for this stream.
    pub(crate) fn caught_up(&mut self, behind: &Behind) {
        self.advance(behind.slot, behind.tick);
    }

    /// Notes that the work of `slot` up to `tick` is done.
    fn advance(&mut self, slot: StreamSlot, tick: u64) {
        let clock = self.clock_mut(slot);
        clock.done = clock.done.max(tick);
    }

    /// Asks the device how far each stream has come, save `except`: queries the event in flight,
    /// and records one where stamps wait for none. Returns whether any clock advanced. Does not
    /// wait.
    pub(crate) fn poll(
        &mut self,
        device: &impl Device,
        except: Option<StreamSlot>,
    ) -> DeviceResult<bool> {
        let mut advanced = false;
        for behind in self.behind() {
            if Some(behind.slot) != except {
                advanced |= self.poll_one(device, behind.slot)?;
            }
        }
        Ok(advanced)
    }

    pub(crate) fn poll_one(
        &mut self,
        device: &impl Device,
        slot: StreamSlot,
    ) -> DeviceResult<bool> {
        let mut advanced = false;
        if device.is_capturing() {
            return Ok(false);
        }
        // Twice at most: an event that is done may have been recorded before the latest stamp.
        for _ in 0..2 {
            let event = match self.clock(slot).event {
                Some(event) => event,
                None => self.record(device, slot)?,
            };
            if !device.query_event(event.0)? {
                break;
            }
            self.clock_mut(slot).event = None;
            self.idle_events.push(event.0);
            self.advance(slot, event.1);
            advanced = true;
            if self.clock(slot).done >= self.clock(slot).stamped {
                break;
            }
        }
        Ok(advanced)
    }

    fn record(&mut self, device: &impl Device, slot: StreamSlot) -> DeviceResult<(EventId, u64)> {
        let event = match self.idle_events.pop() {
            Some(event) => event,
            None => device.create_event()?,
        };
        if let Err(error) = device.record_event(event, self.clock(slot).stream) {
            self.idle_events.push(event);
            return Err(error);
        }
        let recorded = (event, self.clock(slot).retired.unwrap_or(self.tick));
        self.clock_mut(slot).event = Some(recorded);
        Ok(recorded)
    }

    /// Closes a stream's books before it is destroyed: a last event covers all that was submitted
    /// to it, and later frees of memory used on it are stamped no later than that.
    pub(crate) fn retire(&mut self, device: &impl Device, stream: StreamId) -> DeviceResult<()> {
        let Some(&slot) = self.slots.get(&stream) else {
            return Ok(());
        };
        if self.clock(slot).retired.is_some() {
            return Ok(());
        }
        if let Some((event, _)) = self.clock_mut(slot).event.take() {
            self.idle_events.push(event);
        }
        // A tick of its own: blocks that are live now are stamped with it when they are freed, and
        // no earlier event may cover that.
        self.tick += 1;
        self.record(device, slot)?;
        let tick = self.tick;
        let clock = self.clock_mut(slot);
        clock.retired = Some(tick);
        clock.stamped = tick;
        Ok(())
    }

    /// Whether a stream may no longer be used for new allocations.
    #[inline]
    pub(crate) fn is_retired(&self, slot: StreamSlot) -> bool {
        self.clock(slot).retired.is_some()
    }

    /// Takes out all events, to be destroyed with the allocator.
    pub(crate) fn take_events(&mut self) -> Vec<EventId> {
        let mut events = std::mem::take(&mut self.idle_events);
        events.extend(
            self.clocks
                .iter_mut()
                .filter_map(|clock| clock.event.take())
                .map(|e| e.0),
        );
        events
    }

    /// Checks invariant 1; returns what is wrong.
    pub(crate) fn check(&self) -> Result<(), String> {
        for clock in &self.clocks {
            if clock.done > self.tick || clock.stamped > self.tick {
                return Err(format!(
                    "clock of stream {} is ahead of the counter",
                    clock.stream
                ));
            }
            if let Some((_, tick)) = clock.event
                && tick > self.tick
            {
                return Err(format!(
                    "event of stream {} is ahead of the counter",
                    clock.stream
                ));
            }
        }
        Ok(())
    }
}
