//! One work, so many times: `lastref-bench-instructions WORK TIMES`. Without arguments, the works' names.
//!
//! Under valgrind, which counts instructions. What is not the work itself, such as making a device, is the
//! same whatever `TIMES` is, so two runs with different ones give the price of one. The device is small:
//! valgrind refuses large reservations.

use std::hint::black_box;

use anyhow::{Context, Result, bail};
use lastref::alloc::sim::{SimDevice, SimOptions};
use lastref::alloc::{AllocatorOptions, CachingAllocator, StreamId};
use lastref::{Device, Tensor};

const CAPACITY_BYTES: u64 = 2 << 30;
const HISTORY_ENTRIES: usize = 1_000_000;

type Work = (&'static str, fn(u32) -> Result<()>);

const WORKS: &[Work] = &[
    ("hot_pair_4_kib", |times| hot_pair(4 << 10, times)),
    ("hot_pair_1_mib", |times| hot_pair(1 << 20, times)),
    ("churn_small", |times| churn(512, 8, times)),
    ("churn_large", |times| churn(256 << 10, 3, times)),
    ("tensor_clone_drop", tensor_clone_drop),
    ("tensor_empty_drop", tensor_empty_drop),
];

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let Some(name) = arguments.next() else {
        for (name, _) in WORKS {
            println!("{name}");
        }
        return Ok(());
    };
    let Some((_, work)) = WORKS.iter().find(|(known, _)| *known == name) else {
        bail!("there is no work {name}");
    };
    let times = arguments.next().context("how many times?")?;
    work(times.parse().context("how many times is no number")?)
}

/// With statistics and a history, as in the other benchmarks.
fn allocator() -> Result<CachingAllocator<SimDevice>> {
    let device = SimDevice::new(SimOptions::new(CAPACITY_BYTES))?;
    let options = AllocatorOptions::new().with_history(HISTORY_ENTRIES);
    Ok(CachingAllocator::with_options(device, &options))
}

/// One allocation and its free.
fn hot_pair(bytes: u64, times: u32) -> Result<()> {
    let allocator = allocator()?;
    for _ in 0..times {
        drop(black_box(
            allocator.alloc(black_box(bytes), StreamId::DEFAULT)?,
        ));
    }
    Ok(())
}

/// Of 600 live blocks one is freed and another allocated, of random sizes over so many powers of two from
/// `first` on: mostly the heap's work, since sizes seldom come again.
fn churn(first: u64, octaves: u64, times: u32) -> Result<()> {
    let allocator = allocator()?;
    let mut random: u64 = 7;
    let mut next = || {
        // `splitmix64`.
        random = random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    let turns: Vec<(usize, u64)> = (0..8192)
        .map(|_| {
            let octave = first << (next() % octaves);
            ((next() % 600) as usize, octave + next() % octave)
        })
        .collect();
    let mut live = Vec::new();
    live.resize_with(600, || None);
    for &(at, bytes) in turns.iter().cycle().take(times as usize) {
        live[at] = None;
        live[at] = Some(allocator.alloc(bytes, StreamId::DEFAULT)?);
    }
    Ok(())
}

fn tensor_clone_drop(times: u32) -> Result<()> {
    lastref::sim::enable("1GiB")?;
    let tensor = empty()?;
    for _ in 0..times {
        drop(black_box(tensor.clone()));
    }
    Ok(())
}

fn tensor_empty_drop(times: u32) -> Result<()> {
    lastref::sim::enable("1GiB")?;
    for _ in 0..times {
        drop(black_box(empty()?));
    }
    Ok(())
}

fn empty() -> Result<Tensor> {
    Ok(Tensor::empty_with([1024], Device::Cuda(0))?)
}
