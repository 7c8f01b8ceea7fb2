//! Devices, streams and memory, under torch's names.
//!
//! Calls that take `device: impl Into<Option<u32>>` mean the current device where given `None`.
//! All may be called from any thread.
//!
//! Without a device: [`is_available`] is false, [`device_count`] is 0, [`empty_cache`] gives back
//! nothing, and the statistics of the current device are zero, as in torch. Every other call is an
//! [`Error::NoSuchDevice`]. If `LASTREF_SIM` cannot be read, every call
//! that returns a result says so.

mod event;
mod pool;
pub(crate) mod runtime;
mod stream;
mod summary;

use std::sync::Arc;

use crate::alloc::{self, CachingAllocator, DeviceProperties, MemoryInfo, MemoryStats, StreamId};
use crate::gc;
use crate::sync::{AtomicU64, Ordering};
use crate::{Error, Result};

pub use event::Event;
pub use pool::{MemPool, MemPoolContext, use_mem_pool};
use stream::current_id;
pub(crate) use stream::same_device;
pub use stream::{
    DeviceGuard, Stream, StreamGuard, current_device, current_stream, set_device, set_stream,
};

/// The allocator of a device of any kind.
pub type Allocator = CachingAllocator<Arc<dyn alloc::Device>>;
/// A block of an [`Allocator`].
pub type Block = alloc::Block<Arc<dyn alloc::Device>>;

/// Whether there is at least one CUDA device, real or simulated.
#[must_use]
pub fn is_available() -> bool {
    device_count() > 0
}

/// How many CUDA devices there are.
#[must_use]
pub fn device_count() -> u32 {
    runtime::active().map_or(0, |runtime| {
        u32::try_from(runtime.devices.len()).unwrap_or(u32::MAX)
    })
}

/// The name of a device. A simulated one says that it is simulated.
///
/// # Errors
///
/// [`Error::NoSuchDevice`].
pub fn get_device_name(device: impl Into<Option<u32>>) -> Result<String> {
    Ok(entry("get_device_name", device)?
        .allocator
        .device()
        .properties()
        .name
        .clone())
}

/// What a device is.
///
/// # Errors
///
/// [`Error::NoSuchDevice`].
pub fn get_device_properties(device: impl Into<Option<u32>>) -> Result<DeviceProperties> {
    Ok(entry("get_device_properties", device)?
        .allocator
        .device()
        .properties()
        .clone())
}

/// Waits until all work submitted to a device so far is done.
///
/// # Errors
///
/// [`Error::NoSuchDevice`]; the device's.
pub fn synchronize(device: impl Into<Option<u32>>) -> Result<()> {
    Ok(entry("synchronize", device)?.allocator.synchronize()?)
}

/// Gives the cached memory of all devices back to them, where other programs can see it. Returns
/// how many bytes that was.
///
/// It does not enlarge what this process can allocate: cached memory is given back by itself
/// before an allocation fails.
///
/// # Errors
///
/// The device's.
pub fn empty_cache() -> Result<u64> {
    match runtime::active() {
        Ok(runtime) => {
            let mut given_back = 0;
            for entry in &runtime.devices {
                given_back += entry.allocator.empty_cache()?;
            }
            Ok(given_back)
        }
        Err(runtime::Missing::None) => Ok(0),
        Err(missing) => Err(missing.into_error("empty_cache")),
    }
}

/// Gives cached memory of all devices back that was not used for as long as the setting `idle_trim_ms`
/// says, and returns how many bytes that was. Nothing where it is not set.
///
/// The same happens by itself when tensors come and go. A server that may be idle for long calls this from
/// a timer.
///
/// # Errors
///
/// If `LASTREF_SIM` cannot be read.
pub fn trim() -> Result<u64> {
    match runtime::active() {
        Ok(runtime) => Ok(runtime.devices.iter().map(|e| e.allocator.trim()).sum()),
        Err(runtime::Missing::None) => Ok(0),
        Err(missing) => Err(missing.into_error("trim")),
    }
}

/// The allocator of a device: limits, reclaimers, history, checks.
///
/// # Errors
///
/// [`Error::NoSuchDevice`].
pub fn allocator(device: impl Into<Option<u32>>) -> Result<Allocator> {
    Ok(entry("allocator", device)?.allocator.clone())
}

/// Bytes held by tensors, each rounded up to what the allocator gave it (a multiple of 512).
///
/// # Errors
///
/// [`Error::NoSuchDevice`], where `device` is given and not there.
pub fn memory_allocated(device: impl Into<Option<u32>>) -> Result<u64> {
    Ok(memory_stats(device)?.allocated_bytes.all.current)
}

/// The most that [`memory_allocated`] was since the start or [`reset_peak_memory_stats`].
///
/// # Errors
///
/// As `memory_allocated`.
pub fn max_memory_allocated(device: impl Into<Option<u32>>) -> Result<u64> {
    Ok(memory_stats(device)?.allocated_bytes.all.peak)
}

/// Bytes the allocator holds from the device: those of tensors, and the cache.
///
/// # Errors
///
/// As [`memory_allocated`].
pub fn memory_reserved(device: impl Into<Option<u32>>) -> Result<u64> {
    Ok(memory_stats(device)?.reserved_bytes.all.current)
}

/// The most that [`memory_reserved`] was since the start or [`reset_peak_memory_stats`].
///
/// # Errors
///
/// As [`memory_allocated`].
pub fn max_memory_reserved(device: impl Into<Option<u32>>) -> Result<u64> {
    Ok(memory_stats(device)?.reserved_bytes.all.peak)
}

/// All statistics of a device's allocator.
///
/// # Errors
///
/// As [`memory_allocated`].
pub fn memory_stats(device: impl Into<Option<u32>>) -> Result<MemoryStats> {
    let device = device.into();
    if device.is_none() && matches!(runtime::active(), Err(runtime::Missing::None)) {
        return Ok(MemoryStats::default());
    }
    Ok(entry("memory_stats", device)?.allocator.stats())
}

/// The statistics as a table for people.
///
/// # Errors
///
/// As [`memory_allocated`].
pub fn memory_summary(device: impl Into<Option<u32>>) -> Result<String> {
    let device = device.into();
    let stats = memory_stats(device)?;
    Ok(summary::table(
        &stats,
        device.unwrap_or_else(current_device),
    ))
}

/// The segments and blocks of a device's allocator, and its history where that is recorded.
///
/// # Errors
///
/// [`Error::NoSuchDevice`].
pub fn memory_snapshot(device: impl Into<Option<u32>>) -> Result<alloc::Snapshot> {
    Ok(entry("memory_snapshot", device)?.allocator.snapshot())
}

/// Sets every peak to the current value.
///
/// # Errors
///
/// [`Error::NoSuchDevice`].
pub fn reset_peak_memory_stats(device: impl Into<Option<u32>>) -> Result<()> {
    entry("reset_peak_memory_stats", device)?
        .allocator
        .reset_peak_stats();
    Ok(())
}

/// Sets every sum of allocated and freed, and the counts of retries and errors, to zero.
///
/// # Errors
///
/// [`Error::NoSuchDevice`].
pub fn reset_accumulated_memory_stats(device: impl Into<Option<u32>>) -> Result<()> {
    entry("reset_accumulated_memory_stats", device)?
        .allocator
        .reset_accumulated_stats();
    Ok(())
}

/// What the device says is free, and all it has, for all processes together.
///
/// # Errors
///
/// [`Error::NoSuchDevice`]; the device's.
pub fn mem_get_info(device: impl Into<Option<u32>>) -> Result<MemoryInfo> {
    Ok(entry("mem_get_info", device)?
        .allocator
        .device()
        .memory_info()?)
}

/// Limits this process to a fraction, 0 to 1, of the device's memory. Memory held already stays.
///
/// # Errors
///
/// [`Error::NoSuchDevice`]; [`Error::InvalidFraction`].
pub fn set_per_process_memory_fraction(
    fraction: f64,
    device: impl Into<Option<u32>>,
) -> Result<()> {
    entry("set_per_process_memory_fraction", device)?
        .allocator
        .set_memory_fraction(fraction)?;
    Ok(())
}

/// Changes settings of all devices' allocators: `key:value,key:value`, as in
/// [`LASTREF_ALLOC_CONF`](alloc::CONF_VARIABLE); [`AllocatorOptions`](alloc::AllocatorOptions) has
/// the list. What is not named stays as it is. Returns at once; what is allocated stays where it is.
///
/// # Errors
///
/// [`Error::InvalidSetting`] if the text cannot be understood or the setting cannot change any
/// more; [`Error::NoSuchDevice`].
///
/// # Examples
///
/// ```
/// use lastref::{cuda, sim};
///
/// sim::enable("8GiB")?;
/// cuda::set_allocator_settings("per_process_memory_fraction:0.5,history_entries:1000")?;
/// assert_eq!(cuda::allocator(0)?.memory_limit(), Some(4 << 30));
/// assert!(cuda::set_allocator_settings("per_process_memory_fraction:50").is_err());
/// # Ok::<(), lastref::Error>(())
/// ```
pub fn set_allocator_settings(settings: &str) -> Result<()> {
    let call = "set_allocator_settings";
    let invalid = |reason: alloc::InvalidOption| Error::InvalidSetting {
        setting: call,
        value: settings.to_owned(),
        reason: reason.to_string(),
    };
    let options: alloc::AllocatorOptions = settings.parse().map_err(invalid)?;
    let runtime = runtime::active().map_err(|missing| missing.into_error(call))?;
    for entry in &runtime.devices {
        entry.allocator.change_options(&options).map_err(invalid)?;
    }
    Ok(())
}

/// What tensor operations on devices have moved through the host, since the start.
///
/// A device without kernels can copy bytes, rows and fills. What these cannot express, a dtype
/// conversion or a scattered copy of many pieces, goes to the host, is done there, and comes back:
/// correct, but slow and waiting for the stream. These counts show whether a program does so.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CopyCounts {
    /// Operations between tensors on devices that went through the host.
    pub staged_copies: u64,
    /// Bytes of the elements that such operations read back to the host.
    pub staged_bytes: u64,
}

static STAGED_COPIES: AtomicU64 = AtomicU64::new(0);
static STAGED_BYTES: AtomicU64 = AtomicU64::new(0);

/// Reads the [`CopyCounts`] of this process.
#[must_use]
pub fn copy_counts() -> CopyCounts {
    CopyCounts {
        staged_copies: STAGED_COPIES.load(Ordering::Relaxed),
        staged_bytes: STAGED_BYTES.load(Ordering::Relaxed),
    }
}

pub(crate) fn count_staged(bytes: u64) {
    STAGED_COPIES.fetch_add(1, Ordering::Relaxed);
    STAGED_BYTES.fetch_add(bytes, Ordering::Relaxed);
}

/// A device, and the stream that work on it goes to now.
pub(crate) fn on_stream(
    call: &'static str,
    device: u32,
) -> Result<(&'static dyn alloc::Device, StreamId)> {
    let entry = runtime::device(call, device)?;
    Ok((entry.allocator.device(), current_id(device)))
}

/// A block on the current stream of `device`.
pub(crate) fn alloc(call: &'static str, device: u32, bytes: u64) -> Result<Block> {
    let entry = runtime::device(call, device)?;
    let block = entry.allocator.alloc(bytes, current_id(device))?;
    gc::added(device, block.allocated_bytes());
    Ok(block)
}

fn entry(
    call: &'static str,
    device: impl Into<Option<u32>>,
) -> Result<&'static runtime::DeviceEntry> {
    runtime::device(call, device.into().unwrap_or_else(current_device))
}
