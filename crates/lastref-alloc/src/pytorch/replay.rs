//! Traces through [`NativeAllocator`], with the reports of [`crate::replay`].

use std::convert::Infallible;
use std::time::Instant;

use lastref_snapshot::trace::{OperationKind, Trace};

use super::native::{Exhausted, NativeAllocator, NativeBlock, NativeStats};
use super::settings::Settings;
use crate::device::DeviceIndex;
use crate::error::{AllocError, OutOfMemoryError};
use crate::ladder::{Rung, RungOutcome, RungReport};
use crate::replay::{
    Live, OutOfMemory, PROGRESS_STEP, Place, ReplayOptions, ReplayReport, SMALLEST_STEP_BYTES,
    Smallest, peak_live_bytes, scaled, search_smallest,
};
use crate::sim::{Call, LatencyTable};

/// The capacity of a device on which nothing is refused: 256 TiB.
pub const UNLIMITED: u64 = 1 << 48;

/// Runs `trace` through PyTorch's allocator on a device of this capacity.
///
/// The report has the form of that of lastref's own allocator. `device_allocations` is PyTorch's
/// `num_device_alloc`; device time is what the calls take by the table of the simulated device. There
/// are no blocks to write to, so [`ReplayOptions::verify`] adds nothing.
///
/// # Examples
///
/// ```
/// use lastref_alloc::pytorch::{self, Settings};
/// use lastref_alloc::replay::ReplayOptions;
/// use lastref_snapshot::trace::Trace;
///
/// let csv = "op,id,bytes,stream,phase,label\nalloc,1,5000000,0,init,weights\n";
/// let trace = Trace::read(csv.as_bytes())?;
/// let report = pytorch::replay(&trace, &Settings::default(), 8 << 30, ReplayOptions::default());
/// assert_eq!(report.peak_reserved_bytes, 20 << 20);
/// # Ok::<(), lastref_snapshot::trace::TraceError>(())
/// ```
#[must_use]
pub fn replay(
    trace: &Trace,
    settings: &Settings,
    capacity: u64,
    mut options: ReplayOptions<'_>,
) -> ReplayReport {
    let mut allocator = NativeAllocator::new(settings.clone(), capacity);
    let mut blocks: Vec<Option<NativeBlock>> = Vec::new();
    blocks.resize_with(trace.peak_live_blocks(), || None);
    let mut live = Live::default();
    let mut out_of_memory = None;
    let mut done = 0;
    let start = Instant::now();
    for (index, operation) in trace.operations().iter().enumerate() {
        if index % PROGRESS_STEP == 0
            && let Some(progress) = &mut options.progress
        {
            progress(index as u64);
        }
        let bytes = scaled(operation, options.scale);
        let slot = &mut blocks[operation.slot as usize];
        match operation.kind {
            OperationKind::Alloc => match allocator.alloc(bytes, operation.stream) {
                Ok(block) => {
                    *slot = Some(block);
                    live.add(bytes);
                }
                Err(exhausted) => {
                    out_of_memory = Some(OutOfMemory {
                        place: Place::new(trace, index),
                        requested: bytes,
                        error: error(&allocator, exhausted, bytes, capacity),
                    });
                    break;
                }
            },
            OperationKind::Free => {
                let block = slot.take().expect("a trace frees what is live, once");
                allocator.free(block);
                live.remove(bytes);
            }
        }
        done = index as u64 + 1;
    }
    let host_time = start.elapsed();
    let stats = allocator.stats();
    ReplayReport {
        operations: done,
        peak_live_bytes: live.peak,
        peak_reserved_bytes: stats.peak_reserved_bytes,
        device_allocations: stats.num_device_alloc,
        device_microseconds: device_microseconds(&stats),
        host_time,
        out_of_memory,
    }
}

/// Finds the smallest device on which `trace` completes under these settings, as
/// [`crate::replay::smallest`] does for lastref's own allocator.
#[must_use]
pub fn smallest(trace: &Trace, settings: &Settings, options: ReplayOptions<'_>) -> Smallest {
    let scale = options.scale;
    let on = |capacity| {
        let options = ReplayOptions {
            scale,
            ..ReplayOptions::default()
        };
        replay(trace, settings, capacity, options)
    };
    // As much as it takes where nothing is refused: there it completes, if no fraction is set.
    let enough = on(UNLIMITED).peak_reserved_bytes;
    let live = peak_live_bytes(trace, scale);
    let completes = |capacity| Ok::<_, Infallible>(on(capacity).out_of_memory.is_none());
    let Ok(bytes) = search_smallest(live, Some(enough), completes);
    let report = replay(trace, settings, bytes, options);
    Smallest { bytes, report }
}

/// What the device's calls take, by the same table as the simulated device's. Its prices of pages are
/// for 2 MiB: a larger one costs as many times that.
fn device_microseconds(stats: &NativeStats) -> f64 {
    let table = LatencyTable::a100();
    let fixed = |call, count: u64| table.call(call).fixed * count as f64;
    let pages =
        |call, count: u64| table.call(call).microseconds(SMALLEST_STEP_BYTES) * count as f64;
    if stats.num_ranges > 0 {
        let created = stats.page_bytes_created / SMALLEST_STEP_BYTES;
        let released = stats.page_bytes_released / SMALLEST_STEP_BYTES;
        return fixed(Call::ReserveRange, stats.num_ranges)
            + pages(Call::CreatePage, created)
            + pages(Call::MapPage, created)
            + fixed(Call::SetAccess, stats.num_device_alloc)
            + pages(Call::UnmapPage, released)
            + pages(Call::DestroyPage, released);
    }
    let mebibytes = stats.segment_bytes_allocated as f64 / f64::from(1 << 20);
    fixed(Call::AllocSegment, stats.num_device_alloc)
        + table.call(Call::AllocSegment).per_mib * mebibytes
        + fixed(Call::FreeSegment, stats.num_device_free)
}

/// What lastref's own allocator would say.
fn error(
    allocator: &NativeAllocator,
    exhausted: Exhausted,
    requested: u64,
    capacity: u64,
) -> AllocError {
    let limit = allocator.limit();
    if exhausted.hopeless {
        return AllocError::TooLarge {
            requested,
            most: limit.unwrap_or(capacity),
            limited: limit.is_some(),
            device: DeviceIndex(0),
        };
    }
    let stats = allocator.stats();
    AllocError::OutOfMemory(Box::new(OutOfMemoryError {
        requested,
        rounded: exhausted.rounded,
        device: DeviceIndex(0),
        device_name: "PyTorch's policy".into(),
        capacity,
        device_free: capacity - stats.reserved_bytes,
        limit,
        allocated: stats.allocated_bytes,
        pending: stats.pending_bytes,
        cached: stats.reserved_bytes - stats.allocated_bytes - stats.pending_bytes,
        other: 0,
        largest_hole: stats.largest_free_bytes,
        pinned: None,
        rungs: vec![RungReport {
            rung: Rung::ReleaseCached,
            outcome: RungOutcome::Tried,
            bytes_freed: exhausted.released,
            microseconds: 0,
        }],
    }))
}
