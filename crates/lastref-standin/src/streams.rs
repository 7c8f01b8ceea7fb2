//! Streams, events, captures, and the work on them.
//!
//! Work runs when the simulated device lets it: later, at random, unless something waits for it. Work on a stream that is
//! captured goes into the graph instead, and runs when the graph is launched.
//!
//! # Invariants
//!
//! 1. A stream with a `capture` is one of the `streams` of that capture, and the other way round.
//! 2. The legacy default stream and the streams created to wait for it see each other's work through events, recorded
//!    when work is submitted. Its number is the simulated device's default stream, which waits for nobody by itself.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use lastref_alloc::{Device as _, DeviceIndex, DevicePtr, EventId, Extent2d, FillValue, StreamId};

use crate::abi::{self, Callback, Opaque, Out, StreamCallback};
use crate::entry;
use crate::error::{Code, Outcome};
use crate::state::{Current, State, capture_mode};

/// The handles that name default streams.
const LEGACY: u64 = 1;
const PER_THREAD: u64 = 2;

/// Priorities go from this, served last, to the other, served first.
pub(crate) const LEAST_PRIORITY: i32 = 0;
pub(crate) const GREATEST_PRIORITY: i32 = -5;

#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) device: usize,
    pub(crate) context: u64,
    pub(crate) id: StreamId,
    pub(crate) priority: i32,
    pub(crate) non_blocking: bool,
    pub(crate) capture: Option<u64>,
}

#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) device: usize,
    pub(crate) context: u64,
    pub(crate) id: EventId,
    timed: bool,
    recorded: bool,
    /// Recorded while its stream was captured: the capture, the stream, and how much was on it.
    captured: Option<(u64, u64, usize)>,
}

/// Where work is to be done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct On {
    pub(crate) device: usize,
    pub(crate) context: u64,
    pub(crate) id: StreamId,
    /// The handle, or [`LEGACY`].
    pub(crate) key: u64,
}

/// What a thread's calls may do while something is captured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CaptureMode {
    Global,
    ThreadLocal,
    Relaxed,
}

impl CaptureMode {
    pub(crate) fn from_number(number: i32) -> Result<Self, Code> {
        match number {
            0 => Ok(Self::Global),
            1 => Ok(Self::ThreadLocal),
            2 => Ok(Self::Relaxed),
            _ => Err(Code::INVALID_VALUE),
        }
    }

    pub(crate) const fn number(self) -> i32 {
        match self {
            Self::Global => 0,
            Self::ThreadLocal => 1,
            Self::Relaxed => 2,
        }
    }
}

/// A piece of work.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Op {
    Copy {
        dst: u64,
        src: u64,
        bytes: u64,
    },
    Fill {
        dst: u64,
        value: FillValue,
        extent: Extent2d,
    },
    Kernel,
    Host {
        function: Callback,
        data: Opaque,
    },
}

#[derive(Debug)]
pub(crate) struct Capture {
    origin: u64,
    thread: std::thread::ThreadId,
    mode: CaptureMode,
    ops: Vec<Op>,
    /// The streams that are captured: how much was done on each, and how much of that others have waited for.
    streams: BTreeMap<u64, (usize, usize)>,
    broken: bool,
    pub(crate) graph: u64,
    kept: Vec<(u64, u32)>,
}

#[derive(Clone, Debug)]
pub(crate) struct Graph {
    pub(crate) ops: Arc<[Op]>,
    /// References to objects that live as long as the graph.
    kept: Vec<(u64, u32)>,
}

/// Something of the caller's that goes when nobody refers to it any more.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UserObject {
    destroy: Callback,
    data: Opaque,
    references: u32,
}

thread_local! {
    /// The thread's own default stream on each device.
    static OWN_STREAMS: RefCell<HashMap<usize, u64>> = RefCell::new(HashMap::new());
}

impl State {
    // ---- streams ------------------------------------------------------------------------------------

    /// The stream that a caller's handle means in a context.
    pub(crate) fn stream(&mut self, current: Current, handle: u64) -> Result<On, Code> {
        let own = handle == PER_THREAD || (handle == 0 && entry::is_per_thread());
        let handle = match handle {
            _ if own => self.own_stream(current)?,
            0 | LEGACY => {
                return Ok(On {
                    device: current.device,
                    context: current.context,
                    id: StreamId::DEFAULT,
                    key: LEGACY,
                });
            }
            handle => handle,
        };
        let stream = self.streams.get(&handle).ok_or(Code::INVALID_HANDLE)?;
        Ok(On {
            device: stream.device,
            context: stream.context,
            id: stream.id,
            key: handle,
        })
    }

    fn own_stream(&mut self, current: Current) -> Result<u64, Code> {
        let known = OWN_STREAMS.with_borrow(|streams| streams.get(&current.device).copied());
        if let Some(handle) = known.filter(|handle| self.streams.contains_key(handle)) {
            return Ok(handle);
        }
        let handle = self.create_stream(current, 0, LEAST_PRIORITY)?;
        OWN_STREAMS.with_borrow_mut(|streams| streams.insert(current.device, handle));
        Ok(handle)
    }

    pub(crate) fn create_stream(
        &mut self,
        current: Current,
        flags: u32,
        priority: i32,
    ) -> Result<u64, Code> {
        const NON_BLOCKING: u32 = 1;
        if flags & !NON_BLOCKING != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let priority = priority.clamp(GREATEST_PRIORITY, LEAST_PRIORITY);
        let gpu = &mut self.gpus[current.device];
        let id = gpu.sim.create_stream(priority)?;
        let non_blocking = flags & NON_BLOCKING != 0;
        if !non_blocking {
            gpu.blocking.push(id);
        }
        let handle = self.new_handle();
        let stream = Stream {
            device: current.device,
            context: current.context,
            id,
            priority,
            non_blocking,
            capture: None,
        };
        self.streams.insert(handle, stream);
        Ok(handle)
    }

    pub(crate) fn destroy_stream(&mut self, handle: u64) -> Outcome {
        let stream = self.streams.get(&handle).ok_or(Code::INVALID_HANDLE)?;
        let (device, id, capture) = (stream.device, stream.id, stream.capture);
        if let Some(capture) = capture {
            self.break_capture(capture);
        }
        self.retire_stream(device, id)?;
        let gpu = &mut self.gpus[device];
        gpu.sim.destroy_stream(id)?;
        gpu.blocking.retain(|&other| other != id);
        self.streams.remove(&handle);
        Ok(())
    }

    pub(crate) fn is_stream_idle(&mut self, on: On) -> Result<bool, Code> {
        self.forbid_on(on)?;
        let idle = self.gpus[on.device].sim.query_stream(on.id)?;
        self.check_work(on.device)?;
        Ok(idle)
    }

    pub(crate) fn synchronize_stream(&mut self, on: On) -> Outcome {
        self.forbid_on(on)?;
        // The legacy default stream stands for the streams that wait for it too.
        self.order(on)?;
        self.gpus[on.device].sim.synchronize_stream(on.id)?;
        self.trim_pools(on.device)?;
        self.check_work(on.device)
    }

    pub(crate) fn synchronize_device(&mut self, device: usize) -> Outcome {
        self.forbid_while_capturing()?;
        self.gpus[device].sim.synchronize()?;
        self.trim_pools(device)?;
        self.check_work(device)
    }

    /// Puts work that is about to be submitted behind what it must wait for (invariant 2).
    fn order(&mut self, on: On) -> Outcome {
        let gpu = &self.gpus[on.device];
        let (sim, legacy) = (&gpu.sim, StreamId::DEFAULT);
        let follow = |later: StreamId, earlier: StreamId| -> Outcome {
            let event = sim.create_event()?;
            sim.record_event(event, earlier)?;
            sim.wait_event(later, event)?;
            Ok(sim.destroy_event(event)?)
        };
        if on.id == legacy {
            gpu.blocking
                .iter()
                .try_for_each(|&stream| follow(legacy, stream))
        } else if gpu.blocking.contains(&on.id) {
            follow(on.id, legacy)
        } else {
            Ok(())
        }
    }

    // ---- events -------------------------------------------------------------------------------------

    pub(crate) fn create_event(&mut self, current: Current, flags: u32) -> Result<u64, Code> {
        const DISABLE_TIMING: u32 = 2;
        const INTERPROCESS: u32 = 4;
        if flags & !7 != 0 {
            return Err(Code::INVALID_VALUE);
        }
        if flags & INTERPROCESS != 0 && flags & DISABLE_TIMING == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let id = self.gpus[current.device].sim.create_event()?;
        let handle = self.new_handle();
        let event = Event {
            device: current.device,
            context: current.context,
            id,
            timed: flags & DISABLE_TIMING == 0,
            recorded: false,
            captured: None,
        };
        self.events.insert(handle, event);
        Ok(handle)
    }

    fn event(&self, handle: u64) -> Result<&Event, Code> {
        self.events.get(&handle).ok_or(Code::INVALID_HANDLE)
    }

    pub(crate) fn destroy_event(&mut self, handle: u64) -> Outcome {
        let event = self.events.remove(&handle).ok_or(Code::INVALID_HANDLE)?;
        Ok(self.gpus[event.device].sim.destroy_event(event.id)?)
    }

    pub(crate) fn record_event(&mut self, handle: u64, on: On) -> Outcome {
        let event = self.event(handle)?;
        let (device, id) = (event.device, event.id);
        if device != on.device {
            return Err(Code::INVALID_HANDLE);
        }
        let captured = self.capture_of(on)?;
        let place = captured.and_then(|capture| {
            let (done, _) = self.captures.get(&capture)?.streams.get(&on.key)?;
            Some((capture, on.key, *done))
        });
        if place.is_none() {
            self.order(on)?;
            self.gpus[device].sim.record_event(id, on.id)?;
        }
        if let Some(event) = self.events.get_mut(&handle) {
            event.captured = place;
            event.recorded = true;
        }
        Ok(())
    }

    /// An event that may be asked about or waited for by the host.
    fn plain_event(&self, handle: u64) -> Result<&Event, Code> {
        let event = self.event(handle)?;
        if event.captured.is_some() {
            return Err(Code::CAPTURED_EVENT);
        }
        Ok(event)
    }

    pub(crate) fn is_event_done(&mut self, handle: u64) -> Result<bool, Code> {
        let event = self.plain_event(handle)?;
        let (device, id) = (event.device, event.id);
        self.forbid_while_capturing()?;
        let done = self.gpus[device].sim.query_event(id)?;
        self.check_work(device)?;
        Ok(done)
    }

    pub(crate) fn synchronize_event(&mut self, handle: u64) -> Outcome {
        let event = self.plain_event(handle)?;
        let (device, id) = (event.device, event.id);
        self.forbid_while_capturing()?;
        self.gpus[device].sim.synchronize_event(id)?;
        self.trim_pools(device)?;
        self.check_work(device)
    }

    pub(crate) fn elapsed_milliseconds(&mut self, start: u64, end: u64) -> Result<f32, Code> {
        let (first, last) = (self.plain_event(start)?, self.plain_event(end)?);
        let usable = |event: &Event| event.timed && event.recorded;
        if !usable(first) || !usable(last) || first.device != last.device {
            return Err(Code::INVALID_HANDLE);
        }
        let (device, first, last) = (first.device, first.id, last.id);
        let sim = &self.gpus[device].sim;
        if !sim.query_event(first)? || !sim.query_event(last)? {
            return Err(Code::NOT_READY);
        }
        let microseconds = sim.elapsed_microseconds(first, last)?;
        #[expect(
            clippy::cast_possible_truncation,
            reason = "the C interface has single precision"
        )]
        Ok((microseconds / 1000.0) as f32)
    }

    pub(crate) fn wait_event(&mut self, on: On, handle: u64) -> Outcome {
        let event = self.event(handle)?;
        let (id, captured) = (event.id, event.captured);
        let capture = self.capture_of(on)?;
        let Some((of, from, done)) = captured.filter(|(of, ..)| self.captures.contains_key(of))
        else {
            if capture.is_some() && self.event(handle)?.recorded {
                self.break_capture_of(on);
                return Err(Code::STREAM_CAPTURE_ISOLATION);
            }
            self.order(on)?;
            return Ok(self.gpus[on.device].sim.wait_event(on.id, id)?);
        };
        match capture {
            Some(capture) if capture != of => {
                self.break_capture(of);
                self.break_capture(capture);
                return Err(Code::STREAM_CAPTURE_MERGE);
            }
            Some(_) => {}
            None if on.key == LEGACY => return Err(Code::STREAM_CAPTURE_IMPLICIT),
            // The stream joins the capture.
            None => {
                if let Some(stream) = self.streams.get_mut(&on.key) {
                    stream.capture = Some(of);
                }
            }
        }
        if let Some(capture) = self.captures.get_mut(&of) {
            capture.streams.entry(on.key).or_insert((0, 0)).0 += 1;
            if let Some((_, waited)) = capture.streams.get_mut(&from) {
                *waited = (*waited).max(done);
            }
        }
        Ok(())
    }

    // ---- captures -----------------------------------------------------------------------------------

    /// The capture that a stream takes part in. Fails if that has been broken.
    fn capture_of(&self, on: On) -> Result<Option<u64>, Code> {
        let capture = self.streams.get(&on.key).and_then(|stream| stream.capture);
        let broken = capture
            .and_then(|capture| self.captures.get(&capture))
            .is_some_and(|c| c.broken);
        if broken {
            return Err(Code::STREAM_CAPTURE_INVALIDATED);
        }
        let blocks_legacy = |stream: &Stream| {
            stream.capture.is_some() && !stream.non_blocking && stream.device == on.device
        };
        if on.key == LEGACY && self.streams.values().any(blocks_legacy) {
            return Err(Code::STREAM_CAPTURE_IMPLICIT);
        }
        Ok(capture)
    }

    fn break_capture(&mut self, capture: u64) {
        if let Some(capture) = self.captures.get_mut(&capture) {
            capture.broken = true;
        }
    }

    fn break_capture_of(&mut self, on: On) {
        if let Some(capture) = self.streams.get(&on.key).and_then(|stream| stream.capture) {
            self.break_capture(capture);
        }
    }

    /// Refuses to ask about or wait for a captured stream.
    fn forbid_on(&mut self, on: On) -> Outcome {
        let is_captured = self
            .streams
            .get(&on.key)
            .is_some_and(|stream| stream.capture.is_some());
        if is_captured {
            self.break_capture_of(on);
            return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
        }
        if on.key == LEGACY {
            self.capture_of(on)?;
        }
        Ok(())
    }

    /// Refuses calls that CUDA holds unsafe while something is captured: in global mode all threads', else those of the
    /// thread that captures; none of a thread in relaxed mode.
    pub(crate) fn forbid_while_capturing(&mut self) -> Outcome {
        let mode = capture_mode();
        if self.captures.is_empty() || mode == CaptureMode::Relaxed {
            return Ok(());
        }
        let this = std::thread::current().id();
        let mut forbidden = false;
        for capture in self.captures.values_mut() {
            let own = capture.mode == CaptureMode::ThreadLocal && capture.thread == this;
            let any = capture.mode == CaptureMode::Global
                && (mode == CaptureMode::Global || capture.thread == this);
            if own || any {
                capture.broken = true;
                forbidden = true;
            }
        }
        if forbidden {
            return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
        }
        Ok(())
    }

    pub(crate) fn begin_capture(&mut self, on: On, mode: CaptureMode) -> Outcome {
        let (handle, graph) = (self.new_handle(), self.new_handle());
        // The default stream cannot be captured.
        let stream = self
            .streams
            .get_mut(&on.key)
            .ok_or(Code::STREAM_CAPTURE_UNSUPPORTED)?;
        if stream.capture.is_some() {
            return Err(Code::INVALID_VALUE);
        }
        stream.capture = Some(handle);
        let capture = Capture {
            origin: on.key,
            thread: std::thread::current().id(),
            mode,
            ops: Vec::new(),
            streams: BTreeMap::from([(on.key, (0, 0))]),
            broken: false,
            graph,
            kept: Vec::new(),
        };
        self.captures.insert(handle, capture);
        Ok(())
    }

    pub(crate) fn end_capture(&mut self, on: On) -> Result<u64, Code> {
        let stream = self.streams.get(&on.key).ok_or(Code::INVALID_VALUE)?;
        let handle = stream.capture.ok_or(Code::INVALID_VALUE)?;
        let capture = self.captures.get(&handle).ok_or(Code::INVALID_VALUE)?;
        if capture.origin != on.key {
            self.break_capture(handle);
            return Err(Code::STREAM_CAPTURE_UNMATCHED);
        }
        if capture.mode != CaptureMode::Relaxed && capture.thread != std::thread::current().id() {
            return Err(Code::STREAM_CAPTURE_WRONG_THREAD);
        }
        let Some(capture) = self.captures.remove(&handle) else {
            return Err(Code::INVALID_VALUE);
        };
        for stream in capture.streams.keys() {
            if let Some(stream) = self.streams.get_mut(stream) {
                stream.capture = None;
            }
        }
        if capture.broken {
            return Err(Code::STREAM_CAPTURE_INVALIDATED);
        }
        let is_joined =
            |(stream, (done, waited)): (&u64, &(usize, usize))| *stream == on.key || waited >= done;
        if !capture.streams.iter().all(is_joined) {
            return Err(Code::STREAM_CAPTURE_UNJOINED);
        }
        let graph = Graph {
            ops: capture.ops.into(),
            kept: capture.kept,
        };
        self.graphs.insert(capture.graph, graph);
        Ok(capture.graph)
    }

    /// Whether a stream is captured, and the capture: 0 for no, 1 for yes, 2 for one that was broken.
    pub(crate) fn capture_status(&self, on: On) -> Result<(i32, u64), Code> {
        match self.capture_of(on) {
            Ok(None) => Ok((0, 0)),
            Ok(Some(capture)) => Ok((1, capture)),
            Err(Code::STREAM_CAPTURE_INVALIDATED) => Ok((2, 0)),
            Err(code) => Err(code),
        }
    }

    // ---- work ---------------------------------------------------------------------------------------

    /// Does a piece of work on a stream, or captures it.
    pub(crate) fn submit(&mut self, on: On, op: Op) -> Outcome {
        if let Some(capture) = self.capture_of(on)? {
            if let Some(capture) = self.captures.get_mut(&capture) {
                capture.ops.push(op);
                capture.streams.entry(on.key).or_insert((0, 0)).0 += 1;
            }
            return Ok(());
        }
        self.run(on, op)
    }

    /// Does a piece of work on a stream. Functions of the caller's are not called here.
    pub(crate) fn run(&mut self, on: On, op: Op) -> Outcome {
        self.order(on)?;
        match op {
            Op::Copy { dst, src, bytes } => self.copy(on, dst, src, bytes),
            Op::Fill { dst, value, extent } => self.fill(on, dst, value, extent),
            Op::Kernel => {
                self.kernels_launched += 1;
                Ok(self.gpus[on.device].sim.launch("kernel", &[], 1.0, on.id)?)
            }
            Op::Host { .. } => Ok(()),
        }
    }

    fn copy(&mut self, on: On, dst: u64, src: u64, bytes: u64) -> Outcome {
        if bytes == 0 {
            return Ok(());
        }
        let (to, from) = (self.side(dst), self.side(src));
        let (dst_ptr, src_ptr) = (DevicePtr(dst), DevicePtr(src));
        match (to, from) {
            (Side::Device(to), Side::Device(from)) => self.on_device(on, to, |sim, stream| {
                if to == from {
                    return sim.copy(dst_ptr, src_ptr, bytes, stream);
                }
                let peer = DeviceIndex(u32::try_from(from).unwrap_or(u32::MAX));
                sim.copy_from_peer(dst_ptr, peer, src_ptr, bytes, stream)
            }),
            (Side::Device(to), Side::Lent) => {
                let lent = abi::lent(src, bytes);
                self.on_device(on, to, |sim, stream| {
                    sim.copy_from_lent(dst_ptr, lent, stream)
                })
            }
            (Side::Device(to), Side::Host) => {
                let host = abi::host_slice(src, bytes)?;
                self.on_device(on, to, |sim, stream| {
                    sim.copy_from_host(dst_ptr, host, stream)
                })
            }
            (Side::Lent, Side::Device(from)) => {
                let lent = abi::lent(dst, bytes);
                self.on_device(on, from, |sim, stream| {
                    sim.copy_to_lent(lent, src_ptr, stream)
                })
            }
            (Side::Host, Side::Device(from)) => {
                let host = abi::host_slice_mut(dst, bytes)?;
                self.on_device(on, from, |sim, stream| {
                    sim.copy_to_host(host, src_ptr, stream)
                })
            }
            (Side::Host | Side::Lent, Side::Host | Side::Lent) => {
                self.gpus[on.device].sim.synchronize_stream(on.id)?;
                abi::host_move(dst, src, bytes)
            }
        }
    }

    fn fill(&mut self, on: On, dst: u64, value: FillValue, extent: Extent2d) -> Outcome {
        let rows = extent.height;
        if rows == 0 || extent.width_bytes == 0 {
            return Ok(());
        }
        if let Side::Device(device) = self.side(dst) {
            return self.on_device(on, device, |sim, stream| {
                if rows == 1 {
                    let count = extent.width_bytes / value.bytes();
                    sim.fill(DevicePtr(dst), value, count, stream)
                } else {
                    sim.fill_2d(DevicePtr(dst), value, extent, stream)
                }
            });
        }
        // Pinned memory can be filled too, and nothing else.
        if self.side(dst) != Side::Lent {
            return Err(Code::INVALID_VALUE);
        }
        self.gpus[on.device].sim.synchronize_stream(on.id)?;
        for row in 0..rows {
            let host = abi::host_slice_mut(dst + row * extent.dst_pitch, extent.width_bytes)?;
            match value {
                FillValue::U8(value) => host.fill(value),
                FillValue::U16(value) => repeat(host, value.to_ne_bytes()),
                FillValue::U32(value) => repeat(host, value.to_ne_bytes()),
            }
        }
        Ok(())
    }

    /// Where an address is.
    pub(crate) fn side(&self, address: u64) -> Side {
        match self.region(address) {
            None => Side::Host,
            Some((_, region)) if region.is_host() => Side::Lent,
            Some((_, region)) => Side::Device(region.device),
        }
    }

    /// Does work of a device in the order of a stream, which may be another device's.
    fn on_device(
        &mut self,
        on: On,
        device: usize,
        work: impl FnOnce(&lastref_alloc::sim::SimDevice, StreamId) -> lastref_alloc::DeviceResult<()>,
    ) -> Outcome {
        if device == on.device {
            return Ok(work(&self.gpus[device].sim, on.id)?);
        }
        let helper = match self.gpus[device].helper {
            Some(helper) => helper,
            None => {
                let made = self.gpus[device].sim.create_stream(LEAST_PRIORITY)?;
                *self.gpus[device].helper.insert(made)
            }
        };
        let (ours, theirs) = (&self.gpus[on.device].sim, &self.gpus[device].sim);
        let before = ours.create_event()?;
        ours.record_event(before, on.id)?;
        theirs.wait_event(helper, before)?;
        ours.destroy_event(before)?;
        work(theirs, helper)?;
        let after = theirs.create_event()?;
        theirs.record_event(after, helper)?;
        ours.wait_event(on.id, after)?;
        Ok(theirs.destroy_event(after)?)
    }

    pub(crate) fn instantiate(&mut self, graph: u64) -> Result<u64, Code> {
        let made = self.graph(graph)?.clone();
        for (object, count) in &made.kept {
            self.retain_user_object(*object, *count)?;
        }
        let handle = self.new_handle();
        self.graphs.insert(handle, made);
        Ok(handle)
    }

    /// Returns what is to be called, with no lock held, since nothing refers to it any more.
    pub(crate) fn destroy_graph(&mut self, graph: u64) -> Result<Vec<(Callback, Opaque)>, Code> {
        let gone = self.graphs.remove(&graph).ok_or(Code::INVALID_VALUE)?;
        let mut called = Vec::new();
        for (object, count) in gone.kept {
            called.extend(self.release_user_object(object, count)?);
        }
        Ok(called)
    }

    pub(crate) fn create_user_object(
        &mut self,
        destroy: Callback,
        data: Opaque,
        references: u32,
    ) -> u64 {
        let handle = self.new_handle();
        let object = UserObject {
            destroy,
            data,
            references,
        };
        self.user_objects.insert(handle, object);
        handle
    }

    pub(crate) fn retain_user_object(&mut self, object: u64, count: u32) -> Outcome {
        let object = self
            .user_objects
            .get_mut(&object)
            .ok_or(Code::INVALID_VALUE)?;
        object.references = object
            .references
            .checked_add(count)
            .ok_or(Code::INVALID_VALUE)?;
        Ok(())
    }

    /// As [`destroy_graph`](Self::destroy_graph).
    pub(crate) fn release_user_object(
        &mut self,
        handle: u64,
        count: u32,
    ) -> Result<Vec<(Callback, Opaque)>, Code> {
        let object = self
            .user_objects
            .get_mut(&handle)
            .ok_or(Code::INVALID_VALUE)?;
        object.references = object
            .references
            .checked_sub(count)
            .ok_or(Code::INVALID_VALUE)?;
        if object.references > 0 {
            return Ok(Vec::new());
        }
        let gone = *object;
        self.user_objects.remove(&handle);
        Ok(vec![(gone.destroy, gone.data)])
    }

    /// Lets a graph refer to an object; with `given`, by references that the caller had.
    pub(crate) fn keep_with_graph(
        &mut self,
        graph: u64,
        object: u64,
        count: u32,
        given: bool,
    ) -> Outcome {
        if !self.user_objects.contains_key(&object) {
            return Err(Code::INVALID_VALUE);
        }
        // While it is captured, a graph is not among those that can be launched yet.
        let captured = self
            .captures
            .values_mut()
            .find(|capture| capture.graph == graph);
        let kept = match captured {
            Some(capture) => &mut capture.kept,
            None => &mut self.graphs.get_mut(&graph).ok_or(Code::INVALID_VALUE)?.kept,
        };
        kept.push((object, count));
        if given {
            Ok(())
        } else {
            self.retain_user_object(object, count)
        }
    }

    /// The nodes of a graph: as many as pieces of work, each with a handle of nothing.
    pub(crate) fn graph_nodes(
        &mut self,
        graph: u64,
        nodes: Out<Opaque>,
        count: Out<u64>,
    ) -> Outcome {
        let made = self.graph(graph)?.ops.len();
        if !nodes.is_null() {
            let room = abi::size(count.get()?).min(made);
            for index in 0..room {
                nodes.set_nth(index, graph + 1 + index as u64)?;
            }
        }
        count.set(made as u64)
    }

    /// What launching a graph comes to.
    pub(crate) fn graph(&self, handle: u64) -> Result<&Graph, Code> {
        self.graphs.get(&handle).ok_or(Code::INVALID_VALUE)
    }
}

/// What kind of memory an address is in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Side {
    Device(usize),
    /// Host memory that is pinned: copies may come later.
    Lent,
    Host,
}

fn repeat<const N: usize>(bytes: &mut [u8], pattern: [u8; N]) {
    for chunk in bytes.chunks_exact_mut(N) {
        chunk.copy_from_slice(&pattern);
    }
}

/// A function of the caller's that is to be called once the work on a stream is done. It is called with no lock held.
pub(crate) fn call_host(
    enter: impl Fn(&mut dyn FnMut(&mut State) -> Outcome) -> Outcome,
    on: On,
    function: Callback,
    data: Opaque,
) -> Outcome {
    enter(&mut |state| Ok(state.gpus[on.device].sim.synchronize_stream(on.id)?))?;
    function.call(data);
    Ok(())
}

/// As [`call_host`], for the older kind of function.
pub(crate) fn call_stream_host(
    enter: impl Fn(&mut dyn FnMut(&mut State) -> Outcome) -> Outcome,
    on: On,
    handle: Opaque,
    function: StreamCallback,
    data: Opaque,
) -> Outcome {
    if function.is_none() {
        return Err(Code::INVALID_VALUE);
    }
    enter(&mut |state| Ok(state.gpus[on.device].sim.synchronize_stream(on.id)?))?;
    function.call(handle, data);
    Ok(())
}
