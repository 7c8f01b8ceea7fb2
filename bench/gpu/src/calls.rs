//! What each call to the driver costs the host, in microseconds: the median of rounds. And how long memory that was just
//! freed must be waited for.

use std::time::Instant;

use anyhow::{Context, Result, anyhow};
use lastref_alloc::{Device, FillValue, StreamId};
use lastref_cuda::cudarc::driver::result::{self, DriverError, event};
use lastref_cuda::cudarc::driver::sys;
use serde_json::{Map, Value, json};

use crate::{Setting, median, rounded};

const ROUNDS: usize = 30;
const SIZES: [u64; 2] = [2 << 20, 32 << 20];

fn driver<T>(call: &str, result: Result<T, DriverError>) -> Result<T> {
    result.map_err(|error| anyhow!("{call}: {error}"))
}

/// The median time of `work`, in microseconds, where `work` returns what it takes to undo it.
fn timed<T>(
    mut work: impl FnMut() -> Result<T>,
    mut undo: impl FnMut(T) -> Result<()>,
) -> Result<(f64, f64)> {
    let (mut there, mut back) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let start = Instant::now();
        let made = work()?;
        there.push(start.elapsed().as_secs_f64() * 1e6);
        let start = Instant::now();
        undo(made)?;
        back.push(start.elapsed().as_secs_f64() * 1e6);
    }
    Ok((rounded(median(there)), rounded(median(back))))
}

pub(crate) fn measure(setting: &Setting) -> Result<Value> {
    let stream = setting.device.cudarc_stream(StreamId::DEFAULT)?;
    let side = setting.device.create_stream(0)?;
    let side = setting.device.cudarc_stream(side)?.cu_stream();
    driver("bind", stream.context().bind_to_thread())?;
    let mut table = Map::new();
    for bytes in SIZES {
        let size = usize::try_from(bytes)?;
        let (alloc, free) = timed(
            // SAFETY: the memory is freed below, and used by nothing.
            || driver("cuMemAlloc", unsafe { result::malloc_sync(size) }),
            // SAFETY: allocated above.
            |ptr| driver("cuMemFree", unsafe { result::free_sync(ptr) }),
        )?;
        let mut rows = vec![("alloc", alloc), ("free", free)];
        let pools = timed(
            // SAFETY: a stream of ours; the memory is freed below.
            || {
                driver("cuMemAllocAsync", unsafe {
                    result::malloc_async(side, size)
                })
            },
            // SAFETY: allocated above, on this stream.
            |ptr| driver("cuMemFreeAsync", unsafe { result::free_async(ptr, side) }),
        );
        // Not every device has pools.
        if let Ok((alloc, free)) = pools {
            rows.extend([("alloc_async", alloc), ("free_async", free)]);
        }
        if setting.device.properties().page_bytes.is_some() {
            rows.extend(pages(setting, bytes)?);
        }
        for (name, microseconds) in rows {
            table.insert(format!("{}MiB.{name}", bytes >> 20), json!(microseconds));
        }
    }
    events(side, &mut table)?;
    table.insert("just_freed".to_owned(), just_freed(setting)?);
    Ok(Value::Object(table))
}

/// Creating, mapping and opening physical memory of one size, and back.
fn pages(setting: &Setting, bytes: u64) -> Result<Vec<(&'static str, f64)>> {
    let size = usize::try_from(bytes)?;
    let ok = |call: &'static str, result: sys::CUresult| driver(call, result.result());
    let device = i32::try_from(setting.device.properties().index.0)?;
    // SAFETY: a C structure for which zeros are valid.
    let mut property: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    property.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    property.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    property.location.id = device;
    let access = sys::CUmemAccessDesc {
        location: property.location,
        flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    let mut range = 0;
    // SAFETY: the result is a local.
    ok("cuMemAddressReserve", unsafe {
        sys::cuMemAddressReserve(&raw mut range, size, 0, 0, 0)
    })?;
    let create = || {
        let mut page = 0;
        // SAFETY: both pointers are to locals.
        ok("cuMemCreate", unsafe {
            sys::cuMemCreate(&raw mut page, size, &raw const property, 0)
        })?;
        Ok(page)
    };
    // SAFETY: the page was created here and is not mapped.
    let release = |page| ok("cuMemRelease", unsafe { sys::cuMemRelease(page) });
    let (created, released) = timed(create, release)?;
    let page = create()?;
    let map = || {
        // SAFETY: the range was reserved above, and holds nothing.
        ok("cuMemMap", unsafe {
            sys::cuMemMap(range, size, 0, page, 0)
        })
    };
    // SAFETY: mapped, and no work uses it.
    let unmap = || ok("cuMemUnmap", unsafe { sys::cuMemUnmap(range, size) });
    let (mapped, _) = timed(map, |()| unmap())?;
    let open = || {
        // SAFETY: mapped by whoever calls this; the description is a local.
        ok("cuMemSetAccess", unsafe {
            sys::cuMemSetAccess(range, size, &raw const access, 1)
        })
    };
    let mut opening = Vec::new();
    let mut unmapping = Vec::new();
    for _ in 0..ROUNDS {
        map()?;
        let start = Instant::now();
        open()?;
        opening.push(start.elapsed().as_secs_f64() * 1e6);
        let start = Instant::now();
        unmap()?;
        unmapping.push(start.elapsed().as_secs_f64() * 1e6);
    }
    release(page)?;
    // SAFETY: reserved above, and nothing is mapped in it.
    ok("cuMemAddressFree", unsafe {
        sys::cuMemAddressFree(range, size)
    })?;
    Ok(vec![
        ("create", created),
        ("release", released),
        ("map", mapped),
        ("set_access", rounded(median(opening))),
        ("unmap", rounded(median(unmapping))),
    ])
}

fn events(stream: sys::CUstream, table: &mut Map<String, Value>) -> Result<()> {
    let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
    let (create, destroy) = timed(
        || driver("cuEventCreate", event::create(flags)),
        // SAFETY: created above.
        |event| driver("cuEventDestroy", unsafe { event::destroy(event) }),
    )?;
    let kept = driver("cuEventCreate", event::create(flags))?;
    let (record, query) = timed(
        // SAFETY: a live event and a live stream.
        || driver("cuEventRecord", unsafe { event::record(kept, stream) }),
        |()| {
            // SAFETY: a live event. That it is not done yet is an answer.
            let _ = unsafe { event::query(kept) };
            Ok(())
        },
    )?;
    let (wait, synchronize) = timed(
        || {
            let wait = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
            // SAFETY: a live event and a live stream.
            driver("cuStreamWaitEvent", unsafe {
                result::stream::wait_event(stream, kept, wait)
            })
        },
        // SAFETY: a live event.
        |()| driver("cuEventSynchronize", unsafe { event::synchronize(kept) }),
    )?;
    // SAFETY: created above, and used by nothing any more.
    driver("cuEventDestroy", unsafe { event::destroy(kept) })?;
    for (name, microseconds) in [
        ("event.create", create),
        ("event.destroy", destroy),
        ("event.record", record),
        ("event.query", query),
        ("event.synchronize", synchronize),
        ("stream.wait", wait),
    ] {
        table.insert(name.to_owned(), json!(microseconds));
    }
    Ok(())
}

/// How long after the last work was submitted its memory can be used by another stream: what moving a page that was just
/// freed must wait for.
fn just_freed(setting: &Setting) -> Result<Value> {
    let device = setting.device;
    let stream = device.create_stream(0)?;
    let event = device.create_event()?;
    let mut table = Map::new();
    for mib in [0_u64, 2, 32, 256] {
        let bytes = (mib << 20).max(512);
        let ptr = device.alloc_segment(bytes)?;
        let mut waits = Vec::new();
        for _ in 0..ROUNDS {
            if mib > 0 {
                device.fill(ptr, FillValue::U32(1), bytes / 4, stream)?;
            }
            device.record_event(event, stream)?;
            let start = Instant::now();
            while !device.query_event(event)? {
                std::hint::spin_loop();
            }
            waits.push(start.elapsed().as_secs_f64() * 1e6);
        }
        device.free_segment(ptr)?;
        table.insert(
            format!("after_filling_{mib}MiB"),
            json!(rounded(median(waits))),
        );
    }
    device.destroy_event(event)?;
    device.destroy_stream(stream).context("after the waits")?;
    Ok(Value::Object(table))
}
