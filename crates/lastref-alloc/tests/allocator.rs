//! What the caching allocator promises, one behaviour a test, on both kinds of memory.
#![expect(clippy::unwrap_used, reason = "an error here is a failed test")]
#![cfg(target_os = "linux")]

use lastref_alloc::sim::{Call, SimDevice, SimOptions};
use lastref_alloc::{
    AllocError, AllocatorOptions, Backing, CachingAllocator, CheckLevel, Device, DeviceError,
    FillValue, StreamId, StreamWaits,
};
use lastref_snapshot::{BlockState, TraceAction};

const MIB: u64 = 1 << 20;
const S0: StreamId = StreamId::DEFAULT;

fn device(capacity: u64) -> SimDevice {
    SimDevice::new(SimOptions::new(capacity)).unwrap()
}

/// An allocator for each kind of memory.
fn allocators(capacity: u64) -> Vec<CachingAllocator<SimDevice>> {
    [Backing::Auto, Backing::Segments]
        .map(|backing| {
            let options = AllocatorOptions::new().with_backing(backing);
            CachingAllocator::with_options(device(capacity), &options)
        })
        .into()
}

/// The same, where neither host nor device waits for streams to save memory.
fn hasty_allocators(capacity: u64) -> Vec<CachingAllocator<SimDevice>> {
    [Backing::Auto, Backing::Segments]
        .map(|backing| {
            let options = AllocatorOptions::new()
                .with_backing(backing)
                .with_wait_before_growing(false)
                .with_stream_waits(StreamWaits::Never);
            CachingAllocator::with_options(device(capacity), &options)
        })
        .into()
}

fn check(allocator: &CachingAllocator<SimDevice>) {
    allocator.check_invariants(CheckLevel::Device).unwrap();
    assert_eq!(
        allocator.stats().reserved_bytes.all.current,
        allocator.device().counters().held_bytes,
        "reserved is what the device says"
    );
    assert_eq!(allocator.device().errors(), Vec::<String>::new());
}

fn memory_calls(allocator: &CachingAllocator<SimDevice>) -> u64 {
    let counters = allocator.device().counters();
    [
        Call::AllocSegment,
        Call::FreeSegment,
        Call::CreatePage,
        Call::MapPage,
        Call::UnmapPage,
    ]
    .iter()
    .map(|call| counters.calls(*call))
    .sum()
}

#[test]
fn a_dropped_block_is_freed_at_once_and_its_memory_kept() {
    for allocator in allocators(1 << 30) {
        let block = allocator.alloc(100 * MIB, S0).unwrap();
        let reserved = allocator.stats().reserved_bytes.all.current;
        assert_eq!(allocator.stats().allocated_bytes.all.current, 100 * MIB);
        drop(block);
        let stats = allocator.stats();
        assert_eq!(stats.allocated_bytes.all.current, 0);
        assert_eq!(stats.active_bytes.all.current, 0);
        assert_eq!(stats.reserved_bytes.all.current, reserved);
        check(&allocator);
    }
}

#[test]
fn a_hit_makes_no_device_call_and_a_miss_does() {
    for allocator in allocators(1 << 30) {
        drop(allocator.alloc(100 * MIB, S0).unwrap());
        let before = allocator.device().counters().total_calls();
        let hit = allocator.alloc(60 * MIB, S0).unwrap();
        assert_eq!(allocator.device().counters().total_calls(), before);
        let miss = allocator.alloc(60 * MIB, S0).unwrap();
        assert!(allocator.device().counters().total_calls() > before);
        drop((hit, miss));
        check(&allocator);
    }
}

#[test]
fn blocks_are_split_and_merged_again() {
    for allocator in allocators(1 << 30) {
        let whole = allocator.alloc(64 * MIB, S0).unwrap();
        let at = whole.ptr();
        drop(whole);
        let parts: Vec<_> = (0..4)
            .map(|_| allocator.alloc(16 * MIB, S0).unwrap())
            .collect();
        let mut ptrs: Vec<u64> = parts.iter().map(|part| part.ptr().0).collect();
        ptrs.sort_unstable();
        let expected: Vec<u64> = (0..4).map(|n| at.0 + n * 16 * MIB).collect();
        assert_eq!(ptrs, expected, "cut from the one free block");
        drop(parts);
        assert_eq!(
            allocator.alloc(64 * MIB, S0).unwrap().ptr(),
            at,
            "merged into one again"
        );
        check(&allocator);
    }
}

#[test]
fn the_best_fitting_block_is_taken() {
    // With virtual memory, where sizes are not rounded to segments.
    let allocator = allocators(1 << 30).remove(0);
    // In 512-byte units past 32 MiB: three free blocks of one bin, and one of the next.
    let sizes = [900, 1, 300, 1, 0, 1, 4000, 1].map(|units| 32 * MIB + units * 512);
    let mut blocks: Vec<_> = sizes
        .iter()
        .map(|bytes| Some(allocator.alloc(*bytes, S0).unwrap()))
        .collect();
    let at = |n: usize| blocks[n].as_ref().unwrap().ptr();
    let (in_bin, smallest, next_bin) = (at(2), at(4), at(6));
    for n in [0, 2, 4, 6] {
        blocks[n] = None;
    }
    let take = |bytes| allocator.alloc(bytes, S0).unwrap();
    let exact = take(32 * MIB);
    assert_eq!(exact.ptr(), smallest);
    let close = take(32 * MIB + 200 * 512);
    assert_eq!(close.ptr(), in_bin);
    let larger = take(32 * MIB + 3000 * 512);
    assert_eq!(larger.ptr(), next_bin);
    drop((exact, close, larger));
    check(&allocator);
}

#[test]
fn sizes_are_rounded_to_512_and_pools_kept_apart() {
    for allocator in allocators(1 << 30) {
        let block = allocator.alloc(1, S0).unwrap();
        assert_eq!((block.requested_bytes(), block.allocated_bytes()), (1, 512));
        let small = allocator.alloc(128 << 10, S0).unwrap();
        let large = allocator.alloc((128 << 10) + 1, S0).unwrap();
        let stats = allocator.stats();
        assert_eq!(stats.allocation.small_pool.current, 2);
        assert_eq!(stats.allocation.large_pool.current, 1);
        assert_eq!(stats.allocated_bytes.large_pool.current, (128 << 10) + 512);
        assert_eq!(
            stats.requested_bytes.all.current,
            1 + (128 << 10) + (128 << 10) + 1
        );
        assert!(
            large.ptr().0 / (2 * MIB) != small.ptr().0 / (2 * MIB),
            "no page in common"
        );
        check(&allocator);
    }
}

#[test]
fn zero_bytes_take_nothing() {
    for allocator in allocators(1 << 30) {
        let block = allocator.alloc(0, S0).unwrap();
        assert!(block.ptr().is_null());
        block.record_stream(S0).unwrap();
        assert_eq!(allocator.stats().allocation.all.current, 0);
        assert_eq!(memory_calls(&allocator), 0);
    }
}

#[test]
fn empty_cache_gives_back_all_but_what_is_live() {
    for allocator in allocators(1 << 30) {
        let keep = allocator.alloc(50 * MIB, S0).unwrap();
        drop(allocator.alloc(200 * MIB, S0).unwrap());
        let released = allocator.empty_cache().unwrap();
        assert!(released >= 200 * MIB, "{released}");
        check(&allocator);
        assert!(allocator.stats().reserved_bytes.all.current <= 50 * MIB + 2 * MIB);
        drop(keep);
        allocator.empty_cache().unwrap();
        assert_eq!(allocator.stats().reserved_bytes.all.current, 0);
        let info = allocator.device().memory_info().unwrap();
        assert_eq!(info.free_bytes, info.total_bytes);
    }
}

#[test]
fn with_virtual_memory_free_pages_between_live_blocks_go_back() {
    let allocator = CachingAllocator::new(device(1 << 30));
    let mut blocks: Vec<_> = (0..9)
        .map(|_| Some(allocator.alloc(10 * MIB, S0).unwrap()))
        .collect();
    for n in (1..9).step_by(2) {
        blocks[n] = None;
    }
    assert_eq!(allocator.empty_cache().unwrap(), 40 * MIB);
    assert_eq!(
        allocator.stats().segment.all.current,
        5,
        "five stretches are left"
    );
    check(&allocator);
    // A block larger than any hole lies across new pages and old gaps alike.
    let large = allocator.alloc(25 * MIB, S0).unwrap();
    assert_eq!(
        allocator.stats().reserved_bytes.all.current,
        50 * MIB + 26 * MIB
    );
    drop(large);
    check(&allocator);
}

#[test]
fn growth_uses_the_free_memory_beside_it() {
    let allocator = CachingAllocator::new(device(1 << 30));
    let keep = allocator.alloc(10 * MIB, S0).unwrap();
    drop(allocator.alloc(10 * MIB, S0).unwrap());
    let grown = allocator.alloc(14 * MIB, S0).unwrap();
    assert_eq!(
        allocator.stats().reserved_bytes.all.current,
        24 * MIB,
        "only 4 MiB were new"
    );
    assert_eq!(grown.ptr().0, keep.ptr().0 + 10 * MIB);
    check(&allocator);
}

#[test]
fn another_stream_gets_memory_only_after_its_work_is_done() {
    for allocator in hasty_allocators(1 << 30) {
        let device = allocator.device().clone();
        let other = device.create_stream(0).unwrap();
        let block = allocator.alloc(64 * MIB, S0).unwrap();
        let at = block.ptr();
        // Enough work that the scheduler cannot have done it by the next call.
        for _ in 0..200 {
            device.fill(at, FillValue::U8(1), 64, S0).unwrap();
        }
        drop(block);
        assert_eq!(
            allocator.alloc(64 * MIB, S0).unwrap().ptr(),
            at,
            "the same stream: at once"
        );
        let early = allocator.alloc(64 * MIB, other).unwrap();
        assert_ne!(
            early.ptr(),
            at,
            "another stream: not while work is in flight"
        );
        drop(early);
        device.synchronize().unwrap();
        let blocks = [
            allocator.alloc(64 * MIB, other),
            allocator.alloc(64 * MIB, other),
        ];
        let ptrs = blocks.map(|block| block.unwrap().ptr());
        assert!(ptrs.contains(&at), "after it is done: yes");
        check(&allocator);
    }
}

#[test]
fn a_recorded_block_is_pending_until_that_stream_is_done() {
    for allocator in hasty_allocators(1 << 30) {
        let device = allocator.device().clone();
        let other = device.create_stream(0).unwrap();
        let block = allocator.alloc(64 * MIB, S0).unwrap();
        let at = block.ptr();
        for _ in 0..200 {
            device.fill(at, FillValue::U8(1), 64, other).unwrap();
        }
        block.record_stream(other).unwrap();
        block.record_stream(other).unwrap();
        drop(block);
        let stats = allocator.stats();
        assert_eq!(stats.allocated_bytes.all.current, 0);
        assert_eq!(stats.active_bytes.all.current, 64 * MIB);
        let states: Vec<_> = allocator.snapshot().segments[0]
            .blocks
            .iter()
            .map(|b| b.state)
            .collect();
        assert_eq!(states[0], BlockState::ActivePendingFree);
        assert_ne!(
            allocator.alloc(64 * MIB, S0).unwrap().ptr(),
            at,
            "not even for its own stream"
        );
        device.synchronize_stream(other).unwrap();
        let blocks = [allocator.alloc(64 * MIB, S0), allocator.alloc(64 * MIB, S0)];
        assert!(blocks.map(|block| block.unwrap().ptr()).contains(&at));
        assert_eq!(allocator.stats().active_bytes.all.current, 0);
        check(&allocator);
    }
}

#[test]
fn empty_cache_waits_for_pending_work() {
    for allocator in allocators(1 << 30) {
        let device = allocator.device().clone();
        let other = device.create_stream(0).unwrap();
        let block = allocator.alloc(64 * MIB, S0).unwrap();
        for stream in [S0, other] {
            for _ in 0..100 {
                device
                    .fill(block.ptr(), FillValue::U8(1), 64, stream)
                    .unwrap();
            }
        }
        block.record_stream(other).unwrap();
        drop(block);
        assert_eq!(allocator.empty_cache().unwrap(), 64 * MIB);
        assert_eq!(allocator.stats().num_sync_all_streams, 1);
        check(&allocator);
    }
}

#[test]
fn a_retired_stream_leaves_its_blocks_valid() {
    for allocator in hasty_allocators(1 << 30) {
        let device = allocator.device().clone();
        let gone = device.create_stream(0).unwrap();
        let (held, freed) = (
            allocator.alloc(64 * MIB, gone).unwrap(),
            allocator.alloc(64 * MIB, gone).unwrap(),
        );
        for _ in 0..200 {
            device.fill(held.ptr(), FillValue::U8(7), 64, gone).unwrap();
            device
                .fill(freed.ptr(), FillValue::U8(7), 64, gone)
                .unwrap();
        }
        let (held_at, freed_at) = (held.ptr(), freed.ptr());
        drop(freed);
        allocator.retire_stream(gone).unwrap();
        device.destroy_stream(gone).unwrap();
        let refused = allocator.alloc(512, gone).unwrap_err();
        assert_eq!(refused, AllocError::RetiredStream { stream: gone });
        drop(held);
        let early = allocator.alloc(64 * MIB, S0).unwrap();
        assert!(
            ![held_at, freed_at].contains(&early.ptr()),
            "its work is still in flight"
        );
        drop(early);
        device.synchronize().unwrap();
        let after = [(); 3].map(|()| allocator.alloc(64 * MIB, S0).unwrap());
        let ptrs: Vec<_> = after.iter().map(lastref_alloc::Block::ptr).collect();
        assert!(ptrs.contains(&held_at) && ptrs.contains(&freed_at));
        drop(after);
        allocator.empty_cache().unwrap();
        assert_eq!(allocator.stats().reserved_bytes.all.current, 0);
        check(&allocator);
    }
}

#[test]
fn waiting_for_a_stream_that_was_destroyed_works() {
    for allocator in allocators(1 << 30) {
        let device = allocator.device().clone();
        let gone = device.create_stream(0).unwrap();
        let block = allocator.alloc(64 * MIB, gone).unwrap();
        for _ in 0..200 {
            device
                .fill(block.ptr(), FillValue::U8(7), 64, gone)
                .unwrap();
        }
        allocator.retire_stream(gone).unwrap();
        device.destroy_stream(gone).unwrap();
        drop(block);
        assert_eq!(allocator.empty_cache().unwrap(), 64 * MIB);
        check(&allocator);
    }
}

#[test]
fn an_unknown_stream_is_refused() {
    let allocator = CachingAllocator::new(device(1 << 30));
    let error = allocator.alloc(512, StreamId(4711)).unwrap_err();
    assert!(
        matches!(
            error,
            AllocError::Device(DeviceError::InvalidArgument { .. })
        ),
        "{error}"
    );
    let block = allocator.alloc(512, S0).unwrap();
    assert!(block.record_stream(StreamId(4711)).is_err());
    drop(block);
    check(&allocator);
}

#[test]
fn limits_hold_and_can_be_lifted() {
    for allocator in allocators(1 << 30) {
        allocator.set_memory_fraction(0.25).unwrap();
        assert_eq!(allocator.memory_limit(), Some(256 * MIB));
        let block = allocator.alloc(200 * MIB, S0).unwrap();
        let error = allocator.alloc(100 * MIB, S0).unwrap_err();
        assert!(matches!(error, AllocError::OutOfMemory(_)), "{error}");
        let error = allocator.alloc(300 * MIB, S0).unwrap_err();
        assert!(
            matches!(error, AllocError::TooLarge { limited: true, .. }),
            "{error}"
        );
        drop(block);
        assert!(
            allocator.alloc(256 * MIB, S0).is_ok(),
            "the cache does not count against it"
        );
        allocator.set_memory_fraction(1.0).unwrap();
        assert_eq!(allocator.memory_limit(), None);
        assert!(allocator.alloc(900 * MIB, S0).is_ok());
        for wrong in [-0.1, 1.1, f64::NAN, f64::INFINITY] {
            assert!(allocator.set_memory_fraction(wrong).is_err());
        }
        check(&allocator);
    }
}

#[test]
fn peaks_and_sums_are_reset_apart() {
    let allocator = CachingAllocator::new(device(1 << 30));
    let keep = allocator.alloc(10 * MIB, S0).unwrap();
    drop(allocator.alloc(30 * MIB, S0).unwrap());
    assert_eq!(allocator.stats().allocated_bytes.all.peak, 40 * MIB);
    allocator.reset_peak_stats();
    assert_eq!(allocator.stats().allocated_bytes.all.peak, 10 * MIB);
    assert_eq!(allocator.stats().allocated_bytes.all.allocated, 40 * MIB);
    allocator.reset_accumulated_stats();
    let stat = allocator.stats().allocated_bytes.all;
    assert_eq!((stat.allocated, stat.freed, stat.current), (0, 0, 10 * MIB));
    drop(keep);
}

#[test]
fn inactive_split_counts_what_a_live_neighbour_pins() {
    let allocator = CachingAllocator::new(device(1 << 30));
    let a = allocator.alloc(3 * MIB, S0).unwrap();
    let b = allocator.alloc(3 * MIB, S0).unwrap();
    drop(a);
    // Three MiB are free; the second half of the second page is b's, so one MiB is pinned.
    let stats = allocator.stats();
    assert_eq!(stats.inactive_split_bytes.all.current, MIB);
    assert_eq!(stats.inactive_split.all.current, 1);
    assert_eq!(allocator.empty_cache().unwrap(), 2 * MIB);
    drop(b);
    assert_eq!(allocator.stats().inactive_split_bytes.all.current, 0);
    check(&allocator);
}

#[test]
fn history_keeps_the_latest_entries_in_order() {
    let allocator = CachingAllocator::new(device(1 << 30));
    allocator.record_history(4);
    let block = allocator.alloc(1000, S0).unwrap();
    drop(block);
    allocator.empty_cache().unwrap();
    let trace = &allocator.snapshot().device_traces[0];
    let actions: Vec<_> = trace.iter().map(|entry| entry.action).collect();
    assert_eq!(
        actions,
        [
            TraceAction::FreeRequested,
            TraceAction::FreeCompleted,
            TraceAction::SegmentUnmap,
            TraceAction::Snapshot
        ]
    );
    assert_eq!(trace[0].bytes, 1000, "requested bytes");
    assert!(
        trace
            .windows(2)
            .all(|pair| pair[0].sequence < pair[1].sequence)
    );
    allocator.record_history(0);
    assert!(allocator.snapshot().device_traces[0].is_empty());
}

#[test]
fn snapshot_tiles_segments_and_sums_to_the_statistics() {
    for allocator in allocators(1 << 30) {
        let blocks: Vec<_> = (1..40)
            .map(|n| allocator.alloc(n * 70_000, S0).unwrap())
            .collect();
        let kept: Vec<_> = blocks.into_iter().step_by(3).collect();
        let (snapshot, stats) = (allocator.snapshot(), allocator.stats());
        let sum = |field: fn(&lastref_snapshot::Segment) -> u64| -> u64 {
            snapshot.segments.iter().map(field).sum()
        };
        assert_eq!(sum(|s| s.total_bytes), stats.reserved_bytes.all.current);
        assert_eq!(
            sum(|s| s.allocated_bytes),
            stats.allocated_bytes.all.current
        );
        assert_eq!(
            sum(|s| s.requested_bytes),
            stats.requested_bytes.all.current
        );
        assert_eq!(snapshot.segments.len() as u64, stats.segment.all.current);
        for segment in &snapshot.segments {
            let mut at = segment.address;
            for block in &segment.blocks {
                assert_eq!(block.address, at);
                at += block.bytes;
            }
            assert_eq!(at, segment.address + segment.total_bytes);
        }
        drop(kept);
    }
}

#[test]
fn the_last_handle_gives_everything_back_to_the_device() {
    for allocator in allocators(1 << 30) {
        let device = allocator.device().clone();
        let other = device.create_stream(0).unwrap();
        let block = allocator.alloc(10 * MIB, S0).unwrap();
        let recorded = allocator.alloc(10 * MIB, S0).unwrap();
        recorded.record_stream(other).unwrap();
        for _ in 0..2000 {
            device
                .fill(recorded.ptr(), FillValue::U8(1), 64, other)
                .unwrap();
        }
        drop(recorded);
        drop(allocator);
        assert!(
            device.counters().held_bytes > 0,
            "a block keeps its allocator"
        );
        drop(block);
        assert_eq!(device.counters().held_bytes, 0);
        device.synchronize().unwrap();
        assert_eq!(device.errors(), Vec::<String>::new());
    }
}

#[test]
fn blocks_may_be_dropped_on_any_thread() {
    for allocator in allocators(1 << 30) {
        let blocks: Vec<_> = (0..64).map(|_| allocator.alloc(MIB, S0).unwrap()).collect();
        std::thread::scope(|scope| {
            let mut blocks = blocks.into_iter();
            for _ in 0..4 {
                let part: Vec<_> = blocks.by_ref().take(16).collect();
                let allocator = &allocator;
                scope.spawn(move || {
                    for block in part {
                        drop(block);
                        drop(allocator.alloc(MIB / 2, S0).unwrap());
                    }
                });
            }
        });
        assert_eq!(allocator.stats().allocated_bytes.all.current, 0);
        check(&allocator);
    }
}

#[test]
fn a_merged_block_waits_for_the_later_of_its_frees() {
    for allocator in hasty_allocators(1 << 30) {
        let device = allocator.device().clone();
        let other = device.create_stream(0).unwrap();
        let whole = allocator.alloc(64 * MIB, other).unwrap();
        let at = whole.ptr();
        drop(whole);
        let first = allocator.alloc(32 * MIB, other).unwrap();
        let second = allocator.alloc(32 * MIB, other).unwrap();
        assert_eq!(first.ptr().0.min(second.ptr().0), at.0);
        drop(first);
        device.synchronize().unwrap();
        // This stream asks, and learns that the first free is done.
        drop(allocator.alloc(32 * MIB, S0).unwrap());
        for _ in 0..2000 {
            device
                .fill(second.ptr(), FillValue::U8(1), 64, other)
                .unwrap();
        }
        drop(second);
        let early = allocator.alloc(64 * MIB, S0).unwrap();
        assert_ne!(early.ptr(), at, "its second half is still written to");
        drop(early);
        check(&allocator);
    }
}

#[test]
fn the_rest_of_a_split_block_waits_as_the_whole_did() {
    for allocator in hasty_allocators(1 << 30) {
        let device = allocator.device().clone();
        let other = device.create_stream(0).unwrap();
        let whole = allocator.alloc(64 * MIB, S0).unwrap();
        let at = whole.ptr().0;
        for _ in 0..2000 {
            device
                .fill(whole.ptr().offset(48 * MIB), FillValue::U8(1), 64, S0)
                .unwrap();
        }
        drop(whole);
        let part = allocator.alloc(32 * MIB, S0).unwrap();
        assert_eq!(part.ptr().0, at);
        let early = allocator.alloc(32 * MIB, other).unwrap();
        assert_ne!(
            early.ptr().0,
            at + 32 * MIB,
            "the first stream still writes to it"
        );
        drop((part, early));
        check(&allocator);
    }
}

#[test]
fn the_block_freed_last_goes_to_the_same_request_only() {
    for allocator in hasty_allocators(256 * MIB) {
        let take = |bytes, stream| allocator.alloc(bytes, stream).unwrap();
        let keep = take(4 * MIB, S0);
        let at = take(3 * MIB, S0).ptr();
        let again = take(3 * MIB - 100, S0);
        assert_eq!(again.ptr(), at);
        assert_eq!(allocator.stats().requested_bytes.all.current, 7 * MIB - 100);
        drop(again);
        // A smaller block is cut off it, a larger one is not in it.
        drop(take(MIB, S0));
        check(&allocator);
        drop(take(3 * MIB, S0));
        drop(take(5 * MIB, S0));
        check(&allocator);
        // Another stream must know first that the work on it is done.
        drop(take(3 * MIB, S0));
        let other = allocator.device().create_stream(0).unwrap();
        let theirs = take(3 * MIB, other);
        let asked = allocator.device().counters().calls(Call::RecordEvent);
        assert!(theirs.ptr() != at || asked > 0);
        drop((keep, theirs));
        check(&allocator);
    }
}

#[test]
fn whoever_looks_sees_the_block_freed_last() {
    for allocator in allocators(256 * MIB) {
        let blocks = [0; 2].map(|_| allocator.alloc(MIB, S0).unwrap());
        let [kept, freed] = blocks;
        let before = allocator.stats().inactive_split_bytes.all.current;
        drop(freed);
        let stats = allocator.stats();
        assert_eq!(stats.inactive_split_bytes.all.current, before + MIB);
        drop(kept);
        let reserved = allocator.stats().reserved_bytes.all.current;
        drop(allocator.alloc(MIB, S0).unwrap());
        assert_eq!(allocator.empty_cache().unwrap(), reserved);
        check(&allocator);
    }
}
