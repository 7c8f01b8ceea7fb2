//! What is measured of lastref, in nanoseconds: step by step the works of `alloc.cpp`.
//!
//! Statistics are kept, and a history of a million entries that is full: pages of the host that are
//! written for the first time are not what is measured. PyTorch's history is off, as it comes.

use std::hint::black_box;
use std::sync::Barrier;
use std::time::Instant;

use lastref_alloc::sim::{SimDevice, SimOptions};
use lastref_alloc::{AllocatorOptions, Block, CachingAllocator, StreamId};

const CAPACITY: u64 = 32 << 30;
const HISTORY: usize = 1_000_000;
/// Pairs in one go: well under the time that a scheduler gives.
const PAIRS: u32 = 10_000;
/// Goes, of which the best counts.
const GOES: usize = 7;

type Allocator = CachingAllocator<SimDevice>;

fn allocator() -> Allocator {
    let device = SimDevice::new(SimOptions::new(CAPACITY)).expect("the host has addresses");
    let options = AllocatorOptions::new().with_history(HISTORY);
    let allocator = CachingAllocator::with_options(device, &options);
    for _ in 0..HISTORY / 2 {
        drop(alloc(&allocator, 512));
    }
    allocator
}

fn alloc(allocator: &Allocator, bytes: u64) -> Block<SimDevice> {
    allocator.alloc(bytes, StreamId::DEFAULT).expect("it fits")
}

fn best(mut go: impl FnMut() -> f64) -> f64 {
    (0..GOES).map(|_| go()).fold(f64::INFINITY, f64::min)
}

fn nanoseconds_since(start: Instant, pairs: u32) -> f64 {
    start.elapsed().as_secs_f64() * 1e9 / f64::from(pairs)
}

/// An allocation and its free, again and again.
pub(crate) fn hot(bytes: u64) -> f64 {
    let allocator = allocator();
    best(|| {
        let start = Instant::now();
        for _ in 0..PAIRS {
            drop(black_box(alloc(&allocator, black_box(bytes))));
        }
        nanoseconds_since(start, PAIRS)
    })
}

/// A thousand blocks of random sizes live; in turn one is freed and another allocated.
pub(crate) fn churn() -> f64 {
    let allocator = allocator();
    let mut random = Random(7);
    let mut live: Vec<Option<Block<SimDevice>>> = (0..1000)
        .map(|_| Some(alloc(&allocator, random.size())))
        .collect();
    let steps: Vec<(usize, u64)> = (0..PAIRS)
        .map(|_| (random.below(1000) as usize, random.size()))
        .collect();
    best(|| {
        let start = Instant::now();
        for &(at, bytes) in &steps {
            drop(live[at].take());
            live[at] = Some(alloc(&allocator, bytes));
        }
        nanoseconds_since(start, PAIRS)
    })
}

/// Hot pairs of 4 KiB on so many threads at once: for one of them.
pub(crate) fn threads(count: usize) -> f64 {
    let allocator = allocator();
    let barrier = Barrier::new(count);
    let pass = || {
        let mut goes: Vec<f64> = (0..GOES)
            .map(|_| {
                barrier.wait();
                let start = Instant::now();
                for _ in 0..PAIRS * 10 {
                    drop(black_box(alloc(&allocator, black_box(4096))));
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

/// `splitmix64`.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// From 512 bytes to 4 MiB: every power of two equally likely.
    fn size(&mut self) -> u64 {
        let octave = 512 << self.below(13);
        octave + self.below(octave)
    }
}
