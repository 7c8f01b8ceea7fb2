//! No out-of-memory error while dead cycles hold the memory: four threads, a GPU of 16 GiB.
//!
//! `LASTREF_TEST_ALL=1` runs the long one 20 times.
#![expect(clippy::unwrap_used, reason = "an error here is a failed test")]

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use lastref::gc::{self, Gc, Slot, Trace};
use lastref::{Tensor, cuda};

use common::{MIB, allocated, bytes_on_gpu, reserved};

const THREADS: usize = 4;
const ALLOCATIONS: usize = 80_000;

#[derive(Trace)]
struct Model {
    weights: Tensor,
    itself: Slot<Option<Gc<Model>>>,
}

fn dead_cycle(bytes: i64) -> lastref::Result<()> {
    let made = Gc::new(Model {
        weights: bytes_on_gpu(bytes)?,
        itself: Slot::default(),
    });
    assert!(made.weights.is_cuda());
    made.itself.set(Some(made.clone()));
    Ok(())
}

/// A number from 256 to 512.
fn next_size(state: &mut u64) -> i64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    256 + i64::try_from(*state % 257).unwrap()
}

/// All threads allocate at once; how many errors there were, and the first.
fn storm(allocations: usize) -> (usize, Option<String>) {
    let errors = AtomicUsize::new(0);
    let first = thread::scope(|scope| {
        let threads: Vec<_> = (1..=THREADS as u64)
            .map(|seed| {
                let errors = &errors;
                scope.spawn(move || {
                    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
                    let mut first = None;
                    for _ in 0..allocations / THREADS {
                        if let Err(error) = dead_cycle(next_size(&mut state) * MIB) {
                            errors.fetch_add(1, Ordering::Relaxed);
                            first.get_or_insert(error.to_string());
                        }
                    }
                    first
                })
            })
            .collect();
        let firsts = threads
            .into_iter()
            .filter_map(|thread| thread.join().unwrap());
        firsts.reduce(|first, _| first)
    });
    (errors.into_inner(), first)
}

#[test]
fn four_threads_never_see_a_spurious_error() {
    let _device = common::turn("16GiB");
    let all = std::env::var_os("LASTREF_TEST_ALL").is_some();
    for automatic in if all {
        [true, false].repeat(10)
    } else {
        vec![true, false]
    } {
        if automatic {
            gc::enable()
        } else {
            gc::disable()
        }
        let allocations = if all { ALLOCATIONS } else { ALLOCATIONS / 4 };
        let started = Instant::now();
        let (errors, first) = storm(allocations);
        println!("{allocations} allocations in {:?}", started.elapsed());
        assert_eq!(errors, 0, "{}", first.unwrap_or_default());
    }
    gc::enable();
    gc::collect(2).unwrap();
    cuda::empty_cache().unwrap();
    assert_eq!((allocated(), reserved()), (0, 0));
}

/// Ends the other thread's work, also when this one panics.
struct Ends<'a>(&'a AtomicUsize);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(1, Ordering::Relaxed);
    }
}

#[test]
fn four_threads_beside_somebody_who_collects() {
    let _device = common::turn("16GiB");
    gc::disable();
    let ends = AtomicUsize::new(0);
    thread::scope(|scope| {
        // What this one finds is not found by the collector's thread, and is not freed yet.
        scope.spawn(|| {
            while ends.load(Ordering::Relaxed) == 0 {
                gc::collect(2).unwrap();
            }
        });
        let ended = Ends(&ends);
        let (errors, first) = storm(ALLOCATIONS / 8);
        drop(ended);
        assert_eq!(errors, 0, "{}", first.unwrap_or_default());
    });
    gc::enable();
    gc::collect(2).unwrap();
    cuda::empty_cache().unwrap();
}

#[test]
fn an_allocation_waits_for_what_another_collection_frees() {
    #[derive(Trace)]
    struct Slow {
        itself: Slot<Option<Gc<Slow>>>,
        weights: Tensor,
    }
    static DYING: AtomicUsize = AtomicUsize::new(0);
    impl Drop for Slow {
        fn drop(&mut self) {
            DYING.store(1, Ordering::SeqCst);
            thread::sleep(Duration::from_millis(200));
        }
    }
    let _device = common::turn("16GiB");
    gc::disable();
    let slow = Gc::new(Slow {
        itself: Slot::default(),
        weights: bytes_on_gpu(12_000 * MIB).unwrap(),
    });
    slow.itself.set(Some(slow.clone()));
    drop(slow);
    thread::scope(|scope| {
        scope.spawn(|| gc::collect(2).unwrap());
        while DYING.load(Ordering::SeqCst) == 0 {
            thread::yield_now();
        }
        // The other thread has found it and is in its destructor: the collector's finds nothing.
        drop(bytes_on_gpu(12_000 * MIB).unwrap());
    });
    gc::enable();
    cuda::empty_cache().unwrap();
}
