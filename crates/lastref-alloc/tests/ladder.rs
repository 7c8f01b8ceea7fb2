//! What happens before, and in, an out-of-memory error.
#![expect(clippy::unwrap_used, reason = "an error here is a failed test")]
#![cfg(target_os = "linux")]

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use lastref_alloc::ladder::{Rung, RungOutcome};
use lastref_alloc::sim::{Call, Fault, SimDevice, SimOptions};
use lastref_alloc::{
    AllocError, AllocatorOptions, Backing, Block, CachingAllocator, CheckLevel, Device, FillValue,
    OutOfMemoryError, ReclaimLevel, ReclaimRequest, Reclaimer, StreamId, StreamWaits,
};

const MIB: u64 = 1 << 20;
const S0: StreamId = StreamId::DEFAULT;

type Allocator = CachingAllocator<SimDevice>;

fn allocators(capacity: u64) -> Vec<Allocator> {
    [Backing::Auto, Backing::Segments]
        .map(|backing| {
            let device = SimDevice::new(SimOptions::new(capacity)).unwrap();
            CachingAllocator::with_options(device, &AllocatorOptions::new().with_backing(backing))
        })
        .into()
}

fn out_of_memory(result: Result<Block<SimDevice>, AllocError>) -> OutOfMemoryError {
    match result.unwrap_err() {
        AllocError::OutOfMemory(error) => *error,
        other => panic!("expected an out-of-memory error, got: {other}"),
    }
}

fn assert_adds_up(error: &OutOfMemoryError) {
    let sum = error.allocated + error.pending + error.cached + error.other + error.device_free;
    assert_eq!(sum, error.capacity, "{error}");
}

#[test]
fn the_cache_is_given_back_before_an_error() {
    for allocator in allocators(1024 * MIB) {
        // Small pieces, so that no free block is large enough with segments either.
        let pieces: Vec<_> = (0..20)
            .map(|_| allocator.alloc(32 * MIB, S0).unwrap())
            .collect();
        drop(pieces);
        assert_eq!(allocator.stats().num_alloc_retries, 0);
        let large = allocator.alloc(1000 * MIB, S0).unwrap();
        let stats = allocator.stats();
        assert_eq!(stats.num_ooms, 0);
        if stats.num_alloc_retries > 0 {
            assert!(stats.rungs[&Rung::ReleaseCached].bytes_freed >= 640 * MIB);
        }
        drop(large);
        allocator.check_invariants(CheckLevel::Device).unwrap();
    }
}

#[test]
fn the_largest_allocation_is_the_same_with_and_without_empty_cache() {
    for backing in [Backing::Auto, Backing::Segments] {
        let largest = |empty_first: bool| {
            let fits = |mib: u64| {
                let device = SimDevice::new(SimOptions::new(1000 * MIB)).unwrap();
                let options = AllocatorOptions::new().with_backing(backing);
                let allocator = CachingAllocator::with_options(device, &options);
                let keep = allocator.alloc(100 * MIB, S0).unwrap();
                for size in [3, 50, 200, 7] {
                    drop(allocator.alloc(size * MIB, S0).unwrap());
                }
                if empty_first {
                    allocator.empty_cache().unwrap();
                }
                let fits = allocator.alloc(mib * MIB, S0).is_ok();
                drop(keep);
                fits
            };
            (1..=1000).rev().find(|mib| fits(*mib)).unwrap()
        };
        let with = largest(true);
        assert_eq!(with, largest(false));
        assert!(with >= 860, "{with}");
    }
}

#[test]
fn streams_are_waited_for_and_the_lists_searched_again() {
    for allocator in allocators(512 * MIB) {
        let never = AllocatorOptions::new().with_stream_waits(StreamWaits::Never);
        allocator.change_options(&never).unwrap();
        let device = allocator.device().clone();
        let other = device.create_stream(0).unwrap();
        let block = allocator.alloc(512 * MIB, S0).unwrap();
        for _ in 0..2000 {
            device
                .fill(block.ptr(), FillValue::U8(1), 64, other)
                .unwrap();
        }
        block.record_stream(other).unwrap();
        drop(block);
        let again = allocator.alloc(400 * MIB, S0).unwrap();
        let stats = allocator.stats();
        assert_eq!(stats.num_sync_all_streams, 1);
        assert_eq!(stats.rungs[&Rung::WaitForStreams].bytes_freed, 512 * MIB);
        assert_eq!(stats.num_ooms, 0);
        drop(again);
        allocator.check_invariants(CheckLevel::Device).unwrap();
    }
}

#[test]
fn the_error_says_where_the_memory_is_and_adds_up() {
    for allocator in allocators(1024 * MIB) {
        let device = allocator.device().clone();
        device.set_other_process_bytes(100 * MIB);
        let other = device.create_stream(0).unwrap();
        let mut live: Vec<_> = (0..12)
            .map(|_| Some(allocator.alloc(64 * MIB, S0).unwrap()))
            .collect();
        live[3] = None;
        live[7] = None;
        live[11].as_ref().unwrap().record_stream(other).unwrap();
        let error = out_of_memory(allocator.alloc(512 * MIB, S0));
        assert_adds_up(&error);
        assert_eq!(error.requested, 512 * MIB);
        assert_eq!(error.capacity, 1024 * MIB);
        assert_eq!(error.allocated, 640 * MIB);
        assert_eq!(error.other, 100 * MIB);
        assert_eq!(error.cached + error.device_free, 284 * MIB);
        let text = error.to_string();
        for part in [
            "tried to allocate 512.00 MiB",
            "100.00 MiB",
            "1.00 GiB",
            "what to do:",
        ] {
            assert!(text.contains(part), "{part} is not in:\n{text}");
        }
        assert_eq!(allocator.stats().num_ooms, 1);
        drop(live);
        allocator.check_invariants(CheckLevel::Device).unwrap();
    }
}

#[test]
fn pending_memory_is_told_apart() {
    for allocator in allocators(512 * MIB) {
        let device = allocator.device().clone();
        let other = device.create_stream(0).unwrap();
        let keep = allocator.alloc(256 * MIB, S0).unwrap();
        let block = allocator.alloc(128 * MIB, S0).unwrap();
        block.record_stream(other).unwrap();
        device
            .fill(block.ptr(), FillValue::U8(1), 64, other)
            .unwrap();
        drop(block);
        // Waiting fails, so the memory stays pending.
        device.inject(Fault::nth(Call::SynchronizeStream, 1).from_then_on());
        device.inject(Fault::nth(Call::QueryEvent, 1).from_then_on());
        let error = out_of_memory(allocator.alloc(250 * MIB, S0));
        assert_eq!(error.pending, 128 * MIB);
        assert_adds_up(&error);
        let wait = error
            .rungs
            .iter()
            .find(|rung| rung.rung == Rung::WaitForStreams)
            .unwrap();
        assert!(matches!(wait.outcome, RungOutcome::Failed(_)), "{error}");
        device.clear_faults();
        assert!(allocator.alloc(250 * MIB, S0).is_ok(), "nothing was lost");
        drop(keep);
        allocator.check_invariants(CheckLevel::Device).unwrap();
    }
}

#[test]
fn a_fragmented_cache_names_its_largest_hole() {
    let device = SimDevice::new(SimOptions::new(64 * MIB).with_virtual_memory(false)).unwrap();
    let allocator = CachingAllocator::new(device);
    let mut live: Vec<_> = (0..8)
        .map(|_| Some(allocator.alloc(8 * MIB, S0).unwrap()))
        .collect();
    live[1] = None;
    live[2] = None;
    live[5] = None;
    let error = out_of_memory(allocator.alloc(20 * MIB, S0));
    assert_eq!(error.largest_hole, 16 * MIB);
    assert_eq!(error.cached, 24 * MIB);
    assert!(error.to_string().contains("in pieces"), "{error}");
}

#[test]
fn rungs_that_cannot_help_are_skipped() {
    for allocator in allocators(512 * MIB) {
        let keep = allocator.alloc(400 * MIB, S0).unwrap();
        drop(allocator.alloc(32 * MIB, S0).unwrap());
        let calls = allocator.device().counters();
        let error = out_of_memory(allocator.alloc(200 * MIB, S0));
        assert!(
            error
                .rungs
                .iter()
                .all(|r| matches!(r.outcome, RungOutcome::Skipped { .. }))
        );
        let after = allocator.device().counters();
        for call in [Call::UnmapPage, Call::FreeSegment, Call::SynchronizeStream] {
            assert_eq!(calls.calls(call), after.calls(call), "{call:?}");
        }
        assert_eq!(allocator.stats().num_alloc_retries, 0);
        drop(keep);
    }
}

#[test]
fn what_can_never_fit_does_not_climb() {
    for allocator in allocators(512 * MIB) {
        drop(allocator.alloc(64 * MIB, S0).unwrap());
        for bytes in [512 * MIB + 1, 1 << 40, u64::MAX] {
            let error = allocator.alloc(bytes, S0).unwrap_err();
            assert!(
                matches!(error, AllocError::TooLarge { limited: false, .. }),
                "{error}"
            );
            assert!(error.is_out_of_memory());
        }
        assert!(
            allocator.stats().reserved_bytes.all.current > 0,
            "the cache was left alone"
        );
    }
}

/// Holds blocks and drops some when asked.
struct Hoard {
    name: &'static str,
    level: ReclaimLevel,
    blocks: Mutex<Vec<Block<SimDevice>>>,
    log: Arc<Mutex<Vec<&'static str>>>,
}

impl Reclaimer for Hoard {
    fn name(&self) -> &str {
        self.name
    }

    fn level(&self) -> ReclaimLevel {
        self.level
    }

    fn reclaim(&self, request: &ReclaimRequest) -> u64 {
        self.log.lock().unwrap().push(self.name);
        assert!(request.bytes_needed > 0);
        let block = self.blocks.lock().unwrap().pop();
        block.map_or(0, |block| block.allocated_bytes())
    }
}

#[test]
fn reclaimers_are_called_by_level_until_one_gave_enough() {
    for allocator in allocators(512 * MIB) {
        let log = Arc::new(Mutex::new(Vec::new()));
        let hoard = |name, level, sizes: &[u64]| {
            let blocks = sizes
                .iter()
                .map(|mib| allocator.alloc(mib * MIB, S0).unwrap())
                .collect();
            Arc::new(Hoard {
                name,
                level,
                blocks: Mutex::new(blocks),
                log: log.clone(),
            })
        };
        allocator.add_reclaimer(hoard("spill", ReclaimLevel::Spill, &[128]));
        allocator.add_reclaimer(hoard("collect", ReclaimLevel::Collect, &[256]));
        let purge = allocator.add_reclaimer(hoard("purge", ReclaimLevel::Purge, &[]));
        let block = allocator.alloc(300 * MIB, S0).unwrap();
        assert_eq!(*log.lock().unwrap(), ["purge", "collect"]);
        drop(block);
        assert!(allocator.remove_reclaimer(purge));
        assert!(!allocator.remove_reclaimer(purge));
        let error = {
            let _keep = allocator.alloc(384 * MIB, S0).unwrap();
            let _fits_after_spilling = allocator.alloc(100 * MIB, S0).unwrap();
            out_of_memory(allocator.alloc(100 * MIB, S0))
        };
        assert_eq!(
            *log.lock().unwrap(),
            ["purge", "collect", "collect", "spill", "collect", "spill"]
        );
        let tried = error
            .rungs
            .iter()
            .filter(|rung| matches!(rung.rung, Rung::Reclaimer(_)));
        assert_eq!(tried.count(), 2);
        allocator.check_invariants(CheckLevel::Device).unwrap();
    }
}

/// Runs a closure when asked.
struct Run<F>(F);

impl<F: Fn(&ReclaimRequest) -> u64 + Send + Sync> Reclaimer for Run<F> {
    fn name(&self) -> &str {
        "run"
    }

    fn level(&self) -> ReclaimLevel {
        ReclaimLevel::Purge
    }

    fn reclaim(&self, request: &ReclaimRequest) -> u64 {
        (self.0)(request)
    }
}

#[test]
fn a_reclaimer_may_allocate_and_is_not_called_for_that() {
    for allocator in allocators(512 * MIB) {
        let keep = Mutex::new(vec![allocator.alloc(256 * MIB, S0).unwrap()]);
        let inner = allocator.clone();
        allocator.add_reclaimer(Arc::new(Run(move |_: &ReclaimRequest| {
            let error = out_of_memory(inner.alloc(500 * MIB, S0));
            let rung = error.rungs.last().unwrap();
            assert!(
                matches!(rung.outcome, RungOutcome::Skipped { .. }),
                "{rung}"
            );
            assert!(inner.alloc(MIB, S0).is_ok());
            keep.lock()
                .unwrap()
                .pop()
                .map_or(0, |block| block.allocated_bytes())
        })));
        assert!(allocator.alloc(400 * MIB, S0).is_ok());
        assert!(allocator.alloc(400 * MIB, S0).is_ok());
    }
}

/// A collector that finds memory, of which the first finds are taken by other threads at once.
struct Contended {
    allocator: CachingAllocator<SimDevice>,
    held: Mutex<Vec<Block<SimDevice>>>,
    runs: AtomicU32,
    runs_in_vain: u32,
}

impl Reclaimer for Contended {
    fn name(&self) -> &str {
        "contended"
    }

    fn level(&self) -> ReclaimLevel {
        ReclaimLevel::Collect
    }

    fn reclaim(&self, _: &ReclaimRequest) -> u64 {
        let run = self.runs.fetch_add(1, Ordering::Relaxed);
        self.held.lock().unwrap().clear();
        if run < self.runs_in_vain {
            let block = self.allocator.alloc(400 * MIB, S0).unwrap();
            self.held.lock().unwrap().push(block);
        }
        0 // Another thread's run found it.
    }
}

#[test]
fn collecting_goes_on_while_other_threads_take_what_is_found() {
    for (runs_in_vain, bytes, succeeds, runs) in [
        (0, 400 * MIB, true, 1),
        (5, 400 * MIB, true, 6),
        (u32::MAX, 400 * MIB, false, 1024),
        (u32::MAX, 500 * MIB, false, 1), // less was freed than is needed
    ] {
        let allocator = allocators(512 * MIB).remove(0);
        let contended = Arc::new(Contended {
            allocator: allocator.clone(),
            held: Mutex::new(vec![allocator.alloc(400 * MIB, S0).unwrap()]),
            runs: AtomicU32::new(0),
            runs_in_vain,
        });
        let id = allocator.add_reclaimer(contended.clone());
        let result = allocator.alloc(bytes, S0);
        assert_eq!(contended.runs.load(Ordering::Relaxed), runs);
        assert_eq!(result.is_ok(), succeeds);
        if !succeeds {
            let error = out_of_memory(result);
            let tried = error
                .rungs
                .iter()
                .filter(|rung| matches!(rung.rung, Rung::Reclaimer(_)));
            assert_eq!(tried.count(), 1, "the report is of the last round");
        }
        allocator.remove_reclaimer(id);
    }
}

#[test]
fn a_panicking_reclaimer_counts_as_giving_nothing() {
    let allocator = allocators(512 * MIB).remove(0);
    allocator.add_reclaimer(Arc::new(Run(|_: &ReclaimRequest| panic!("no luck"))));
    let _keep = allocator.alloc(400 * MIB, S0).unwrap();
    let error = out_of_memory(allocator.alloc(400 * MIB, S0));
    assert!(error.to_string().contains("no luck"), "{error}");
    // Not poisoned, and not taken for being inside a reclaimer.
    let error = out_of_memory(allocator.alloc(400 * MIB, S0));
    assert!(error.to_string().contains("no luck"), "{error}");
    assert!(allocator.alloc(64 * MIB, S0).is_ok());
}

#[test]
fn bytes_freed_by_a_reclaimer_that_says_zero_are_found() {
    let allocator = allocators(512 * MIB).remove(0);
    let first = allocator.alloc(200 * MIB, S0).unwrap();
    let between = allocator.alloc(32 * MIB, S0).unwrap();
    let second = allocator.alloc(200 * MIB, S0).unwrap();
    let hoard = Mutex::new(vec![first, second]);
    allocator.add_reclaimer(Arc::new(Run(move |_: &ReclaimRequest| {
        hoard.lock().unwrap().clear();
        0
    })));
    // Fits in neither hole: the cheap rungs have to be climbed again.
    assert!(allocator.alloc(400 * MIB, S0).is_ok());
    drop(between);
}

#[test]
fn a_mapping_that_fails_half_way_is_undone() {
    let device = SimDevice::new(SimOptions::new(100 * MIB)).unwrap();
    let allocator = CachingAllocator::new(device.clone());
    device.inject(Fault::nth(Call::MapPage, 7).from_then_on().out_of_memory());
    assert!(matches!(
        allocator.alloc(20 * MIB, S0),
        Err(AllocError::OutOfMemory(_))
    ));
    assert_eq!(device.counters().calls(Call::UnmapPage), 6);
    assert_eq!(device.counters().held_bytes, 0);
    device.clear_faults();
    assert!(allocator.alloc(8 * MIB, S0).is_ok());
    allocator.check_invariants(CheckLevel::Device).unwrap();
}

#[test]
fn pages_that_cannot_be_unmapped_are_kept_in_the_books() {
    let device = SimDevice::new(SimOptions::new(100 * MIB)).unwrap();
    let allocator = CachingAllocator::new(device.clone());
    device.inject(Fault::nth(Call::SetAccess, 1));
    device.inject(Fault::nth(Call::UnmapPage, 3).from_then_on());
    assert!(matches!(
        allocator.alloc(20 * MIB, S0),
        Err(AllocError::Device(_))
    ));
    allocator.check_invariants(CheckLevel::Device).unwrap();
    assert_eq!(allocator.stats().reserved_bytes.all.current, 16 * MIB);
    assert_eq!(device.counters().held_bytes, 16 * MIB);
    device.clear_faults();
    allocator.empty_cache().unwrap();
    assert_eq!(device.counters().held_bytes, 0);
    assert!(allocator.alloc(100 * MIB, S0).is_ok());
    allocator.check_invariants(CheckLevel::Device).unwrap();
}

#[test]
fn memory_that_work_still_uses_is_not_taken_from_under_it() {
    // Two free blocks that do not touch, and a request for what both give back. The stream may
    // have either block at once, but neither's memory may go before its work is done.
    for (allocator, [piece, between, request]) in allocators(64 * MIB)
        .into_iter()
        .zip([[20, 4, 48], [30, 0, 60]])
    {
        let device = allocator.device().clone();
        let first = allocator.alloc(piece * MIB, S0).unwrap();
        let keep = allocator.alloc(between * MIB, S0).unwrap();
        let second = allocator.alloc(piece * MIB, S0).unwrap();
        for block in [&first, &second] {
            for _ in 0..2000 {
                device.fill(block.ptr(), FillValue::U8(1), 64, S0).unwrap();
            }
        }
        drop((first, second));
        let large = allocator.alloc(request * MIB, S0).unwrap();
        assert_eq!(
            allocator.stats().num_sync_all_streams,
            1,
            "waited, with no lock held"
        );
        device.synchronize().unwrap();
        assert_eq!(device.errors(), Vec::<String>::new());
        drop((large, keep));
        allocator.check_invariants(CheckLevel::Device).unwrap();
    }
}

/// A reclaimer that gives nothing, and says how much it could.
struct Idle(ReclaimLevel, u64);

impl Reclaimer for Idle {
    fn name(&self) -> &str {
        match self.0 {
            ReclaimLevel::Purge => "purge",
            ReclaimLevel::Collect => "collect",
            _ => "spill",
        }
    }

    fn level(&self) -> ReclaimLevel {
        self.0
    }

    fn at_most(&self) -> u64 {
        self.1
    }

    fn reclaim(&self, _: &ReclaimRequest) -> u64 {
        0
    }
}

/// An allocation that fails goes by every rung, in this order.
#[test]
fn the_rungs_come_in_their_order() {
    for allocator in allocators(512 * MIB) {
        for level in [
            ReclaimLevel::Spill,
            ReclaimLevel::Collect,
            ReclaimLevel::Purge,
        ] {
            allocator.add_reclaimer(Arc::new(Idle(level, u64::MAX)));
        }
        let keep = [300, 90].map(|mib| allocator.alloc(mib * MIB, S0).unwrap());
        drop(allocator.alloc(33 * MIB, S0).unwrap());
        let error = out_of_memory(allocator.alloc(200 * MIB, S0));
        let rungs: Vec<String> = error.rungs.iter().map(|rung| rung.rung.key()).collect();
        let mut wanted = vec!["thread_caches", "finished_events", "stream_waits"];
        let has_pages = rungs.contains(&"move_pages".to_owned());
        wanted.extend(has_pages.then_some("move_pages"));
        wanted.push("reclaimer purge");
        wanted.extend((!has_pages).then_some("release_cached"));
        wanted.extend(["wait_for_streams", "reclaimer collect", "reclaimer spill"]);
        assert_eq!(rungs, wanted, "{error}");
        drop(keep);
    }
}

#[test]
fn a_reclaimer_that_cannot_give_enough_is_not_called() {
    for allocator in allocators(512 * MIB) {
        allocator.add_reclaimer(Arc::new(Idle(ReclaimLevel::Collect, 99 * MIB)));
        let _keep = allocator.alloc(412 * MIB, S0).unwrap();
        for (mib, is_called) in [(199, true), (200, false)] {
            let error = out_of_memory(allocator.alloc(mib * MIB, S0));
            let rung = error.rungs.last().unwrap();
            assert_eq!(rung.outcome == RungOutcome::Tried, is_called, "{error}");
        }
    }
}

/// What the caches of threads give, streams that are asked, pages that are moved: each is counted, and
/// has its keys.
#[test]
fn each_rung_is_counted_with_what_it_gave() {
    for allocator in allocators(64 * MIB) {
        let device = allocator.device().clone();
        let side = device.create_stream(0).unwrap();
        for _ in 0..3 {
            drop(allocator.alloc(100_000, S0).unwrap());
        }
        let blocks = [20, 1, 20].map(|mib| allocator.alloc(mib * MIB, S0).unwrap());
        let [first, keep, second] = blocks;
        drop(second);
        device.synchronize().unwrap();
        drop(allocator.alloc(20 * MIB, side).unwrap());
        drop(first);
        let large = allocator.alloc(42 * MIB, S0);
        let stats = allocator.stats();
        let keys: std::collections::HashMap<_, _> = stats.torch_keys().into_iter().collect();
        for (rung, totals) in stats.all_rungs() {
            let key = |face| keys[&format!("rung.{}.{face}", rung.key())];
            assert_eq!(key("num_tried"), totals.num_tried);
            assert_eq!(key("bytes_freed"), totals.bytes_freed);
            assert_eq!(key("microseconds"), totals.microseconds);
        }
        let caches = stats.rungs[&Rung::ThreadCaches];
        assert_eq!((caches.num_tried, caches.bytes_freed), (1, 100_352));
        let asked = stats.rungs[&Rung::FinishedEvents];
        assert!(asked.num_tried >= 1 && asked.bytes_freed >= 20 * MIB);
        let pages = stats.rungs.get(&Rung::MovePages);
        let moved = pages.map_or(0, |totals| totals.bytes_freed);
        assert_eq!(moved, stats.num_pages_moved * 2 * MIB);
        assert_eq!(moved > 0, stats.num_pages_moved > 0);
        drop((keep, large));
    }
}
