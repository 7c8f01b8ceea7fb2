//! What is measured of lastref, in nanoseconds: step by step the works of `alloc.cpp`.
//!
//! [`Lastref`] keeps statistics, and a history that is full. PyTorch's history is off, as it comes.

use std::hint::black_box;
use std::sync::Barrier;
use std::time::Instant;

use lastref_bench::peers::{Lastref, Peer as _};
use lastref_bench::work::Random;

/// Pairs in one go: well under the time that a scheduler gives.
const PAIRS: u32 = 10_000;
/// Goes, of which the best counts.
const GOES: usize = 7;

fn lastref() -> Lastref {
    Lastref::new().expect("the host has addresses")
}

fn best(mut go: impl FnMut() -> f64) -> f64 {
    (0..GOES).map(|_| go()).fold(f64::INFINITY, f64::min)
}

fn nanoseconds_since(start: Instant, pairs: u32) -> f64 {
    start.elapsed().as_secs_f64() * 1e9 / f64::from(pairs)
}

/// An allocation and its free, again and again.
pub(crate) fn hot(bytes: u64) -> f64 {
    let lastref = lastref();
    best(|| {
        let start = Instant::now();
        for _ in 0..PAIRS {
            lastref.free(black_box(lastref.alloc(black_box(bytes))));
        }
        nanoseconds_since(start, PAIRS)
    })
}

/// A thousand blocks of random sizes live; in turn one is freed and another allocated.
pub(crate) fn churn() -> f64 {
    let lastref = lastref();
    let mut random = Random(7);
    let mut live: Vec<_> = (0..1000)
        .map(|_| Some(lastref.alloc(random.size())))
        .collect();
    let steps: Vec<(usize, u64)> = (0..PAIRS)
        .map(|_| (random.below(1000) as usize, random.size()))
        .collect();
    best(|| {
        let start = Instant::now();
        for &(at, bytes) in &steps {
            drop(live[at].take());
            live[at] = Some(lastref.alloc(bytes));
        }
        nanoseconds_since(start, PAIRS)
    })
}

/// Hot pairs of 4 KiB on so many threads at once: for one of them.
pub(crate) fn threads(count: usize) -> f64 {
    let lastref = lastref();
    let barrier = Barrier::new(count);
    let pass = || {
        let mut goes: Vec<f64> = (0..GOES)
            .map(|_| {
                barrier.wait();
                let start = Instant::now();
                for _ in 0..PAIRS * 10 {
                    lastref.free(black_box(lastref.alloc(black_box(4096))));
                }
                nanoseconds_since(start, PAIRS * 10)
            })
            .collect();
        // Not the best one: in that, a thread may have been alone.
        goes.sort_by(f64::total_cmp);
        goes[GOES / 2]
    };
    let times: Vec<f64> = std::thread::scope(|scope| {
        let handles: Vec<_> = (0..count).map(|_| scope.spawn(pass)).collect();
        let times = handles.into_iter().map(|handle| handle.join());
        times.map(|time| time.expect("no panic")).collect()
    });
    times.iter().sum::<f64>() / count as f64
}
