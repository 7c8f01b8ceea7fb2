//! The cache that each thread has: what it keeps, and that everybody sees what is in it.
#![expect(clippy::unwrap_used, reason = "an error here is a failed test")]
#![cfg(target_os = "linux")]

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};

use lastref_alloc::sim::{Call, SimDevice, SimOptions};
use lastref_alloc::{
    AllocatorOptions, Backing, Block, CachingAllocator, CheckLevel, Device, StreamId,
};
use lastref_snapshot::{BlockState, TraceAction};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const S0: StreamId = StreamId::DEFAULT;

type Allocator = CachingAllocator<SimDevice>;

/// Of both backings, and both kinds of flags of caches.
fn allocators() -> impl Iterator<Item = Allocator> {
    let backings = [Backing::Auto, Backing::Segments].into_iter();
    let kinds = backings.flat_map(|backing| [(backing, true), (backing, false)]);
    kinds.map(|(backing, has_barriers)| {
        let device = SimDevice::new(SimOptions::new(256 * MIB)).unwrap();
        let options = AllocatorOptions::new()
            .with_backing(backing)
            .with_history(100_000);
        let allocator = CachingAllocator::with_options(device, &options);
        if !has_barriers {
            allocator.disable_barriers();
        }
        allocator
    })
}

fn hits(allocator: &Allocator) -> u64 {
    allocator.stats().num_thread_cache_hits
}

fn take(allocator: &Allocator, bytes: u64) -> Block<SimDevice> {
    allocator.alloc(bytes, S0).unwrap()
}

/// Allocates and frees a size twice: a cache keeps what was asked for before.
fn ask_twice(allocator: &Allocator, bytes: u64, stream: StreamId) {
    for _ in 0..2 {
        drop(allocator.alloc(bytes, stream).unwrap());
    }
}

fn assert_empty(allocator: &Allocator) {
    allocator.check_invariants(CheckLevel::Device).unwrap();
    allocator.empty_cache().unwrap();
    let stats = allocator.stats();
    for (family, stat) in stats.families() {
        assert_eq!(stat.all.current, 0, "{family}");
    }
    assert_eq!(allocator.device().counters().held_bytes, 0);
}

#[test]
fn the_same_size_on_the_same_stream_comes_from_the_cache() {
    for allocator in allocators() {
        // Sizes that are too large. They make the heap grow, and that empties the cache.
        ask_twice(&allocator, 128 * KIB + 1, S0);
        ask_twice(&allocator, 128 * KIB, S0);
        drop(take(&allocator, 1000));
        let at = take(&allocator, 1000).ptr();
        assert_eq!(hits(&allocator), 0);
        let again = take(&allocator, 1000);
        assert_eq!((again.ptr(), hits(&allocator)), (at, 1));
        drop(again);
        // Another size, though it rounds to the same.
        ask_twice(&allocator, 1001, S0);
        assert_eq!(hits(&allocator), 1);
        drop(take(&allocator, 1001));
        drop(take(&allocator, 1000));
        drop(take(&allocator, 128 * KIB));
        assert_eq!(hits(&allocator), 4, "128 KiB is the most that is cached");
        drop(take(&allocator, 128 * KIB + 1));
        assert_eq!(hits(&allocator), 4);
        assert_empty(&allocator);
    }
}

#[test]
fn a_stream_is_served_from_what_was_freed_on_it() {
    for allocator in allocators() {
        let streams = [S0, allocator.device().create_stream(0).unwrap()];
        let mut freed_on = HashMap::new();
        for n in 0..40 {
            let stream = streams[n / 3 % 2];
            let before = hits(&allocator);
            let block = allocator.alloc(1000, stream).unwrap();
            if hits(&allocator) > before {
                assert_eq!(freed_on[&block.ptr()], stream);
            }
            freed_on.insert(block.ptr(), stream);
        }
        assert!(hits(&allocator) > 20, "{}", hits(&allocator));
        assert_empty(&allocator);
    }
}

#[test]
fn no_stream_is_served_from_what_another_freed() {
    for allocator in allocators() {
        // So many that with one of them most sizes fall into the same set as on the default stream.
        let streams = [0; 8].map(|_| allocator.device().create_stream(0).unwrap());
        for bytes in 1000..1100 {
            for stream in streams {
                ask_twice(&allocator, bytes, S0);
                let before = hits(&allocator);
                drop(allocator.alloc(bytes, stream).unwrap());
                assert_eq!(hits(&allocator), before, "{bytes} on stream {stream}");
                allocator.check_invariants(CheckLevel::Counters).unwrap();
            }
        }
        assert_empty(&allocator);
    }
}

#[test]
fn empty_cache_gives_back_what_is_in_the_caches_of_threads() {
    for allocator in allocators() {
        ask_twice(&allocator, 1000, S0);
        let other = allocator.clone();
        std::thread::spawn(move || ask_twice(&other, 3000, S0))
            .join()
            .unwrap();
        assert_eq!(allocator.empty_cache().unwrap(), 2 * MIB);
        assert_eq!(allocator.device().counters().held_bytes, 0);
    }
}

/// What happened to one address happened in turn. Returns how many blocks were given out.
fn assert_in_turn(allocator: &Allocator) -> usize {
    let trace = &allocator.snapshot().device_traces[0];
    let mut live = HashSet::new();
    let mut allocs = 0;
    for (at, entry) in trace.iter().enumerate() {
        assert_eq!(entry.sequence, at as u64);
        match entry.action {
            TraceAction::Alloc => {
                assert!(live.insert(entry.address), "given out twice: {entry:?}");
                allocs += 1;
            }
            TraceAction::FreeRequested => {
                assert!(live.remove(&entry.address), "freed twice: {entry:?}");
            }
            _ => {}
        }
    }
    assert_eq!(live.len(), 0);
    allocs
}

#[test]
fn what_the_heap_gives_out_comes_after_what_a_cache_did_with_it() {
    for allocator in allocators() {
        for _ in 0..5 {
            for _ in 0..50 {
                drop(take(&allocator, 1000));
            }
            allocator.check_invariants(CheckLevel::Counters).unwrap();
        }
        assert_eq!(assert_in_turn(&allocator), 250);
    }
}

#[test]
fn what_one_thread_is_served_another_may_free() {
    for allocator in allocators() {
        let other = allocator.clone();
        let thread = std::thread::spawn(move || {
            drop([0; 3].map(|_| take(&other, 1000)));
            [0; 3].map(|_| take(&other, 1000))
        });
        // This thread has no cache, and the other's has not told the books yet.
        drop(thread.join().unwrap());
        let all = allocator.stats().allocation.all;
        assert_eq!((all.current, all.allocated, all.freed), (0, 6, 6));
        assert_empty(&allocator);
    }
}

#[test]
fn sizes_that_do_not_come_again_are_not_kept() {
    for allocator in allocators() {
        ask_twice(&allocator, 1000, S0);
        for n in 0..10_000 {
            drop(take(&allocator, 2000 + n));
        }
        // Among so many, it may have been forgotten, but what was kept is there.
        drop(take(&allocator, 1000));
        assert_eq!(hits(&allocator), 1);
        assert_empty(&allocator);
    }
}

#[test]
fn what_is_cached_counts_as_free_and_what_is_served_as_live() {
    for allocator in allocators() {
        let blocks = [0; 3].map(|_| take(&allocator, 1000));
        drop(blocks);
        let kept = take(&allocator, 1000);
        let stats = allocator.stats();
        assert_eq!(stats.num_thread_cache_hits, 1);
        let all = stats.allocation.all;
        assert_eq!(
            (all.current, all.peak, all.allocated, all.freed),
            (1, 3, 4, 3)
        );
        assert_eq!(stats.active, stats.allocation);
        assert_eq!(stats.allocated_bytes.small_pool.current, 1024);
        assert_eq!(stats.requested_bytes.all.current, 1000);
        let snapshot = allocator.snapshot();
        let live = snapshot.segments.iter().flat_map(|segment| &segment.blocks);
        let live: Vec<_> = live
            .filter(|block| block.state != BlockState::Inactive)
            .collect();
        assert_eq!(live.len(), 1);
        assert_eq!(live[0].requested_bytes, 1000);
        drop(kept);
        assert_empty(&allocator);
    }
}

#[test]
fn peaks_are_exact_across_the_cache_and_the_heap() {
    for allocator in allocators() {
        drop([0; 3].map(|_| take(&allocator, 100 * KIB)));
        allocator.reset_peak_stats();
        let small = [0; 2].map(|_| take(&allocator, 100 * KIB));
        let large = take(&allocator, MIB);
        assert_eq!(allocator.stats().allocated_bytes.all.peak, MIB + 200 * KIB);
        drop(small);
        let larger = take(&allocator, MIB + 512);
        let peak = 2 * MIB + 512;
        assert_eq!(allocator.stats().allocated_bytes.all.peak, peak);
        let small = take(&allocator, 100 * KIB);
        assert_eq!(allocator.stats().allocated_bytes.all.peak, peak + 100 * KIB);
        drop((small, large, larger));
        assert_empty(&allocator);
    }
}

#[test]
fn the_cache_keeps_a_bounded_number_of_bytes() {
    for allocator in allocators() {
        // 20 MB, of which at most 8 MiB are kept.
        let all = || {
            (0..200)
                .map(|n| take(&allocator, 100 * KIB + n))
                .collect::<Vec<_>>()
        };
        for _ in 0..3 {
            drop(all());
        }
        let before = hits(&allocator);
        drop(all());
        let hits = hits(&allocator) - before;
        assert!((20..=8 * MIB / (100 * KIB)).contains(&hits), "{hits}");
        assert_empty(&allocator);
    }
}

#[test]
fn of_one_size_no_more_are_kept_than_a_set_holds() {
    for allocator in allocators() {
        let blocks: Vec<_> = (0..10).map(|_| take(&allocator, 1000)).collect();
        let first: HashSet<_> = blocks[..4].iter().map(Block::ptr).collect();
        drop(blocks);
        let again: Vec<_> = (0..5).map(|_| take(&allocator, 1000)).collect();
        assert_eq!(hits(&allocator), 4);
        let kept = again[..4].iter().map(Block::ptr);
        assert_eq!(kept.collect::<HashSet<_>>(), first);
        drop(again);
        assert_empty(&allocator);
    }
}

#[test]
fn caches_are_emptied_before_the_heap_grows() {
    let allocator = allocators().next().unwrap();
    for n in 0..16 {
        ask_twice(&allocator, 100 * KIB + n, S0);
    }
    let small: Vec<_> = (0..16).map(|n| take(&allocator, 100 * KIB + n)).collect();
    let keep = take(&allocator, 2 * MIB);
    drop(small);
    let reserved = allocator.stats().reserved_bytes.all.current;
    // Fits only where the small blocks were, or in pages that they pin.
    let block = take(&allocator, 2 * MIB);
    let stats = allocator.stats();
    assert_eq!(stats.reserved_bytes.all.current, reserved);
    assert_eq!(stats.num_pages_moved, 1);
    drop((block, keep));
    assert_empty(&allocator);
}

#[test]
fn a_recorded_block_is_not_cached() {
    for allocator in allocators() {
        let stream = allocator.device().create_stream(0).unwrap();
        ask_twice(&allocator, 1000, S0);
        let block = take(&allocator, 1000);
        block.record_stream(stream).unwrap();
        drop(block);
        drop(take(&allocator, 1000));
        assert_eq!(hits(&allocator), 1);
        assert_empty(&allocator);
    }
}

#[test]
fn a_retired_stream_has_nothing_cached() {
    for allocator in allocators() {
        let stream = allocator.device().create_stream(0).unwrap();
        let held = allocator.alloc(1000, stream).unwrap();
        ask_twice(&allocator, 1000, stream);
        allocator.retire_stream(stream).unwrap();
        assert!(allocator.alloc(1000, stream).is_err());
        drop(held);
        assert!(allocator.alloc(1000, stream).is_err());
        assert_empty(&allocator);
    }
}

#[test]
fn a_cache_that_was_closed_opens_again() {
    for allocator in allocators() {
        ask_twice(&allocator, 1000, S0);
        let held = take(&allocator, 1000);
        // Closes all caches, of all streams.
        let stream = allocator.device().create_stream(0).unwrap();
        allocator.retire_stream(stream).unwrap();
        // Looks at the cache, so that nothing is due but what comes now.
        drop(take(&allocator, MIB));
        let before = hits(&allocator);
        // Refused, and known again from here on.
        drop(held);
        ask_twice(&allocator, 1000, S0);
        drop(take(&allocator, 1000));
        assert!(hits(&allocator) > before);
        assert_empty(&allocator);
    }
}

#[test]
fn a_thread_that_ends_leaves_its_blocks_to_others() {
    for allocator in allocators() {
        for _ in 0..20 {
            let other = allocator.clone();
            let thread = std::thread::spawn(move || {
                let blocks: Vec<_> = (1..50).map(|n| take(&other, n * KIB)).collect();
                drop(blocks);
            });
            thread.join().unwrap();
        }
        // One cache, handed on: with twenty, each would have begun with misses.
        assert!(hits(&allocator) >= 19 * 40, "{}", hits(&allocator));
        assert_eq!(allocator.stats().allocation.all.current, 0);
        assert_empty(&allocator);
    }
}

#[test]
fn blocks_freed_elsewhere_are_nobody_elses() {
    for allocator in allocators() {
        let blocks: Vec<_> = (0..64).map(|_| take(&allocator, 1000)).collect();
        std::thread::scope(|scope| {
            let mut blocks = blocks.into_iter();
            for _ in 0..4 {
                let part: Vec<_> = blocks.by_ref().take(16).collect();
                let allocator = &allocator;
                scope.spawn(move || {
                    for block in part {
                        drop(take(allocator, 1000));
                        drop(block);
                        let live: Vec<_> = (0..3).map(|_| take(allocator, 1000)).collect();
                        assert!(allocator.stats().allocation.all.current >= 3);
                        drop(live);
                    }
                });
            }
        });
        let live: Vec<_> = (0..100).map(|_| take(&allocator, 1000)).collect();
        let places: HashSet<_> = live.iter().map(Block::ptr).collect();
        assert_eq!(places.len(), 100);
        drop(live);
        assert_empty(&allocator);
    }
}

#[test]
fn an_allocator_goes_with_its_last_handle_and_block_whatever_is_cached() {
    for allocator in allocators() {
        let device = allocator.device().clone();
        drop([0; 5].map(|_| take(&allocator, 1000)));
        let (small, empty) = (take(&allocator, 1000), take(&allocator, 0));
        drop(allocator);
        assert!(device.counters().held_bytes > 0, "a block keeps it");
        let again = small.allocator();
        drop(take(&again, 1000));
        drop(again);
        drop(small);
        assert!(device.counters().held_bytes > 0, "also one of zero bytes");
        drop(empty);
        assert_eq!(device.counters().held_bytes, 0);
        assert_eq!(device.errors(), Vec::<String>::new());
    }
}

#[test]
fn many_allocators_on_one_thread_keep_apart() {
    let allocators: Vec<_> = (0..8).flat_map(|_| allocators()).collect();
    for round in 1_u64..6 {
        for allocator in &allocators {
            drop(take(allocator, 1000));
            assert_eq!(hits(allocator), round.saturating_sub(2));
        }
    }
    for allocator in allocators {
        let device = allocator.device().clone();
        drop(allocator);
        assert_eq!(device.counters().held_bytes, 0);
    }
}

#[test]
fn a_history_of_many_threads_reads_back_exactly() {
    for allocator in allocators() {
        const ROUNDS: usize = 500;
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let allocator = &allocator;
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        let bytes = [1000, 3000, 200 * KIB][(thread + round) % 3];
                        drop(take(allocator, bytes));
                    }
                });
            }
        });
        assert_eq!(assert_in_turn(&allocator), 3 * ROUNDS);
        assert_empty(&allocator);
    }
}

#[test]
fn what_another_thread_frees_was_allocated_before() {
    for allocator in allocators() {
        let (to_free, blocks) = std::sync::mpsc::channel();
        let (told, is_ready) = std::sync::mpsc::channel();
        let other = allocator.clone();
        let thread = std::thread::spawn(move || {
            ask_twice(&other, 1000, S0);
            told.send(()).unwrap();
            // Into this thread's cache, whose history is far behind.
            drop(blocks.recv());
        });
        is_ready.recv().unwrap();
        for _ in 0..1000 {
            drop(take(&allocator, 1000));
        }
        to_free.send(take(&allocator, 1000)).unwrap();
        thread.join().unwrap();
        assert_eq!(assert_in_turn(&allocator), 2 + 1000 + 1);
        assert_empty(&allocator);
    }
}

#[test]
fn what_the_heap_gives_out_comes_after_what_another_threads_cache_did() {
    for allocator in allocators() {
        let other = allocator.clone();
        let thread = std::thread::spawn(move || {
            for _ in 0..1000 {
                drop(take(&other, 1000));
            }
        });
        thread.join().unwrap();
        // Empties its cache: the heap gives the same memory out again.
        drop(allocator.snapshot());
        drop(take(&allocator, 1000));
        assert_eq!(assert_in_turn(&allocator), 1000 + 1);
        assert_empty(&allocator);
    }
}

#[test]
fn the_history_of_one_thread_is_in_the_order_of_its_program() {
    // Of sizes that the cache serves, and of those that it does not.
    const SIZES: [u64; 6] = [512, 1000, 4096, 130_000, 200_000, MIB];
    for allocator in allocators() {
        let mut done = Vec::new();
        let mut live = Vec::new();
        let mut random = 7_u64;
        for _ in 0..3000 {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let at = (random >> 33) as usize;
            if live.len() > 20 || (at % 5 < 2 && !live.is_empty()) {
                let block: Block<SimDevice> = live.swap_remove(at / 8 % live.len());
                done.push((TraceAction::FreeCompleted, block.ptr().0));
            } else {
                let block = take(&allocator, SIZES[at / 8 % SIZES.len()]);
                done.push((TraceAction::Alloc, block.ptr().0));
                live.push(block);
            }
        }
        assert!(hits(&allocator) > 100);
        let history = allocator.snapshot().device_traces.remove(0);
        let kinds = [TraceAction::Alloc, TraceAction::FreeCompleted];
        let history = history.iter().filter(|entry| kinds.contains(&entry.action));
        let history: Vec<_> = history.map(|entry| (entry.action, entry.address)).collect();
        let wrong = (0..done.len()).find(|at| history.get(*at) != Some(&done[*at]));
        assert_eq!(wrong, None, "the first entry out of order");
        drop(live);
        assert_empty(&allocator);
    }
}

#[test]
fn a_hit_makes_no_call_of_the_device() {
    for allocator in allocators() {
        ask_twice(&allocator, 1000, S0);
        let calls = allocator.device().counters().total_calls();
        for _ in 0..100 {
            drop(take(&allocator, 1000));
        }
        assert_eq!(allocator.device().counters().total_calls(), calls);
        assert_eq!(allocator.device().counters().calls(Call::QueryEvent), 0);
    }
}

/// Loom cannot judge the barriers of the system and the processor: what is counted twice at once is lost.
#[test]
fn nothing_is_lost_where_others_look_into_a_cache_in_use() {
    const PAIRS: u64 = 200_000;
    for allocator in allocators() {
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..PAIRS {
                    drop(take(&allocator, 1000));
                }
                is_done.store(true, Ordering::Relaxed);
            });
            while !is_done.load(Ordering::Relaxed) {
                let stats = allocator.stats().allocation.all;
                assert_eq!(stats.allocated - stats.freed, stats.current);
                assert!(stats.current <= 1 && stats.peak <= 1, "{stats:?}");
                // Time for the other to be anywhere.
                for _ in 0..stats.allocated % 61 {
                    std::hint::spin_loop();
                }
            }
        });
        let stats = allocator.stats().allocation.all;
        assert_eq!((stats.allocated, stats.freed), (PAIRS, PAIRS));
        assert_empty(&allocator);
    }
}
