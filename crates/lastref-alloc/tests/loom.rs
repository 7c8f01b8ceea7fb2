//! The allocator under loom: every interleaving of two threads, within loom's bounds.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p lastref-alloc --test loom --release`.
#![cfg(loom)]

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use lastref_alloc::bias::Biased;
use lastref_alloc::sim::{SimDevice, SimOptions};
use lastref_alloc::{
    AllocatorOptions, Backing, Block, CachingAllocator, CheckLevel, Device, ReclaimLevel,
    ReclaimRequest, Reclaimer, StreamId,
};
use lastref_snapshot::TraceAction;
use loom::thread;

const MIB: u64 = 1 << 20;
const S0: StreamId = StreamId::DEFAULT;

fn allocator(capacity: u64) -> CachingAllocator<SimDevice> {
    let device = SimDevice::new(SimOptions::new(capacity)).unwrap();
    let options = AllocatorOptions::new().with_backing(Backing::Segments);
    with_options(device, &options)
}

fn with_options(device: SimDevice, options: &AllocatorOptions) -> CachingAllocator<SimDevice> {
    let allocator = CachingAllocator::with_options(device, options);
    if !BARRIERS.get() {
        allocator.disable_barriers();
    }
    allocator
}

thread_local! {
    /// Whether the caches of threads are visited by barriers, in the models that this thread runs:
    /// loom's threads all run on it.
    static BARRIERS: Cell<bool> = const { Cell::new(true) };
}

/// A model of the caches of threads: their flags are of two kinds.
fn model_of_caches(f: impl Fn() + Send + Sync + Clone + 'static) {
    model(f.clone());
    BARRIERS.set(false);
    model(f);
    BARRIERS.set(true);
}

/// Two threads switch at most this often against their will: the bound that keeps the models
/// short. Two switches find all known kinds of lost update and use after free here.
fn model(f: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.max_branches = 10_000;
    let interleavings = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&interleavings);
    builder.check(move || {
        counter.fetch_add(1, Ordering::Relaxed);
        f();
    });
    // A model that loom cannot vary checks nothing.
    let interleavings = interleavings.load(Ordering::Relaxed);
    println!("{interleavings} interleavings");
    assert!(interleavings > 1, "loom found nothing to vary");
}

fn assert_empty(allocator: &CachingAllocator<SimDevice>) {
    allocator.check_invariants(CheckLevel::Structure).unwrap();
    assert_eq!(allocator.stats().allocated_bytes.all.current, 0);
    allocator.empty_cache().unwrap();
    assert_eq!(allocator.stats().reserved_bytes.all.current, 0);
}

#[test]
fn two_threads_never_get_the_same_memory() {
    model(|| {
        let allocator = allocator(64 * MIB);
        let other = allocator.clone();
        let thread = thread::spawn(move || other.alloc(1 << 20, S0).unwrap());
        let mine = allocator.alloc(1 << 20, S0).unwrap();
        let theirs = thread.join().unwrap();
        assert_ne!(mine.ptr(), theirs.ptr());
        drop((mine, theirs));
        assert_empty(&allocator);
    });
}

#[test]
fn a_block_dropped_elsewhere_meets_empty_cache() {
    model(|| {
        let allocator = allocator(64 * MIB);
        let block = allocator.alloc(1 << 20, S0).unwrap();
        let thread = thread::spawn(move || drop(block));
        allocator.empty_cache().unwrap();
        thread.join().unwrap();
        assert_empty(&allocator);
    });
}

#[test]
fn a_full_device_serves_whoever_comes_after_the_free() {
    model(|| {
        let allocator = allocator(32 * MIB);
        let block = allocator.alloc(32 * MIB, S0).unwrap();
        let thread = thread::spawn(move || drop(block));
        let early = allocator.alloc(32 * MIB, S0);
        if let Err(error) = &early {
            assert!(error.is_out_of_memory(), "{error}");
        }
        thread.join().unwrap();
        drop(early);
        assert!(
            allocator.alloc(32 * MIB, S0).is_ok(),
            "after the free it must fit"
        );
        assert_empty(&allocator);
    });
}

#[test]
fn the_last_handle_may_go_on_any_thread() {
    model(|| {
        let allocator = allocator(64 * MIB);
        let device = allocator.device().clone();
        let block = allocator.alloc(1 << 20, S0).unwrap();
        let thread = thread::spawn(move || drop(block));
        // Counts of handles are std's, which loom does not see. A lock is where it changes threads.
        let _ = allocator.stats();
        drop(allocator);
        thread.join().unwrap();
        assert_eq!(device.counters().held_bytes, 0);
    });
}

// ---- the lock of the state, alone ----------------------------------------------------------------

/// Each thread comes so often, and the first that comes twice in a row is favoured.
fn model_of_bias(times: &'static [u64]) {
    model(move || {
        let biased = Arc::new(Biased::favouring_after(2, 0));
        let come = |biased: &Biased<u64>, times| {
            for _ in 0..times {
                // Loom sees whether two are at it at once, and whether each sees what was before.
                biased.with(|value| *value += 1);
            }
        };
        let threads = times[1..].iter().map(|times| {
            let biased = Arc::clone(&biased);
            thread::spawn(move || come(&biased, *times))
        });
        let threads: Vec<_> = threads.collect();
        come(&biased, times[0]);
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(biased.with(|value| *value), times.iter().sum::<u64>());
    });
}

#[test]
fn a_favourite_and_another_are_never_in_together() {
    model_of_bias(&[3, 1]);
    model_of_bias(&[4, 2]);
}

#[test]
fn a_favourite_is_favoured_again() {
    model_of_bias(&[7, 1]);
}

// ---- the caches of threads: blocks of at most 128 KiB -----------------------------------------

/// Allocates and frees twice, so that the calling thread has a cache with a block in it.
fn cached(allocator: &CachingAllocator<SimDevice>, bytes: u64) {
    for _ in 0..2 {
        drop(allocator.alloc(bytes, S0).unwrap());
    }
}

#[test]
fn a_cache_is_emptied_while_its_thread_uses_it() {
    model_of_caches(|| {
        let allocator = allocator(64 * MIB);
        let other = allocator.clone();
        let thread = thread::spawn(move || {
            cached(&other, 1000);
            let again = other.alloc(1000, S0).unwrap();
            assert_eq!(again.requested_bytes(), 1000);
            again
        });
        allocator.empty_cache().unwrap();
        let mine = allocator.alloc(1000, S0).unwrap();
        let theirs = thread.join().unwrap();
        assert_ne!(mine.ptr(), theirs.ptr(), "one block, given out twice");
        assert_eq!(allocator.stats().allocation.all.current, 2);
        drop((mine, theirs));
        assert_empty(&allocator);
    });
}

#[test]
fn statistics_are_exact_while_a_cache_is_in_use() {
    model_of_caches(|| {
        let allocator = allocator(64 * MIB);
        let other = allocator.clone();
        let thread = thread::spawn(move || {
            cached(&other, 1000);
            drop(other.alloc(1000, S0).unwrap());
        });
        let stats = allocator.stats().allocation.all;
        assert!(stats.current <= 1 && stats.allocated <= 3, "{stats:?}");
        assert_eq!(stats.allocated - stats.freed, stats.current);
        thread.join().unwrap();
        let stats = allocator.stats().allocation.all;
        assert_eq!((stats.allocated, stats.freed, stats.peak), (3, 3, 1));
        assert_empty(&allocator);
    });
}

#[test]
fn a_small_block_may_be_freed_on_any_thread() {
    model_of_caches(|| {
        let allocator = allocator(64 * MIB);
        let block = allocator.alloc(1000, S0).unwrap();
        let other = allocator.clone();
        let thread = thread::spawn(move || {
            cached(&other, 1000);
            drop(block);
            other.alloc(1000, S0).unwrap()
        });
        let mine = allocator.alloc(1000, S0).unwrap();
        let theirs = thread.join().unwrap();
        assert_ne!(mine.ptr(), theirs.ptr());
        drop((mine, theirs));
        assert_empty(&allocator);
    });
}

#[test]
fn a_thread_that_ends_leaves_its_cache_to_others() {
    // With barriers only, for the time that three threads take.
    model(|| {
        let allocator = allocator(64 * MIB);
        let other = allocator.clone();
        let first = thread::spawn(move || cached(&other, 1000));
        let other = allocator.clone();
        // Begins before or after the first has ended, with or without its cache.
        let second = thread::spawn(move || cached(&other, 1000));
        first.join().unwrap();
        second.join().unwrap();
        assert_empty(&allocator);
    });
}

#[test]
fn the_last_small_block_and_the_last_handle_go_at_once() {
    model_of_caches(|| {
        let allocator = allocator(64 * MIB);
        let device = allocator.device().clone();
        cached(&allocator, 1000);
        let block = allocator.alloc(1000, S0).unwrap();
        let other = allocator.clone();
        let thread = thread::spawn(move || {
            cached(&other, 1000);
            drop(other);
            drop(block);
        });
        drop(allocator);
        thread.join().unwrap();
        assert_eq!(device.counters().held_bytes, 0, "freed, and once");
    });
}

#[test]
fn nothing_is_cached_on_a_stream_that_was_retired() {
    model_of_caches(|| {
        let allocator = allocator(64 * MIB);
        let stream = allocator.device().create_stream(0).unwrap();
        for _ in 0..2 {
            drop(allocator.alloc(1000, stream).unwrap());
        }
        let other = allocator.clone();
        let thread = thread::spawn(move || {
            // Refused, or served and freed, before the retirement or after it.
            drop(other.alloc(1000, stream));
            other.alloc(1000, stream).is_ok()
        });
        allocator.retire_stream(stream).unwrap();
        assert!(allocator.alloc(1000, stream).is_err());
        thread.join().unwrap();
        assert_empty(&allocator);
    });
}

#[test]
fn histories_of_two_threads_are_one() {
    model_of_caches(|| {
        let device = SimDevice::new(SimOptions::new(64 * MIB)).unwrap();
        let options = AllocatorOptions::new()
            .with_backing(Backing::Segments)
            .with_history(100);
        let allocator = with_options(device, &options);
        let block = allocator.alloc(1000, S0).unwrap();
        let other = allocator.clone();
        let thread = thread::spawn(move || {
            cached(&other, 1000);
            drop(block);
            drop(other.alloc(1000, S0).unwrap());
        });
        cached(&allocator, 1000);
        thread.join().unwrap();
        let snapshot = allocator.snapshot();
        // What happened to one address happened in turn, whichever thread did it.
        let mut live = std::collections::HashSet::new();
        let mut freed = 0;
        for pair in snapshot.device_traces[0].windows(2) {
            assert!(pair[0].sequence < pair[1].sequence);
        }
        for entry in &snapshot.device_traces[0] {
            match entry.action {
                TraceAction::Alloc => assert!(live.insert(entry.address), "{entry:?}"),
                TraceAction::FreeCompleted => {
                    assert!(live.remove(&entry.address), "{entry:?}");
                    freed += 1;
                }
                _ => {}
            }
        }
        assert_eq!((live.len(), freed), (0, 6));
        assert_empty(&allocator);
    });
}

/// Holds a block and drops it when asked.
struct Hoard(loom::sync::Mutex<Option<Block<SimDevice>>>);

impl Reclaimer for Hoard {
    fn name(&self) -> &str {
        "hoard"
    }

    fn level(&self) -> ReclaimLevel {
        ReclaimLevel::Collect
    }

    fn reclaim(&self, _: &ReclaimRequest) -> u64 {
        let block = self.0.lock().unwrap().take();
        block.map_or(0, |block| block.allocated_bytes())
    }
}

#[test]
fn two_threads_reclaim_at_once_without_deadlock() {
    model(|| {
        let allocator = allocator(32 * MIB);
        let block = allocator.alloc(32 * MIB, S0).unwrap();
        let id = allocator.add_reclaimer(Arc::new(Hoard(loom::sync::Mutex::new(Some(block)))));
        let other = allocator.clone();
        let thread = thread::spawn(move || other.alloc(16 * MIB, S0).is_ok());
        let mine = allocator.alloc(16 * MIB, S0).is_ok();
        let theirs = thread.join().unwrap();
        assert!(mine || theirs, "what was reclaimed served nobody");
        allocator.remove_reclaimer(id);
        assert_empty(&allocator);
    });
}
