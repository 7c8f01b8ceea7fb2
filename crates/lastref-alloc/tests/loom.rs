//! The allocator under loom: every interleaving of two threads, within loom's bounds.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p lastref-alloc --test loom --release`.
#![cfg(loom)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use lastref_alloc::sim::{SimDevice, SimOptions};
use lastref_alloc::{
    AllocatorOptions, Backing, Block, CachingAllocator, CheckLevel, ReclaimLevel, ReclaimRequest,
    Reclaimer, StreamId,
};
use loom::thread;

const MIB: u64 = 1 << 20;
const S0: StreamId = StreamId::DEFAULT;

fn allocator(capacity: u64) -> CachingAllocator<SimDevice> {
    let device = SimDevice::new(SimOptions::new(capacity)).unwrap();
    let options = AllocatorOptions::new().with_backing(Backing::Segments);
    CachingAllocator::with_options(device, &options)
}

/// Two threads switch at most this often against their will: the bound that keeps the models
/// short. Two switches find all known kinds of lost update and use after free here.
fn model(f: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
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
