//! What is measured: nanoseconds a piece of work, the best of a few goes.

use std::hint::black_box;
use std::sync::Barrier;
use std::time::Instant;

use lastref_alloc::replay::{ReplayOptions, replay};
use lastref_alloc::sim::{SimDevice, SimOptions};
use lastref_alloc::{CachingAllocator, Device, StreamId};
use lastref_snapshot::trace::Trace;

use crate::peers::{Lastref, Peer};

/// Pairs in one go: well under the time that a scheduler gives.
const PAIRS: u32 = 10_000;
/// Goes, of which the best counts.
const GOES: usize = 7;

fn best(mut go: impl FnMut() -> f64) -> f64 {
    (0..GOES).map(|_| go()).fold(f64::INFINITY, f64::min)
}

/// Nanoseconds for each of `PAIRS`.
fn per_pair(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e9 / f64::from(PAIRS)
}

/// One allocation and its free, again and again.
pub(crate) fn hot_pair<P: Peer>(bytes: u64) -> f64 {
    let peer = P::new();
    best(|| {
        let start = Instant::now();
        for _ in 0..PAIRS {
            peer.free(black_box(peer.alloc(black_box(bytes))));
        }
        per_pair(start)
    })
}

/// A thousand blocks of random sizes live; in turn one is freed and another allocated.
pub(crate) fn churn<P: Peer>() -> f64 {
    let peer = P::new();
    let mut random = Random(7);
    let mut live: Vec<Option<P::Block>> =
        (0..1000).map(|_| Some(peer.alloc(random.size()))).collect();
    let sizes: Vec<(usize, u64)> = (0..PAIRS)
        .map(|_| (random.below(1000) as usize, random.size()))
        .collect();
    let time = best(|| {
        let start = Instant::now();
        for &(at, bytes) in &sizes {
            if let Some(block) = live[at].take() {
                peer.free(block);
            }
            live[at] = Some(peer.alloc(bytes));
        }
        per_pair(start)
    });
    for block in live.into_iter().flatten() {
        peer.free(block);
    }
    time
}

/// Hot pairs of 4 KiB on several threads at once: for one of them.
pub(crate) fn threads<P: Peer>(threads: usize) -> f64 {
    let peer = P::new();
    let barrier = Barrier::new(threads);
    let pass = || {
        let mut goes: Vec<f64> = (0..GOES)
            .map(|_| {
                barrier.wait();
                let start = Instant::now();
                for _ in 0..PAIRS * 10 {
                    peer.free(black_box(peer.alloc(black_box(4096))));
                }
                per_pair(start) / 10.0
            })
            .collect();
        // Not the best one: in that, a thread may have been alone.
        goes.sort_by(f64::total_cmp);
        goes[GOES / 2]
    };
    let times: Vec<f64> = std::thread::scope(|scope| {
        let handles: Vec<_> = (0..threads).map(|_| scope.spawn(pass)).collect();
        let times = handles.into_iter().map(|handle| handle.join());
        times.map(|time| time.expect("no panic")).collect()
    });
    times.iter().sum::<f64>() / times.len() as f64
}

/// Blocks freed on one stream and taken on another, which is what an event and its query cost.
pub(crate) fn hand_over() -> f64 {
    let Lastref(allocator) = Lastref::new();
    let other = allocator.device().create_stream(0).expect("a stream");
    let streams = [StreamId::DEFAULT, other];
    best(|| {
        let start = Instant::now();
        for at in 0..PAIRS as usize {
            drop(black_box(allocator.alloc(1 << 20, streams[at % 2])));
        }
        per_pair(start)
    })
}

/// A trace: nanoseconds an operation, device time apart.
pub(crate) fn replayed(trace: &Trace) -> f64 {
    best(|| replay_once(trace))
}

fn replay_once(trace: &Trace) -> f64 {
    let capacity = (trace.peak_live_bytes() * 2).max(80 << 30);
    let device = SimDevice::new(SimOptions::new(capacity)).expect("the host has addresses");
    let report = replay(
        &CachingAllocator::new(device),
        trace,
        ReplayOptions::default(),
    );
    report.expect("a sound trace").nanoseconds_per_operation()
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
