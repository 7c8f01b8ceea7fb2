//! The governor of waste: pages are moved rather than created, and how much is reserved.
#![expect(clippy::unwrap_used, reason = "an error here is a failed test")]
#![cfg(target_os = "linux")]

use std::collections::VecDeque;

use lastref_alloc::ladder::Rung;
use lastref_alloc::sim::{Call, SimDevice, SimOptions};
use lastref_alloc::{
    AllocatorOptions, Block, CachingAllocator, CheckLevel, Device, FillValue, StreamId,
};
use lastref_snapshot::TraceAction;

const MIB: u64 = 1 << 20;
const S0: StreamId = StreamId::DEFAULT;

type Allocator = CachingAllocator<SimDevice>;

fn with(capacity: u64, options: &AllocatorOptions) -> Allocator {
    let device = SimDevice::new(SimOptions::new(capacity)).unwrap();
    CachingAllocator::with_options(device, options)
}

fn allocator() -> Allocator {
    with(1 << 30, &AllocatorOptions::new().with_history(1000))
}

fn reserved(allocator: &Allocator) -> u64 {
    allocator.check_invariants(CheckLevel::Device).unwrap();
    let reserved = allocator.stats().reserved_bytes.all.current;
    assert_eq!(reserved, allocator.device().counters().held_bytes);
    reserved
}

fn created(allocator: &Allocator) -> u64 {
    allocator.device().counters().calls(Call::CreatePage)
}

/// Ten blocks of 10 MiB, of which those at odd places are dropped again, in the order given.
fn holes(allocator: &Allocator, dropped: &[usize]) -> Vec<Option<Block<SimDevice>>> {
    let blocks = (0..10).map(|_| Some(allocator.alloc(10 * MIB, S0).unwrap()));
    let mut blocks: Vec<_> = blocks.collect();
    for at in dropped {
        blocks[*at] = None;
    }
    blocks
}

#[test]
fn idle_pages_are_moved_rather_than_new_ones_created() {
    let allocator = allocator();
    let _keep = holes(&allocator, &[1, 3, 5, 7]);
    let before = created(&allocator);
    let _large = allocator.alloc(40 * MIB, S0).unwrap();
    assert_eq!(created(&allocator), before);
    assert_eq!(allocator.stats().num_pages_moved, 20);
    assert_eq!(reserved(&allocator), 100 * MIB);
}

#[test]
fn pages_are_created_within_the_slack() {
    for (slack, moved, expected) in [(0, 20, 100), (50, 18, 104), (400, 0, 140)] {
        let allocator = with(
            1 << 30,
            &AllocatorOptions::new().with_slack_per_mille(slack),
        );
        let _keep = holes(&allocator, &[1, 3, 5, 7]);
        let _large = allocator.alloc(40 * MIB, S0).unwrap();
        assert_eq!(allocator.stats().num_pages_moved, moved);
        assert_eq!(reserved(&allocator), expected * MIB);
    }
}

#[test]
fn the_slack_counts_from_the_peak_and_not_from_what_is_in_use() {
    let allocator = allocator();
    drop(allocator.alloc(112 * MIB, S0).unwrap());
    allocator.empty_cache().unwrap();
    let _keep = holes(&allocator, &[1]);
    let _large = allocator.alloc(12 * MIB, S0).unwrap();
    assert_eq!(
        allocator.stats().num_pages_moved,
        0,
        "112 MiB were in use before"
    );
    let _more = allocator.alloc(12 * MIB, S0).unwrap();
    assert_eq!(allocator.stats().num_pages_moved, 5, "but not more");
}

#[test]
fn the_coldest_pages_go_first() {
    for order in [[1, 3, 5, 7], [7, 5, 3, 1], [5, 1, 7, 3]] {
        let allocator = allocator();
        let blocks: Vec<_> = holes(&allocator, &[]);
        let at: Vec<u64> = blocks.iter().flatten().map(|block| block.ptr().0).collect();
        let mut blocks = blocks;
        for place in order {
            blocks[place] = None;
        }
        let _larger = allocator.alloc(16 * MIB, S0).unwrap();
        let snapshot = allocator.snapshot();
        let unmapped = snapshot.device_traces[0]
            .iter()
            .filter(|entry| entry.action == TraceAction::SegmentUnmap);
        let unmapped: Vec<u64> = unmapped.map(|entry| entry.address).collect();
        assert_eq!(unmapped, [at[order[0]], at[order[1]] + 4 * MIB]);
    }
}

#[test]
fn an_allocation_waits_for_idle_pages_if_it_may() {
    for wait in [true, false] {
        let options = AllocatorOptions::new().with_wait_before_growing(wait);
        let allocator = with(1 << 30, &options);
        let keep = holes(&allocator, &[]);
        let device = allocator.device().clone();
        let at = keep[1].as_ref().unwrap().ptr();
        for _ in 0..2000 {
            device.fill(at, FillValue::U8(1), 64, S0).unwrap();
        }
        let mut keep = keep;
        for place in [1, 3, 5, 7] {
            keep[place] = None;
        }
        let _large = allocator.alloc(40 * MIB, S0).unwrap();
        let stats = allocator.stats();
        assert_eq!(stats.num_waits_before_growing, u64::from(wait));
        assert_eq!(stats.num_sync_all_streams, u64::from(wait));
        assert_eq!(reserved(&allocator), if wait { 100 } else { 140 } * MIB);
        device.synchronize().unwrap();
        assert_eq!(device.errors(), Vec::<String>::new());
    }
}

#[test]
fn a_full_device_and_a_limit_take_no_more_of_the_cache_than_is_missing() {
    for limited in [false, true] {
        let options = AllocatorOptions::new().with_slack_per_mille(1000);
        let allocator = with(if limited { 200 } else { 104 } * MIB, &options);
        if limited {
            allocator.set_memory_limit(Some(104 * MIB));
        }
        let _keep = holes(&allocator, &[1, 3, 5, 7]);
        let _large = allocator.alloc(20 * MIB, S0).unwrap();
        let stats = allocator.stats();
        assert_eq!(stats.num_pages_moved, 8, "4 MiB were free on the device");
        assert_eq!(stats.rungs[&Rung::MovePages].bytes_freed, 16 * MIB);
        assert_eq!(stats.rungs[&Rung::MovePages].num_tried, 1);
        assert_eq!((stats.num_alloc_retries, stats.num_ooms), (0, 0));
        assert_eq!(reserved(&allocator), 104 * MIB);
        let cached = 104 * MIB - stats.allocated_bytes.all.current;
        assert_eq!(cached, 24 * MIB, "the rest of the cache is where it was");
    }
}

#[test]
fn nothing_is_moved_for_an_allocation_that_fails() {
    let allocator = with(104 * MIB, &AllocatorOptions::new());
    let _keep = holes(&allocator, &[1, 3, 5, 7]);
    assert!(allocator.alloc(60 * MIB, S0).is_err());
    assert_eq!(allocator.device().counters().calls(Call::UnmapPage), 0);
    assert_eq!(reserved(&allocator), 100 * MIB);
}

#[test]
fn pools_grow_from_opposite_ends_of_one_range_and_share_no_page() {
    let allocator = allocator();
    let large = [0; 3].map(|_| allocator.alloc(3 * MIB, S0).unwrap());
    let small = [0; 40].map(|_| allocator.alloc(100_000, S0).unwrap());
    assert_eq!(allocator.device().counters().calls(Call::ReserveRange), 1);
    let end = small[0].ptr().0 + small[0].allocated_bytes();
    assert_eq!(end - large[0].ptr().0, 2 << 30, "twice the device's memory");
    for pair in large.windows(2) {
        assert_eq!(pair[0].ptr().0 + 3 * MIB, pair[1].ptr().0);
    }
    for pair in small.windows(2) {
        assert_eq!(pair[0].ptr().0, pair[1].ptr().0 + pair[1].allocated_bytes());
    }
    let stats = allocator.stats();
    assert_eq!(stats.segment.all.current, 2);
    assert_eq!(stats.reserved_bytes.small_pool.current, 4 * MIB);
    assert_eq!(stats.reserved_bytes.large_pool.current, 10 * MIB);
    assert_eq!(allocator.snapshot().segments.len(), 2);
    // Pages of one pool serve the other.
    drop(large);
    let created = created(&allocator);
    let _more = [0; 40].map(|_| allocator.alloc(100_000, S0).unwrap());
    assert_eq!(
        allocator.device().counters().calls(Call::CreatePage),
        created
    );
    assert_eq!(allocator.stats().num_pages_moved, 2);
    assert_eq!(reserved(&allocator), 14 * MIB);
}

#[test]
fn the_place_that_takes_the_fewest_pages_is_taken() {
    // 1000 thousandths of slack: nothing is moved, so that the place alone decides.
    let allocator = with(
        1 << 30,
        &AllocatorOptions::new().with_slack_per_mille(10_000),
    );
    let mut keep = holes(&allocator, &[]);
    let at: Vec<u64> = keep.iter().flatten().map(|block| block.ptr().0).collect();
    keep[2] = None;
    keep[5] = None;
    keep[6] = None;
    allocator.empty_cache().unwrap();
    // Beside the gap of 20 MiB 10 are free, beside that of 10 MiB none, and before the rest 10.
    keep[7] = None;
    keep[9] = None;
    let first = allocator.alloc(24 * MIB, S0).unwrap();
    assert_eq!(
        first.ptr().0,
        at[5] + 6 * MIB,
        "14 MiB are new, flush with the end"
    );
    let second = allocator.alloc(12 * MIB, S0).unwrap();
    assert_eq!(second.ptr().0, at[9], "2 MiB are new");
    assert_eq!(reserved(&allocator), 86 * MIB);
}

/// Sizes that change by phases, as a training program's with inputs of varying length, and results
/// that are kept for a while.
fn phases(allocator: &Allocator, phases: u64) {
    let mut state = 1_u64;
    let mut random = |below: u64| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 33) % below
    };
    let weights: Vec<_> = (0..50)
        .map(|n| allocator.alloc(MIB + n * 50_000, S0).unwrap())
        .collect();
    let mut kept = VecDeque::new();
    for _ in 0..phases {
        let length = 512 + random(1536);
        let mut activations = Vec::new();
        for layer in 0..40 {
            activations.push(
                allocator
                    .alloc(length * (10_000 + layer % 5 * 3000), S0)
                    .unwrap(),
            );
            drop(allocator.alloc(length * length * 20, S0).unwrap());
            if layer % 8 == 0 {
                kept.push_back(allocator.alloc(length * 20_000, S0).unwrap());
            }
        }
        while kept.len() > 20 {
            kept.pop_front();
        }
        while let Some(block) = activations.pop() {
            drop(
                allocator
                    .alloc(block.requested_bytes() / 2 + 512, S0)
                    .unwrap(),
            );
        }
    }
    drop((weights, kept));
}

#[test]
fn a_program_whose_sizes_change_wastes_little_more_than_the_slack() {
    // Of 2.2 GB. The slack is 9 MB of it, the rest lies in partly used pages.
    let wasted = |options: AllocatorOptions| {
        let allocator = with(8 << 30, &options);
        phases(&allocator, 30);
        let stats = allocator.stats();
        allocator.check_invariants(CheckLevel::Device).unwrap();
        let (reserved, active) = (stats.reserved_bytes.all.peak, stats.active_bytes.all.peak);
        (reserved - active, stats.num_pages_moved)
    };
    let (governed, moved) = wasted(AllocatorOptions::new());
    assert!(
        governed <= 64 * MIB && moved > 0,
        "{governed} wasted, {moved} moved"
    );
    let (alone, moved) = wasted(AllocatorOptions::new().with_slack_per_mille(u32::MAX));
    assert!(
        alone > 2 * governed && moved == 0,
        "{alone} wasted, {moved} moved"
    );
}
