//! When freed memory may be used again: stamps and stream clocks.
//!
//! Work on a stream is done in order, so memory freed on stream *s* may be given to stream *s* at
//! once: whatever the new owner submits comes later. Another stream must know first that *s* has
//! passed the point of the free. Each free takes a number from one counter (the tick) and stamps
//! the memory with *(stream, tick)*. What is known about a stamp is one of three:
//!
//! ```text
//!   done      the host has seen that the work of s up to the tick is finished    for every stream
//!   ordered   t waits, on the device, for the work of s up to the tick           for t alone
//!   neither   the memory may be in use
//! ```
//!
//! *Done* is one number a stream, *ordered* a matrix: for each stream, up to which tick of each other
//! one its later work comes. An event recorded on *s* stands for all that *s* has so far and for
//! all that *s* comes after: its [`Reach`]. A stream that waits for it learns the reach, and so does
//! the host that sees it finished. So what is known goes on from stream to stream.
//!
//! The allocator's own events are recorded lazily, one on the old stream, only when somebody else wants
//! the memory. On a **foreign** stream, which may be destroyed by others at any time, one is recorded
//! at each free instead. The program's events and waits are learned where they go through the
//! allocator. While work is captured into a graph nothing is recorded, queried or waited for, and nothing
//! is learned: captured work runs later, and on any stream. So what is only ordered is not given
//! out then.
//!
//! # Invariants
//!
//! 1. `done <= tick` for every clock, and so is each number of a reach.
//! 2. A retired stream (one about to be destroyed) takes no stamp past the tick of its retirement:
//!    no work can have been submitted to it later.
//! 3. Slots are never used again, as stream identifiers are not.
//! 4. A reach is taken before its event is recorded, and learned after the wait for it was submitted
//!    or has ended, under one hold of the state's lock or for an event that was not recorded again
//!    meanwhile. So it never says more than the device does.

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

    /// The slot of that index.
    pub(crate) const fn at(index: u32) -> Self {
        Self(index)
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

    /// Forgets other streams than the first, where they are done.
    #[inline]
    pub(crate) fn forget_finished(&mut self, finished: impl Fn(StreamSlot, u64) -> bool) {
        if let Some(others) = &mut self.others {
            others.retain(|(slot, tick)| !finished(*slot, *tick));
            if others.is_empty() {
                self.others = None;
            }
        }
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

/// For each stream by its slot: up to which tick its work comes earlier. Nothing where it ends.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub(crate) struct Reach(Vec<u64>);

impl Reach {
    fn tick(&self, slot: StreamSlot) -> u64 {
        self.0.get(slot.0 as usize).copied().unwrap_or(0)
    }

    fn raise(&mut self, slot: StreamSlot, tick: u64) {
        let at = slot.0 as usize;
        if self.0.len() <= at {
            self.0.resize(at + 1, 0);
        }
        self.0[at] = self.0[at].max(tick);
    }

    fn join(&mut self, other: &Self) {
        for (slot, tick) in other.iter() {
            self.raise(slot, tick);
        }
    }

    fn iter(&self) -> impl Iterator<Item = (StreamSlot, u64)> + '_ {
        (0..).map(StreamSlot).zip(self.0.iter().copied())
    }
}

/// How to wait for a stream that has work of freed memory in flight.
#[derive(Clone, Copy, Debug)]
enum Way {
    Stream(StreamId),
    /// Of a stream that may be gone: its last event, in flight until it is done.
    Event(EventId),
    /// Of a stream that was destroyed before its last event could be recorded.
    Device,
}

/// A stream that has work of freed memory in flight.
#[derive(Clone, Debug)]
pub(crate) struct Behind {
    slot: StreamSlot,
    way: Way,
    reach: Reach,
}

impl Behind {
    /// Waits on the device. To be called with no lock held; then [`Clocks::caught_up`].
    pub(crate) fn wait(&self, device: &impl Device) -> DeviceResult<()> {
        match self.way {
            Way::Stream(stream) => device.synchronize_stream(stream),
            Way::Event(event) => device.synchronize_event(event),
            Way::Device => device.synchronize(),
        }
    }
}

/// An event of the allocator's own in flight.
#[derive(Clone, Debug)]
struct InFlight {
    event: EventId,
    reach: Reach,
}

#[derive(Debug)]
struct Clock {
    stream: StreamId,
    /// Every stamp of this stream up to this tick is known to be done.
    done: u64,
    /// The latest stamp given out for this stream.
    stamped: u64,
    /// No stamp is later. The tick at which the stream was retired; else the highest there is.
    last: u64,
    /// In the order of recording. One; on a foreign stream two, of which the later one moves on.
    events: SmallVec<[InFlight; 1]>,
    /// What work submitted to this stream from now on comes after, by waits on the device.
    after: Reach,
    /// Others may destroy it without a word.
    is_foreign: bool,
    /// Others have destroyed it: nothing can be recorded on it.
    is_gone: bool,
}

impl Clock {
    const fn is_retired(&self) -> bool {
        self.last != u64::MAX
    }
}

/// What one of the program's events stands for.
#[derive(Debug)]
struct Noted {
    /// Which recording, of all.
    number: u64,
    reach: Reach,
}

/// All streams of one device, and the counter.
#[derive(Debug)]
pub(crate) struct Clocks {
    tick: u64,
    clocks: Vec<Clock>,
    slots: HashMap<StreamId, StreamSlot>,
    /// Finished events, kept since making one costs a device call.
    idle_events: Vec<EventId>,
    /// The program's events that were recorded through the allocator.
    noted: HashMap<EventId, Noted>,
    num_noted: u64,
    /// Whether a stamp was given out for a foreign stream, and no event was recorded since.
    is_event_due: bool,
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
            noted: HashMap::new(),
            num_noted: 0,
            is_event_due: false,
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
            last: u64::MAX,
            events: SmallVec::new(),
            after: Reach::default(),
            is_foreign: false,
            is_gone: false,
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

    /// The tick of the latest free.
    pub(crate) const fn tick(&self) -> u64 {
        self.tick
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
        let tick = now.min(clock.last);
        clock.stamped = clock.stamped.max(tick);
        let is_foreign = clock.is_foreign;
        self.is_event_due |= is_foreign;
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
    pub(crate) fn covered(&self, device: &impl Device, stamps: &Stamps, slot: StreamSlot) -> bool {
        #[cfg(any(test, feature = "test-util"))]
        if self.unchecked {
            return true;
        }
        if stamps.others.is_none() && stamps.slot == slot {
            return true;
        }
        self.covers_others(device, stamps, slot)
    }

    #[inline(never)]
    fn covers_others(&self, device: &impl Device, stamps: &Stamps, slot: StreamSlot) -> bool {
        let mut is_done = true;
        let is_ordered = stamps.iter().all(|(user, tick)| {
            let known = user == slot || self.is_done(user, tick);
            is_done &= known;
            known || self.clock(slot).after.tick(user) >= tick
        });
        is_done || is_ordered && !device.is_capturing()
    }

    /// Whether work on memory with these stamps is known to be done, that of `slot` apart.
    #[inline]
    pub(crate) fn others_are_done(&self, stamps: &Stamps, slot: StreamSlot) -> bool {
        #[cfg(any(test, feature = "test-util"))]
        if self.unchecked {
            return true;
        }
        stamps.others.is_none() && stamps.slot == slot
            || stamps
                .iter()
                .all(|(user, tick)| user == slot || self.is_done(user, tick))
    }

    /// Whether all work on memory with these stamps is known to be done.
    pub(crate) fn finished(&self, stamps: &Stamps) -> bool {
        stamps.iter().all(|(user, tick)| self.is_done(user, tick))
    }

    fn all_slots(&self) -> impl Iterator<Item = StreamSlot> + use<> {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "`insert` checked the count"
        )]
        (0..self.clocks.len() as u32).map(StreamSlot)
    }

    fn is_behind(&self, slot: StreamSlot) -> bool {
        let clock = self.clock(slot);
        clock.done < clock.stamped
    }

    /// Whether a stream other than `slot` may still use freed memory.
    pub(crate) fn others_are_behind(&self, slot: StreamSlot) -> bool {
        self.all_slots()
            .any(|other| other != slot && self.is_behind(other))
    }

    /// Streams whose stamps are not all known to be done, and how to wait for each.
    pub(crate) fn behind(&self) -> SmallVec<[Behind; 4]> {
        let behind = self.all_slots().filter(|slot| self.is_behind(*slot));
        behind
            .map(|slot| {
                let clock = self.clock(slot);
                let last = clock.events.last();
                let last = last.filter(|last| last.reach.tick(slot) >= clock.stamped);
                let (way, reach) = match last {
                    Some(last) if clock.is_retired() || clock.is_foreign => {
                        (Way::Event(last.event), last.reach.clone())
                    }
                    _ if clock.is_gone => {
                        let mut reach = Reach::default();
                        reach.raise(slot, clock.stamped);
                        (Way::Device, reach)
                    }
                    _ => (Way::Stream(clock.stream), self.reach(slot)),
                };
                Behind { slot, way, reach }
            })
            .collect()
    }

    /// Notes that [`Behind::wait`] has returned for this stream.
    pub(crate) fn caught_up(&mut self, behind: &Behind) {
        debug_assert!(behind.reach.tick(behind.slot) <= self.tick);
        self.finish(&behind.reach);
    }

    /// What an event stands for that is recorded on `slot` now.
    fn reach(&self, slot: StreamSlot) -> Reach {
        let clock = self.clock(slot);
        let mut reach = clock.after.clone();
        reach.raise(slot, self.tick.min(clock.last));
        reach
    }

    /// Notes that all that `reach` stands for is done.
    fn finish(&mut self, reach: &Reach) {
        for (slot, tick) in reach.iter() {
            let clock = self.clock_mut(slot);
            clock.done = clock.done.max(tick);
        }
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
        for slot in self.all_slots() {
            // An earlier one may have told.
            if Some(slot) != except && self.is_behind(slot) {
                advanced |= self.poll_one(device, slot)?;
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
        if !self.is_behind(slot) || device.is_capturing() {
            return Ok(false);
        }
        // Twice at most: an event that is done may have been recorded before the latest stamp.
        for _ in 0..2 {
            if self.clock(slot).events.is_empty() && !self.record(device, slot)? {
                break;
            }
            let event = self.clock(slot).events[0].event;
            if !device.query_event(event)? {
                break;
            }
            let InFlight { event, reach } = self.clock_mut(slot).events.remove(0);
            self.idle_events.push(event);
            self.finish(&reach);
            advanced = true;
            if !self.is_behind(slot) {
                break;
            }
        }
        Ok(advanced)
    }

    /// Records an event on a stream. False if that is gone.
    fn record(&mut self, device: &impl Device, slot: StreamSlot) -> DeviceResult<bool> {
        if self.clock(slot).is_gone {
            return Ok(false);
        }
        let reach = self.reach(slot);
        let event = self.record_new(device, slot)?;
        self.clock_mut(slot).events.push(InFlight { event, reach });
        Ok(true)
    }

    fn record_new(&mut self, device: &impl Device, slot: StreamSlot) -> DeviceResult<EventId> {
        let event = match self.idle_events.pop() {
            Some(event) => event,
            None => device.create_event()?,
        };
        if let Err(error) = device.record_event(event, self.clock(slot).stream) {
            self.idle_events.push(event);
            return Err(error);
        }
        Ok(event)
    }

    // ---- waiting on the device -----------------------------------------------------------------

    /// Whether [`make_wait`](Self::make_wait) can order the work on memory with these stamps before
    /// that of `slot`; if `early`, by events that are in flight already.
    pub(crate) fn can_wait(&self, stamps: &Stamps, slot: StreamSlot, early: bool) -> bool {
        stamps.iter().all(|(user, tick)| {
            self.is_known(user, tick, slot)
                || self.event_for(user, tick).is_some()
                || !early && !self.clock(user).is_gone
        })
    }

    /// Whether the work of `user` up to `tick` comes before what is submitted to `slot` from now on.
    fn is_known(&self, user: StreamSlot, tick: u64, slot: StreamSlot) -> bool {
        user == slot || self.is_done(user, tick) || self.clock(slot).after.tick(user) >= tick
    }

    /// The oldest event in flight that stands for the work of `slot` up to `tick`.
    fn event_for(&self, slot: StreamSlot, tick: u64) -> Option<&InFlight> {
        let mut events = self.clock(slot).events.iter();
        events.find(|event| event.reach.tick(slot) >= tick)
    }

    /// Makes `slot` wait, on the device, for the work on memory with these stamps. Returns how many
    /// waits were submitted, also where one more could not be.
    pub(crate) fn make_wait(
        &mut self,
        device: &impl Device,
        stamps: &Stamps,
        slot: StreamSlot,
    ) -> (u64, DeviceResult<()>) {
        let mut count = 0;
        for (user, tick) in stamps.iter() {
            if self.is_known(user, tick, slot) {
                continue;
            }
            if let Err(error) = self.make_wait_for(device, user, tick, slot) {
                return (count, Err(error));
            }
            count += 1;
        }
        (count, Ok(()))
    }

    fn make_wait_for(
        &mut self,
        device: &impl Device,
        user: StreamSlot,
        tick: u64,
        slot: StreamSlot,
    ) -> DeviceResult<()> {
        let stream = self.clock(slot).stream;
        let reach = match self.event_for(user, tick).cloned() {
            Some(InFlight { event, reach }) => {
                device.wait_event(stream, event)?;
                reach
            }
            None => {
                let reach = self.reach(user);
                let event = self.record_new(device, user)?;
                // The wait holds, whatever the event is used for next.
                let waits = device.wait_event(stream, event);
                self.idle_events.push(event);
                waits?;
                reach
            }
        };
        self.clock_mut(slot).after.join(&reach);
        Ok(())
    }

    // ---- streams that end ----------------------------------------------------------------------

    /// Notes that others may destroy this stream at any time.
    pub(crate) fn set_foreign(&mut self, slot: StreamSlot) {
        let clock = self.clock_mut(slot);
        clock.is_foreign = true;
        let is_behind = clock.done < clock.stamped;
        self.is_event_due |= is_behind;
    }

    pub(crate) fn is_foreign(&self, slot: StreamSlot) -> bool {
        self.clock(slot).is_foreign
    }

    pub(crate) const fn is_event_due(&self) -> bool {
        self.is_event_due
    }

    /// Records an event on each foreign stream that was given a stamp since its last one. Returns how
    /// many could not be: such a stream is taken as gone, save while work is captured.
    pub(crate) fn record_due(&mut self, device: &impl Device) -> u64 {
        let mut num_failed = 0;
        if device.is_capturing() {
            return 0;
        }
        self.is_event_due = false;
        for slot in self.all_slots() {
            let clock = self.clock(slot);
            let recorded = clock.events.last().map(|last| last.reach.tick(slot));
            let is_due = clock.stamped > clock.done.max(recorded.unwrap_or(0));
            if !clock.is_foreign || clock.is_gone || clock.is_retired() || !is_due {
                continue;
            }
            // The first one stays, so that it is done some day; the second moves on.
            let moving = clock.events.get(1).map(|second| second.event);
            let recorded = match moving {
                Some(event) => {
                    let reach = self.reach(slot);
                    let recorded = device.record_event(event, self.stream(slot));
                    recorded.map(|()| self.clock_mut(slot).events[1].reach = reach)
                }
                None => self.record(device, slot).map(|_| ()),
            };
            if recorded.is_err() {
                num_failed += 1;
                self.clock_mut(slot).is_gone = true;
            }
        }
        num_failed
    }

    /// Closes a stream's books before it is destroyed: a last event covers all that was submitted
    /// to it, and later frees of memory used on it are stamped no later than that.
    pub(crate) fn retire(&mut self, device: &impl Device, stream: StreamId) -> DeviceResult<()> {
        let Some(&slot) = self.slots.get(&stream) else {
            return Ok(());
        };
        if self.clock(slot).is_retired() {
            return Ok(());
        }
        let events = std::mem::take(&mut self.clock_mut(slot).events);
        self.idle_events
            .extend(events.iter().map(|last| last.event));
        // A tick of its own: blocks that are live now are stamped with it when they are freed, and
        // no earlier event may cover that.
        self.tick += 1;
        self.record(device, slot)?;
        let tick = self.tick;
        let clock = self.clock_mut(slot);
        clock.last = tick;
        clock.stamped = tick;
        Ok(())
    }

    /// Whether a stream may no longer be used for new allocations.
    #[inline]
    pub(crate) fn is_retired(&self, slot: StreamSlot) -> bool {
        self.clock(slot).is_retired()
    }

    // ---- the program's own events ----------------------------------------------------------------

    /// Records one of the program's events.
    pub(crate) fn note_record(
        &mut self,
        device: &impl Device,
        event: EventId,
        stream: StreamId,
    ) -> DeviceResult<()> {
        self.noted.remove(&event);
        if device.is_capturing() {
            return device.record_event(event, stream);
        }
        let slot = self.slot(device, stream)?;
        let reach = self.reach(slot);
        device.record_event(event, stream)?;
        self.num_noted += 1;
        let number = self.num_noted;
        self.noted.insert(event, Noted { number, reach });
        Ok(())
    }

    /// Makes a stream wait for one of the program's events.
    pub(crate) fn note_wait(
        &mut self,
        device: &impl Device,
        stream: StreamId,
        event: EventId,
    ) -> DeviceResult<()> {
        if device.is_capturing() {
            return device.wait_event(stream, event);
        }
        let slot = self.slot(device, stream)?;
        device.wait_event(stream, event)?;
        if let Some(noted) = self.noted.get(&event) {
            self.clocks[slot.0 as usize].after.join(&noted.reach);
        }
        Ok(())
    }

    /// Which recording of an event is the latest.
    pub(crate) fn recording(&self, event: EventId) -> Option<u64> {
        self.noted.get(&event).map(|noted| noted.number)
    }

    /// Notes that an event was seen finished: this recording of it.
    pub(crate) fn note_finished(&mut self, event: EventId, recording: Option<u64>) {
        if recording.is_some() && recording == self.recording(event) {
            let reach = self.noted[&event].reach.clone();
            self.finish(&reach);
        }
    }

    pub(crate) fn forget_event(&mut self, event: EventId) {
        self.noted.remove(&event);
    }

    /// What there is to learn from waiting for a stream, or for all of them.
    pub(crate) fn reach_of(&self, stream: Option<StreamId>) -> Reach {
        let mut reach = Reach::default();
        for slot in self.all_slots() {
            if stream.is_none_or(|stream| stream == self.stream(slot)) {
                reach.join(&self.reach(slot));
            }
        }
        reach
    }

    /// Notes that what a stream had is done.
    pub(crate) fn note_done(&mut self, reach: &Reach) {
        self.finish(reach);
    }

    // ---- the end -------------------------------------------------------------------------------

    /// Takes out all events, to be destroyed with the allocator.
    pub(crate) fn take_events(&mut self) -> Vec<EventId> {
        let mut events = std::mem::take(&mut self.idle_events);
        for clock in &mut self.clocks {
            events.extend(clock.events.drain(..).map(|in_flight| in_flight.event));
        }
        events
    }

    /// Checks invariant 1; returns what is wrong.
    pub(crate) fn check(&self) -> Result<(), String> {
        for clock in &self.clocks {
            let reaches = clock.events.iter().map(|event| &event.reach);
            let reaches = reaches.chain([&clock.after]);
            let latest = reaches.flat_map(Reach::iter).map(|(_, tick)| tick).max();
            let latest = latest.unwrap_or(0).max(clock.done).max(clock.stamped);
            if latest > self.tick {
                return Err(format!(
                    "clock of stream {} is ahead of the counter",
                    clock.stream
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_merged_frees_on_one_stream_the_later_one_stays() {
        let (own, other) = (StreamSlot(1), StreamSlot(2));
        let stamps = |others: &[(StreamSlot, u64)]| {
            let mut stamps = Stamps::default();
            (stamps.slot, stamps.tick) = (own, 5);
            for stamp in others {
                stamps.add(*stamp, &|_, _| false);
            }
            stamps
        };
        let merged = |mut first: Stamps, second: &Stamps| {
            first.merge(second, &|_, _| false);
            first.iter().collect::<Vec<_>>()
        };
        let (early, late) = (stamps(&[(other, 7)]), stamps(&[(other, 9)]));
        let wanted = [(own, 5), (other, 9)];
        assert_eq!(merged(early.clone(), &late), wanted);
        assert_eq!(merged(late, &early), wanted);
    }

    /// While the host waits for an event, others may record it again.
    #[test]
    fn an_event_that_was_recorded_again_says_nothing_of_what_it_stood_for() {
        let mut clocks = Clocks::new();
        let event = EventId(1);
        let mut reach = Reach::default();
        reach.raise(StreamSlot::DEFAULT, 1);
        clocks.tick = 1;
        clocks.noted.insert(event, Noted { number: 1, reach });
        let before = clocks.recording(event);
        if let Some(noted) = clocks.noted.get_mut(&event) {
            noted.number = 2;
        }
        clocks.note_finished(event, before);
        assert!(!clocks.is_done(StreamSlot::DEFAULT, 1));
        clocks.note_finished(event, clocks.recording(event));
        assert!(clocks.is_done(StreamSlot::DEFAULT, 1));
        clocks.note_finished(EventId(2), None);
    }
}
