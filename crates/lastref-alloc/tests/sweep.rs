//! Every device call fails once, in turn: nothing is lost, mapped twice or counted wrongly.
//!
//! The programs are beginnings of traces: sizes that come again, as a model's weights, activations
//! and small state do, on two streams, on a device that is just large enough. So the sweep goes
//! through growth, moving of pages, the ladder, waits and the caches of threads.
#![expect(clippy::unwrap_used, reason = "an error here is a failed test")]
#![cfg(target_os = "linux")]

use std::collections::HashMap;

use lastref_alloc::sim::{Call, Fault, SimDevice, SimOptions};
use lastref_alloc::{
    AllocatorOptions, Backing, Block, CachingAllocator, CheckLevel, Device, FillValue, StreamId,
    StreamWaits,
};
use lastref_snapshot::trace::{OperationKind, Trace};

const MIB: u64 = 1 << 20;

/// The first `num_operations` of a training program with inputs of varying length.
fn trace(seed: u64, num_operations: usize) -> Trace {
    let mut state = seed;
    let mut random = |below: u64| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 33) % below
    };
    let mut lines = Vec::new();
    let mut next_id = 0;
    let mut alloc = |lines: &mut Vec<String>, bytes: u64, stream: u64| {
        next_id += 1;
        lines.push(format!("alloc,{next_id},{bytes},{stream},p,l"));
        next_id
    };
    let free = |lines: &mut Vec<String>, id: u64| lines.push(format!("free,{id},0,0,p,"));
    for layer in 0..4 {
        alloc(&mut lines, 3 * MIB + layer * 700_000, 0);
        alloc(&mut lines, 1000, 0);
    }
    while lines.len() < num_operations {
        let length = 1 + random(6);
        let input = alloc(&mut lines, length * MIB + 4096, 7);
        let mut activations = Vec::new();
        for _ in 0..4 {
            activations.push(alloc(&mut lines, length * 900_000, 0));
            let state = alloc(&mut lines, 1000, 0);
            let scratch = alloc(&mut lines, length * 2 * MIB, 0);
            free(&mut lines, scratch);
            free(&mut lines, state);
        }
        while let Some(id) = activations.pop() {
            let gradient = alloc(&mut lines, length * 450_000, 0);
            free(&mut lines, id);
            free(&mut lines, gradient);
        }
        free(&mut lines, input);
        let evaluation = alloc(&mut lines, length * 9 * MIB, 0);
        free(&mut lines, evaluation);
    }
    lines.truncate(num_operations);
    let csv = format!("op,id,bytes,stream,phase,label\n{}\n", lines.join("\n"));
    Trace::read(csv.as_bytes()).unwrap()
}

struct Run {
    device: SimDevice,
    allocator: CachingAllocator<SimDevice>,
    blocks: HashMap<u64, Block<SimDevice>>,
    failures: u32,
}

impl Run {
    fn check(&self, level: CheckLevel) {
        self.allocator.check_invariants(level).unwrap();
        let stats = self.allocator.stats();
        let requested: u64 = self.blocks.values().map(Block::requested_bytes).sum();
        assert_eq!(stats.requested_bytes.all.current, requested);
        let held = self.device.counters().held_bytes;
        assert_eq!(stats.reserved_bytes.all.current, held);
        assert_eq!(self.device.errors(), Vec::<String>::new());
        let mut places: Vec<_> = self
            .blocks
            .values()
            .map(|block| (block.ptr().0, block.allocated_bytes()))
            .collect();
        places.sort_unstable();
        for pair in places.windows(2) {
            assert!(
                pair[0].0 + pair[0].1 <= pair[1].0,
                "blocks overlap: {pair:x?}"
            );
        }
    }

    /// Does what the trace says, as far as it can. Each block is written to, on its stream.
    fn go(
        trace: &Trace,
        capacity: u64,
        (backing, waits): (Backing, StreamWaits),
        fault: Option<Fault>,
    ) -> Self {
        let device = SimDevice::new(SimOptions::new(capacity)).unwrap();
        let options = AllocatorOptions::new()
            .with_backing(backing)
            .with_stream_waits(waits)
            .with_history(50);
        let other = device.create_stream(0).unwrap();
        let mut run = Self {
            allocator: CachingAllocator::with_options(device.clone(), &options),
            device,
            blocks: HashMap::new(),
            failures: 0,
        };
        run.device.reset_counters();
        if let Some(fault) = fault {
            run.device.inject(fault);
        }
        for (at, operation) in trace.operations().iter().enumerate() {
            match operation.kind {
                OperationKind::Alloc => {
                    let stream = if operation.stream == 0 {
                        StreamId::DEFAULT
                    } else {
                        other
                    };
                    match run.allocator.alloc(operation.bytes, stream) {
                        Ok(block) => {
                            // The fault may meet this call, which is not the allocator's.
                            let _ = run.device.fill(block.ptr(), FillValue::U8(7), 64, stream);
                            run.blocks.insert(operation.id, block);
                        }
                        Err(_) => {
                            run.failures += 1;
                            run.check(CheckLevel::Structure);
                        }
                    }
                }
                OperationKind::Free => {
                    run.blocks.remove(&operation.id);
                }
            }
            if at % 16 == 0 {
                run.check(CheckLevel::Structure);
            }
        }
        run
    }

    /// When failures stop, allocating works, and everything returns to zero.
    fn end(mut self, capacity: u64) {
        self.device.clear_faults();
        self.check(CheckLevel::Device);
        let block = self.allocator.alloc(MIB, StreamId::DEFAULT).unwrap();
        self.blocks.insert(u64::MAX, block);
        self.check(CheckLevel::Device);
        self.blocks.clear();
        let whole = self.allocator.alloc(capacity, StreamId::DEFAULT).unwrap();
        drop(whole);
        self.allocator.empty_cache().unwrap();
        self.check(CheckLevel::Device);
        for (family, stat) in self.allocator.stats().families() {
            assert_eq!(stat.all.current, 0, "{family}");
        }
        assert_eq!(self.device.counters().held_bytes, 0);
        drop(self.allocator);
        assert_eq!(self.device.counters().held_bytes, 0);
    }
}

/// On devices with so many per cent of the peak of live memory.
fn sweep(kind: (Backing, StreamWaits), per_cent: u64, must_see: &[Call]) {
    let mut failed = 0;
    for (seed, num_operations) in [(1, 40), (2, 80), (3, 160)] {
        let trace = trace(seed, num_operations);
        let capacity = (trace.peak_live_bytes() * per_cent / 100).next_multiple_of(2 * MIB);
        let sound = Run::go(&trace, capacity, kind, None);
        let counters = sound.device.counters();
        if num_operations == 160 {
            for call in must_see {
                assert!(counters.calls(*call) > 0, "no {call:?} in the program");
            }
        }
        let (calls, failures) = (counters.total_calls(), sound.failures);
        sound.end(capacity);
        for n in 1..=calls {
            for full in [false, true] {
                let fault = Fault::nth_of_any(n);
                let fault = if full { fault.out_of_memory() } else { fault };
                let run = Run::go(&trace, capacity, kind, Some(fault));
                failed += u32::from(run.failures > failures);
                run.end(capacity);
            }
        }
    }
    assert!(failed > 20, "only {failed} failures were seen by a caller");
}

const NEVER: StreamWaits = StreamWaits::Never;
const WAITS: StreamWaits = StreamWaits::BeforeGrowing;

#[test]
fn virtual_memory_survives_the_failure_of_every_call() {
    let calls = [Call::UnmapPage, Call::CreatePage, Call::QueryEvent];
    sweep((Backing::Auto, NEVER), 102, &calls);
    let calls = [Call::CreatePage, Call::QueryEvent, Call::WaitEvent];
    sweep((Backing::Auto, WAITS), 102, &calls);
}

#[test]
fn segments_survive_the_failure_of_every_call() {
    let calls = [Call::AllocSegment, Call::FreeSegment, Call::QueryEvent];
    sweep((Backing::Segments, NEVER), 130, &calls);
    sweep((Backing::Segments, WAITS), 130, &[]);
}
