//! Blocks that one thread's cache gives out and another thread frees: the numbers stay right.
#![cfg(target_os = "linux")]

use std::sync::mpsc::channel;
use std::thread;

use lastref_alloc::sim::{SimDevice, SimOptions};
use lastref_alloc::{CachingAllocator, CheckLevel, StreamId};

const S0: StreamId = StreamId::DEFAULT;

/// A block from another thread's cache is freed here, where nothing is known of it yet: with a cache
/// of this thread's own that takes it in, or without.
#[test]
fn a_block_from_another_threads_cache_is_counted_wherever_it_is_freed() {
    for has_cache in [false, true] {
        let allocator = CachingAllocator::new(SimDevice::new(SimOptions::new(1 << 30)).unwrap());
        if has_cache {
            drop(allocator.alloc(1000, S0).unwrap());
        }
        let (blocks, received) = channel();
        let (done, wait) = channel::<()>();
        let worker = {
            let allocator = allocator.clone();
            thread::spawn(move || {
                drop(allocator.alloc(100_000, S0).unwrap());
                // A miss: what was counted so far is told.
                let held = allocator.alloc(50_000, S0).unwrap();
                blocks.send(allocator.alloc(100_000, S0).unwrap()).unwrap();
                // The thread, and its cache, stay until everything was looked at.
                wait.recv().unwrap();
                drop(held);
            })
        };
        drop(received.recv().unwrap());
        let miss = allocator.alloc(70_000, S0).unwrap();
        let stats = allocator.stats();
        assert_eq!(stats.allocation.all.current, 2);
        assert_eq!(stats.requested_bytes.all.current, 120_000);
        assert!(stats.allocated_bytes.all.peak <= 300_000, "{stats:?}");
        allocator.check_invariants(CheckLevel::Device).unwrap();
        done.send(()).unwrap();
        worker.join().unwrap();
        drop(miss);
        assert_eq!(allocator.stats().allocation.all.current, 0);
        allocator.check_invariants(CheckLevel::Device).unwrap();
    }
}
