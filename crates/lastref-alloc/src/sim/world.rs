//! The world of a group of simulated devices: their streams and events, the scheduler that runs
//! their work, and the clock.
//!
//! ```text
//! World ── devices ── Memory
//!       │          └─ streams ── queue of work, oldest first
//!       ├─ events ──→ Record, shared with the queued record and the queued waits
//!       └─ rng, clock
//! ```
//!
//! One lock protects all of it. Work runs inside device calls, on the caller's thread: each call
//! runs a random few pieces of pending work before it does its own, and a synchronising call runs
//! what it needs. The same calls in the same order with the same seed run the same work in the
//! same order.
//!
//! # Invariants
//!
//! 1. Work runs once, and the work of one stream in the order of submission.
//! 2. A queued wait names the record that the event had when the wait was submitted. That record
//!    was submitted earlier, and it is finished or still in its stream's queue.
//! 3. `pending` is the number of pieces of work in all queues.
//! 4. A destroyed stream stays until its queue is empty.
//!
//! No deadlock is possible. Work depends only on work submitted before it: the piece ahead of it on
//! its stream (1) and, for a wait, a record (2). The oldest pending piece therefore depends on
//! nothing pending and can run, and no call waits for another thread while it holds the lock.

use std::collections::{BTreeMap, VecDeque};
use std::panic::Location;
use std::sync::{Arc, OnceLock};

use smallvec::SmallVec;

use super::calls::{Call, Cost, Fault, LatencyTable, PerCall};
use super::memory::{HostMemory, Memory, invalid};
use super::races::{Clock, Races, Touched};
use crate::device::{
    DeviceError, DevicePtr, DeviceResult, EventId, Extent2d, FillValue, PageId, StreamId,
};

/// `splitmix64`, small and good enough to choose what runs next.
#[derive(Debug)]
pub(super) struct Rng(pub(super) u64);

impl Rng {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// An index below `len`, which is not 0.
    fn index(&mut self, len: usize) -> usize {
        let drawn = self.next() % len as u64;
        usize::try_from(drawn).unwrap_or(0)
    }
}

/// A stream of a device.
type StreamKey = (usize, StreamId);

/// One recording of an event.
#[derive(Debug)]
struct Record {
    stream: StreamKey,
    /// When it finished, in microseconds of device time.
    finished: OnceLock<f64>,
    /// What it stands for, where races are looked for.
    stands_for: Option<Clock>,
}

impl Record {
    fn is_finished(&self) -> bool {
        self.finished.get().is_some()
    }
}

#[derive(Debug)]
struct Event {
    device: usize,
    record: Option<Arc<Record>>,
}

/// Work on a stream.
#[derive(Clone, Debug)]
enum Work {
    Write {
        dst: DevicePtr,
        bytes: Box<[u8]>,
    },
    WriteLent {
        dst: DevicePtr,
        src: HostMemory,
    },
    ReadLent {
        dst: HostMemory,
        src: DevicePtr,
    },
    Copy {
        dst: DevicePtr,
        from: usize,
        src: DevicePtr,
        extent: Extent2d,
    },
    Fill {
        dst: DevicePtr,
        value: FillValue,
        extent: Extent2d,
    },
    Record {
        record: Arc<Record>,
        /// Queries still to come until it may run by itself.
        late: u32,
    },
    Wait(Arc<Record>),
    Kernel {
        uses: Box<[KernelUse]>,
        microseconds: f64,
    },
}

/// Memory that a [launched](super::SimDevice::launch) kernel uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KernelUse {
    pub(super) ptr: DevicePtr,
    pub(super) bytes: u64,
    pub(super) writes: bool,
}

impl KernelUse {
    /// It reads `bytes` bytes from `ptr`.
    #[must_use]
    pub const fn read(ptr: DevicePtr, bytes: u64) -> Self {
        let writes = false;
        Self { ptr, bytes, writes }
    }

    /// It writes, or reads and writes, `bytes` bytes from `ptr`.
    #[must_use]
    pub const fn write(ptr: DevicePtr, bytes: u64) -> Self {
        let writes = true;
        Self { ptr, bytes, writes }
    }
}

/// Who asks for work, for reports.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    pub(super) call: &'static str,
    pub(super) at: &'static Location<'static>,
    /// Whether it is part of a graph, which may use memory that was freed while it was captured.
    pub(super) in_graph: bool,
}

#[derive(Debug)]
struct Queued {
    call: &'static str,
    work: Work,
    /// When it was submitted, on the clock that also stamps mappings.
    stamp: u64,
    /// The same in microseconds; it does not start before.
    not_before: f64,
}

impl Queued {
    fn is_runnable(&self) -> bool {
        match &self.work {
            Work::Wait(record) => record.is_finished(),
            Work::Record { late, .. } => *late == 0,
            Work::Write { .. }
            | Work::WriteLent { .. }
            | Work::ReadLent { .. }
            | Work::Copy { .. }
            | Work::Fill { .. }
            | Work::Kernel { .. } => true,
        }
    }
}

/// Rows of memory that work uses.
#[derive(Clone, Copy, Debug)]
struct Rows {
    device: usize,
    ptr: DevicePtr,
    extent: Extent2d,
    pitch: u64,
    writes: bool,
}

impl Rows {
    fn read(device: usize, ptr: DevicePtr, extent: Extent2d) -> Self {
        Self {
            device,
            ptr,
            extent,
            pitch: extent.src_pitch,
            writes: false,
        }
    }

    fn write(device: usize, ptr: DevicePtr, extent: Extent2d) -> Self {
        Self {
            device,
            ptr,
            extent,
            pitch: extent.dst_pitch,
            writes: true,
        }
    }
}

/// A piece of work in a graph.
#[derive(Clone, Debug)]
struct Captured {
    call: &'static str,
    uses: SmallVec<[Rows; 2]>,
    work: Work,
}

/// Work of a stream that was captured instead of run, to be run as often as wanted. See
/// [`SimDevice::begin_capture`](super::SimDevice::begin_capture).
#[derive(Clone, Debug)]
pub struct SimGraph {
    device: usize,
    work: Arc<[Captured]>,
}

/// A capture under way.
#[derive(Debug, Default)]
struct Capture {
    work: Vec<Captured>,
    /// The call that must not be made meanwhile, and was.
    broken_by: Option<&'static str>,
}

/// CUDA's `cudaErrorStreamCaptureUnsupported` and `cudaErrorStreamCaptureInvalidated`.
const CAPTURE_UNSUPPORTED: i32 = 900;
const CAPTURE_INVALIDATED: i32 = 901;

#[derive(Debug)]
struct Stream {
    priority: i32,
    /// When what it has done so far was done, in microseconds of device time.
    clock: f64,
    queue: VecDeque<Queued>,
    destroyed: bool,
    /// While it is captured: what would have been queued.
    capture: Option<Capture>,
}

impl Stream {
    fn new(priority: i32) -> Self {
        Self {
            priority,
            clock: 0.0,
            queue: VecDeque::new(),
            destroyed: false,
            capture: None,
        }
    }
}

/// What a device was asked and what it holds. See [`SimDevice::counters`](super::SimDevice::counters).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SimCounters {
    pub(super) calls: PerCall<u64>,
    /// What the calls cost by the latency table, in microseconds.
    pub device_microseconds: f64,
    /// Host time spent inside the calls that move memory or wait, in nanoseconds.
    pub host_nanoseconds: u64,
    /// Physical pages that exist.
    pub pages: u64,
    /// Segments that exist.
    pub segments: u64,
    /// What they take of the device, in bytes.
    pub held_bytes: u64,
    /// The most that they have taken, in bytes, since the counters were reset.
    pub peak_held_bytes: u64,
}

impl SimCounters {
    /// How often `call` was made, including the times it failed.
    #[must_use]
    pub const fn calls(&self, call: Call) -> u64 {
        self.calls.get(call)
    }

    /// How many calls were made.
    #[must_use]
    pub fn total_calls(&self) -> u64 {
        Call::ALL.iter().map(|&call| self.calls(call)).sum()
    }
}

/// One device of the world.
#[derive(Debug)]
pub(super) struct DeviceState {
    pub(super) memory: Memory,
    pub(super) errors: Vec<String>,
    pub(super) faults: Vec<Fault>,
    pub(super) late_queries: u32,
    latencies: LatencyTable,
    max_ops_per_step: u32,
    streams: BTreeMap<StreamId, Stream>,
    calls: PerCall<u64>,
    device_microseconds: f64,
    pub(super) host_nanoseconds: u64,
    peak_held_bytes: u64,
}

impl DeviceState {
    pub(super) fn new(memory: Memory, latencies: LatencyTable, max_ops_per_step: u32) -> Self {
        Self {
            memory,
            errors: Vec::new(),
            faults: Vec::new(),
            late_queries: 0,
            latencies,
            max_ops_per_step,
            streams: BTreeMap::from([(StreamId::DEFAULT, Stream::new(0))]),
            calls: PerCall::all(0),
            device_microseconds: 0.0,
            host_nanoseconds: 0,
            peak_held_bytes: 0,
        }
    }

    pub(super) fn counters(&self) -> SimCounters {
        SimCounters {
            calls: self.calls,
            device_microseconds: self.device_microseconds,
            host_nanoseconds: self.host_nanoseconds,
            pages: self.memory.pages(),
            segments: self.memory.segments(),
            held_bytes: self.memory.held_bytes(),
            peak_held_bytes: self.peak_held_bytes,
        }
    }

    pub(super) fn reset_counters(&mut self) {
        self.calls = PerCall::all(0);
        self.device_microseconds = 0.0;
        self.host_nanoseconds = 0;
        self.peak_held_bytes = self.memory.held_bytes();
    }

    pub(super) fn note_held_bytes(&mut self) {
        self.peak_held_bytes = self.peak_held_bytes.max(self.memory.held_bytes());
    }

    pub(super) fn pending_ops(&self) -> usize {
        self.streams.values().map(|stream| stream.queue.len()).sum()
    }

    /// The stream a call names.
    fn stream(&mut self, call: &'static str, id: StreamId) -> DeviceResult<&mut Stream> {
        self.streams
            .get_mut(&id)
            .filter(|stream| !stream.destroyed)
            .ok_or_else(|| invalid(call, format!("there is no stream {id}")))
    }
}

#[derive(Debug)]
pub(super) struct World {
    pub(super) devices: Vec<DeviceState>,
    events: BTreeMap<EventId, Event>,
    next_stream: u64,
    next_event: u64,
    rng: Rng,
    /// Stamps mappings and submissions in the order they happen.
    stamp: u64,
    /// Host time in microseconds: what calls have cost, and what waiting has been seen to take.
    now: f64,
    pending: usize,
    /// `None` where nobody asked for it.
    pub(super) races: Option<Box<Races>>,
}

impl World {
    pub(super) fn new(devices: Vec<DeviceState>, seed: u64, find_races: bool) -> Self {
        Self {
            devices,
            events: BTreeMap::new(),
            next_stream: 1,
            next_event: 1,
            rng: Rng(seed),
            stamp: 0,
            now: 0.0,
            pending: 0,
            races: find_races.then(|| Box::new(Races::new())),
        }
    }

    /// Begins a device call: counts it, charges for it, fails it if that was asked for, and lets
    /// time pass.
    pub(super) fn begin(&mut self, device: usize, call: Call, bytes: u64) -> DeviceResult<()> {
        let cost = self.devices[device].latencies.call(call);
        self.begin_at(device, call, bytes, cost.microseconds(bytes))
    }

    /// Begins what the device does in one call with what began before: it counts and can fail by
    /// itself, and costs what its size costs.
    pub(super) fn begin_more(&mut self, device: usize, call: Call, bytes: u64) -> DeviceResult<()> {
        let cost = Cost::per_mib(self.devices[device].latencies.call(call).per_mib);
        self.begin_at(device, call, bytes, cost.microseconds(bytes))
    }

    fn begin_at(&mut self, device: usize, call: Call, bytes: u64, cost: f64) -> DeviceResult<()> {
        let state = &mut self.devices[device];
        *state.calls.get_mut(call) += 1;
        state.device_microseconds += cost;
        self.now += cost;
        if let Some(error) = Self::fault(state, call, bytes) {
            return Err(error);
        }
        self.pass_time(device);
        Ok(())
    }

    fn fault(state: &mut DeviceState, call: Call, bytes: u64) -> Option<DeviceError> {
        let mut fired = None;
        state.faults.retain_mut(|fault| {
            if !fault.matches(call) {
                return true;
            }
            if fault.left > 1 {
                fault.left -= 1;
                return true;
            }
            fired.get_or_insert_with(|| fault.clone());
            fault.repeats
        });
        let fault = fired?;
        Some(fault.error(call, state.memory.out_of_memory(call, bytes)))
    }

    /// The next stamp for a mapping or a submission.
    pub(super) fn tick(&mut self) -> u64 {
        self.stamp += 1;
        self.stamp
    }

    // ---- scheduling -----------------------------------------------------------------------

    /// Runs a random few pieces of work that could run, of any stream of any device.
    fn pass_time(&mut self, device: usize) {
        let most = self.devices[device].max_ops_per_step as usize;
        if self.pending == 0 || most == 0 {
            return;
        }
        for _ in 0..self.rng.index(most + 1) {
            if !self.run_any() {
                break;
            }
        }
    }

    /// Runs one piece of work that can run. False if there was none.
    fn run_any(&mut self) -> bool {
        let mut candidates: Vec<StreamKey> = Vec::new();
        for (device, state) in self.devices.iter().enumerate() {
            let ready = |stream: &Stream| stream.queue.front().is_some_and(Queued::is_runnable);
            // Streams with a lower priority number are served first.
            let ready: Vec<_> = state.streams.iter().filter(|(_, s)| ready(s)).collect();
            let first = ready.iter().map(|(_, stream)| stream.priority).min();
            candidates.extend(
                ready
                    .iter()
                    .filter(|(_, stream)| Some(stream.priority) == first)
                    .map(|(id, _)| (device, **id)),
            );
        }
        if candidates.is_empty() {
            return false;
        }
        let chosen = self.rng.index(candidates.len());
        self.run_head(candidates[chosen]);
        true
    }

    /// Runs one piece of pending work, or brings a late event one step nearer where there is
    /// nothing else. False if nothing is pending.
    pub(super) fn step(&mut self) -> bool {
        if self.pending == 0 {
            return false;
        }
        if !self.run_any() {
            let heads = self
                .devices
                .iter_mut()
                .flat_map(|state| state.streams.values_mut())
                .filter_map(|stream| stream.queue.front_mut());
            for queued in heads {
                if let Work::Record { late, .. } = &mut queued.work {
                    *late = late.saturating_sub(1);
                }
            }
        }
        true
    }

    /// Runs what is needed until `stream` has done all its work, other streams' work in between.
    fn finish_stream(&mut self, device: usize, stream: StreamKey) {
        while self.is_busy(stream) {
            self.pass_time(device);
            if let Some(needed) = self.needed_for(stream) {
                self.run_head(needed);
            }
        }
        if let Some(races) = &mut self.races {
            races.host_saw_stream(stream);
        }
        if let Some(stream) = self.devices[stream.0].streams.get(&stream.1) {
            self.now = self.now.max(stream.clock);
        }
    }

    /// Runs what is needed until the device has done all its work.
    pub(super) fn finish_device(&mut self, device: usize) {
        loop {
            let streams = self.devices[device].streams.iter();
            let busy: Vec<_> = streams
                .filter(|(_, stream)| !stream.queue.is_empty())
                .map(|(id, _)| *id)
                .collect();
            if busy.is_empty() {
                break;
            }
            let chosen = self.rng.index(busy.len());
            if let Some(needed) = self.needed_for((device, busy[chosen])) {
                self.run_head(needed);
            }
            self.pass_time(device);
        }
        if let Some(races) = &mut self.races {
            races.host_saw_device(device);
        }
        let clocks = self.devices[device].streams.values().map(|s| s.clock);
        self.now = clocks.fold(self.now, f64::max);
    }

    fn is_busy(&self, (device, id): StreamKey) -> bool {
        let stream = self.devices[device].streams.get(&id);
        stream.is_some_and(|stream| !stream.queue.is_empty())
    }

    /// The stream whose next piece of work must run before `stream` can go on: itself, unless it
    /// waits. Ends, because each step goes to earlier work (see the module).
    fn needed_for(&self, mut stream: StreamKey) -> Option<StreamKey> {
        loop {
            let (device, id) = stream;
            let head = self.devices[device].streams.get(&id)?.queue.front()?;
            match &head.work {
                Work::Wait(record) if !record.is_finished() => stream = record.stream,
                _ => return Some(stream),
            }
        }
    }

    /// Runs the oldest work of a stream. It must not be a wait for something unfinished.
    fn run_head(&mut self, (device, id): StreamKey) {
        let state = &mut self.devices[device];
        let Some(stream) = state.streams.get_mut(&id) else {
            return;
        };
        let Some(queued) = stream.queue.pop_front() else {
            return;
        };
        self.pending -= 1;
        stream.clock = stream.clock.max(queued.not_before);
        let stamp = queued.stamp;
        let outcome = match queued.work {
            Work::Record { record, .. } => {
                // A record runs once, so the time is not set yet.
                let _ = record.finished.set(stream.clock);
                Ok(0.0)
            }
            Work::Wait(record) => {
                let finished = record.finished.get().copied().unwrap_or_default();
                stream.clock = stream.clock.max(finished);
                Ok(0.0)
            }
            Work::Write { dst, bytes } => {
                let cost = state.latencies.host_copy;
                let len = bytes.len() as u64;
                let done = state.memory.write(dst, &bytes, stamp);
                done.map(|()| cost.microseconds(len))
            }
            Work::WriteLent { dst, src } => {
                let cost = state.latencies.host_copy;
                let done = state.memory.write_from(dst, src, stamp);
                done.map(|()| cost.microseconds(src.bytes()))
            }
            Work::ReadLent { dst, src } => {
                let cost = state.latencies.host_copy;
                let done = state.memory.read_to(dst, src, stamp);
                done.map(|()| cost.microseconds(dst.bytes()))
            }
            Work::Fill { dst, value, extent } => {
                let cost = state.latencies.fill;
                let done = state.memory.fill(dst, value, extent, stamp);
                done.map(|()| work_cost(cost, extent))
            }
            Work::Copy {
                dst,
                from,
                src,
                extent,
            } => {
                let cost = if from == device {
                    state.latencies.device_copy
                } else {
                    state.latencies.peer_copy
                };
                let source = &self.devices[from].memory;
                let target = &self.devices[device].memory;
                let done = target.copy(dst, source, src, extent, stamp);
                done.map(|()| work_cost(cost, extent))
            }
            Work::Kernel { uses, microseconds } => {
                let memory = &state.memory;
                let mut uses = uses.iter();
                let checked = uses.try_for_each(|used| memory.check(used.ptr, used.bytes, stamp));
                checked.map(|()| microseconds)
            }
        };
        let state = &mut self.devices[device];
        match outcome {
            Ok(microseconds) => {
                if let Some(stream) = state.streams.get_mut(&id) {
                    stream.clock += microseconds;
                }
            }
            Err(reason) => {
                let call = queued.call;
                state
                    .errors
                    .push(format!("{call} on stream {id}: {reason}"));
            }
        }
        let gone = |stream: &Stream| stream.destroyed && stream.queue.is_empty();
        if state.streams.get(&id).is_some_and(gone) {
            state.streams.remove(&id);
        }
    }

    /// Queues work that uses memory, or adds it to the graph that is captured from the stream.
    fn submit_uses(
        &mut self,
        stream: StreamKey,
        asked: Asked,
        uses: &[Rows],
        work: Work,
    ) -> DeviceResult<()> {
        let capture = &mut self.devices[stream.0].stream(asked.call, stream.1)?.capture;
        if let Some(capture) = capture {
            capture.work.push(Captured {
                call: asked.call,
                uses: uses.into(),
                work,
            });
            return Ok(());
        }
        self.note_uses(stream, asked, uses);
        self.submit(stream, asked.call, work)
    }

    /// Tells the race detector, if there is one, of memory that work on `stream` uses.
    fn note_uses(&mut self, stream: StreamKey, asked: Asked, uses: &[Rows]) {
        let Some(races) = &mut self.races else {
            return;
        };
        let mut touched = Vec::new();
        for used in uses {
            let Rows {
                device,
                ptr,
                extent,
                pitch,
                writes,
            } = *used;
            // Rows without gaps are one range.
            let (rows, bytes) = if pitch == extent.width_bytes {
                (1, extent.width_bytes.saturating_mul(extent.height))
            } else {
                (extent.height, extent.width_bytes)
            };
            for row in 0..rows {
                let ptr = ptr.offset(row * pitch);
                let places = self.devices[device].memory.places(ptr, bytes);
                touched.push(Touched {
                    device,
                    ptr,
                    bytes,
                    writes,
                    places,
                });
            }
        }
        races.used(stream, asked, touched);
    }

    /// Queues work on a stream.
    fn submit(
        &mut self,
        (device, id): StreamKey,
        call: &'static str,
        work: Work,
    ) -> DeviceResult<()> {
        let stamp = self.tick();
        let not_before = self.now;
        let stream = self.devices[device].stream(call, id)?;
        stream.queue.push_back(Queued {
            call,
            work,
            stamp,
            not_before,
        });
        self.pending += 1;
        Ok(())
    }

    // ---- streams and events ---------------------------------------------------------------

    pub(super) fn create_stream(&mut self, device: usize, priority: i32) -> StreamId {
        let id = StreamId(self.next_stream);
        self.next_stream += 1;
        let mut stream = Stream::new(priority);
        stream.clock = self.now;
        self.devices[device].streams.insert(id, stream);
        id
    }

    pub(super) fn destroy_stream(&mut self, device: usize, id: StreamId) -> DeviceResult<()> {
        let call = Call::DestroyStream.name();
        if id == StreamId::DEFAULT {
            return Err(invalid(call, "the default stream cannot be destroyed"));
        }
        self.forbid_on_captured(device, Call::DestroyStream, id)?;
        let state = &mut self.devices[device];
        let stream = state.stream(call, id)?;
        stream.destroyed = true;
        if stream.queue.is_empty() {
            state.streams.remove(&id);
        }
        Ok(())
    }

    pub(super) fn query_stream(&mut self, device: usize, id: StreamId) -> DeviceResult<bool> {
        self.devices[device].stream(Call::QueryStream.name(), id)?;
        self.forbid_while_capturing(device, Call::QueryStream)?;
        let stream = self.devices[device].stream(Call::QueryStream.name(), id)?;
        let done = stream.queue.is_empty();
        let clock = stream.clock;
        if done {
            self.now = self.now.max(clock);
            if let Some(races) = &mut self.races {
                races.host_saw_stream((device, id));
            }
        }
        Ok(done)
    }

    pub(super) fn synchronize_stream(&mut self, device: usize, id: StreamId) -> DeviceResult<()> {
        self.devices[device].stream(Call::SynchronizeStream.name(), id)?;
        self.forbid_while_capturing(device, Call::SynchronizeStream)?;
        self.finish_stream(device, (device, id));
        Ok(())
    }

    pub(super) fn create_event(&mut self, device: usize) -> EventId {
        let id = EventId(self.next_event);
        self.next_event += 1;
        let record = None;
        self.events.insert(id, Event { device, record });
        id
    }

    fn event(&self, call: &'static str, id: EventId) -> DeviceResult<&Event> {
        self.events
            .get(&id)
            .ok_or_else(|| invalid(call, format!("there is no event {}", id.0)))
    }

    /// An event of this very device.
    fn own_event(&self, device: usize, call: &'static str, id: EventId) -> DeviceResult<&Event> {
        let event = self.event(call, id)?;
        if event.device == device {
            Ok(event)
        } else {
            let reason = format!("event {} belongs to device {}", id.0, event.device);
            Err(invalid(call, reason))
        }
    }

    pub(super) fn destroy_event(&mut self, id: EventId) -> DeviceResult<()> {
        self.event(Call::DestroyEvent.name(), id)?;
        self.events.remove(&id);
        Ok(())
    }

    pub(super) fn record_event(
        &mut self,
        device: usize,
        id: EventId,
        stream: StreamId,
    ) -> DeviceResult<()> {
        let call = Call::RecordEvent.name();
        self.own_event(device, call, id)?;
        self.forbid_on_captured(device, Call::RecordEvent, stream)?;
        let races = self.races.as_mut();
        let record = Arc::new(Record {
            stream: (device, stream),
            finished: OnceLock::new(),
            stands_for: races.map(|races| races.recorded((device, stream))),
        });
        let work = Work::Record {
            record: Arc::clone(&record),
            late: self.devices[device].late_queries,
        };
        let is_idle = !self.is_busy((device, stream));
        self.submit((device, stream), call, work)?;
        if let Some(event) = self.events.get_mut(&id) {
            event.record = Some(record);
        }
        // There is nothing to wait for.
        if is_idle && self.devices[device].late_queries == 0 {
            self.run_head((device, stream));
        }
        Ok(())
    }

    pub(super) fn query_event(&mut self, device: usize, id: EventId) -> DeviceResult<bool> {
        self.event(Call::QueryEvent.name(), id)?;
        self.forbid_while_capturing(device, Call::QueryEvent)?;
        let Some(record) = self.event(Call::QueryEvent.name(), id)?.record.clone() else {
            return Ok(true);
        };
        if let Some(&finished) = record.finished.get() {
            self.now = self.now.max(finished);
            self.host_saw(&record);
            return Ok(true);
        }
        let (device, stream) = record.stream;
        let stream = self.devices[device].streams.get_mut(&stream);
        if let Some(head) = stream.and_then(|stream| stream.queue.front_mut())
            && let Work::Record { record: next, late } = &mut head.work
            && Arc::ptr_eq(next, &record)
        {
            *late = late.saturating_sub(1);
        }
        Ok(false)
    }

    fn host_saw(&mut self, record: &Record) {
        if let (Some(races), Some(clock)) = (&mut self.races, &record.stands_for) {
            races.host_saw(clock);
        }
    }

    pub(super) fn synchronize_event(&mut self, device: usize, id: EventId) -> DeviceResult<()> {
        self.event(Call::SynchronizeEvent.name(), id)?;
        self.forbid_while_capturing(device, Call::SynchronizeEvent)?;
        let Some(record) = self
            .event(Call::SynchronizeEvent.name(), id)?
            .record
            .clone()
        else {
            return Ok(());
        };
        loop {
            if let Some(&finished) = record.finished.get() {
                self.now = self.now.max(finished);
                self.host_saw(&record);
                return Ok(());
            }
            self.pass_time(device);
            if !record.is_finished()
                && let Some(needed) = self.needed_for(record.stream)
            {
                self.run_head(needed);
            }
        }
    }

    pub(super) fn wait_event(
        &mut self,
        device: usize,
        stream: StreamId,
        id: EventId,
    ) -> DeviceResult<()> {
        let call = Call::WaitEvent.name();
        self.forbid_on_captured(device, Call::WaitEvent, stream)?;
        match self.event(call, id)?.record.clone() {
            Some(record) => {
                if let (Some(races), Some(clock)) = (&mut self.races, &record.stands_for) {
                    races.waits((device, stream), clock);
                }
                self.submit((device, stream), call, Work::Wait(record))
            }
            None => Ok(()),
        }
    }

    pub(super) fn elapsed_microseconds(
        &self,
        device: usize,
        start: EventId,
        end: EventId,
    ) -> DeviceResult<f64> {
        let call = Call::ElapsedMicroseconds.name();
        let finished = |id: EventId| {
            let event = self.own_event(device, call, id)?;
            let record = event
                .record
                .as_ref()
                .ok_or_else(|| invalid(call, format!("event {} is not recorded", id.0)))?;
            let time = record.finished.get().copied();
            time.ok_or_else(|| invalid(call, format!("event {} is not finished", id.0)))
        };
        Ok(finished(end)? - finished(start)?)
    }

    // ---- moving bytes ---------------------------------------------------------------------

    fn check(
        &self,
        device: usize,
        call: &'static str,
        ptr: DevicePtr,
        bytes: u64,
    ) -> DeviceResult<()> {
        let checked = self.devices[device].memory.check(ptr, bytes, u64::MAX);
        checked.map_err(|reason| invalid(call, reason))
    }

    pub(super) fn copy_from_host(
        &mut self,
        device: usize,
        dst: DevicePtr,
        src: &[u8],
        stream: StreamId,
        at: &'static Location<'static>,
    ) -> DeviceResult<()> {
        let call = Call::CopyFromHost.name();
        self.devices[device].stream(call, stream)?;
        self.check(device, call, dst, src.len() as u64)?;
        if src.is_empty() {
            return Ok(());
        }
        let row = Extent2d::one_row(src.len() as u64);
        let uses = [Rows::write(device, dst, row)];
        let bytes = Box::from(src);
        let asked = Asked {
            call,
            at,
            in_graph: false,
        };
        self.submit_uses((device, stream), asked, &uses, Work::Write { dst, bytes })
    }

    pub(super) fn copy_to_host(
        &mut self,
        device: usize,
        dst: &mut [u8],
        src: DevicePtr,
        stream: StreamId,
        at: &'static Location<'static>,
    ) -> DeviceResult<()> {
        let call = Call::CopyToHost.name();
        self.devices[device].stream(call, stream)?;
        self.check(device, call, src, dst.len() as u64)?;
        self.forbid_while_capturing(device, Call::CopyToHost)?;
        if !dst.is_empty() {
            let row = Extent2d::one_row(dst.len() as u64);
            let uses = [Rows::read(device, src, row)];
            self.note_uses(
                (device, stream),
                Asked {
                    call,
                    at,
                    in_graph: false,
                },
                &uses,
            );
        }
        self.finish_stream(device, (device, stream));
        let state = &mut self.devices[device];
        let read = state.memory.read(dst, src, u64::MAX);
        read.map_err(|reason| invalid(call, reason))?;
        let cost = state.latencies.host_copy.microseconds(dst.len() as u64);
        let now = self.now;
        let stream = state.stream(call, stream)?;
        stream.clock = stream.clock.max(now) + cost;
        self.now = stream.clock;
        Ok(())
    }

    /// A copy between device memory at `ptr` and lent host memory.
    pub(super) fn copy_lent(
        &mut self,
        (device, stream): StreamKey,
        asked: Asked,
        ptr: DevicePtr,
        lent: HostMemory,
        to_host: bool,
    ) -> DeviceResult<()> {
        self.devices[device].stream(asked.call, stream)?;
        self.check(device, asked.call, ptr, lent.bytes())?;
        if lent.bytes() == 0 {
            return Ok(());
        }
        let row = Extent2d::one_row(lent.bytes());
        let (used, work) = if to_host {
            let work = Work::ReadLent {
                dst: lent,
                src: ptr,
            };
            (Rows::read(device, ptr, row), work)
        } else {
            let work = Work::WriteLent {
                dst: ptr,
                src: lent,
            };
            (Rows::write(device, ptr, row), work)
        };
        self.submit_uses((device, stream), asked, &[used], work)
    }

    /// Copies rows from device `from`.
    pub(super) fn copy_rows(
        &mut self,
        (device, stream): StreamKey,
        asked: Asked,
        dst: DevicePtr,
        from: usize,
        src: DevicePtr,
        extent: Extent2d,
    ) -> DeviceResult<()> {
        let call = asked.call;
        self.devices[device].stream(call, stream)?;
        if from >= self.devices.len() {
            let reason = format!("there is no device {from}, only {}", self.devices.len());
            return Err(invalid(call, reason));
        }
        let wrong = |reason| invalid(call, reason);
        let to_span = extent.span(extent.dst_pitch).map_err(wrong)?;
        let from_span = extent.span(extent.src_pitch).map_err(wrong)?;
        self.check(device, call, dst, to_span)?;
        self.check(from, call, src, from_span)?;
        if to_span == 0 {
            return Ok(());
        }
        if from == device && extent.rows_overlap(dst, src) {
            let reason = format!("{to_span} bytes at {dst} and {from_span} at {src} overlap");
            return Err(invalid(call, reason));
        }
        let uses = [
            Rows::read(from, src, extent),
            Rows::write(device, dst, extent),
        ];
        let work = Work::Copy {
            dst,
            from,
            src,
            extent,
        };
        self.submit_uses((device, stream), asked, &uses, work)
    }

    /// Fills rows.
    pub(super) fn fill_rows(
        &mut self,
        (device, stream): StreamKey,
        asked: Asked,
        dst: DevicePtr,
        value: FillValue,
        extent: Extent2d,
    ) -> DeviceResult<()> {
        let call = asked.call;
        self.devices[device].stream(call, stream)?;
        let wrong = |reason| invalid(call, reason);
        extent.check_fill(dst, value).map_err(wrong)?;
        let bytes = extent.span(extent.dst_pitch).map_err(wrong)?;
        self.check(device, call, dst, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        let uses = [Rows::write(device, dst, extent)];
        let work = Work::Fill { dst, value, extent };
        self.submit_uses((device, stream), asked, &uses, work)
    }

    /// Queues a kernel.
    pub(super) fn launch(
        &mut self,
        (device, stream): StreamKey,
        asked: Asked,
        uses: &[KernelUse],
        microseconds: f64,
    ) -> DeviceResult<()> {
        self.devices[device].stream(asked.call, stream)?;
        self.pass_time(device);
        for used in uses {
            self.check(device, asked.call, used.ptr, used.bytes)?;
        }
        let noted: Vec<_> = uses
            .iter()
            .filter(|used| used.bytes > 0)
            .map(|used| {
                let row = Extent2d::one_row(used.bytes);
                if used.writes {
                    Rows::write(device, used.ptr, row)
                } else {
                    Rows::read(device, used.ptr, row)
                }
            })
            .collect();
        let uses = Box::from(uses);
        let work = Work::Kernel { uses, microseconds };
        self.submit_uses((device, stream), asked, &noted, work)
    }

    // ---- graphs -------------------------------------------------------------------------------

    pub(super) fn is_capturing(&self, device: usize) -> bool {
        let mut streams = self.devices[device].streams.values();
        streams.any(|stream| stream.capture.is_some())
    }

    pub(super) fn begin_capture(&mut self, device: usize, id: StreamId) -> DeviceResult<()> {
        let call = "begin_capture";
        let stream = self.devices[device].stream(call, id)?;
        if stream.capture.is_some() {
            return Err(invalid(call, format!("stream {id} is captured already")));
        }
        stream.capture = Some(Capture::default());
        Ok(())
    }

    pub(super) fn end_capture(&mut self, device: usize, id: StreamId) -> DeviceResult<SimGraph> {
        let call = "end_capture";
        let stream = self.devices[device].stream(call, id)?;
        let Some(capture) = stream.capture.take() else {
            return Err(invalid(call, format!("stream {id} is not being captured")));
        };
        match capture.broken_by {
            Some(broken_by) => Err(DeviceError::Driver {
                call,
                code: CAPTURE_INVALIDATED,
                text: format!("{broken_by} was called while the stream was captured"),
            }),
            None => Ok(SimGraph {
                device,
                work: capture.work.into(),
            }),
        }
    }

    pub(super) fn launch_graph(
        &mut self,
        (device, stream): StreamKey,
        graph: &SimGraph,
        at: &'static Location<'static>,
    ) -> DeviceResult<()> {
        let call = "launch_graph";
        self.devices[device].stream(call, stream)?;
        if graph.device != device {
            let reason = format!("the graph belongs to device {}", graph.device);
            return Err(invalid(call, reason));
        }
        self.pass_time(device);
        for captured in &*graph.work {
            let asked = Asked {
                call: captured.call,
                at,
                in_graph: true,
            };
            let work = captured.work.clone();
            self.submit_uses((device, stream), asked, &captured.uses, work)?;
        }
        Ok(())
    }

    /// What asks or waits for the device breaks the captures under way, and fails.
    pub(super) fn forbid_while_capturing(&mut self, device: usize, call: Call) -> DeviceResult<()> {
        let streams = self.devices[device].streams.values_mut();
        Self::break_captures(streams.filter_map(|stream| stream.capture.as_mut()), call)
    }

    /// So does what orders a captured stream, which this device cannot put into a graph.
    fn forbid_on_captured(&mut self, device: usize, call: Call, id: StreamId) -> DeviceResult<()> {
        let stream = self.devices[device].stream(call.name(), id)?;
        Self::break_captures(stream.capture.iter_mut(), call)
    }

    fn break_captures<'a>(
        captures: impl Iterator<Item = &'a mut Capture>,
        call: Call,
    ) -> DeviceResult<()> {
        let mut result = Ok(());
        for capture in captures {
            capture.broken_by.get_or_insert(call.name());
            result = Err(DeviceError::Driver {
                call: call.name(),
                code: CAPTURE_UNSUPPORTED,
                text: "operation not permitted when stream is capturing".to_owned(),
            });
        }
        result
    }

    // ---- taking memory away, and blocks on it, for the race detector -------------------------

    pub(super) fn note_unmapping(&mut self, device: usize, ptr: DevicePtr) {
        let memory = &self.devices[device].memory;
        if let Some(races) = &mut self.races {
            let places = memory.places(ptr, super::memory::PAGE_BYTES);
            races.taken_away(device, Call::UnmapPage.name(), &places);
        }
    }

    pub(super) fn destroy_page(&mut self, device: usize, page: PageId) -> DeviceResult<()> {
        let memory = &mut self.devices[device].memory;
        let place = memory.place_of_page(page);
        memory.destroy_page(page)?;
        if let (Some(races), Some(place)) = (&mut self.races, place) {
            races.forget(device, &place);
        }
        Ok(())
    }

    pub(super) fn note_freeing_segment(&mut self, device: usize, ptr: DevicePtr) {
        let place = self.devices[device].memory.place_of_segment(ptr);
        if let (Some(races), Some(place)) = (&mut self.races, place) {
            races.taken_away(device, Call::FreeSegment.name(), &[place]);
            races.forget(device, &place);
        }
    }
}

fn work_cost(cost: Cost, extent: Extent2d) -> f64 {
    cost.microseconds(extent.width_bytes.saturating_mul(extent.height))
}
