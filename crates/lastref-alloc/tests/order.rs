//! Which stream is known to come after which: by the program's waits, by waits that the allocator
//! inserts, by events that were seen finished; and streams that others destroy without a word.
#![expect(clippy::unwrap_used, reason = "an error here is a failed test")]
#![cfg(target_os = "linux")]

use std::cell::RefCell;

use lastref_alloc::ladder::{Rung, RungOutcome};
use lastref_alloc::sim::{Call, Fault, KernelUse, SimDevice, SimOptions};
use lastref_alloc::{
    AllocError, AllocatorOptions, Backing, Block, CachingAllocator, CheckLevel, Device, EventId,
    StreamId, StreamWaits,
};

const MIB: u64 = 1 << 20;
const S0: StreamId = StreamId::DEFAULT;

type Allocator = CachingAllocator<SimDevice>;

/// A device that does nothing until it is waited for, and an allocator on each kind of memory that never
/// waits by itself.
struct Gpu {
    device: SimDevice,
    allocator: Allocator,
    streams: [StreamId; 3],
    /// Blocks that were given and are in nobody's way.
    kept: RefCell<Vec<Block<SimDevice>>>,
}

impl Gpu {
    fn new(capacity: u64, options: AllocatorOptions) -> Self {
        let sim = SimOptions::new(capacity).with_races(true);
        let device = SimDevice::new(sim.with_max_ops_per_step(0)).unwrap();
        let streams = [(); 3].map(|()| device.create_stream(0).unwrap());
        let options = options.with_wait_before_growing(false);
        Self {
            allocator: CachingAllocator::with_options(device.clone(), &options),
            device,
            streams,
            kept: RefCell::default(),
        }
    }

    fn each(capacity: u64, waits: StreamWaits) -> [Self; 2] {
        [Backing::Auto, Backing::Segments].map(|backing| {
            let options = AllocatorOptions::new().with_backing(backing);
            Self::new(capacity, options.with_stream_waits(waits))
        })
    }

    fn take(&self, mib: u64, stream: StreamId) -> Block<SimDevice> {
        let block = self.allocator.alloc(mib * MIB, stream).unwrap();
        self.work(&block, stream);
        block
    }

    fn work(&self, block: &Block<SimDevice>, stream: StreamId) {
        let used = KernelUse::write(block.ptr(), block.requested_bytes());
        self.device.launch("kernel", &[used], 5.0, stream).unwrap();
    }

    /// A block that its stream still works on is freed. Returns where it was.
    fn freed(&self, mib: u64, stream: StreamId) -> u64 {
        self.take(mib, stream).ptr().0
    }

    /// Whether the memory at `at` is given to `stream`, which then uses it and frees it. Other memory it
    /// keeps.
    fn gives(&self, at: u64, mib: u64, stream: StreamId) -> bool {
        let block = self.take(mib, stream);
        let is_given = block.ptr().0 == at;
        if !is_given {
            self.kept.borrow_mut().push(block);
        }
        is_given
    }

    fn recorded(&self, stream: StreamId) -> EventId {
        let event = self.device.create_event().unwrap();
        self.allocator.record_event(event, stream).unwrap();
        event
    }

    fn waits(&self, stream: StreamId, other: StreamId) {
        let event = self.recorded(other);
        self.allocator.wait_event(stream, event).unwrap();
        self.allocator.destroy_event(event).unwrap();
    }

    fn calls(&self, call: Call) -> u64 {
        self.device.counters().calls(call)
    }

    fn end(self) {
        self.kept.borrow_mut().clear();
        self.allocator.check_invariants(CheckLevel::Device).unwrap();
        assert!(self.device.races().is_empty(), "{}", self.device.races()[0]);
        self.allocator.empty_cache().unwrap();
        assert_eq!(self.device.counters().held_bytes, 0);
        assert_eq!(self.device.errors(), Vec::<String>::new());
    }
}

#[test]
fn memory_goes_to_a_stream_that_waits_for_the_one_it_was_freed_on() {
    for gpu in Gpu::each(1 << 30, StreamWaits::Never) {
        let [a, b, c] = gpu.streams;
        let at = gpu.freed(40, a);
        assert!(!gpu.gives(at, 40, b), "b does not wait");
        gpu.waits(b, a);
        let queries = gpu.calls(Call::QueryEvent);
        assert!(gpu.gives(at, 40, b), "b waits");
        assert_eq!(gpu.calls(Call::QueryEvent), queries, "nobody has to ask");
        assert!(!gpu.gives(at, 40, c), "c does not");
        gpu.end();
    }
}

#[test]
fn what_a_stream_comes_after_goes_on_to_those_that_wait_for_it() {
    for gpu in Gpu::each(1 << 30, StreamWaits::Never) {
        let [a, b, c] = gpu.streams;
        let at = gpu.freed(40, a);
        gpu.waits(b, a);
        gpu.waits(c, b);
        assert!(gpu.gives(at, 40, c));
        gpu.end();
    }
}

#[test]
fn an_event_does_not_stand_for_what_was_freed_after_it() {
    for gpu in Gpu::each(1 << 30, StreamWaits::Never) {
        let [a, b, _] = gpu.streams;
        let early = gpu.recorded(a);
        let at = gpu.freed(40, a);
        gpu.allocator.wait_event(b, early).unwrap();
        assert!(!gpu.gives(at, 40, b));
        // Nor for what comes before a later wait of its own stream.
        let at = gpu.freed(50, b);
        let early = gpu.recorded(a);
        gpu.waits(a, b);
        gpu.allocator.wait_event(gpu.streams[2], early).unwrap();
        assert!(!gpu.gives(at, 50, gpu.streams[2]));
        gpu.end();
    }
}

#[test]
fn an_event_stands_for_its_latest_recording() {
    for gpu in Gpu::each(1 << 30, StreamWaits::Never) {
        let [a, b, c] = gpu.streams;
        let at = gpu.freed(40, a);
        let event = gpu.recorded(a);
        gpu.allocator.record_event(event, c).unwrap();
        gpu.allocator.wait_event(b, event).unwrap();
        assert!(!gpu.gives(at, 40, b));
        gpu.allocator.synchronize_event(event).unwrap();
        assert!(!gpu.gives(at, 40, b));
        gpu.end();
    }
}

#[test]
fn what_the_host_has_seen_is_done_for_all_and_so_is_what_came_before() {
    type See = fn(&Gpu, EventId, StreamId);
    let ways: [See; 5] = [
        |gpu, event, _| gpu.allocator.synchronize_event(event).unwrap(),
        |gpu, event, b| {
            gpu.device.synchronize_stream(b).unwrap();
            assert!(gpu.allocator.query_event(event).unwrap());
        },
        |gpu, _, b| gpu.allocator.synchronize_stream(b).unwrap(),
        |gpu, _, b| {
            gpu.device.synchronize_stream(b).unwrap();
            assert!(gpu.allocator.query_stream(b).unwrap());
        },
        |gpu, _, _| gpu.allocator.synchronize().unwrap(),
    ];
    for way in ways {
        for gpu in Gpu::each(1 << 30, StreamWaits::Never) {
            let [a, b, c] = gpu.streams;
            let at = gpu.freed(40, a);
            gpu.waits(b, a);
            let event = gpu.recorded(b);
            way(&gpu, event, b);
            let queries = gpu.calls(Call::QueryEvent);
            assert!(gpu.gives(at, 40, c));
            assert_eq!(gpu.calls(Call::QueryEvent), queries);
            gpu.end();
        }
    }
}

/// The block's own stream may have it, and no other that knows less.
#[test]
fn a_pending_block_is_free_for_its_stream_when_that_waits_for_the_recorded_one() {
    for gpu in Gpu::each(1 << 30, StreamWaits::Never) {
        let [a, b, c] = gpu.streams;
        let block = gpu.take(40, a);
        gpu.waits(b, a);
        gpu.work(&block, b);
        block.record_stream(b).unwrap();
        let at = block.ptr().0;
        drop(block);
        gpu.waits(c, a);
        assert!(!gpu.gives(at, 40, a), "b is not done");
        gpu.waits(a, b);
        // The free is completed when somebody looks. c still knows nothing of b.
        assert!(!gpu.gives(at, 40, c));
        let stats = gpu.allocator.stats();
        assert_eq!(stats.active_bytes, stats.allocated_bytes, "none is pending");
        assert!(gpu.gives(at, 40, a));
        gpu.end();
    }
}

/// Captured work runs when its graph is launched, on any stream: what the capturing one waits for
/// says nothing about it.
#[test]
fn what_is_only_ordered_is_not_given_out_while_work_is_captured() {
    for gpu in Gpu::each(1 << 30, StreamWaits::Never) {
        let [a, b, _] = gpu.streams;
        let at = gpu.freed(40, a);
        gpu.waits(b, a);
        let before = gpu.recorded(a);
        gpu.device.begin_capture(b).unwrap();
        let event = gpu.device.create_event().unwrap();
        let [_, _, c] = gpu.streams;
        let block = gpu.allocator.alloc(40 * MIB, b).unwrap();
        assert_ne!(block.ptr().0, at);
        // Nothing is learned meanwhile.
        gpu.allocator.record_event(event, a).unwrap();
        gpu.allocator.wait_event(c, before).unwrap();
        gpu.device.end_capture(b).unwrap();
        gpu.allocator.wait_event(S0, event).unwrap();
        assert!(!gpu.gives(at, 40, S0));
        assert!(!gpu.gives(at, 40, c));
        gpu.kept.borrow_mut().push(block);
        assert!(gpu.gives(at, 40, b), "afterwards it is");
        gpu.end();
    }
}

#[test]
fn no_stream_is_made_to_wait_while_work_is_captured() {
    for gpu in Gpu::each(1 << 30, StreamWaits::BeforeGrowing) {
        let [a, b, c] = gpu.streams;
        let at = gpu.freed(40, a);
        gpu.device.begin_capture(c).unwrap();
        let calls = gpu.device.counters();
        let block = gpu.allocator.alloc(40 * MIB, b).unwrap();
        assert_ne!(block.ptr().0, at);
        for call in [Call::RecordEvent, Call::WaitEvent, Call::QueryEvent] {
            assert_eq!(gpu.calls(call), calls.calls(call), "{call:?}");
        }
        gpu.device.end_capture(c).unwrap();
        drop(block);
        gpu.end();
    }
}

#[test]
fn a_stream_waits_for_another_rather_than_growing_past_the_slack() {
    for gpu in Gpu::each(1 << 30, StreamWaits::BeforeGrowing) {
        let [a, b, _] = gpu.streams;
        let at = gpu.freed(40, a);
        assert!(gpu.gives(at, 40, b));
        let stats = gpu.allocator.stats();
        assert_eq!(stats.num_stream_waits, 1);
        assert_eq!(gpu.calls(Call::WaitEvent), 1);
        assert_eq!(stats.num_sync_all_streams, 0, "the host does not wait");
        assert_eq!(stats.reserved_bytes.all.current, 40 * MIB);
        assert_eq!(stats.rungs[&Rung::StreamWaits].bytes_freed, 40 * MIB);
        // What it waits for it knows.
        let at = gpu.freed(40, b);
        assert!(gpu.gives(at, 40, b));
        assert_eq!(gpu.allocator.stats().num_stream_waits, 1);
        gpu.end();
    }
}

#[test]
fn a_stream_waits_at_a_limit_or_never_if_that_is_set() {
    for (waits, at_limit) in [(StreamWaits::AtLimit, 1), (StreamWaits::Never, 0)] {
        for gpu in Gpu::each(100 * MIB, waits) {
            let [a, b, _] = gpu.streams;
            let at = gpu.freed(40, a);
            let second = gpu.take(40, b);
            assert_ne!(second.ptr().0, at, "there is room");
            assert_eq!(gpu.allocator.stats().num_stream_waits, 0);
            let third = gpu.take(40, b);
            assert_eq!(third.ptr().0, at, "there is none");
            let stats = gpu.allocator.stats();
            assert_eq!(stats.num_stream_waits, at_limit);
            assert_eq!(stats.num_sync_all_streams, 1 - at_limit);
            drop((second, third));
            gpu.end();
        }
    }
}

/// Of two blocks that would do, the one for which an event is in flight already: its work is older.
#[test]
fn a_stream_waits_for_older_work_first() {
    for gpu in Gpu::each(1 << 30, StreamWaits::AtLimit) {
        let [a, b, c] = gpu.streams;
        let [old, x, other, y, new, z] = [(42, a), (1, c), (5, b), (1, c), (40, b), (1, c)]
            .map(|(mib, stream)| Some(gpu.take(mib, stream)))
            .map(|block| (block.as_ref().unwrap().ptr().0, block));
        drop((old.1, other.1));
        // a and b are asked: an event is in flight on each.
        let more = gpu.take(50, c);
        drop(new.1);
        let recorded = gpu.calls(Call::RecordEvent);
        gpu.allocator.set_memory_limit(Some(1));
        let first = gpu.take(40, c);
        assert_eq!(first.ptr().0, old.0, "though it fits less well");
        assert_eq!(gpu.calls(Call::RecordEvent), recorded);
        // There is no other now: a new event is recorded.
        let second = gpu.take(40, c);
        assert_eq!(second.ptr().0, new.0);
        assert_eq!(gpu.calls(Call::RecordEvent), recorded + 1);
        drop((x, y, z, more, first, second));
        gpu.end();
    }
}

/// Free memory at the end of what is mapped is grown, though another stream still uses it.
#[test]
fn a_stream_waits_for_memory_beside_which_less_is_missing() {
    let options = AllocatorOptions::new().with_stream_waits(StreamWaits::BeforeGrowing);
    let gpu = Gpu::new(1 << 30, options);
    let [a, b, _] = gpu.streams;
    let keep = gpu.take(20, a);
    let at = gpu.freed(40, a);
    let large = gpu.take(60, b);
    assert_eq!(large.ptr().0, at);
    let stats = gpu.allocator.stats();
    assert_eq!(stats.reserved_bytes.all.current, 80 * MIB);
    assert_eq!(stats.num_stream_waits, 1);
    assert_eq!(stats.rungs[&Rung::StreamWaits].bytes_freed, 40 * MIB);
    drop((keep, large));
    gpu.end();
}

#[test]
fn a_stream_waits_for_those_that_its_own_pending_block_was_recorded_on() {
    for gpu in Gpu::each(60 * MIB, StreamWaits::BeforeGrowing) {
        let [a, b, _] = gpu.streams;
        let block = gpu.take(40, a);
        gpu.waits(b, a);
        gpu.work(&block, b);
        block.record_stream(b).unwrap();
        let at = block.ptr().0;
        drop(block);
        assert!(gpu.gives(at, 40, a));
        assert_eq!(gpu.allocator.stats().num_stream_waits, 1);
        gpu.end();
    }
}

#[test]
fn a_retired_stream_is_waited_for_by_its_last_event() {
    for gpu in Gpu::each(1 << 30, StreamWaits::BeforeGrowing) {
        let [a, b, _] = gpu.streams;
        let at = gpu.freed(40, a);
        gpu.allocator.retire_stream(a).unwrap();
        gpu.device.destroy_stream(a).unwrap();
        assert!(gpu.gives(at, 40, b));
        assert_eq!(gpu.allocator.stats().num_stream_waits, 1);
        assert_eq!(gpu.allocator.stats().num_device_errors, 0);
        gpu.end();
    }
}

#[test]
fn a_wait_that_fails_is_counted_and_the_heap_grows() {
    for call in [Call::RecordEvent, Call::WaitEvent] {
        for gpu in Gpu::each(1 << 30, StreamWaits::BeforeGrowing) {
            let [a, b, _] = gpu.streams;
            let at = gpu.freed(40, a);
            gpu.device.inject(Fault::nth(call, 1).from_then_on());
            let other = gpu.take(40, b);
            assert_ne!(other.ptr().0, at);
            gpu.device.clear_faults();
            let stats = gpu.allocator.stats();
            assert_eq!(stats.rungs[&Rung::StreamWaits].num_failed, 1);
            assert_eq!(stats.num_stream_waits, 0);
            drop(other);
            gpu.end();
        }
    }
}

#[test]
fn the_error_says_whether_a_stream_was_made_to_wait() {
    let cases = [
        (
            StreamWaits::AtLimit,
            "no free block of another stream is large enough",
        ),
        (StreamWaits::Never, "stream_waits is never"),
    ];
    for (waits, wanted) in cases {
        for gpu in Gpu::each(100 * MIB, waits) {
            let [a, b, _] = gpu.streams;
            let keep = gpu.take(80, a);
            gpu.freed(10, a);
            let error = match gpu.allocator.alloc(60 * MIB, b).unwrap_err() {
                AllocError::OutOfMemory(error) => error,
                error => panic!("{error}"),
            };
            let mut rungs = error.rungs.iter();
            let rung = rungs.find(|rung| rung.rung == Rung::StreamWaits).unwrap();
            let reason = wanted;
            assert_eq!(rung.outcome, RungOutcome::Skipped { reason }, "{error}");
            drop(keep);
            gpu.end();
        }
    }
}

// ---- streams of others -------------------------------------------------------------------------

#[test]
fn a_foreign_stream_may_be_destroyed_without_a_word() {
    for gpu in Gpu::each(1 << 30, StreamWaits::Never) {
        let [a, b, _] = gpu.streams;
        gpu.allocator.set_foreign_stream(a).unwrap();
        let at = gpu.freed(40, a);
        assert_eq!(gpu.calls(Call::RecordEvent), 1, "at the free");
        gpu.device.destroy_stream(a).unwrap();
        assert!(!gpu.gives(at, 40, b), "its work is not done");
        gpu.device.synchronize().unwrap();
        assert!(gpu.gives(at, 40, b));
        assert_eq!(gpu.allocator.stats().num_device_errors, 0);
        gpu.end();
    }
}

#[test]
fn small_blocks_and_recorded_ones_of_foreign_streams_get_an_event_too() {
    for gpu in Gpu::each(1 << 30, StreamWaits::Never) {
        let [a, b, c] = gpu.streams;
        // Kept by this thread, and freed when the stream is said to be foreign.
        for _ in 0..3 {
            drop(gpu.allocator.alloc(1000, a).unwrap());
        }
        gpu.allocator.set_foreign_stream(a).unwrap();
        assert_eq!(gpu.calls(Call::RecordEvent), 1);
        for n in 2..4 {
            drop(gpu.allocator.alloc(1000, a).unwrap());
            assert_eq!(gpu.calls(Call::RecordEvent), n);
        }
        let block = gpu.take(40, b);
        let at = block.ptr().0;
        gpu.waits(a, b);
        gpu.work(&block, a);
        block.record_stream(a).unwrap();
        let recorded = gpu.calls(Call::RecordEvent);
        drop(block);
        assert_eq!(gpu.calls(Call::RecordEvent), recorded + 1);
        gpu.device.destroy_stream(a).unwrap();
        assert!(!gpu.gives(at, 40, b));
        assert!(!gpu.gives(at, 40, c));
        gpu.device.synchronize().unwrap();
        assert!(gpu.gives(at, 40, b));
        assert_eq!(gpu.allocator.stats().num_device_errors, 0);
        gpu.end();
    }
}

/// However often something is freed: the first event stays until it is done.
#[test]
fn a_foreign_stream_has_two_events_in_flight_at_most() {
    for gpu in Gpu::each(1 << 30, StreamWaits::Never) {
        let [a, b, _] = gpu.streams;
        gpu.allocator.set_foreign_stream(a).unwrap();
        let mut blocks = [(); 7].map(|()| Some(gpu.take(40, a)));
        let first = blocks[0].as_ref().unwrap().ptr().0;
        blocks[0] = None;
        let early = gpu.recorded(a);
        for at in [2, 4] {
            gpu.work(blocks[at].as_ref().unwrap(), a);
            blocks[at] = None;
        }
        gpu.work(blocks[6].as_ref().unwrap(), a);
        // One of them is this test's.
        assert_eq!(gpu.calls(Call::CreateEvent), 3);
        while !gpu.device.query_event(early).unwrap() {
            gpu.device.step();
        }
        assert!(gpu.gives(first, 40, b), "what was freed first is done");
        assert!(!gpu.device.query_stream(a).unwrap());
        drop(blocks);
        gpu.end();
    }
}

#[test]
fn a_block_freed_after_its_foreign_stream_is_gone_waits_for_the_device() {
    for gpu in Gpu::each(100 * MIB, StreamWaits::BeforeGrowing) {
        let [a, b, _] = gpu.streams;
        gpu.allocator.set_foreign_stream(a).unwrap();
        let block = gpu.take(60, a);
        let at = block.ptr().0;
        gpu.device.destroy_stream(a).unwrap();
        drop(block);
        assert!(!gpu.gives(at, 30, b));
        assert!(gpu.device.pending_ops() > 0, "nobody waited");
        let other = gpu.take(60, b);
        assert_eq!(gpu.calls(Call::Synchronize), 1);
        let stats = gpu.allocator.stats();
        assert_eq!(stats.num_stream_waits, 0);
        assert_eq!(stats.num_device_errors, 1, "of the event at the free");
        drop(other);
        gpu.end();
    }
}
