//! Random programs against the allocator, with its invariants checked after every step.
//!
//! A program allocates, also from private pools, frees, writes on its own and on foreign streams, announces that with
//! `record_stream`, changes limits, empties the cache, retires streams, lets time pass and makes
//! device calls fail. After each step the books are walked and compared with the device's. Every
//! write carries a value of its own, and a block is read back before it is freed: memory given out
//! too early, while another stream still writes to it, does not hold what was written last.
#![expect(clippy::unwrap_used, reason = "an error here is a failed test")]
#![cfg(target_os = "linux")]

use std::cell::Cell;

use lastref_alloc::sim::{Call, Fault, SimDevice, SimOptions};
use lastref_alloc::{
    AllocError, AllocatorOptions, Backing, Block, CachingAllocator, CheckLevel, Device, FillValue,
    MemPool, StreamId,
};
use proptest::prelude::*;

const MIB: u64 = 1 << 20;
const CAPACITY: u64 = 256 * MIB;
const NUM_STREAMS: usize = 3;
const NUM_POOLS: usize = 2;

#[derive(Clone, Debug)]
enum Op {
    Alloc {
        bytes: u64,
        stream: usize,
        /// From this private pool.
        pool: Option<usize>,
    },
    /// A private pool goes, another comes.
    ReplacePool(usize),
    EmptyPool(usize),
    Free {
        at: usize,
    },
    WriteOn {
        at: usize,
        stream: usize,
    },
    EmptyCache,
    Limit(Option<u64>),
    Retire {
        stream: usize,
    },
    Synchronize {
        stream: usize,
    },
    Step,
    Fail {
        call: Call,
        n: u64,
        full: bool,
        always: bool,
    },
    LateEvents(u32),
    ClearFaults,
    ResetPeaks,
}

fn sizes() -> impl Strategy<Value = u64> {
    prop_oneof![
        Just(1000_u64),
        0..2048_u64,
        0..300_000_u64,
        1..8 * MIB,
        1..100 * MIB,
        Just(2 * MIB),
        Just(32 * MIB)
    ]
}

fn ops() -> impl Strategy<Value = Op> {
    let stream = || 0..NUM_STREAMS;
    // Calls that the driver of the test makes itself are left out: it needs them to check.
    let call = prop::sample::select(vec![
        Call::AllocSegment,
        Call::FreeSegment,
        Call::ReserveRange,
        Call::CreatePage,
        Call::DestroyPage,
        Call::MapPage,
        Call::SetAccess,
        Call::UnmapPage,
        Call::CreateEvent,
        Call::RecordEvent,
        Call::QueryEvent,
        Call::MemoryInfo,
        Call::QueryStream,
    ]);
    prop_oneof![
        12 => (sizes(), stream(), prop::option::weighted(0.3, 0..NUM_POOLS))
            .prop_map(|(bytes, stream, pool)| Op::Alloc { bytes, stream, pool }),
        1 => (0..NUM_POOLS).prop_map(Op::ReplacePool),
        1 => (0..NUM_POOLS).prop_map(Op::EmptyPool),
        9 => any::<usize>().prop_map(|at| Op::Free { at }),
        5 => (any::<usize>(), stream()).prop_map(|(at, stream)| Op::WriteOn { at, stream }),
        1 => Just(Op::EmptyCache),
        1 => prop::option::of(0..CAPACITY).prop_map(Op::Limit),
        1 => stream().prop_map(|stream| Op::Retire { stream }),
        1 => stream().prop_map(|stream| Op::Synchronize { stream }),
        2 => Just(Op::Step),
        3 => (call, 1..6_u64, any::<bool>(), any::<bool>())
            .prop_map(|(call, n, full, always)| Op::Fail { call, n, full, always }),
        1 => (0..4_u32).prop_map(Op::LateEvents),
        2 => Just(Op::ClearFaults),
        1 => Just(Op::ResetPeaks),
    ]
}

struct Held {
    block: Block<SimDevice>,
    value: u32,
    /// The stream that wrote last.
    writer: StreamId,
}

struct Program {
    device: SimDevice,
    allocator: CachingAllocator<SimDevice>,
    streams: Vec<StreamId>,
    pools: Vec<MemPool<SimDevice>>,
    held: Vec<Held>,
    next_value: u32,
    num_checks: Cell<u32>,
}

impl Program {
    fn new(backing: Backing, seed: u64) -> Self {
        let device = SimDevice::new(SimOptions::new(CAPACITY).with_seed(seed)).unwrap();
        let options = AllocatorOptions::new()
            .with_backing(backing)
            .with_history(64);
        let allocator = CachingAllocator::with_options(device.clone(), &options);
        let mut streams = vec![StreamId::DEFAULT];
        streams.extend((1..NUM_STREAMS).map(|_| device.create_stream(0).unwrap()));
        Self {
            device,
            pools: (0..NUM_POOLS).map(|_| allocator.create_pool()).collect(),
            allocator,
            streams,
            held: Vec::new(),
            next_value: 1,
            num_checks: Cell::new(0),
        }
    }

    fn alloc(
        &self,
        bytes: u64,
        stream: StreamId,
        pool: Option<usize>,
    ) -> Result<Block<SimDevice>, AllocError> {
        match pool {
            Some(pool) => self.pools[pool].alloc(bytes, stream),
            None => self.allocator.alloc(bytes, stream),
        }
    }

    /// The first and the last word are written: what is between is the same block's.
    fn write(&mut self, at: usize, stream: StreamId) {
        let held = &mut self.held[at];
        let bytes = held.block.requested_bytes();
        if bytes < 8 {
            return;
        }
        // Writers of one block take turns, as programs do; only its free is unordered.
        if held.writer != stream {
            let event = self.device.create_event();
            let Ok(event) = event else { return };
            if self.device.record_event(event, held.writer).is_err() {
                return;
            }
            self.device.wait_event(stream, event).unwrap();
        }
        if stream != held.block.stream() && held.block.record_stream(stream).is_err() {
            return;
        }
        let value = self.next_value;
        self.next_value += 1;
        let ptr = held.block.ptr();
        self.device
            .fill(ptr, FillValue::U32(value), 1, stream)
            .unwrap();
        let last = ptr.offset((bytes / 4 - 1) * 4);
        self.device
            .fill(last, FillValue::U32(value), 1, stream)
            .unwrap();
        (held.value, held.writer) = (value, stream);
    }

    fn free(&mut self, at: usize, look: bool) -> Result<(), TestCaseError> {
        let held = self.held.swap_remove(at);
        let bytes = held.block.requested_bytes();
        if look && held.value != 0 && bytes >= 8 {
            // Everything in flight anywhere runs first: a late writer would show.
            self.device.synchronize().unwrap();
            let ptr = held.block.ptr();
            for place in [ptr, ptr.offset((bytes / 4 - 1) * 4)] {
                let word = self.device.read_bytes(place, 4).unwrap();
                prop_assert_eq!(
                    word,
                    held.value.to_ne_bytes(),
                    "at {} of {} bytes",
                    place,
                    bytes
                );
            }
        }
        Ok(())
    }

    fn run(&mut self, op: &Op) -> Result<(), TestCaseError> {
        match *op {
            Op::Alloc {
                bytes,
                stream,
                pool,
            } => {
                let stream = self.streams[stream];
                if let Ok(block) = self.alloc(bytes, stream, pool) {
                    self.held.push(Held {
                        block,
                        value: 0,
                        writer: stream,
                    });
                    self.write(self.held.len() - 1, stream);
                }
            }
            Op::Free { at } if !self.held.is_empty() => {
                // Half of them without waiting for the device, so that work stays in flight.
                self.free(at % self.held.len(), at % 2 == 0)?;
            }
            Op::WriteOn { at, stream } if !self.held.is_empty() => {
                self.write(at % self.held.len(), self.streams[stream]);
            }
            Op::ReplacePool(pool) => self.pools[pool] = self.allocator.create_pool(),
            Op::EmptyPool(pool) => {
                let _ = self.pools[pool].empty_cache();
            }
            Op::EmptyCache => {
                let _ = self.allocator.empty_cache();
            }
            Op::Limit(limit) => self.allocator.set_memory_limit(limit),
            Op::Retire { stream } if stream > 0 => {
                let old = self.streams[stream];
                // A stream whose last writer is still to be waited for stays.
                if self
                    .held
                    .iter()
                    .all(|held| held.writer != old || held.block.stream() == old)
                    && !self.held.iter().any(|held| held.writer == old)
                    && self.allocator.retire_stream(old).is_ok()
                {
                    self.device.destroy_stream(old).unwrap();
                    self.streams[stream] = self.device.create_stream(0).unwrap();
                }
            }
            Op::Synchronize { stream } => {
                self.device
                    .synchronize_stream(self.streams[stream])
                    .unwrap();
            }
            Op::Step => {
                self.device.step();
            }
            Op::Fail {
                call,
                n,
                full,
                always,
            } => {
                let mut fault = Fault::nth(call, n);
                if full {
                    fault = fault.out_of_memory();
                }
                if always {
                    fault = fault.from_then_on();
                }
                self.device.inject(fault);
            }
            Op::LateEvents(queries) => self.device.delay_events(queries),
            Op::ClearFaults => self.device.clear_faults(),
            Op::ResetPeaks => self.allocator.reset_peak_stats(),
            Op::Free { .. } | Op::WriteOn { .. } | Op::Retire { .. } => {}
        }
        self.check()
    }

    fn check(&self) -> Result<(), TestCaseError> {
        // A check empties the caches of threads. They are to be used now and then.
        self.num_checks.set(self.num_checks.get() + 1);
        if self.num_checks.get().is_multiple_of(3) {
            let checked = self.allocator.check_invariants(CheckLevel::Structure);
            prop_assert!(checked.is_ok(), "{}", checked.unwrap_err());
        }
        let stats = self.allocator.stats();
        let counters = self.device.counters();
        prop_assert_eq!(stats.reserved_bytes.all.current, counters.held_bytes);
        let requested: u64 = self
            .held
            .iter()
            .map(|held| held.block.requested_bytes())
            .sum();
        prop_assert_eq!(stats.requested_bytes.all.current, requested);
        let mut ranges: Vec<_> = self
            .held
            .iter()
            .filter(|held| held.block.allocated_bytes() > 0)
            .map(|held| (held.block.ptr().0, held.block.allocated_bytes()))
            .collect();
        ranges.sort_unstable();
        for pair in ranges.windows(2) {
            prop_assert!(
                pair[0].0 + pair[0].1 <= pair[1].0,
                "live blocks overlap: {:x?}",
                pair
            );
        }
        prop_assert_eq!(self.device.errors(), Vec::<String>::new());
        Ok(())
    }

    /// When failures stop, nothing is lost.
    fn end(mut self) -> Result<(), TestCaseError> {
        self.device.clear_faults();
        while let Some(last) = self.held.len().checked_sub(1) {
            self.free(last, true)?;
        }
        self.allocator.set_memory_limit(None);
        self.allocator.empty_cache().unwrap();
        let stats = self.allocator.stats();
        for (family, stat) in stats.families() {
            prop_assert_eq!(stat.all.current, 0, "{}", family);
        }
        let checked = self.allocator.check_invariants(CheckLevel::Device);
        prop_assert!(checked.is_ok(), "{}", checked.unwrap_err());
        prop_assert_eq!(self.device.counters().held_bytes, 0);
        let whole = self.allocator.alloc(CAPACITY, StreamId::DEFAULT);
        prop_assert!(whole.is_ok(), "{}", whole.unwrap_err());
        Ok(())
    }
}

fn run(backing: Backing, seed: u64, program: &[Op]) -> Result<(), TestCaseError> {
    let mut state = Program::new(backing, seed);
    for op in program {
        state.run(op)?;
    }
    state.end()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, max_shrink_iters: 20_000, ..ProptestConfig::default() })]

    #[test]
    fn virtual_memory_survives_random_programs(
        seed in any::<u64>(),
        program in prop::collection::vec(ops(), 1..120),
    ) {
        run(Backing::Auto, seed, &program)?;
    }

    #[test]
    fn segments_survive_random_programs(
        seed in any::<u64>(),
        program in prop::collection::vec(ops(), 1..120),
    ) {
        run(Backing::Segments, seed, &program)?;
    }
}

/// The last page of a closed pool is moved to another pool, once a stream is done with it.
#[test]
fn a_closed_pool_whose_pages_are_moved_away_is_removed() {
    let alloc = |bytes, stream, pool| Op::Alloc {
        bytes,
        stream,
        pool,
    };
    let program = [
        Op::LateEvents(0),
        alloc(1000, 0, None),
        Op::ReplacePool(0),
        Op::Free { at: 0 },
        alloc(1000, 0, None),
        Op::LateEvents(2),
        alloc(32 * MIB, 0, None),
        Op::ResetPeaks,
        alloc(1000, 1, Some(0)),
        Op::ReplacePool(0),
        alloc(131_073, 0, None),
        alloc(69_206_017, 0, Some(1)),
        Op::Free {
            at: 5_498_408_114_412_370_820,
        },
        alloc(1000, 0, Some(0)),
        Op::Limit(Some(0)),
        Op::EmptyCache,
        alloc(1000, 0, None),
        alloc(1000, 0, None),
        Op::Free {
            at: 1_935_563_526_632_223_004,
        },
        Op::Free {
            at: 2_724_257_859_230_266_746,
        },
        alloc(1000, 0, None),
    ];
    run(Backing::Auto, 43_346_316_744_974_259, &program).unwrap();
}

/// For a program that is known, every device call fails once, and from then on, in turn.
#[test]
fn every_single_failure_leaves_nothing_lost() {
    let alloc = |bytes, stream| Op::Alloc {
        bytes,
        stream,
        pool: None,
    };
    let in_pool = |bytes, stream| Op::Alloc {
        bytes,
        stream,
        pool: Some(0),
    };
    let free = |at| Op::Free { at };
    let program = [
        alloc(20 * MIB, 0),
        alloc(1000, 1),
        Op::WriteOn { at: 0, stream: 2 },
        free(0),
        alloc(100 * MIB, 1),
        Op::EmptyCache,
        alloc(70 * MIB, 2),
        free(1),
        alloc(120 * MIB, 0),
        free(1),
        alloc(180 * MIB, 1),
        free(3),
        Op::EmptyCache,
        alloc(200 * MIB, 2),
        free(0),
        free(0),
        free(0),
        in_pool(150 * MIB, 0),
        free(0),
        alloc(180 * MIB, 1),
        free(0),
        in_pool(1000, 1),
        in_pool(30 * MIB, 0),
        free(0),
        Op::ReplacePool(0),
        alloc(50 * MIB, 2),
    ];
    let mut fired = 0;
    for backing in [Backing::Auto, Backing::Segments] {
        for always in [false, true] {
            for full in [false, true] {
                for n in 1..500 {
                    let mut state = Program::new(backing, n);
                    let mut fault = Fault::nth_of_any(n);
                    if full {
                        fault = fault.out_of_memory();
                    }
                    if always {
                        fault = fault.from_then_on();
                    }
                    let mut failed = false;
                    for (at, op) in program.iter().enumerate() {
                        // The test's own calls must work: the fault waits only during the
                        // allocator's.
                        if at == 0 {
                            state.device.inject(fault.clone());
                        }
                        match *op {
                            Op::Alloc {
                                bytes,
                                stream,
                                pool,
                            } => {
                                let stream = state.streams[stream];
                                match state.alloc(bytes, stream, pool) {
                                    Ok(block) => {
                                        state.held.push(Held {
                                            block,
                                            value: 0,
                                            writer: stream,
                                        });
                                    }
                                    Err(_) => failed = true,
                                }
                            }
                            Op::WriteOn { at, stream } if at < state.held.len() => {
                                let stream = state.streams[stream];
                                failed |= state.held[at].block.record_stream(stream).is_err();
                            }
                            Op::Free { at } if !state.held.is_empty() => {
                                let at = at % state.held.len();
                                state.held.swap_remove(at);
                            }
                            Op::EmptyCache => failed |= state.allocator.empty_cache().is_err(),
                            Op::ReplacePool(pool) => {
                                state.pools[pool] = state.allocator.create_pool();
                            }
                            _ => {}
                        }
                        state.check().unwrap();
                    }
                    fired += u32::from(failed);
                    state.end().unwrap();
                }
            }
        }
    }
    assert!(fired > 500, "only {fired} failures were seen by a caller");
}
