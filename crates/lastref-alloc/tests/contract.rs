//! The device contract on the simulated device, under many interleavings, and on devices that break
//! it, to see that the suite notices.
#![cfg(all(target_os = "linux", target_pointer_width = "64"))]

use std::sync::Arc;

use lastref_alloc::contract::{self, Report};
use lastref_alloc::sim::{SimDevice, SimOptions};
use lastref_alloc::{
    Device, DeviceError, DeviceIndex, DeviceProperties, DevicePtr, DeviceResult, EventId, Extent2d,
    FillValue, MemoryInfo, PageId, StreamId,
};

fn group(seed: u64, count: usize, change: fn(SimOptions) -> SimOptions) -> Vec<SimDevice> {
    let options = change(SimOptions::new(1 << 30).with_seed(seed));
    SimDevice::group(vec![options; count]).expect("the host has memory files")
}

fn run(seed: u64, count: usize, change: fn(SimOptions) -> SimOptions) -> Report {
    contract::run_all(&|| {
        let devices = group(seed, count, change).into_iter();
        devices.map(|d| Arc::new(d) as Arc<dyn Device>).collect()
    })
}

fn skipped(report: &Report) -> Vec<&str> {
    report.skipped.iter().map(|(name, _)| *name).collect()
}

#[test]
fn two_devices_pass_under_many_seeds() {
    for seed in 0..4 {
        let report = run(seed, 2, |options| options);
        report.assert_passed();
        let skipped = skipped(&report);
        assert_eq!(skipped, ["virtual_memory_is_refused_where_there_is_none"]);
        assert_eq!(report.passed.len() + skipped.len(), contract::CASES.len());
    }
}

#[test]
fn a_busy_device_passes() {
    run(1, 2, |options| options.with_max_ops_per_step(20)).assert_passed();
}

#[test]
fn a_device_without_virtual_memory_or_peer_says_what_it_skips() {
    let report = run(2, 1, |options| options.with_virtual_memory(false));
    report.assert_passed();
    let needs_pages = [
        "ranges_take_no_memory",
        "wrong_ranges_are_refused",
        "memory_info_follows_pages",
        "bytes_cross_page_borders",
        "a_moved_page_keeps_its_bytes",
        "pages_can_be_shuffled",
        "pages_are_unmapped_together",
        "wrong_page_calls_change_nothing",
        "peers_copy_and_wait_for_each_other",
    ];
    assert_eq!(skipped(&report), needs_pages);
}

// ---- devices that break the contract ------------------------------------------------------

/// What a [`Broken`] device does wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Defect {
    HidesThatItIsSimulated,
    GivesSegmentsOfNothing,
    AlignsTo8,
    SaysItIsBroken,
    FreesAnything,
    TakesNothing,
    LosesMemory,
    RoundsRanges,
    ClearsMovedPages,
    UnmapsTheFirst,
    OpensOnePage,
    LeaksOnErrors,
    AcceptsAnyWork,
    UsesTheDefaultStream,
    SynchronizesTheDefaultStream,
    IsAlwaysIdle,
    IgnoresWaits,
    IgnoresNewRecords,
    FinishesEventsAtOnce,
    StopsTheClock,
    FillsWithBytes,
    IgnoresPitch,
    RefusesNothing,
    CopiesFromItself,
}

/// Each defect, and a case that must notice it.
const NOTICED: &[(Defect, &str)] = &[
    (Defect::HidesThatItIsSimulated, "properties_are_sensible"),
    (
        Defect::GivesSegmentsOfNothing,
        "segments_that_cannot_be_had_take_nothing",
    ),
    (Defect::AlignsTo8, "segments_are_aligned_and_apart"),
    (
        Defect::SaysItIsBroken,
        "segments_that_cannot_be_had_take_nothing",
    ),
    (Defect::FreesAnything, "wrong_segment_frees_are_refused"),
    (Defect::TakesNothing, "memory_info_follows_segments"),
    (Defect::TakesNothing, "memory_info_follows_pages"),
    (Defect::LosesMemory, "threads_allocate_at_once"),
    (Defect::RoundsRanges, "wrong_ranges_are_refused"),
    (Defect::ClearsMovedPages, "a_moved_page_keeps_its_bytes"),
    (Defect::ClearsMovedPages, "pages_can_be_shuffled"),
    (Defect::UnmapsTheFirst, "pages_are_unmapped_together"),
    (Defect::OpensOnePage, "bytes_cross_page_borders"),
    (Defect::LeaksOnErrors, "wrong_page_calls_change_nothing"),
    (
        Defect::AcceptsAnyWork,
        "streams_that_do_not_exist_are_refused",
    ),
    (Defect::AcceptsAnyWork, "wrong_fills_are_refused"),
    (Defect::AcceptsAnyWork, "overlapping_copies_are_refused"),
    (
        Defect::AcceptsAnyWork,
        "work_outside_device_memory_is_refused",
    ),
    (Defect::UsesTheDefaultStream, "work_on_a_stream_is_in_order"),
    (Defect::UsesTheDefaultStream, "threads_copy_at_once"),
    (
        Defect::SynchronizesTheDefaultStream,
        "synchronize_covers_all_streams",
    ),
    (Defect::IsAlwaysIdle, "streams_become_idle"),
    (Defect::IgnoresWaits, "an_event_orders_two_streams"),
    (Defect::IgnoresWaits, "a_wait_keeps_the_record_it_was_given"),
    (Defect::IgnoresWaits, "a_wait_outlives_its_event"),
    (Defect::IgnoresWaits, "a_destroyed_stream_finishes_its_work"),
    (
        Defect::IgnoresNewRecords,
        "an_event_stands_for_its_latest_record",
    ),
    (Defect::FinishesEventsAtOnce, "events_become_done"),
    (Defect::StopsTheClock, "elapsed_time_does_not_go_backwards"),
    (Defect::FillsWithBytes, "fills_repeat_their_value"),
    (
        Defect::IgnoresPitch,
        "rows_are_filled_and_copied_at_their_pitch",
    ),
    (Defect::RefusesNothing, "work_of_no_bytes_is_accepted"),
    (
        Defect::CopiesFromItself,
        "peers_copy_and_wait_for_each_other",
    ),
];

/// A simulated device with a defect.
struct Broken {
    inner: SimDevice,
    properties: DeviceProperties,
    defect: Defect,
}

impl Broken {
    fn new(inner: SimDevice, defect: Defect) -> Self {
        let mut properties = inner.properties().clone();
        if defect == Defect::HidesThatItIsSimulated {
            properties.name = "a GPU".to_owned();
        }
        Self {
            inner,
            properties,
            defect,
        }
    }

    fn has(&self, defect: Defect) -> bool {
        self.defect == defect
    }

    /// The result of submitting work.
    fn work(&self, result: DeviceResult<()>) -> DeviceResult<()> {
        if self.has(Defect::AcceptsAnyWork) {
            return Ok(());
        }
        result
    }

    /// Refuses work that has nothing to do.
    fn some(&self, bytes: u64) -> DeviceResult<()> {
        if bytes == 0 && self.has(Defect::RefusesNothing) {
            let reason = "nothing to do".to_owned();
            return Err(DeviceError::InvalidArgument {
                call: "work",
                reason,
            });
        }
        Ok(())
    }
}

#[test]
fn every_defect_is_noticed() {
    for &(defect, case) in NOTICED {
        let case = contract::CASES.iter().find(|c| c.name == case).unwrap();
        // What depends on chance is noticed under some seed.
        let noticed = (0..20).any(|seed| {
            let devices = group(seed, 2, |options| options).into_iter();
            let broken = devices.map(|d| Arc::new(Broken::new(d, defect)) as Arc<dyn Device>);
            let devices: Vec<_> = broken.collect();
            let run = std::panic::AssertUnwindSafe(|| (case.run)(&devices));
            !matches!(std::panic::catch_unwind(run), Ok(Ok(_)))
        });
        assert!(noticed, "{} does not notice {defect:?}", case.name);
    }
}

// SAFETY: a simulated device does the work and checks every access; only it follows an address.
unsafe impl Device for Broken {
    fn properties(&self) -> &DeviceProperties {
        &self.properties
    }

    fn memory_info(&self) -> DeviceResult<MemoryInfo> {
        let mut info = self.inner.memory_info()?;
        if self.has(Defect::TakesNothing) {
            info.free_bytes = info.total_bytes;
        }
        Ok(info)
    }

    fn alloc_segment(&self, bytes: u64) -> DeviceResult<DevicePtr> {
        if bytes == 0 && self.has(Defect::GivesSegmentsOfNothing) {
            return Ok(DevicePtr(512));
        }
        if self.has(Defect::AlignsTo8) {
            return Ok(self.inner.alloc_segment(bytes + 8)?.offset(8));
        }
        let result = self.inner.alloc_segment(bytes);
        if self.has(Defect::SaysItIsBroken) {
            return result.map_err(|error| DeviceError::Driver {
                call: "alloc_segment",
                code: 1,
                text: error.to_string(),
            });
        }
        result
    }

    fn free_segment(&self, ptr: DevicePtr) -> DeviceResult<()> {
        if self.has(Defect::LosesMemory) {
            return Ok(());
        }
        let result = self.inner.free_segment(ptr);
        if self.has(Defect::FreesAnything) {
            return Ok(());
        }
        result
    }

    fn reserve_range(&self, bytes: u64) -> DeviceResult<DevicePtr> {
        let bytes = if self.has(Defect::RoundsRanges) {
            bytes.max(1).next_multiple_of(2 << 20)
        } else {
            bytes
        };
        self.inner.reserve_range(bytes)
    }

    fn release_range(&self, ptr: DevicePtr, bytes: u64) -> DeviceResult<()> {
        self.inner.release_range(ptr, bytes)
    }

    fn create_page(&self) -> DeviceResult<PageId> {
        self.inner.create_page()
    }

    fn destroy_page(&self, page: PageId) -> DeviceResult<()> {
        self.inner.destroy_page(page)
    }

    fn map_page(&self, ptr: DevicePtr, page: PageId) -> DeviceResult<()> {
        let result = self.inner.map_page(ptr, page);
        if result.is_err() && self.has(Defect::LeaksOnErrors) {
            self.inner.create_page()?;
        }
        result
    }

    fn set_access(&self, ptr: DevicePtr, bytes: u64) -> DeviceResult<()> {
        let opened = if self.has(Defect::OpensOnePage) {
            2 << 20
        } else {
            bytes
        };
        self.inner.set_access(ptr, opened)?;
        if self.has(Defect::ClearsMovedPages) {
            self.inner
                .fill(ptr, FillValue::U8(0), bytes, StreamId::DEFAULT)?;
        }
        Ok(())
    }

    fn unmap_page(&self, ptr: DevicePtr) -> DeviceResult<()> {
        self.inner.unmap_page(ptr)
    }

    fn unmap_pages(&self, ptr: DevicePtr, count: usize) -> Result<(), (usize, DeviceError)> {
        let count = if self.has(Defect::UnmapsTheFirst) {
            count.min(1)
        } else {
            count
        };
        self.inner.unmap_pages(ptr, count)
    }

    fn create_stream(&self, priority: i32) -> DeviceResult<StreamId> {
        self.inner.create_stream(priority)
    }

    fn destroy_stream(&self, stream: StreamId) -> DeviceResult<()> {
        self.inner.destroy_stream(stream)
    }

    fn query_stream(&self, stream: StreamId) -> DeviceResult<bool> {
        Ok(self.inner.query_stream(stream)? || self.has(Defect::IsAlwaysIdle))
    }

    fn synchronize_stream(&self, stream: StreamId) -> DeviceResult<()> {
        self.inner.synchronize_stream(stream)
    }

    fn synchronize(&self) -> DeviceResult<()> {
        if self.has(Defect::SynchronizesTheDefaultStream) {
            return self.inner.synchronize_stream(StreamId::DEFAULT);
        }
        self.inner.synchronize()
    }

    fn create_event(&self) -> DeviceResult<EventId> {
        self.inner.create_event()
    }

    fn destroy_event(&self, event: EventId) -> DeviceResult<()> {
        self.inner.destroy_event(event)
    }

    fn record_event(&self, event: EventId, stream: StreamId) -> DeviceResult<()> {
        if self.has(Defect::IgnoresNewRecords)
            && self.inner.elapsed_microseconds(event, event).is_ok()
        {
            return Ok(());
        }
        self.inner.record_event(event, stream)
    }

    fn query_event(&self, event: EventId) -> DeviceResult<bool> {
        Ok(self.inner.query_event(event)? || self.has(Defect::FinishesEventsAtOnce))
    }

    fn synchronize_event(&self, event: EventId) -> DeviceResult<()> {
        self.inner.synchronize_event(event)
    }

    fn wait_event(&self, stream: StreamId, event: EventId) -> DeviceResult<()> {
        if self.has(Defect::IgnoresWaits) {
            return Ok(());
        }
        self.inner.wait_event(stream, event)
    }

    fn elapsed_microseconds(&self, start: EventId, end: EventId) -> DeviceResult<f64> {
        let elapsed = self.inner.elapsed_microseconds(start, end)?;
        Ok(if self.has(Defect::StopsTheClock) {
            0.0
        } else {
            elapsed
        })
    }

    fn copy_from_host(&self, dst: DevicePtr, src: &[u8], stream: StreamId) -> DeviceResult<()> {
        self.some(src.len() as u64)?;
        self.work(self.inner.copy_from_host(dst, src, stream))
    }

    fn copy_to_host(&self, dst: &mut [u8], src: DevicePtr, stream: StreamId) -> DeviceResult<()> {
        self.inner.copy_to_host(dst, src, stream)
    }

    fn copy(
        &self,
        dst: DevicePtr,
        src: DevicePtr,
        bytes: u64,
        stream: StreamId,
    ) -> DeviceResult<()> {
        let stream = if self.has(Defect::UsesTheDefaultStream) {
            StreamId::DEFAULT
        } else {
            stream
        };
        self.work(self.inner.copy(dst, src, bytes, stream))
    }

    fn copy_2d(
        &self,
        dst: DevicePtr,
        src: DevicePtr,
        mut extent: Extent2d,
        stream: StreamId,
    ) -> DeviceResult<()> {
        if self.has(Defect::IgnoresPitch) {
            extent.src_pitch = extent.dst_pitch;
        }
        self.work(self.inner.copy_2d(dst, src, extent, stream))
    }

    fn copy_from_peer(
        &self,
        dst: DevicePtr,
        peer: DeviceIndex,
        src: DevicePtr,
        bytes: u64,
        stream: StreamId,
    ) -> DeviceResult<()> {
        if self.has(Defect::CopiesFromItself) {
            return self
                .inner
                .copy_from_peer(dst, self.properties.index, dst, bytes, stream);
        }
        self.work(self.inner.copy_from_peer(dst, peer, src, bytes, stream))
    }

    fn fill(
        &self,
        dst: DevicePtr,
        value: FillValue,
        count: u64,
        stream: StreamId,
    ) -> DeviceResult<()> {
        if let (FillValue::U32(wide), true) = (value, self.has(Defect::FillsWithBytes)) {
            let value = FillValue::U8(wide.to_ne_bytes()[0]);
            return self.inner.fill(dst, value, count.saturating_mul(4), stream);
        }
        self.work(self.inner.fill(dst, value, count, stream))
    }

    fn fill_2d(
        &self,
        dst: DevicePtr,
        value: FillValue,
        extent: Extent2d,
        stream: StreamId,
    ) -> DeviceResult<()> {
        self.work(self.inner.fill_2d(dst, value, extent, stream))
    }
}
