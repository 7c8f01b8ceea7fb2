//! What the devices say they are: the numbers of an NVIDIA H100 where programs choose kernels by them, and no more than
//! the simulated device can do.

use crate::memory::PAGE_BYTES;
use crate::settings::settings;
use crate::state::Gpu;
use lastref_alloc::Device as _;

pub(crate) const MAJOR: i32 = 9;
pub(crate) const MINOR: i32 = 0;
pub(crate) const MULTIPROCESSORS: i32 = 64;
pub(crate) const WARP: i32 = 32;
pub(crate) const MAX_THREADS_PER_BLOCK: i32 = 1024;
pub(crate) const MAX_THREADS_PER_MULTIPROCESSOR: i32 = 2048;
pub(crate) const MAX_BLOCK: [i32; 3] = [1024, 1024, 64];
pub(crate) const MAX_GRID: [i32; 3] = [i32::MAX, 65_535, 65_535];
pub(crate) const SHARED_PER_BLOCK: i32 = 48 << 10;
pub(crate) const SHARED_PER_BLOCK_OPTIN: i32 = 227 << 10;
pub(crate) const SHARED_PER_MULTIPROCESSOR: i32 = 228 << 10;
pub(crate) const REGISTERS: i32 = 64 << 10;
pub(crate) const CONSTANT: i32 = 64 << 10;
pub(crate) const L2_CACHE: i32 = 50 << 20;
pub(crate) const BUS_WIDTH: i32 = 5120;
pub(crate) const CLOCK_KHZ: i32 = 1_000_000;

/// An attribute by its number, the same in the driver and in the runtime. `None` if there is no such number.
pub(crate) fn attribute(gpu: &Gpu, number: i32) -> Option<i32> {
    let yes = 1;
    let has_virtual_memory = i32::from(gpu.sim.properties().page_bytes == Some(PAGE_BYTES));
    let bus = i32::try_from(gpu.physical).unwrap_or(0) + 1;
    // Without an arm of its own, a feature is not there.
    Some(match number {
        1 => MAX_THREADS_PER_BLOCK,
        2..=4 => MAX_BLOCK[usize::try_from(number - 2).ok()?],
        5..=7 => MAX_GRID[usize::try_from(number - 5).ok()?],
        8 => SHARED_PER_BLOCK,
        9 => CONSTANT,
        10 => WARP,
        11 => i32::MAX,
        12 | 82 => REGISTERS,
        13 | 36 => CLOCK_KHZ,
        14 | 30 => 512,
        16 => MULTIPROCESSORS,
        // Copies beside kernels; host memory mapped; kernels beside each other; one address space.
        15 | 19 | 31 | 41 => yes,
        33 => bus,
        37 => BUS_WIDTH,
        38 => L2_CACHE,
        39 => MAX_THREADS_PER_MULTIPROCESSOR,
        40 => 2,
        51 => 32,
        75 => MAJOR,
        76 => MINOR,
        // Priorities of streams; caches; managed memory.
        78..=80 | 83 => yes,
        81 => SHARED_PER_MULTIPROCESSOR,
        87 => 2,
        // Preemption; registered memory at its own address; cooperative kernels; registering.
        90 | 91 | 95 | 99 => yes,
        97 => SHARED_PER_BLOCK_OPTIN,
        102 => has_virtual_memory,
        106 => 32,
        111 => 1024,
        // Memory pools; clusters of blocks.
        115 | 120 => yes,
        // There is no NUMA node.
        131 | 134 => -1,
        _ if (1..=160).contains(&number) => 0,
        _ => return None,
    })
}

/// The version of the driver that is played.
pub(crate) fn driver_version() -> i32 {
    settings().map_or(0, |settings| settings.driver_version)
}
