//! Random programs on several streams: a correct one has no race, and with the allocator's clock
//! check switched off one is found at once.
//!
//! A program allocates and frees on two threads, from private pools and the default one, uses blocks on any stream, makes streams wait for
//! each other, through the allocator or past it, records events again and waits for them on either side,
//! records streams or waits instead, synchronises, empties the cache, lets device calls fail and destroys streams,
//! some of them without a word. It is correct by construction: before a stream uses a block, it is
//! made to wait for the stream that the block belongs to and for the uses that it conflicts with;
//! before a block is dropped, each stream that used it was recorded, or is waited for.
#![expect(clippy::unwrap_used, reason = "an error here is a failed test")]
#![cfg(target_os = "linux")]

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use lastref_alloc::sim::{Call, Fault, KernelUse, SimDevice, SimOptions};
use lastref_alloc::{
    AllocatorOptions, Backing, Block, CachingAllocator, CheckLevel, Device, EventId, MemPool,
    StreamId, StreamWaits,
};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

const MIB: u64 = 1 << 20;
const CAPACITY: u64 = 64 * MIB;
const NUM_STREAMS: usize = 3;
const NUM_POOLS: usize = 2;
const NUM_EVENTS: usize = 3;

/// What makes it safe to drop a block that another stream than its own has used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Care {
    RecordStream,
    /// The block's own stream waits for the other.
    StreamWaits,
    HostWaits,
}

#[derive(Clone, Debug)]
enum Op {
    Alloc {
        bytes: u64,
        stream: usize,
        /// From this private pool.
        pool: Option<usize>,
        worker: bool,
        fault: Option<(Call, u64)>,
    },
    /// A private pool goes, another comes.
    ReplacePool(usize),
    Free {
        at: usize,
        worker: bool,
    },
    Use {
        at: usize,
        stream: usize,
        writes: bool,
        care: Care,
    },
    EmptyCache,
    /// Others may destroy this stream without a word.
    Foreign(usize),
    Destroy {
        stream: usize,
    },
    Record {
        event: usize,
        stream: usize,
    },
    Wait {
        event: usize,
        stream: usize,
    },
    /// On the host.
    Await(usize),
    Query(usize),
    QueryStream(usize),
    Synchronize(Option<usize>),
    Step,
    LateEvents(u32),
    /// Looking empties the caches of threads, so it is not done after every step.
    Check,
}

fn ops() -> impl Strategy<Value = Op> {
    let stream = || 0..NUM_STREAMS;
    // Some sizes come again and again, so that blocks are used again as they are.
    let again = prop::sample::select(vec![1000, 4096, 100_000, 4 * MIB]);
    let sizes = prop_oneof![4 => again, 1 => 1..300_000_u64, 1 => 1..20 * MIB];
    let call = prop::sample::select(vec![
        Call::AllocSegment,
        Call::CreatePage,
        Call::MapPage,
        Call::SetAccess,
        Call::UnmapPage,
        Call::CreateEvent,
        Call::RecordEvent,
        Call::QueryEvent,
    ]);
    let care = prop::sample::select(vec![Care::RecordStream, Care::StreamWaits, Care::HostWaits]);
    prop_oneof![
        12 => (
            sizes,
            stream(),
            prop::option::weighted(0.3, 0..NUM_POOLS),
            any::<bool>(),
            prop::option::weighted(0.1, (call, 1..4_u64)),
        )
            .prop_map(|(bytes, stream, pool, worker, fault)| Op::Alloc { bytes, stream, pool, worker, fault }),
        1 => (0..NUM_POOLS).prop_map(Op::ReplacePool),
        10 => (any::<usize>(), any::<bool>()).prop_map(|(at, worker)| Op::Free { at, worker }),
        12 => (any::<usize>(), stream(), any::<bool>(), care)
            .prop_map(|(at, stream, writes, care)| Op::Use { at, stream, writes, care }),
        1 => Just(Op::EmptyCache),
        1 => stream().prop_map(Op::Foreign),
        1 => stream().prop_map(|stream| Op::Destroy { stream }),
        3 => (0..NUM_EVENTS, stream()).prop_map(|(event, stream)| Op::Record { event, stream }),
        4 => (0..NUM_EVENTS, stream()).prop_map(|(event, stream)| Op::Wait { event, stream }),
        1 => (0..NUM_EVENTS).prop_map(Op::Await),
        1 => (0..NUM_EVENTS).prop_map(Op::Query),
        1 => stream().prop_map(Op::QueryStream),
        1 => prop::option::of(stream()).prop_map(Op::Synchronize),
        2 => Just(Op::Step),
        1 => (0..3_u32).prop_map(Op::LateEvents),
        1 => Just(Op::Check),
    ]
}

/// A second thread, which runs what it is sent, one job after the other.
struct Worker {
    jobs: Option<Sender<Box<dyn FnOnce() + Send>>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Worker {
    fn new() -> Self {
        let (jobs, queue): (_, Receiver<Box<dyn FnOnce() + Send>>) = channel();
        let thread = thread::spawn(move || queue.into_iter().for_each(|job| job()));
        Self {
            jobs: Some(jobs),
            thread: Some(thread),
        }
    }

    fn run<R: Send + 'static>(&self, job: impl FnOnce() -> R + Send + 'static) -> R {
        let (result, answer) = channel();
        let job = Box::new(move || result.send(job()).unwrap());
        self.jobs.as_ref().unwrap().send(job).unwrap();
        answer.recv().unwrap()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        drop(self.jobs.take());
        let _ = self.thread.take().unwrap().join();
    }
}

/// Something that later work must come after.
#[derive(Clone, Copy, PartialEq, Eq)]
enum After {
    Stream(StreamId),
    /// Of a stream that is gone.
    Event(EventId),
}

struct Held {
    block: Block<SimDevice>,
    /// Whose work a write must come after; a read, without the readers.
    writer: After,
    readers: Vec<After>,
}

struct Program {
    device: SimDevice,
    allocator: CachingAllocator<SimDevice>,
    streams: Vec<StreamId>,
    foreign: Vec<StreamId>,
    /// Recorded again and again.
    events: Vec<EventId>,
    num_recorded: u64,
    pools: Vec<MemPool<SimDevice>>,
    held: Vec<Held>,
    worker: Worker,
}

impl Program {
    fn new(backing: Backing, seed: u64, checked: bool) -> Self {
        let options = SimOptions::new(CAPACITY).with_races(true);
        let device = SimDevice::new(options.with_seed(seed)).unwrap();
        let waits = [
            StreamWaits::Never,
            StreamWaits::AtLimit,
            StreamWaits::BeforeGrowing,
        ];
        let options = AllocatorOptions::new()
            .with_backing(backing)
            .with_wait_before_growing(seed.is_multiple_of(2))
            .with_stream_waits(waits[usize::try_from(seed % 3).unwrap()]);
        let allocator = CachingAllocator::with_options(device.clone(), &options);
        if !checked {
            allocator.disable_clock_check();
        }
        let pools = (0..NUM_POOLS).map(|_| allocator.create_pool()).collect();
        let mut streams = vec![StreamId::DEFAULT];
        streams.extend((1..NUM_STREAMS).map(|_| device.create_stream(0).unwrap()));
        let events = (0..NUM_EVENTS).map(|_| device.create_event().unwrap());
        let events = events.collect();
        Self {
            device,
            allocator,
            streams,
            foreign: Vec::new(),
            events,
            num_recorded: 0,
            pools,
            held: Vec::new(),
            worker: Worker::new(),
        }
    }

    /// Whether the next event goes through the allocator. Not each does.
    fn is_told(&mut self) -> bool {
        self.num_recorded += 1;
        !self.num_recorded.is_multiple_of(3)
    }

    fn recorded(&mut self, stream: StreamId) -> EventId {
        let event = self.device.create_event().unwrap();
        if self.is_told() {
            self.allocator.record_event(event, stream).unwrap();
        } else {
            self.device.record_event(event, stream).unwrap();
        }
        event
    }

    fn stream_waits(&mut self, stream: StreamId, after: After) {
        let event = match after {
            After::Stream(other) if other == stream => return,
            After::Stream(other) => self.recorded(other),
            After::Event(event) => event,
        };
        self.allocator.wait_event(stream, event).unwrap();
    }

    fn is_alive(&self, stream: StreamId) -> bool {
        self.streams.contains(&stream)
    }

    fn use_block(&mut self, at: usize, stream: StreamId, writes: bool, care: Care) {
        let held = &self.held[at];
        let own = held.block.stream();
        let mut earlier = vec![held.writer];
        if writes {
            earlier.extend(&held.readers);
        }
        for after in earlier {
            self.stream_waits(stream, after);
        }
        let held = &self.held[at];
        let (ptr, bytes) = (held.block.ptr(), held.block.requested_bytes());
        let used = if writes {
            KernelUse::write(ptr, bytes)
        } else {
            KernelUse::read(ptr, bytes)
        };
        self.device.launch("kernel", &[used], 5.0, stream).unwrap();
        if stream != own {
            let event = self.recorded(stream);
            match care {
                Care::StreamWaits if self.is_alive(own) => {
                    self.allocator.wait_event(own, event).unwrap();
                }
                Care::RecordStream if self.held[at].block.record_stream(stream).is_ok() => {}
                _ => self.allocator.synchronize_event(event).unwrap(),
            }
        }
        let held = &mut self.held[at];
        if writes {
            held.writer = After::Stream(stream);
            held.readers.clear();
        } else {
            held.readers.push(After::Stream(stream));
        }
    }

    /// Destroys a stream; what came after its work now comes after an event.
    fn destroy(&mut self, at: usize) {
        let old = self.streams[at];
        let event = self.recorded(old);
        if !self.foreign.contains(&old) && self.allocator.retire_stream(old).is_err() {
            return;
        }
        self.device.destroy_stream(old).unwrap();
        for held in &mut self.held {
            let afters = std::iter::once(&mut held.writer).chain(&mut held.readers);
            for after in afters.filter(|after| **after == After::Stream(old)) {
                *after = After::Event(event);
            }
        }
        self.streams[at] = self.device.create_stream(0).unwrap();
    }

    fn run(&mut self, op: &Op) {
        match *op {
            Op::Alloc {
                bytes,
                stream,
                pool,
                worker,
                fault,
            } => {
                let stream = self.streams[stream];
                let pool = pool.map(|pool| self.pools[pool].clone());
                if let Some((call, n)) = fault {
                    self.device.inject(Fault::nth(call, n));
                }
                let allocator = self.allocator.clone();
                let alloc = move || {
                    let _scope = pool.as_ref().map(MemPool::enter);
                    allocator.alloc(bytes, stream)
                };
                let block = if worker {
                    self.worker.run(alloc)
                } else {
                    alloc()
                };
                if fault.is_some() {
                    self.device.clear_faults();
                }
                if let Ok(block) = block {
                    let writer = After::Stream(stream);
                    let readers = Vec::new();
                    self.held.push(Held {
                        block,
                        writer,
                        readers,
                    });
                    let last = self.held.len() - 1;
                    self.use_block(last, stream, true, Care::RecordStream);
                }
            }
            Op::Free { at, worker } if !self.held.is_empty() => {
                let held = self.held.swap_remove(at % self.held.len());
                if worker {
                    self.worker.run(move || drop(held));
                }
            }
            Op::Use {
                at,
                stream,
                writes,
                care,
            } if !self.held.is_empty() => {
                self.use_block(at % self.held.len(), self.streams[stream], writes, care);
            }
            Op::ReplacePool(pool) => self.pools[pool] = self.allocator.create_pool(),
            Op::EmptyCache => {
                let _ = self.allocator.empty_cache();
            }
            Op::Foreign(stream) => {
                let stream = self.streams[stream];
                self.allocator.set_foreign_stream(stream).unwrap();
                self.foreign.push(stream);
            }
            Op::Destroy { stream } if stream > 0 => self.destroy(stream),
            Op::Record { event, stream } => {
                let (event, stream) = (self.events[event], self.streams[stream]);
                self.allocator.record_event(event, stream).unwrap();
            }
            Op::Wait { event, stream } => {
                let (event, stream) = (self.events[event], self.streams[stream]);
                self.allocator.wait_event(stream, event).unwrap();
            }
            Op::Await(event) => self
                .allocator
                .synchronize_event(self.events[event])
                .unwrap(),
            Op::Query(event) => {
                self.allocator.query_event(self.events[event]).unwrap();
            }
            Op::QueryStream(stream) => {
                self.allocator.query_stream(self.streams[stream]).unwrap();
            }
            Op::Synchronize(None) => self.allocator.synchronize().unwrap(),
            Op::Synchronize(Some(stream)) => {
                self.allocator
                    .synchronize_stream(self.streams[stream])
                    .unwrap();
            }
            Op::Step => {
                self.device.step();
            }
            Op::LateEvents(queries) => self.device.delay_events(queries),
            Op::Check => self
                .allocator
                .check_invariants(CheckLevel::Structure)
                .unwrap(),
            Op::Free { .. } | Op::Use { .. } | Op::Destroy { .. } => {}
        }
    }
}

fn programs() -> impl Strategy<Value = Vec<Op>> {
    prop::collection::vec(ops(), 1..100)
}

fn run_correct(backing: Backing, seed: u64, ops: &[Op]) -> Result<(), TestCaseError> {
    let mut program = Program::new(backing, seed, true);
    for op in ops {
        program.run(op);
        let races = program.device.races();
        prop_assert!(races.is_empty(), "{}", races[0]);
    }
    let checked = program.allocator.check_invariants(CheckLevel::Device);
    prop_assert!(checked.is_ok(), "{}", checked.unwrap_err());
    program.held.clear();
    program.device.synchronize().unwrap();
    program.allocator.empty_cache().unwrap();
    let races = program.device.races();
    prop_assert!(races.is_empty(), "{}", races[0]);
    prop_assert_eq!(program.device.errors(), Vec::<String>::new());
    prop_assert_eq!(program.device.counters().held_bytes, 0);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, max_shrink_iters: 20_000, ..ProptestConfig::default() })]

    #[test]
    fn correct_programs_have_no_race_on_virtual_memory(seed in any::<u64>(), program in programs()) {
        run_correct(Backing::Auto, seed, &program)?;
    }

    #[test]
    fn correct_programs_have_no_race_on_segments(seed in any::<u64>(), program in programs()) {
        run_correct(Backing::Segments, seed, &program)?;
    }
}

#[test]
fn without_the_clock_check_a_race_is_found_within_a_second() {
    for backing in [Backing::Auto, Backing::Segments] {
        let mut runner = TestRunner::deterministic();
        let started = Instant::now();
        let found = (0..).find(|seed| {
            let ops = programs().new_tree(&mut runner).unwrap().current();
            let mut program = Program::new(backing, *seed, false);
            let found = ops.iter().any(|op| {
                program.run(op);
                !program.device.races().is_empty()
            });
            found || started.elapsed() > Duration::from_secs(10)
        });
        let took = started.elapsed();
        assert!(
            took < Duration::from_secs(1),
            "{took:?}, {found:?} programs"
        );
    }
}
