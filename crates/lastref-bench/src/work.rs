//! What is measured: nanoseconds a piece of work, the median of a few goes.

use std::fmt;
use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use lastref_alloc::{Device, DeviceResult, StreamId};

use crate::peers::{Lastref, Peer};

/// Pairs timed at once. Reading the clock costs less than a thousandth of them.
const BATCH: u32 = 1_000;
/// Batches in one go, or fewer: a go ends with the batch that passes [`LONG`].
const BATCHES: u32 = 10;
/// Under the time that a scheduler gives.
const LONG: Duration = Duration::from_millis(1);
/// Goes, of which the median counts.
const GOES: usize = 7;
/// Blocks that are live while random sizes come and go.
const LIVE: usize = 1_000;
/// What threads ask for.
const THREAD_BYTES: u64 = 4 << 10;

/// Sizes of the hot pair, in bytes.
pub const SIZES: [u64; 9] = [
    512,
    4 << 10,
    64 << 10,
    128 << 10,
    256 << 10,
    1 << 20,
    4 << 20,
    16 << 20,
    64 << 20,
];

/// Threads that allocate at once.
pub const THREADS: [usize; 3] = [1, 2, 4];

/// A piece of work that every peer can do.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Work {
    /// One allocation of so many bytes and its free, again and again.
    HotPair(u64),
    /// A thousand blocks of random sizes are live; in turn one is freed and another allocated.
    Churn,
    /// Hot pairs of 4 KiB on so many threads at once: for one of them.
    Threads(usize),
}

impl Work {
    /// All of them: every size, every number of threads.
    pub fn all() -> impl Iterator<Item = Self> {
        let hot = SIZES.into_iter().map(Self::HotPair);
        let threads = THREADS.into_iter().map(Self::Threads);
        hot.chain([Self::Churn]).chain(threads)
    }

    /// Nanoseconds that a fresh peer takes for an allocation and a free.
    ///
    /// # Errors
    ///
    /// As [`Peer::new`].
    pub fn measure<P: Peer>(self) -> DeviceResult<f64> {
        let peer = P::new()?;
        Ok(match self {
            Self::HotPair(bytes) => hot_pair(&peer, bytes),
            Self::Churn => churn(&peer),
            Self::Threads(count) => threads(&peer, count),
        })
    }
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::HotPair(bytes) => match bytes {
                0..1024 => write!(f, "hot pair, {bytes} B"),
                1024..1_048_576 => write!(f, "hot pair, {} KiB", bytes >> 10),
                _ => write!(f, "hot pair, {} MiB", bytes >> 20),
            },
            Self::Churn => write!(f, "1000 live, random sizes"),
            Self::Threads(1) => write!(f, "4 KiB, 1 thread"),
            Self::Threads(count) => write!(f, "4 KiB, {count} threads at once"),
        }
    }
}

fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}

/// One go: nanoseconds for each of the calls of `pair`, which is given their numbers.
fn go(mut pair: impl FnMut(u32)) -> f64 {
    let start = Instant::now();
    let mut done = 0;
    loop {
        for number in done..done + BATCH {
            pair(number);
        }
        done += BATCH;
        let elapsed = start.elapsed();
        if done == BATCH * BATCHES || elapsed > LONG {
            return elapsed.as_secs_f64() * 1e9 / f64::from(done);
        }
    }
}

fn goes(mut pair: impl FnMut(u32)) -> f64 {
    median((0..GOES).map(|_| go(&mut pair)).collect())
}

fn hot_pair<P: Peer>(peer: &P, bytes: u64) -> f64 {
    goes(|_| peer.free(black_box(peer.alloc(black_box(bytes)))))
}

fn churn<P: Peer>(peer: &P) -> f64 {
    let mut random = Random(7);
    let mut live: Vec<Option<P::Block>> =
        (0..LIVE).map(|_| Some(peer.alloc(random.size()))).collect();
    let turns: Vec<(u64, u64)> = (0..BATCH * BATCHES)
        .map(|_| (random.below(LIVE as u64), random.size()))
        .collect();
    let time = goes(|number| {
        let (at, bytes) = turns[number as usize];
        let at = usize::try_from(at).expect("fewer than there are live");
        if let Some(block) = live[at].take() {
            peer.free(block);
        }
        live[at] = Some(peer.alloc(bytes));
    });
    for block in live.into_iter().flatten() {
        peer.free(block);
    }
    time
}

fn threads<P: Peer>(peer: &P, count: usize) -> f64 {
    // Several times what a scheduler gives at once, so that threads which share a core do share it.
    const PAIRS: u32 = 300_000;
    const GOES: usize = 5;
    let barrier = Barrier::new(count);
    let pass = || {
        let pairs = |_| {
            barrier.wait();
            let start = Instant::now();
            for _ in 0..PAIRS {
                peer.free(black_box(peer.alloc(black_box(THREAD_BYTES))));
            }
            start.elapsed().as_secs_f64() * 1e9 / f64::from(PAIRS)
        };
        median((0..GOES).map(pairs).collect())
    };
    let times: Vec<f64> = std::thread::scope(|scope| {
        let handles: Vec<_> = (0..count).map(|_| scope.spawn(pass)).collect();
        let times = handles.into_iter().map(|handle| handle.join());
        times.map(|time| time.expect("no panic")).collect()
    });
    times.iter().sum::<f64>() / times.len() as f64
}

/// Nanoseconds for a block of 1 MiB that was freed on one stream and is taken on another, and its free: with
/// what an event and its query cost.
///
/// # Errors
///
/// The device has no stream, or [`Peer::new`]'s.
pub fn hand_over() -> DeviceResult<f64> {
    let lastref = Lastref::new()?;
    let allocator = lastref.allocator();
    let streams = [StreamId::DEFAULT, allocator.device().create_stream(0)?];
    Ok(goes(|number| {
        drop(black_box(
            allocator.alloc(1 << 20, streams[number as usize % 2]),
        ));
    }))
}

/// Numbers by `splitmix64`, from a seed.
#[derive(Debug)]
pub struct Random(pub u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number from 0 up to `end`, which is not 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// A size from 512 bytes to 4 MiB: every power of two equally likely.
    pub fn size(&mut self) -> u64 {
        let octave = 512 << self.below(13);
        octave + self.below(octave)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Mimalloc;

    #[test]
    fn every_work_takes_some_time_with_every_peer() {
        for work in [
            Work::HotPair(512),
            Work::HotPair(64 << 20),
            Work::Churn,
            Work::Threads(2),
        ] {
            for time in [work.measure::<Lastref>(), work.measure::<Mimalloc>()] {
                let time = time.unwrap();
                assert!(time > 0.5 && time.is_finite(), "{work}: {time}");
            }
        }
        assert!(hand_over().unwrap() > 0.5);
    }

    #[test]
    fn a_go_ends_early_if_pairs_are_slow() {
        let mut calls = 0;
        let time = go(|_| {
            calls += 1;
            std::thread::yield_now();
            std::thread::sleep(Duration::from_micros(2));
        });
        assert_eq!(calls, BATCH);
        assert!(time > 2_000.0);
    }
}
