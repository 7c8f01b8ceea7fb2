//! Private pools: which allocations go to them, what they keep apart, and how they end.
#![expect(clippy::unwrap_used, reason = "an error here is a failed test")]
#![cfg(target_os = "linux")]

use std::thread;

use lastref_alloc::ladder::{Rung, RungReport};
use lastref_alloc::sim::{Call, SimDevice, SimOptions};
use lastref_alloc::{
    AllocError, AllocatorOptions, Backing, Block, CachingAllocator, CheckLevel, Device, DevicePtr,
    FillValue, MemPool, StreamId,
};

type Allocator = CachingAllocator<SimDevice>;

const MIB: u64 = 1 << 20;
const PAGE: u64 = 2 * MIB;
const S0: StreamId = StreamId::DEFAULT;

/// An allocator for each kind of memory, on a device that looks for races and where work runs when
/// something waits for it.
fn allocators(capacity: u64) -> Vec<Allocator> {
    [Backing::Auto, Backing::Segments]
        .map(|backing| {
            let options = SimOptions::new(capacity).with_races(true);
            let device = SimDevice::new(options.with_max_ops_per_step(0)).unwrap();
            let options = AllocatorOptions::new().with_backing(backing);
            CachingAllocator::with_options(device, &options)
        })
        .into()
}

fn check(allocator: &Allocator) {
    allocator.check_invariants(CheckLevel::Device).unwrap();
    let device = allocator.device();
    assert_eq!(
        allocator.stats().reserved_bytes.all.current,
        device.counters().held_bytes
    );
    let races = device.races();
    assert!(races.is_empty(), "{}", races[0]);
    assert_eq!(device.errors(), Vec::<String>::new());
}

fn reserved(allocator: &Allocator) -> u64 {
    allocator.stats().reserved_bytes.all.current
}

/// Which of the pools, counted from 1, the block lies in; 0 for none of them.
fn home(block: &Block<SimDevice>, pools: &[&MemPool<SimDevice>]) -> usize {
    let owner = pools.iter().position(|pool| pool.owns(block));
    owner.map_or(0, |at| at + 1)
}

#[test]
fn a_scope_sends_this_threads_allocations_to_its_pool() {
    for allocator in allocators(1 << 30) {
        let (one, two) = (allocator.create_pool(), allocator.create_pool());
        let pools = [&one, &two];
        let take = || allocator.alloc(MIB, S0).unwrap();
        let mut held = vec![(take(), 0)];
        {
            let _outer = one.enter();
            held.push((take(), 1));
            {
                let _inner = two.enter();
                held.push((take(), 2));
                {
                    let _again = one.enter();
                    held.push((take(), 1));
                }
                held.push((take(), 2));
                let elsewhere = thread::scope(|scope| scope.spawn(take).join().unwrap());
                held.push((elsewhere, 0));
                // Whatever scope is open, a pool can be asked itself.
                held.push((one.alloc(MIB, S0).unwrap(), 1));
            }
            held.push((take(), 1));
        }
        held.push((take(), 0));
        for (n, (block, wanted)) in held.iter().enumerate() {
            assert_eq!(home(block, &pools), *wanted, "allocation {n}");
        }
        check(&allocator);
    }
}

#[test]
fn scopes_may_be_dropped_out_of_turn_and_concern_one_allocator() {
    for allocator in allocators(1 << 30) {
        let other = Allocator::new(SimDevice::new(SimOptions::new(1 << 30)).unwrap());
        let (one, two) = (allocator.create_pool(), allocator.create_pool());
        let pools = [&one, &two];
        let outer = one.enter();
        let inner = two.enter();
        let foreign = other.create_pool().enter();
        let take = || home(&allocator.alloc(MIB, S0).unwrap(), &pools);
        assert_eq!(take(), 2, "the other allocator's scope is not in the way");
        let block = other.alloc(MIB, S0).unwrap();
        assert!(foreign.pool().owns(&block));
        drop(outer);
        assert_eq!(take(), 2);
        drop(inner);
        assert_eq!(take(), 0);
        assert!(foreign.pool().owns(&other.alloc(MIB, S0).unwrap()));
        drop(foreign);
        check(&allocator);
    }
}

#[test]
fn a_pools_memory_lies_apart_and_serves_the_pool() {
    for allocator in allocators(1 << 30) {
        let pool = allocator.create_pool();
        let mut held = Vec::new();
        for bytes in [512, 100_000, MIB, 3 * MIB, 40 * MIB] {
            held.push((pool.alloc(bytes, S0).unwrap(), true));
            held.push((allocator.alloc(bytes, S0).unwrap(), false));
        }
        for (block, inside) in &held {
            for (other, other_inside) in &held {
                if inside != other_inside {
                    let pages = |block: &Block<SimDevice>| {
                        let start = block.ptr().0 / PAGE;
                        start..=(block.ptr().0 + block.allocated_bytes() - 1) / PAGE
                    };
                    let (one, two) = (pages(block), pages(other));
                    assert!(one.end() < two.start() || two.end() < one.start());
                }
            }
        }
        // What is free in one is not given out by the other.
        let calls = |allocator: &Allocator| allocator.device().counters().total_calls();
        let inside: Vec<DevicePtr> = held
            .iter()
            .filter(|(_, inside)| *inside)
            .map(|(block, _)| block.ptr())
            .collect();
        held.retain(|(_, inside)| !inside);
        let before = reserved(&allocator);
        let outside = allocator.alloc(40 * MIB, S0).unwrap();
        assert!(reserved(&allocator) >= before + 40 * MIB);
        let before = calls(&allocator);
        let again = pool.alloc(40 * MIB, S0).unwrap();
        assert_eq!(calls(&allocator), before, "a hit");
        assert!(inside.contains(&again.ptr()));
        drop((held, outside));
        check(&allocator);
    }
}

#[test]
fn a_live_pool_is_flushed_before_anybody_runs_out_of_memory() {
    for allocator in allocators(256 * MIB) {
        let pool = allocator.create_pool();
        let fill = |pool: &MemPool<SimDevice>| drop(pool.alloc(200 * MIB, S0).unwrap());
        // For the default pool, for another one, and for its own larger request.
        fill(&pool);
        drop(allocator.alloc(200 * MIB, S0).unwrap());
        fill(&pool);
        let other = allocator.create_pool();
        fill(&other);
        let pieces = [100, 100].map(|mib| pool.alloc(mib * MIB, S0).unwrap());
        drop(pieces);
        drop(pool.alloc(240 * MIB, S0).unwrap());
        check(&allocator);
        // What is live stays, and the numbers of the error add up.
        let block = pool.alloc(200 * MIB, S0).unwrap();
        let error = match allocator.alloc(100 * MIB, S0).unwrap_err() {
            AllocError::OutOfMemory(error) => *error,
            error => panic!("{error}"),
        };
        assert_eq!(error.allocated, 200 * MIB);
        let parts = error.allocated + error.pending + error.cached + error.other;
        assert_eq!(parts + error.device_free, error.capacity);
        drop(block);
        // And a limit counts it in.
        allocator.set_memory_limit(Some(210 * MIB));
        fill(&pool);
        assert!(allocator.alloc(200 * MIB, S0).is_ok());
        check(&allocator);
    }
}

#[test]
fn emptying_the_cache_empties_pools_and_one_pool_alone() {
    for allocator in allocators(1 << 30) {
        let (one, two) = (allocator.create_pool(), allocator.create_pool());
        let device = allocator.device().clone();
        let fill = || {
            for pool in [&one, &two] {
                let block = pool.alloc(40 * MIB, S0).unwrap();
                device.fill(block.ptr(), FillValue::U8(1), 8, S0).unwrap();
            }
            drop(allocator.alloc(40 * MIB, S0).unwrap());
        };
        fill();
        assert_eq!(
            one.empty_cache().unwrap(),
            40 * MIB,
            "it waits for the stream"
        );
        assert_eq!(one.stats().reserved_bytes.current, 0);
        assert_eq!(two.stats().reserved_bytes.current, 40 * MIB);
        assert_eq!(reserved(&allocator), 80 * MIB);
        check(&allocator);
        fill();
        assert_eq!(allocator.empty_cache().unwrap(), 120 * MIB);
        check(&allocator);
    }
}

#[test]
fn a_block_outlives_its_pool() {
    for allocator in allocators(1 << 30) {
        let device = allocator.device().clone();
        let pool = allocator.create_pool();
        let number = pool.id();
        let [kept, free] = [40, 60].map(|mib| pool.alloc(mib * MIB, S0).unwrap());
        drop(free);
        let clone = pool.clone();
        let scope = pool.enter();
        drop(pool);
        drop(scope);
        assert!(reserved(&allocator) >= 100 * MIB, "a handle is left");
        drop(clone);
        assert_eq!(reserved(&allocator), 40 * MIB, "what was free went back");
        device.fill(kept.ptr(), FillValue::U8(7), 8, S0).unwrap();
        device.synchronize().unwrap();
        assert_eq!(device.read_bytes(kept.ptr(), 8).unwrap(), [7; 8]);
        // Its number is not another pool's while it is left.
        let second = allocator.create_pool();
        assert_ne!(second.id(), number);
        check(&allocator);
        drop(kept);
        assert_eq!(reserved(&allocator), 40 * MIB, "no device call in a free");
        // It belongs to nobody: it goes before more is asked of the device.
        let block = allocator.alloc(50 * MIB, S0).unwrap();
        assert!(reserved(&allocator) < 80 * MIB);
        assert_eq!(allocator.create_pool().id(), number);
        drop((block, second));
        allocator.empty_cache().unwrap();
        assert_eq!(reserved(&allocator), 0);
        let counters = device.counters();
        let made = counters.calls(Call::ReserveRange);
        assert_eq!(
            counters.calls(Call::ReleaseRange),
            made.saturating_sub(1),
            "addresses too"
        );
        check(&allocator);
    }
}

#[test]
fn closing_a_pool_waits_for_nothing() {
    for allocator in allocators(1 << 30) {
        let device = allocator.device().clone();
        let side = device.create_stream(0).unwrap();
        let pool = allocator.create_pool();
        let [own, recorded] = [40, 60].map(|mib| pool.alloc(mib * MIB, S0).unwrap());
        for (block, stream) in [(&own, S0), (&recorded, side)] {
            device
                .fill(block.ptr(), FillValue::U8(1), 8, stream)
                .unwrap();
        }
        recorded.record_stream(side).unwrap();
        drop((own, recorded));
        drop(pool);
        assert!(device.pending_ops() > 0);
        assert_eq!(reserved(&allocator), 100 * MIB, "work may still use it");
        check(&allocator);
        device.synchronize().unwrap();
        let block = allocator.alloc(90 * MIB, S0).unwrap();
        assert!(reserved(&allocator) <= 100 * MIB, "it serves others");
        drop(block);
        allocator.empty_cache().unwrap();
        assert_eq!(reserved(&allocator), 0);
        check(&allocator);
    }
}

#[test]
fn a_pool_counts_what_it_holds() {
    for allocator in allocators(1 << 30) {
        let device = allocator.device().clone();
        let side = device.create_stream(0).unwrap();
        let pool = allocator.create_pool();
        let numbers = || {
            let stats = pool.stats();
            [
                stats.allocation,
                stats.allocated_bytes,
                stats.active_bytes,
                stats.reserved_bytes,
            ]
            .map(|stat| (stat.current, stat.peak))
        };
        assert_eq!(numbers(), [(0, 0); 4]);
        let first = pool.alloc(40 * MIB, S0).unwrap();
        let second = pool.alloc(40 * MIB - 100, S0).unwrap();
        let _other = allocator.alloc(MIB, S0).unwrap();
        let full = (80 * MIB, 80 * MIB);
        assert_eq!(numbers(), [(2, 2), full, full, full]);
        device
            .fill(second.ptr(), FillValue::U8(1), 8, side)
            .unwrap();
        second.record_stream(side).unwrap();
        drop(second);
        let half = (40 * MIB, 80 * MIB);
        assert_eq!(numbers(), [(1, 2), half, full, full], "pending");
        pool.empty_cache().unwrap();
        assert_eq!(numbers(), [(1, 2), half, half, half]);
        drop(first);
        pool.empty_cache().unwrap();
        let none = (0, 80 * MIB);
        assert_eq!(numbers(), [(0, 2), none, none, none]);
        assert_eq!(pool.alloc(0, S0).unwrap().ptr(), DevicePtr::NULL);
        assert_eq!(numbers()[0], (0, 2), "nothing is nowhere");
        check(&allocator);
    }
}

#[test]
fn what_a_graph_uses_stays_until_its_pool_is_closed() {
    for allocator in allocators(256 * MIB) {
        let device = allocator.device().clone();
        let stream = device.create_stream(0).unwrap();
        let pool = allocator.create_pool();
        // Memory from before the capture, and from within it.
        drop(pool.alloc(40 * MIB, stream).unwrap());
        device.synchronize().unwrap();
        device.begin_capture(stream).unwrap();
        let scratch = pool.alloc(100 * MIB, stream).unwrap();
        device
            .fill(scratch.ptr(), FillValue::U8(3), 64, stream)
            .unwrap();
        let at = scratch.ptr();
        drop(scratch);
        let graph = device.end_capture(stream).unwrap();
        // Neither pressure nor the user takes it, though nothing is live in it.
        let error = match allocator.alloc(200 * MIB, S0).unwrap_err() {
            AllocError::OutOfMemory(error) => *error,
            error => panic!("{error}"),
        };
        let gave = |rung: &RungReport| rung.bytes_freed > 0;
        assert!(!error.rungs.iter().any(gave), "nothing that helps: {error}");
        pool.empty_cache().unwrap();
        allocator.empty_cache().unwrap();
        assert!(pool.stats().reserved_bytes.current >= 100 * MIB);
        let other = allocator.alloc(100 * MIB, S0).unwrap();
        device.fill(other.ptr(), FillValue::U8(9), 64, S0).unwrap();
        device.launch_graph(&graph, stream).unwrap();
        device.synchronize().unwrap();
        assert_eq!(device.read_bytes(at, 64).unwrap(), [3; 64]);
        assert_eq!(device.read_bytes(other.ptr(), 64).unwrap(), [9; 64]);
        check(&allocator);
        drop((pool, other));
        assert!(allocator.alloc(200 * MIB, S0).is_ok());
        check(&allocator);
    }
}

#[test]
fn a_captured_pool_ends_like_any_other() {
    for allocator in allocators(256 * MIB) {
        let device = allocator.device().clone();
        let pool = allocator.create_pool();
        device.begin_capture(S0).unwrap();
        let block = pool.alloc(200 * MIB, S0).unwrap();
        device.end_capture(S0).unwrap();
        drop(pool);
        drop(block);
        assert!(allocator.alloc(200 * MIB, S0).is_ok());
        check(&allocator);
    }
}

#[test]
fn a_captured_pool_takes_what_others_have_free() {
    for allocator in allocators(256 * MIB) {
        let device = allocator.device().clone();
        let (pool, other) = (allocator.create_pool(), allocator.create_pool());
        device.begin_capture(S0).unwrap();
        drop(pool.alloc(20 * MIB, S0).unwrap());
        device.end_capture(S0).unwrap();
        drop(allocator.alloc(100 * MIB, S0).unwrap());
        drop(other.alloc(100 * MIB, S0).unwrap());
        let large = pool.alloc(220 * MIB, S0).unwrap();
        assert!(pool.stats().reserved_bytes.current >= 220 * MIB);
        drop(large);
        check(&allocator);
    }
}

#[test]
fn nothing_is_moved_in_the_hope_of_what_a_captured_pool_has() {
    let allocator = allocators(256 * MIB).remove(0);
    let device = allocator.device().clone();
    let pool = allocator.create_pool();
    device.begin_capture(S0).unwrap();
    drop(pool.alloc(100 * MIB, S0).unwrap());
    device.end_capture(S0).unwrap();
    let [first, keep, second] = [40, 2, 40].map(|mib| allocator.alloc(mib * MIB, S0).unwrap());
    drop((first, second));
    // 80 are idle and 74 left on the device.
    assert!(allocator.alloc(160 * MIB, S0).is_err());
    assert_eq!(allocator.stats().num_pages_moved, 0);
    assert!(allocator.alloc(150 * MIB, S0).is_ok());
    assert!(allocator.stats().num_pages_moved > 0);
    drop(keep);
    check(&allocator);
}

#[test]
fn pages_come_from_the_pools_that_may_give_them() {
    let allocator = allocators(256 * MIB).remove(0);
    let device = allocator.device().clone();
    let (kept, open) = (allocator.create_pool(), allocator.create_pool());
    device.begin_capture(S0).unwrap();
    drop(kept.alloc(100 * MIB, S0).unwrap());
    device.end_capture(S0).unwrap();
    let block = open.alloc(100 * MIB, S0).unwrap();
    drop(block);
    let _large = allocator.alloc(140 * MIB, S0).unwrap();
    assert_eq!(kept.stats().reserved_bytes.current, 100 * MIB);
    assert!(open.stats().reserved_bytes.current <= 16 * MIB);
    check(&allocator);
}

#[test]
fn an_allocation_waits_for_work_in_other_pools_before_it_climbs() {
    let allocator = allocators(256 * MIB).remove(0);
    let device = allocator.device().clone();
    let side = device.create_stream(0).unwrap();
    let pool = allocator.create_pool();
    let block = pool.alloc(200 * MIB, side).unwrap();
    device
        .fill(block.ptr(), FillValue::U8(1), 64, side)
        .unwrap();
    drop(block);
    let _large = allocator.alloc(200 * MIB, S0).unwrap();
    let stats = allocator.stats();
    assert_eq!(stats.num_waits_before_growing, 1);
    assert!(!stats.rungs.contains_key(&Rung::WaitForStreams));
    check(&allocator);
}

#[test]
fn what_waiting_makes_free_in_other_pools_counts() {
    let allocator = allocators(256 * MIB).remove(1);
    let device = allocator.device().clone();
    let side = device.create_stream(0).unwrap();
    let pool = allocator.create_pool();
    let block = pool.alloc(200 * MIB, S0).unwrap();
    device
        .fill(block.ptr(), FillValue::U8(1), 64, side)
        .unwrap();
    block.record_stream(side).unwrap();
    drop(block);
    let _large = allocator.alloc(200 * MIB, S0).unwrap();
    let rungs = allocator.stats().rungs;
    assert_eq!(rungs[&Rung::WaitForStreams].bytes_freed, 200 * MIB);
    check(&allocator);
}

#[test]
fn what_open_pools_have_free_stays_when_others_close() {
    for allocator in allocators(1 << 30) {
        let (open, closed) = (allocator.create_pool(), allocator.create_pool());
        drop(open.alloc(40 * MIB, S0).unwrap());
        let block = closed.alloc(40 * MIB, S0).unwrap();
        drop(closed);
        drop(block);
        let _grown = allocator.alloc(60 * MIB, S0).unwrap();
        assert_eq!(open.stats().reserved_bytes.current, 40 * MIB);
        check(&allocator);
    }
}

#[test]
fn pools_are_safe_from_many_threads() {
    for allocator in allocators(256 * MIB) {
        let shared = allocator.create_pool();
        thread::scope(|scope| {
            for thread in 0..4 {
                let (allocator, shared) = (&allocator, &shared);
                scope.spawn(move || {
                    for round in 0..50 {
                        let own = allocator.create_pool();
                        let scope = if (thread + round) % 2 == 0 {
                            own.enter()
                        } else {
                            shared.enter()
                        };
                        let blocks: Vec<_> = (1..5)
                            .map(|n| allocator.alloc(n * 300_000, S0).unwrap())
                            .collect();
                        for block in &blocks {
                            assert!(scope.pool().owns(block));
                        }
                        drop(own);
                        if round % 10 == 0 {
                            allocator.empty_cache().unwrap();
                        }
                        drop(scope);
                        drop(blocks);
                    }
                });
            }
        });
        drop(shared);
        allocator.empty_cache().unwrap();
        assert_eq!(reserved(&allocator), 0);
        check(&allocator);
    }
}
