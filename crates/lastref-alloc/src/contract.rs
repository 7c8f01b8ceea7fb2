//! What every [`Device`] must do, as cases to run on it.
//!
//! The cases take a few dozen MiB, give all of it back, and assume nothing about how the device
//! works or how large it is. Those that need what a device lacks (virtual memory, a peer) are
//! reported as skipped, never passed over. Exact byte counts are compared, so nobody else may use
//! the device meanwhile.
//!
//! ```
//! # #[cfg(target_os = "linux")] {
//! use std::sync::Arc;
//! use lastref_alloc::{Device, contract, sim::{SimDevice, SimOptions}};
//!
//! let report = contract::run_all(&|| {
//!     let device = SimDevice::new(SimOptions::new(1 << 30)).expect("the host has a memory file");
//!     vec![Arc::new(device) as Arc<dyn Device>]
//! });
//! report.assert_passed();
//! assert!(!report.skipped.is_empty(), "there is no peer");
//! # }
//! ```

use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::device::{
    Device, DeviceError, DeviceIndex, DevicePtr, DeviceResult, EventId, Extent2d, FillValue,
    PageId, StreamId,
};

const MIB: u64 = 1 << 20;
const DEFAULT: StreamId = StreamId::DEFAULT;

/// How a case ended that did not fail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// The device does what it must.
    Passed,
    /// The device lacks what the case is about.
    Skipped(&'static str),
}

/// One thing that a device must do.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// What it must do.
    pub name: &'static str,
    /// Checks it on the first device; the others are its peers.
    ///
    /// # Errors
    ///
    /// The first device call that failed and should not have.
    ///
    /// # Panics
    ///
    /// If the device does something else.
    pub run: fn(&[Arc<dyn Device>]) -> DeviceResult<Outcome>,
}

/// What [`run_all`] found.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Report {
    /// Names of the cases that passed.
    pub passed: Vec<&'static str>,
    /// Names of the cases that were skipped, and why.
    pub skipped: Vec<(&'static str, &'static str)>,
    /// Names of the cases that failed, and how.
    pub failed: Vec<(&'static str, String)>,
}

impl Report {
    /// # Panics
    ///
    /// If a case failed, with all that failed.
    pub fn assert_passed(&self) {
        let failed = self.failed.iter();
        let lines: Vec<_> = failed.map(|(name, how)| format!("{name}: {how}")).collect();
        assert!(lines.is_empty(), "device contract:\n{}", lines.join("\n"));
    }
}

/// Runs every case, each on what `make` returns: a device, then its peers with the indices that
/// [`Device::properties`] gives them. `make` may return the same devices each time.
#[must_use]
pub fn run_all(make: &dyn Fn() -> Vec<Arc<dyn Device>>) -> Report {
    let mut report = Report::default();
    for case in CASES {
        let run = || (case.run)(&make());
        match catch_unwind(AssertUnwindSafe(run)) {
            Ok(Ok(Outcome::Passed)) => report.passed.push(case.name),
            Ok(Ok(Outcome::Skipped(why))) => report.skipped.push((case.name, why)),
            Ok(Err(error)) => report.failed.push((case.name, error.to_string())),
            Err(panic) => {
                let text = panic
                    .downcast_ref::<String>()
                    .cloned()
                    .or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
                let how = text.unwrap_or_else(|| "panicked".to_owned());
                report.failed.push((case.name, how));
            }
        }
    }
    report
}

macro_rules! cases {
    ($($name:ident),+ $(,)?) => {
        /// All cases, in the order in which they say most when one fails.
        pub const CASES: &[Case] = &[$(Case { name: stringify!($name), run: $name }),+];
    };
}

cases! {
    properties_are_sensible,
    segments_are_aligned_and_apart,
    segments_that_cannot_be_had_take_nothing,
    wrong_segment_frees_are_refused,
    memory_info_follows_segments,
    freeing_a_segment_waits_for_work,
    ranges_take_no_memory,
    wrong_ranges_are_refused,
    memory_info_follows_pages,
    bytes_cross_page_borders,
    a_moved_page_keeps_its_bytes,
    pages_can_be_shuffled,
    pages_are_unmapped_together,
    wrong_page_calls_change_nothing,
    virtual_memory_is_refused_where_there_is_none,
    streams_that_do_not_exist_are_refused,
    stream_ids_are_not_used_again,
    work_on_a_stream_is_in_order,
    host_bytes_are_taken_at_the_call,
    synchronize_covers_all_streams,
    streams_become_idle,
    a_destroyed_stream_finishes_its_work,
    an_event_orders_two_streams,
    an_event_never_recorded_stands_for_nothing,
    an_event_stands_for_its_latest_record,
    a_wait_keeps_the_record_it_was_given,
    a_wait_outlives_its_event,
    events_that_do_not_exist_are_refused,
    events_become_done,
    elapsed_time_does_not_go_backwards,
    fills_repeat_their_value,
    wrong_fills_are_refused,
    rows_are_filled_and_copied_at_their_pitch,
    overlapping_copies_are_refused,
    work_outside_device_memory_is_refused,
    work_of_no_bytes_is_accepted,
    threads_copy_at_once,
    threads_allocate_at_once,
    peers_copy_and_wait_for_each_other,
}

// ---- helpers ------------------------------------------------------------------------------

/// Bytes that differ for different seeds and have no period a copy could hide in.
fn pattern(seed: u64, bytes: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut drawn = vec![0; size(bytes)];
    for chunk in drawn.chunks_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        chunk.copy_from_slice(&state.to_le_bytes()[..chunk.len()]);
    }
    drawn
}

fn size(bytes: u64) -> usize {
    usize::try_from(bytes).expect("the cases move little")
}

/// Asserts that a call was refused for its arguments.
#[track_caller]
fn refused<T: Debug>(result: DeviceResult<T>, what: &str) {
    let ok = matches!(result, Err(DeviceError::InvalidArgument { .. }));
    assert!(ok, "{what} must be an invalid argument, got {result:?}");
}

fn free_bytes(device: &dyn Device) -> DeviceResult<u64> {
    Ok(device.memory_info()?.free_bytes)
}

fn get(device: &dyn Device, ptr: DevicePtr, bytes: u64, on: StreamId) -> DeviceResult<Vec<u8>> {
    let len = size(bytes);
    // Not zeros, which new memory may hold anyway.
    let mut read = vec![0xa5; len];
    device.copy_to_host(&mut read, ptr, on)?;
    Ok(read)
}

/// Asserts what device memory holds, without printing all of it.
#[track_caller]
fn expect_bytes(read: &[u8], wanted: &[u8], what: &str) {
    assert_eq!(read.len(), wanted.len(), "{what}: length");
    if let Some(i) = (0..read.len()).find(|&i| read[i] != wanted[i]) {
        let (is, should) = (read[i], wanted[i]);
        panic!(
            "{what}: byte {i} of {} is {is:#04x}, not {should:#04x}",
            read.len()
        );
    }
}

/// Calls `done` until it says yes, for at most ten seconds.
#[track_caller]
fn poll(what: &str, done: &dyn Fn() -> DeviceResult<bool>) -> DeviceResult<()> {
    let start = std::time::Instant::now();
    while !done()? {
        assert!(start.elapsed().as_secs() < 10, "{what} did not happen");
        std::thread::yield_now();
    }
    Ok(())
}

fn rows(width_bytes: u64, height: u64, dst_pitch: u64, src_pitch: u64) -> Extent2d {
    Extent2d {
        width_bytes,
        height,
        dst_pitch,
        src_pitch,
    }
}

/// A range with `slots` page slots, and pages for all of them, none mapped.
struct Paged<'a> {
    device: &'a dyn Device,
    page_bytes: u64,
    start: DevicePtr,
    pages: Vec<PageId>,
}

impl<'a> Paged<'a> {
    fn new(device: &'a dyn Device, slots: u64) -> DeviceResult<Option<Self>> {
        let Some(page_bytes) = device.properties().page_bytes else {
            return Ok(None);
        };
        let start = device.reserve_range(slots * page_bytes)?;
        let pages = (0..slots).map(|_| device.create_page());
        Ok(Some(Self {
            device,
            page_bytes,
            start,
            pages: pages.collect::<DeviceResult<_>>()?,
        }))
    }

    fn slot(&self, slot: u64) -> DevicePtr {
        self.start.offset(slot * self.page_bytes)
    }

    fn bytes(&self) -> u64 {
        self.pages.len() as u64 * self.page_bytes
    }

    /// Maps page `page` at slot `slot` and opens it.
    fn put(&self, page: usize, slot: u64) -> DeviceResult<()> {
        self.device.map_page(self.slot(slot), self.pages[page])?;
        self.device.set_access(self.slot(slot), self.page_bytes)
    }

    /// Gives everything back; `mapped` are the slots that hold a page.
    fn close(self, mapped: impl IntoIterator<Item = u64>) -> DeviceResult<()> {
        self.device.synchronize()?;
        for slot in mapped {
            self.device.unmap_page(self.slot(slot))?;
        }
        for &page in &self.pages {
            self.device.destroy_page(page)?;
        }
        self.device.release_range(self.start, self.bytes())
    }
}

const NO_VIRTUAL_MEMORY: Outcome = Outcome::Skipped("no virtual memory");

/// Work that keeps `stream` busy for a while: fills of `ptr`.
fn keep_busy(device: &dyn Device, ptr: DevicePtr, bytes: u64, on: StreamId) -> DeviceResult<()> {
    for i in 0..16 {
        device.fill(ptr, FillValue::U8(i), bytes, on)?;
    }
    Ok(())
}

// ---- properties and segments --------------------------------------------------------------

fn properties_are_sensible(devices: &[Arc<dyn Device>]) -> DeviceResult<Outcome> {
    for device in devices {
        let properties = device.properties();
        assert!(!properties.name.is_empty(), "a device has a name");
        if properties.simulated {
            let name = properties.name.to_lowercase();
            assert!(name.contains("simulated"), "{name} must say so");
        }
        let info = device.memory_info()?;
        assert_eq!(info.total_bytes, properties.total_bytes);
        assert!(info.free_bytes <= info.total_bytes);
        if let Some(page_bytes) = properties.page_bytes {
            assert!(page_bytes.is_power_of_two() && page_bytes >= 4096);
        }
    }
    let indices: Vec<_> = devices.iter().map(|d| d.properties().index).collect();
    let distinct: std::collections::BTreeSet<_> = indices.iter().collect();
    assert_eq!(distinct.len(), indices.len(), "indices are distinct");
    Ok(Outcome::Passed)
}

fn segments_are_aligned_and_apart(devices: &[Arc<dyn Device>]) -> DeviceResult<Outcome> {
    let device = &*devices[0];
    let sizes = [1, 511, 512, 513, 4096, 2 * MIB, 2 * MIB + 1, 5 * MIB];
    let mut held = Vec::new();
    for (seed, bytes) in (1..).zip(sizes) {
        let ptr = device.alloc_segment(bytes)?;
        assert_eq!(ptr.0 % 512, 0, "a segment of {bytes} bytes at {ptr}");
        device.copy_from_host(ptr, &pattern(seed, bytes), DEFAULT)?;
        held.push((ptr, bytes, seed));
    }
    held.sort_unstable();
    for pair in held.windows(2) {
        let ((first, bytes, _), (second, ..)) = (pair[0], pair[1]);
        assert!(first.0 + bytes <= second.0, "{first} and {second} overlap");
    }
    for (ptr, bytes, seed) in held {
        let read = get(device, ptr, bytes, DEFAULT)?;
        expect_bytes(&read, &pattern(seed, bytes), "a segment");
        device.free_segment(ptr)?;
    }
    Ok(Outcome::Passed)
}

fn segments_that_cannot_be_had_take_nothing(devices: &[Arc<dyn Device>]) -> DeviceResult<Outcome> {
    let device = &*devices[0];
    let before = device.memory_info()?;
    refused(device.alloc_segment(0), "a segment of 0 bytes");
    for bytes in [before.total_bytes + 1, 2 * before.total_bytes, u64::MAX] {
        let result = device.alloc_segment(bytes);
        let full = result.as_ref().is_err_and(DeviceError::is_out_of_memory);
        assert!(full, "{bytes} bytes must be out of memory, got {result:?}");
        if let Err(DeviceError::OutOfMemory { requested, .. }) = result {
            assert_eq!(requested, bytes);
        }
    }
    assert_eq!(device.memory_info()?, before);
    Ok(Outcome::Passed)
}

fn wrong_segment_frees_are_refused(devices: &[Arc<dyn Device>]) -> DeviceResult<Outcome> {
    let device = &*devices[0];
    let bytes = 2 * MIB;
    let ptr = device.alloc_segment(bytes)?;
    device.copy_from_host(ptr, &pattern(1, bytes), DEFAULT)?;
    let before = device.memory_info()?;
    refused(device.free_segment(DevicePtr::NULL), "freeing null");
    refused(device.free_segment(ptr.offset(512)), "freeing the middle");
    assert_eq!(device.memory_info()?, before);
    let read = get(device, ptr, bytes, DEFAULT)?;
    expect_bytes(&read, &pattern(1, bytes), "a segment after refused frees");
    device.free_segment(ptr)?;
    refused(device.free_segment(ptr), "freeing twice");
    Ok(Outcome::Passed)
}

fn memory_info_follows_segments(devices: &[Arc<dyn Device>]) -> DeviceResult<Outcome> {
    let device = &*devices[0];
    let before = free_bytes(device)?;
    let ptr = device.alloc_segment(64 * MIB)?;
    assert_eq!(before - free_bytes(device)?, 64 * MIB);
    let second = device.alloc_segment(32 * MIB)?;
    assert_eq!(before - free_bytes(device)?, 96 * MIB);
    device.free_segment(ptr)?;
    assert_eq!(before - free_bytes(device)?, 32 * MIB);
    device.free_segment(second)?;
    assert_eq!(free_bytes(device)?, before);
    Ok(Outcome::Passed)
}

fn freeing_a_segment_waits_for_work(devices: &[Arc<dyn Device>]) -> DeviceResult<Outcome> {
    let device = &*devices[0];
    let bytes = 4 * MIB;
    let stream = device.create_stream(0)?;
    let (from, to) = (device.alloc_segment(bytes)?, device.alloc_segment(bytes)?);
    keep_busy(device, to, bytes, stream)?;
    device.copy_from_host(from, &pattern(1, bytes), stream)?;
    device.copy(to, from, bytes, stream)?;
    device.free_segment(from)?;
    assert!(device.query_stream(stream)?, "the free waited");
    let read = get(device, to, bytes, DEFAULT)?;
    expect_bytes(&read, &pattern(1, bytes), "a copy out of a freed segment");
    device.free_segment(to)?;
    device.destroy_stream(stream)?;
    Ok(Outcome::Passed)
}

// ---- virtual memory -----------------------------------------------------------------------

fn ranges_take_no_memory(devices: &[Arc<dyn Device>]) -> DeviceResult<Outcome> {
    let device = &*devices[0];
    let Some(page_bytes) = device.properties().page_bytes else {
        return Ok(NO_VIRTUAL_MEMORY);
    };
    let before = device.memory_info()?;
    // As an allocator does: more addresses than there is memory.
    let large = (before.total_bytes * 2).next_multiple_of(page_bytes);
    let mut held = Vec::new();
    for bytes in [page_bytes, 3 * page_bytes, large] {
        let ptr = device.reserve_range(bytes)?;
        assert_eq!(ptr.0 % page_bytes, 0, "a range at {ptr}");
        held.push((ptr, bytes));
    }
    held.sort_unstable();
    for pair in held.windows(2) {
        let (first, second) = (pair[0], pair[1]);
        assert!(first.0.0 + first.1 <= second.0.0, "ranges overlap");
    }
    assert_eq!(device.memory_info()?, before);
    for (ptr, bytes) in held {
        device.release_range(ptr, bytes)?;
    }
    Ok(Outcome::Passed)
}

fn wrong_ranges_are_refused(devices: &[Arc<dyn Device>]) -> DeviceResult<Outcome> {
    let device = &*devices[0];
    let Some(page_bytes) = device.properties().page_bytes else {
        return Ok(NO_VIRTUAL_MEMORY);
    };
    refused(device.reserve_range(0), "a range of 0 bytes");
    refused(
        device.reserve_range(page_bytes + 512),
        "a range of part of a page",
    );
    let bytes = 4 * page_bytes;
    let ptr = device.reserve_range(bytes)?;
    let inside = ptr.offset(page_bytes);
    refused(
        device.release_range(inside, page_bytes),
        "releasing the middle",
    );
    refused(device.release_range(ptr, page_bytes), "releasing a part");
    refused(
        device.release_range(ptr, bytes + page_bytes),
        "releasing more",
    );
    device.release_range(ptr, bytes)?;
    refused(device.release_range(ptr, bytes), "releasing twice");
    Ok(Outcome::Passed)
}

fn memory_info_follows_pages(devices: &[Arc<dyn Device>]) -> DeviceResult<Outcome> {
    let device = &*devices[0];
    let before = free_bytes(device)?;
    let Some(paged) = Paged::new(device, 4)? else {
        return Ok(NO_VIRTUAL_MEMORY);
    };
    let taken = before - paged.bytes();
    assert_eq!(free_bytes(device)?, taken, "pages take memory when created");
    paged.put(0, 2)?;
    assert_eq!(free_bytes(device)?, taken, "mapping takes no more");
    device.unmap_page(paged.slot(2))?;
    assert_eq!(free_bytes(device)?, taken, "unmapping gives nothing back");
    paged.close([])?;
    assert_eq!(free_bytes(device)?, before, "destroying gives all back");
    Ok(Outcome::Passed)
}

fn bytes_cross_page_borders(devices: &[Arc<dyn Device>]) -> DeviceResult<Outcome> {
    let device = &*devices[0];
    let Some(paged) = Paged::new(device, 4)? else {
        return Ok(NO_VIRTUAL_MEMORY);
    };
    for (slot, &page) in (0..).zip(&paged.pages) {
        device.map_page(paged.slot(slot), page)?;
    }
    // One call opens all of them.
    device.set_access(paged.start, paged.bytes())?;
    let bytes = paged.bytes();
    let wanted = pattern(1, bytes);
    device.copy_from_host(paged.start, &wanted, DEFAULT)?;
    let read = get(device, paged.start, bytes, DEFAULT)?;
    expect_bytes(&read, &wanted, "a range of four pages");
    // A copy inside the device from the middle of one page to the middle of another.
    let (from, to) = (paged.page_bytes / 2, paged.page_bytes * 5 / 2);
    let len = paged.page_bytes;
    device.copy(
        paged.start.offset(to),
        paged.start.offset(from),
        len,
        DEFAULT,
    )?;
    let read = get(device, paged.start.offset(to), len, DEFAULT)?;
    let first = size(from);
    let copied = &wanted[first..first + read.len()];
    expect_bytes(&read, copied, "a copy across page borders");
    paged.close(0..4)?;
    Ok(Outcome::Passed)
}

fn a_moved_page_keeps_its_bytes(devices: &[Arc<dyn Device>]) -> DeviceResult<Outcome> {
    let device = &*devices[0];
    let Some(paged) = Paged::new(device, 5)? else {
        return Ok(NO_VIRTUAL_MEMORY);
    };
    let bytes = paged.page_bytes;
    let (one, two) = (pattern(1, bytes), pattern(2, bytes));
    paged.put(0, 0)?;
    device.copy_from_host(paged.slot(0), &one, DEFAULT)?;
    let mut last = 0;
    for next in [3, 1, 4] {
        device.synchronize()?;
        device.unmap_page(paged.slot(last))?;
        paged.put(0, next)?;
        let read = get(device, paged.slot(next), bytes, DEFAULT)?;
        expect_bytes(&read, &one, "a moved page");
        last = next;
    }
    // Another page where it once was.
    paged.put(1, 0)?;
    device.copy_from_host(paged.slot(0), &two, DEFAULT)?;
    let read = get(device, paged.slot(last), bytes, DEFAULT)?;
    expect_bytes(&read, &one, "a page whose old address is used again");
    let read = get(device, paged.slot(0), bytes, DEFAULT)?;
    expect_bytes(&read, &two, "a page at a used address");
    paged.close([0, last])?;
    Ok(Outcome::Passed)
}

fn pages_can_be_shuffled(devices: &[Arc<dyn Device>]) -> DeviceResult<Outcome> {
    let device = &*devices[0];
    let Some(paged) = Paged::new(device, 6)? else {
        return Ok(NO_VIRTUAL_MEMORY);
    };
    let bytes = paged.page_bytes;
    let orders = [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [2, 5, 0, 4, 1, 3]];
    for (round, order) in (0..).zip(orders) {
        for (slot, page) in (0..).zip(order) {
            paged.put(page, slot)?;
            let seed = page as u64 + 1;
            if round == 0 {
                device.copy_from_host(paged.slot(slot), &pattern(seed, bytes), DEFAULT)?;
            }
            let read = get(device, paged.slot(slot), bytes, DEFAULT)?;
            expect_bytes(&read, &pattern(seed, bytes), "a shuffled page");
        }
        for slot in 0..6 {
            device.unmap_page(paged.slot(slot))?;
        }
    }
    paged.close([])?;
    Ok(Outcome::Passed)
}

fn pages_are_unmapped_together(devices: &[Arc<dyn Device>]) -> DeviceResult<Outcome> {
    let device = &*devices[0];
    let Some(paged) = Paged::new(device, 6)? else {
        return Ok(NO_VIRTUAL_MEMORY);
    };
    let bytes = paged.page_bytes;
    for page in 0..6 {
        paged.put(page, page as u64)?;
        let wanted = pattern(page as u64, bytes);
        device.copy_from_host(paged.slot(page as u64), &wanted, DEFAULT)?;
    }
    device.synchronize()?;
    let none = device.unmap_pages(paged.slot(0), 0);
    assert!(none.is_ok(), "unmapping no page: {none:?}");
    // A part of what was mapped, from the middle.
    device
        .unmap_pages(paged.slot(1), 3)
        .map_err(|(_, error)| error)?;
    for (slot, page) in [(1, 3), (2, 1), (3, 2)] {
        paged.put(page, slot)?;
    }
    for (slot, page) in [0, 3, 1, 2, 4, 5].into_iter().enumerate() {
        let read = get(device, paged.slot(slot as u64), bytes, DEFAULT)?;
        expect_bytes(&read, &pattern(page, bytes), "a page beside unmapped ones");
    }
    device.synchronize()?;
    // Nothing is mapped at the fourth: those before it go, those behind it stay.
    device.unmap_page(paged.slot(3))?;
    match device.unmap_pages(paged.slot(1), 4) {
        Err((done, _)) => assert_eq!(done, 2, "pages before the one that is missing"),
        Ok(()) => panic!("unmapping four pages, one of which is missing, was accepted"),
    }
    for slot in [0, 4, 5] {
        let read = get(device, paged.slot(slot), bytes, DEFAULT)?;
        expect_bytes(&read, &pattern(slot, bytes), "a page that stayed");
    }
    paged.close([0, 4, 5])?;
    Ok(Outcome::Passed)
}

fn wrong_page_calls_change_nothing(devices: &[Arc<dyn Device>]) -> DeviceResult<Outcome> {
    let device = &*devices[0];
    let Some(paged) = Paged::new(device, 4)? else {
        return Ok(NO_VIRTUAL_MEMORY);
    };
    let bytes = paged.page_bytes;
    let wanted = pattern(1, bytes);
    paged.put(0, 1)?;
    device.copy_from_host(paged.slot(1), &wanted, DEFAULT)?;
    device.synchronize()?;
    let before = device.memory_info()?;
    let gone = device.create_page()?;
    device.destroy_page(gone)?;

    let page = paged.pages[1];
    let end = paged.start.offset(paged.bytes());
    refused(device.map_page(paged.slot(1), page), "mapping over a page");
    refused(device.map_page(end, page), "mapping past the range");
    refused(device.map_page(DevicePtr::NULL, page), "mapping at null");
    let crooked = paged.slot(2).offset(512);
    refused(
        device.map_page(crooked, page),
        "mapping at an address inside a page",
    );
    refused(
        device.map_page(paged.slot(2), gone),
        "mapping a destroyed page",
    );
    refused(device.set_access(paged.slot(2), bytes), "access to nothing");
    refused(
        device.set_access(paged.slot(1), 2 * bytes),
        "access to part nothing",
    );
    refused(device.unmap_page(paged.slot(2)), "unmapping nothing");
    refused(
        device.destroy_page(paged.pages[0]),
        "destroying a mapped page",
    );
    refused(device.destroy_page(gone), "destroying twice");
    let released = device.release_range(paged.start, paged.bytes());
    refused(released, "releasing a range with a page in it");

    assert_eq!(device.memory_info()?, before);
    let read = get(device, paged.slot(1), bytes, DEFAULT)?;
    expect_bytes(&read, &wanted, "a page after refused calls");
    // The page that was refused everywhere is free to be mapped.
    paged.put(1, 2)?;
    paged.close([1, 2])?;
    Ok(Outcome::Passed)
}

fn virtual_memory_is_refused_where_there_is_none(
    devices: &[Arc<dyn Device>],
) -> DeviceResult<Outcome> {
    let device = &*devices[0];
    if device.properties().page_bytes.is_some() {
        return Ok(Outcome::Skipped("the device has virtual memory"));
    }
    let ptr = DevicePtr(2 * MIB);
    let page = PageId(1);
    let results = [
        device.reserve_range(2 * MIB).map(drop),
        device.release_range(ptr, 2 * MIB),
        device.create_page().map(drop),
        device.destroy_page(page),
        device.map_page(ptr, page),
        device.set_access(ptr, 2 * MIB),
        device.unmap_page(ptr),
    ];
    for result in results {
        let ok = matches!(result, Err(DeviceError::NotSupported { .. }));
        assert!(ok, "must not be supported, got {result:?}");
    }
    Ok(Outcome::Passed)
}

// ---- streams ------------------------------------------------------------------------------

fn streams_that_do_not_exist_are_refused(devices: &[Arc<dyn Device>]) -> DeviceResult<Outcome> {
    let device = &*devices[0];
    let ptr = device.alloc_segment(4096)?;
    device.copy_from_host(ptr, &pattern(1, 4096), DEFAULT)?;
    let event = device.create_event()?;
    device.record_event(event, DEFAULT)?;
    let gone = device.create_stream(0)?;
    device.destroy_stream(gone)?;
    let half = rows(16, 4, 32, 32);
    let upper = ptr.offset(2048);
    for stream in [gone, StreamId(u64::MAX)] {
        refused(device.destroy_stream(stream), "destroy_stream");
        refused(device.query_stream(stream), "query_stream");
        refused(device.synchronize_stream(stream), "synchronize_stream");
        refused(device.record_event(event, stream), "record_event");
        refused(device.wait_event(stream, event), "wait_event");
        refused(
            device.copy_from_host(ptr, &[1; 64], stream),
            "copy_from_host",
        );
        refused(
            device.copy_to_host(&mut [0; 64], ptr, stream),
            "copy_to_host",
        );
        refused(device.copy(ptr, upper, 64, stream), "copy");
        refused(device.copy_2d(ptr, upper, half, stream), "copy_2d");
        let own = device.properties().index;
        refused(
            device.copy_from_peer(ptr, own, upper, 64, stream),
            "copy_from_peer",
        );
        refused(device.fill(ptr, FillValue::U8(1), 64, stream), "fill");
        refused(
            device.fill_2d(ptr, FillValue::U8(1), half, stream),
            "fill_2d",
        );
    }
    refused(
        device.destroy_stream(DEFAULT),
        "destroying the default stream",
    );
    device.synchronize()?;
    assert!(device.query_event(event)?, "the event keeps its record");
    let read = get(device, ptr, 4096, DEFAULT)?;
    expect_bytes(&read, &pattern(1, 4096), "memory after refused work");
    device.destroy_event(event)?;
    device.free_segment(ptr)?;
    Ok(Outcome::Passed)
}

fn stream_ids_are_not_used_again(devices: &[Arc<dyn Device>]) -> DeviceResult<Outcome> {
    let device = &*devices[0];
    let mut seen = std::collections::BTreeSet::from([DEFAULT]);
    for priority in [0, -1, 1, 0, 0, -5, 5, 0] {
        let stream = device.create_stream(priority)?;
        assert!(seen.insert(stream), "stream {stream} was there before");
        device.destroy_stream(stream)?;
    }
    Ok(Outcome::Passed)
}

fn work_on_a_stream_is_in_order(devices: &[Arc<dyn Device>]) -> DeviceResult<Outcome> {
    let device = &*devices[0];
    let bytes = MIB;
    let stream = device.create_stream(0)?;
    let (a, b) = (device.alloc_segment(bytes)?, device.alloc_segment(bytes)?);
    for on in [stream, DEFAULT] {
        for round in 0..32 {
            device.copy_from_host(a, &pattern(round, bytes), on)?;
            device.copy(b, a, bytes, on)?;
            device.fill(a, FillValue::U8(0), bytes, on)?;
        }
        expect_bytes(
            &get(device, b, bytes, on)?,
            &pattern(31, bytes),
            "the last copy",
        );
        let zeros = pattern(0, 0)
            .into_iter()
            .chain(std::iter::repeat_n(0, 1 << 20));
        let zeros: Vec<u8> = zeros.collect();
        expect_bytes(&get(device, a, bytes, on)?, &zeros, "the last fill");
    }
    device.free_segment(a)?;
    device.free_segment(b)?;
    device.destroy_stream(stream)?;
    Ok(Outcome::Passed)
}

fn host_bytes_are_taken_at_the_call(devices: &[Arc<dyn Device>]) -> DeviceResult<Outcome> {
    let device = &*devices[0];
    let bytes = 2 * MIB;
    let stream = device.create_stream(0)?;
    let ptr = device.alloc_segment(bytes)?;
    keep_busy(device, ptr, bytes, stream)?;
    let mut host = pattern(1, bytes);
    device.copy_from_host(ptr, &host, stream)?;
    host.fill(0xee);
    let read = get(device, ptr, bytes, stream)?;
    expect_bytes(&read, &pattern(1, bytes), "bytes changed after the call");
    device.free_segment(ptr)?;
    device.destroy_stream(stream)?;
    Ok(Outcome::Passed)
}

fn synchronize_covers_all_streams(devices: &[Arc<dyn Device>]) -> DeviceResult<Outcome> {
    let device = &*devices[0];
    let bytes = MIB;
    let mut held = Vec::new();
    for seed in 1..5 {
        let stream = device.create_stream(0)?;
        let ptr = device.alloc_segment(bytes)?;
        keep_busy(device, ptr, bytes, stream)?;
        device.copy_from_host(ptr, &pattern(seed, bytes), stream)?;
        held.push((stream, ptr, seed));
    }
    device.synchronize()?;
    for &(stream, ptr, seed) in &held {
        assert!(device.query_stream(stream)?, "stream {stream} is done");
        // On another stream, which orders nothing: it is there.
        let read = get(device, ptr, bytes, DEFAULT)?;
        expect_bytes(&read, &pattern(seed, bytes), "work before synchronize");
    }
    for (stream, ptr, _) in held {
        device.free_segment(ptr)?;
        device.destroy_stream(stream)?;
    }
    Ok(Outcome::Passed)
}

fn streams_become_idle(devices: &[Arc<dyn Device>]) -> DeviceResult<Outcome> {
    let device = &*devices[0];
    let bytes = MIB;
    let stream = device.create_stream(0)?;
    let ptr = device.alloc_segment(bytes)?;
    assert!(device.query_stream(stream)?, "a new stream is idle");
    keep_busy(device, ptr, bytes, stream)?;
    device.copy_from_host(ptr, &pattern(1, bytes), stream)?;
    poll("an idle stream", &|| device.query_stream(stream))?;
    // Idle means done: it is there, also for a stream that waited for nothing.
    let read = get(device, ptr, bytes, DEFAULT)?;
    expect_bytes(&read, &pattern(1, bytes), "the work of an idle stream");
    keep_busy(device, ptr, bytes, stream)?;
    device.synchronize_stream(stream)?;
    assert!(
        device.query_stream(stream)?,
        "idle after synchronize_stream"
    );
    device.free_segment(ptr)?;
    device.destroy_stream(stream)?;
    Ok(Outcome::Passed)
}

fn a_destroyed_stream_finishes_its_work(devices: &[Arc<dyn Device>]) -> DeviceResult<Outcome> {
    let device = &*devices[0];
    let bytes = 2 * MIB;
    let ptr = device.alloc_segment(bytes)?;
    for how in 0..3 {
        let stream = device.create_stream(0)?;
        let event = device.create_event()?;
        keep_busy(device, ptr, bytes, stream)?;
        device.copy_from_host(ptr, &pattern(how, bytes), stream)?;
        device.record_event(event, stream)?;
        device.destroy_stream(stream)?;
        match how {
            0 => device.synchronize()?,
            1 => device.synchronize_event(event)?,
            _ => device.wait_event(DEFAULT, event)?,
        }
        let read = get(device, ptr, bytes, DEFAULT)?;
        expect_bytes(&read, &pattern(how, bytes), "work of a destroyed stream");
        device.destroy_event(event)?;
    }
    device.free_segment(ptr)?;
    Ok(Outcome::Passed)
}

// ---- events -------------------------------------------------------------------------------

/// Two streams, an event, and three buffers of `BYTES`: what the event cases work with.
struct Bench<'a> {
    device: &'a dyn Device,
    first: StreamId,
    second: StreamId,
    event: EventId,
    a: DevicePtr,
    b: DevicePtr,
    c: DevicePtr,
}

impl<'a> Bench<'a> {
    const BYTES: u64 = 2 * MIB;

    fn new(device: &'a dyn Device) -> DeviceResult<Self> {
        Ok(Self {
            device,
            first: device.create_stream(0)?,
            second: device.create_stream(0)?,
            event: device.create_event()?,
            a: device.alloc_segment(Self::BYTES)?,
            b: device.alloc_segment(Self::BYTES)?,
            c: device.alloc_segment(Self::BYTES)?,
        })
    }

    /// Long work on `on` that ends with `pattern(seed)` in `ptr`.
    fn produce(&self, ptr: DevicePtr, seed: u64, on: StreamId) -> DeviceResult<()> {
        keep_busy(self.device, ptr, Self::BYTES, on)?;
        let bytes = pattern(seed, Self::BYTES);
        self.device.copy_from_host(ptr, &bytes, on)
    }

    /// Copies `from` to `to` on `on`, and asserts that `pattern(seed)` arrived.
    #[track_caller]
    fn consume(
        &self,
        from: DevicePtr,
        to: DevicePtr,
        on: StreamId,
        seed: u64,
        what: &str,
    ) -> DeviceResult<()> {
        self.device.copy(to, from, Self::BYTES, on)?;
        let read = get(self.device, to, Self::BYTES, on)?;
        expect_bytes(&read, &pattern(seed, Self::BYTES), what);
        Ok(())
    }

    fn close(self) -> DeviceResult<Outcome> {
        self.device.synchronize()?;
        for ptr in [self.a, self.b, self.c] {
            self.device.free_segment(ptr)?;
        }
        self.device.destroy_event(self.event)?;
        self.device.destroy_stream(self.first)?;
        self.device.destroy_stream(self.second)?;
        Ok(Outcome::Passed)
    }
}

fn an_event_orders_two_streams(devices: &[Arc<dyn Device>]) -> DeviceResult<Outcome> {
    let device = &*devices[0];
    let bench = Bench::new(device)?;
    for seed in 1..9 {
        bench.produce(bench.a, seed, bench.first)?;
        device.record_event(bench.event, bench.first)?;
        device.wait_event(bench.second, bench.event)?;
        let what = "bytes behind an event";
        bench.consume(bench.a, bench.b, bench.second, seed, what)?;
        // And back: the next round must not write while this one is read.
        device.record_event(bench.event, bench.second)?;
        device.wait_event(bench.first, bench.event)?;
    }
    bench.close()
}

fn an_event_never_recorded_stands_for_nothing(
    devices: &[Arc<dyn Device>],
) -> DeviceResult<Outcome> {
    let device = &*devices[0];
    let bench = Bench::new(device)?;
    bench.produce(bench.a, 1, bench.first)?;
    assert!(device.query_event(bench.event)?, "nothing to wait for");
    device.synchronize_event(bench.event)?;
    device.wait_event(bench.second, bench.event)?;
    bench.produce(bench.b, 2, bench.second)?;
    let what = "work behind a wait for nothing";
    bench.consume(bench.b, bench.c, bench.second, 2, what)?;
    // A record after the wait does not reach back to it.
    device.wait_event(bench.second, bench.event)?;
    device.record_event(bench.event, bench.second)?;
    device.synchronize_stream(bench.second)?;
    bench.close()
}

fn an_event_stands_for_its_latest_record(devices: &[Arc<dyn Device>]) -> DeviceResult<Outcome> {
    let device = &*devices[0];
    let bench = Bench::new(device)?;
    device.record_event(bench.event, bench.second)?;
    device.synchronize_event(bench.event)?;
    for seed in 1..5 {
        bench.produce(bench.a, seed, bench.first)?;
        device.record_event(bench.event, bench.first)?;
        device.synchronize_event(bench.event)?;
        let what = "bytes behind an event recorded anew";
        bench.consume(bench.a, bench.b, bench.second, seed, what)?;
    }
    bench.close()
}

fn a_wait_keeps_the_record_it_was_given(devices: &[Arc<dyn Device>]) -> DeviceResult<Outcome> {
    let device = &*devices[0];
    let bench = Bench::new(device)?;
    let third = device.create_stream(0)?;
    for seed in 1..5 {
        bench.produce(bench.a, seed, bench.first)?;
        device.record_event(bench.event, bench.first)?;
        device.wait_event(bench.second, bench.event)?;
        // Recorded anew on a stream with nothing to do: the wait above is still for the first.
        device.record_event(bench.event, third)?;
        let what = "bytes behind a wait whose event was recorded anew";
        bench.consume(bench.a, bench.b, bench.second, seed, what)?;
    }
    device.destroy_stream(third)?;
    bench.close()
}

fn a_wait_outlives_its_event(devices: &[Arc<dyn Device>]) -> DeviceResult<Outcome> {
    let device = &*devices[0];
    let bench = Bench::new(device)?;
    for seed in 1..5 {
        let event = device.create_event()?;
        bench.produce(bench.a, seed, bench.first)?;
        device.record_event(event, bench.first)?;
        device.wait_event(bench.second, event)?;
        device.destroy_event(event)?;
        let what = "bytes behind a wait for a destroyed event";
        bench.consume(bench.a, bench.b, bench.second, seed, what)?;
    }
    bench.close()
}

fn events_that_do_not_exist_are_refused(devices: &[Arc<dyn Device>]) -> DeviceResult<Outcome> {
    let device = &*devices[0];
    let good = device.create_event()?;
    device.record_event(good, DEFAULT)?;
    device.synchronize()?;
    let gone = device.create_event()?;
    device.destroy_event(gone)?;
    for event in [gone, EventId(u64::MAX)] {
        refused(device.destroy_event(event), "destroy_event");
        refused(device.record_event(event, DEFAULT), "record_event");
        refused(device.query_event(event), "query_event");
        refused(device.synchronize_event(event), "synchronize_event");
        refused(device.wait_event(DEFAULT, event), "wait_event");
        refused(device.elapsed_microseconds(event, good), "elapsed from");
        refused(device.elapsed_microseconds(good, event), "elapsed to");
    }
    device.destroy_event(good)?;
    Ok(Outcome::Passed)
}

fn events_become_done(devices: &[Arc<dyn Device>]) -> DeviceResult<Outcome> {
    let device = &*devices[0];
    let bench = Bench::new(device)?;
    bench.produce(bench.a, 1, bench.first)?;
    device.record_event(bench.event, bench.first)?;
    poll("a finished event", &|| device.query_event(bench.event))?;
    // Done means that what is before it is done.
    let what = "bytes behind an event that was polled";
    bench.consume(bench.a, bench.b, bench.second, 1, what)?;

    bench.produce(bench.a, 2, bench.first)?;
    device.record_event(bench.event, bench.first)?;
    device.synchronize_stream(bench.first)?;
    assert!(device.query_event(bench.event)?, "done with its stream");
    bench.close()
}

fn elapsed_time_does_not_go_backwards(devices: &[Arc<dyn Device>]) -> DeviceResult<Outcome> {
    let device = &*devices[0];
    let bench = Bench::new(device)?;
    let never = device.create_event()?;
    let mut events = Vec::new();
    for seed in 0..4 {
        let event = device.create_event()?;
        device.record_event(event, bench.first)?;
        events.push(event);
        bench.produce(bench.a, seed, bench.first)?;
    }
    device.synchronize_stream(bench.first)?;
    let between = |from: usize, to: usize| device.elapsed_microseconds(events[from], events[to]);
    for at in 1..events.len() {
        assert!(between(at - 1, at)? > 0.0, "work takes time");
        let (long, short) = (between(0, at)?, between(0, at - 1)?);
        assert!(
            long >= short,
            "{long} us up to event {at}, {short} us before"
        );
    }
    assert!(between(2, 2)?.abs() < f64::EPSILON, "no time to itself");
    refused(
        device.elapsed_microseconds(never, events[0]),
        "from no record",
    );
    refused(
        device.elapsed_microseconds(events[0], never),
        "to no record",
    );
    for event in events {
        device.destroy_event(event)?;
    }
    device.destroy_event(never)?;
    bench.close()
}

// ---- moving bytes -------------------------------------------------------------------------

fn fills_repeat_their_value(devices: &[Arc<dyn Device>]) -> DeviceResult<Outcome> {
    let device = &*devices[0];
    let bytes = 4096;
    let ptr = device.alloc_segment(bytes)?;
    let values = [
        (FillValue::U8(0xab), vec![0xab]),
        (FillValue::U16(0x1234), 0x1234_u16.to_ne_bytes().to_vec()),
        (
            FillValue::U32(0x89ab_cdef),
            0x89ab_cdef_u32.to_ne_bytes().to_vec(),
        ),
    ];
    for (value, unit) in values {
        let mut wanted = pattern(1, bytes);
        device.copy_from_host(ptr, &wanted, DEFAULT)?;
        // From the third value on, 100 of them; what is around stays.
        let (skip, count) = (2 * unit.len(), 100);
        let at = ptr.offset(skip as u64);
        device.fill(at, value, count as u64, DEFAULT)?;
        for chunk in wanted[skip..].chunks_exact_mut(unit.len()).take(count) {
            chunk.copy_from_slice(&unit);
        }
        let read = get(device, ptr, bytes, DEFAULT)?;
        expect_bytes(&read, &wanted, &format!("a fill with {value:?}"));
    }
    device.free_segment(ptr)?;
    Ok(Outcome::Passed)
}

fn wrong_fills_are_refused(devices: &[Arc<dyn Device>]) -> DeviceResult<Outcome> {
    let device = &*devices[0];
    let bytes = 4096;
    let ptr = device.alloc_segment(bytes)?;
    let wanted = pattern(1, bytes);
    device.copy_from_host(ptr, &wanted, DEFAULT)?;
    let (wide, long) = (FillValue::U16(7), FillValue::U32(7));
    refused(
        device.fill(ptr.offset(1), wide, 4, DEFAULT),
        "an odd address",
    );
    refused(
        device.fill(ptr.offset(2), long, 4, DEFAULT),
        "an address not of 4",
    );
    refused(
        device.fill(ptr, long, u64::MAX, DEFAULT),
        "a count past everything",
    );
    let cases = [
        (long, rows(6, 4, 32, 0), "a width not of 4"),
        (long, rows(8, 4, 30, 0), "a pitch not of 4"),
        (wide, rows(8, 4, 31, 0), "an odd pitch"),
        (wide, rows(16, 4, 8, 0), "a pitch less than the width"),
        (wide, rows(16, u64::MAX, 16, 0), "rows past everything"),
    ];
    for (value, extent, what) in cases {
        refused(device.fill_2d(ptr, value, extent, DEFAULT), what);
    }
    let read = get(device, ptr, bytes, DEFAULT)?;
    expect_bytes(&read, &wanted, "memory after refused fills");
    device.free_segment(ptr)?;
    Ok(Outcome::Passed)
}

fn rows_are_filled_and_copied_at_their_pitch(devices: &[Arc<dyn Device>]) -> DeviceResult<Outcome> {
    let device = &*devices[0];
    let bytes = 8192;
    let (a, b) = (device.alloc_segment(bytes)?, device.alloc_segment(bytes)?);
    let from = pattern(1, bytes);
    let extents = [
        rows(48, 20, 64, 80),
        rows(64, 20, 64, 64),
        rows(1, 33, 7, 5),
        rows(5, 33, 5, 40),
        rows(300, 1, 300, 300),
    ];
    for extent in extents {
        let (width, dst_pitch, src_pitch) = (
            size(extent.width_bytes),
            size(extent.dst_pitch),
            size(extent.src_pitch),
        );
        let mut wanted = pattern(2, bytes);
        device.copy_from_host(a, &from, DEFAULT)?;
        device.copy_from_host(b, &wanted, DEFAULT)?;
        // From and to somewhere inside.
        device.copy_2d(b.offset(128), a.offset(64), extent, DEFAULT)?;
        for row in 0..size(extent.height) {
            let (to, source) = (128 + row * dst_pitch, 64 + row * src_pitch);
            wanted[to..to + width].copy_from_slice(&from[source..source + width]);
        }
        let read = get(device, b, bytes, DEFAULT)?;
        expect_bytes(&read, &wanted, &format!("a copy of {extent:?}"));

        device.fill_2d(b.offset(64), FillValue::U8(0x5a), extent, DEFAULT)?;
        for row in 0..size(extent.height) {
            wanted[64 + row * dst_pitch..][..width].fill(0x5a);
        }
        let read = get(device, b, bytes, DEFAULT)?;
        expect_bytes(&read, &wanted, &format!("a fill of {extent:?}"));
    }
    // Wider values in rows.
    let mut wanted = pattern(3, bytes);
    device.copy_from_host(b, &wanted, DEFAULT)?;
    let extent = rows(24, 9, 40, 0);
    device.fill_2d(b.offset(8), FillValue::U32(0x0102_0304), extent, DEFAULT)?;
    for row in 0..9 {
        for value in wanted[8 + row * 40..][..24].chunks_exact_mut(4) {
            value.copy_from_slice(&0x0102_0304_u32.to_ne_bytes());
        }
    }
    let read = get(device, b, bytes, DEFAULT)?;
    expect_bytes(&read, &wanted, "rows of four-byte values");
    device.free_segment(a)?;
    device.free_segment(b)?;
    Ok(Outcome::Passed)
}

fn overlapping_copies_are_refused(devices: &[Arc<dyn Device>]) -> DeviceResult<Outcome> {
    let device = &*devices[0];
    let bytes = 8192;
    let ptr = device.alloc_segment(bytes)?;
    let mut wanted = pattern(1, bytes);
    device.copy_from_host(ptr, &wanted, DEFAULT)?;
    for shift in [0, 1, 512, 1023] {
        let other = ptr.offset(shift);
        refused(device.copy(other, ptr, 1024, DEFAULT), "a copy upwards");
        refused(device.copy(ptr, other, 1024, DEFAULT), "a copy downwards");
    }
    let extent = rows(16, 8, 64, 64);
    let narrow = rows(64, 4, 32, 64);
    refused(
        device.copy_2d(ptr.offset(8), ptr, extent, DEFAULT),
        "rows in rows",
    );
    let below = ptr.offset(64 * 3 + 15);
    refused(
        device.copy_2d(below, ptr, extent, DEFAULT),
        "rows in later rows",
    );
    let far = ptr.offset(4096);
    refused(
        device.copy_2d(far, ptr, narrow, DEFAULT),
        "a pitch too small",
    );
    let read = get(device, ptr, bytes, DEFAULT)?;
    expect_bytes(&read, &wanted, "memory after refused copies");

    // Next to each other is fine, and so are rows that lie between rows.
    device.copy(ptr.offset(1024), ptr, 1024, DEFAULT)?;
    wanted.copy_within(0..1024, 1024);
    device.copy_2d(ptr.offset(16), ptr, extent, DEFAULT)?;
    for row in 0..8 {
        wanted.copy_within(row * 64..row * 64 + 16, row * 64 + 16);
    }
    let read = get(device, ptr, bytes, DEFAULT)?;
    expect_bytes(&read, &wanted, "copies side by side");
    device.free_segment(ptr)?;
    Ok(Outcome::Passed)
}

fn work_outside_device_memory_is_refused(devices: &[Arc<dyn Device>]) -> DeviceResult<Outcome> {
    let device = &*devices[0];
    let bytes = 2 * MIB;
    let good = device.alloc_segment(bytes)?;
    let gone = device.alloc_segment(bytes)?;
    device.copy_from_host(good, &pattern(1, bytes), DEFAULT)?;
    device.free_segment(gone)?;
    let unmapped = match device.properties().page_bytes {
        Some(page_bytes) => Some((device.reserve_range(page_bytes)?, page_bytes)),
        None => None,
    };
    let value = FillValue::U8(9);
    let own = device.properties().index;
    let extent = rows(64, 4, 128, 128);
    let bad = [DevicePtr::NULL, DevicePtr(u64::MAX - 8), gone];
    for ptr in bad.into_iter().chain(unmapped.map(|(ptr, _)| ptr)) {
        let what = format!("work at {ptr}");
        refused(device.copy_from_host(ptr, &[1; 64], DEFAULT), &what);
        refused(device.copy_to_host(&mut [0; 64], ptr, DEFAULT), &what);
        refused(device.copy(ptr, good, 64, DEFAULT), &what);
        refused(device.copy(good, ptr, 64, DEFAULT), &what);
        refused(device.copy_2d(ptr, good, extent, DEFAULT), &what);
        refused(device.copy_2d(good, ptr, extent, DEFAULT), &what);
        refused(device.copy_from_peer(ptr, own, good, 64, DEFAULT), &what);
        refused(device.copy_from_peer(good, own, ptr, 64, DEFAULT), &what);
        refused(device.fill(ptr, value, 64, DEFAULT), &what);
        refused(device.fill_2d(ptr, value, extent, DEFAULT), &what);
    }
    // More than there is cannot all be there.
    let all = device.properties().total_bytes;
    refused(
        device.fill(good, value, all + 1, DEFAULT),
        "a fill past the end",
    );
    let pitch = all.next_multiple_of(512);
    let extent = rows(64, 2, pitch, 64);
    refused(
        device.fill_2d(good, value, extent, DEFAULT),
        "rows past the end",
    );
    let read = get(device, good, bytes, DEFAULT)?;
    expect_bytes(&read, &pattern(1, bytes), "memory after refused work");
    device.free_segment(good)?;
    if let Some((ptr, page_bytes)) = unmapped {
        device.release_range(ptr, page_bytes)?;
    }
    Ok(Outcome::Passed)
}

fn work_of_no_bytes_is_accepted(devices: &[Arc<dyn Device>]) -> DeviceResult<Outcome> {
    let device = &*devices[0];
    let ptr = device.alloc_segment(4096)?;
    let wanted = pattern(1, 4096);
    device.copy_from_host(ptr, &wanted, DEFAULT)?;
    let upper = ptr.offset(2048);
    device.copy_from_host(ptr, &[], DEFAULT)?;
    device.copy_to_host(&mut [], ptr, DEFAULT)?;
    device.copy(ptr, upper, 0, DEFAULT)?;
    device.fill(ptr, FillValue::U32(1), 0, DEFAULT)?;
    for extent in [rows(0, 8, 16, 16), rows(16, 0, 16, 16)] {
        device.copy_2d(ptr, upper, extent, DEFAULT)?;
        device.fill_2d(ptr, FillValue::U8(1), extent, DEFAULT)?;
    }
    let read = get(device, ptr, 4096, DEFAULT)?;
    expect_bytes(&read, &wanted, "memory after no work");
    device.free_segment(ptr)?;
    Ok(Outcome::Passed)
}

// ---- threads and peers --------------------------------------------------------------------

/// Runs `f` on four threads at once and passes on what fails.
fn on_threads(f: &(dyn Fn(u64) -> DeviceResult<()> + Sync)) -> DeviceResult<()> {
    std::thread::scope(|scope| {
        let spawn = |thread| scope.spawn(move || f(thread));
        let threads: Vec<_> = (0..4).map(spawn).collect();
        threads
            .into_iter()
            .try_for_each(|thread| match thread.join() {
                Ok(result) => result,
                Err(panic) => std::panic::resume_unwind(panic),
            })
    })
}

fn threads_copy_at_once(devices: &[Arc<dyn Device>]) -> DeviceResult<Outcome> {
    let device = &*devices[0];
    let bytes = MIB;
    on_threads(&|thread| {
        let stream = device.create_stream(0)?;
        let (a, b) = (device.alloc_segment(bytes)?, device.alloc_segment(bytes)?);
        for round in 0..8 {
            let seed = 1000 * thread + round;
            device.copy_from_host(a, &pattern(seed, bytes), stream)?;
            device.copy(b, a, bytes, stream)?;
            let read = get(device, b, bytes, stream)?;
            expect_bytes(&read, &pattern(seed, bytes), "one of four threads");
        }
        device.free_segment(a)?;
        device.free_segment(b)?;
        device.destroy_stream(stream)
    })?;
    Ok(Outcome::Passed)
}

fn threads_allocate_at_once(devices: &[Arc<dyn Device>]) -> DeviceResult<Outcome> {
    let device = &*devices[0];
    let before = device.memory_info()?;
    on_threads(&|thread| {
        for round in 0..16 {
            let seed = 1000 * thread + round;
            let bytes = 4096 * (1 + round % 3);
            let segment = device.alloc_segment(bytes)?;
            device.copy_from_host(segment, &pattern(seed, bytes), DEFAULT)?;
            let paged = Paged::new(device, 2)?;
            if let Some(paged) = &paged {
                paged.put(0, 1)?;
                device.copy(paged.slot(1), segment, bytes, DEFAULT)?;
                let read = get(device, paged.slot(1), bytes, DEFAULT)?;
                expect_bytes(&read, &pattern(seed, bytes), "a page of four threads'");
            }
            let read = get(device, segment, bytes, DEFAULT)?;
            expect_bytes(&read, &pattern(seed, bytes), "a segment of four threads'");
            if let Some(paged) = paged {
                paged.close([1])?;
            }
            device.free_segment(segment)?;
        }
        Ok(())
    })?;
    assert_eq!(device.memory_info()?, before, "all came back");
    Ok(Outcome::Passed)
}

fn peers_copy_and_wait_for_each_other(devices: &[Arc<dyn Device>]) -> DeviceResult<Outcome> {
    let [here, there, ..] = devices else {
        let device = &*devices[0];
        let ptr = device.alloc_segment(4096)?;
        let nobody = DeviceIndex(u32::MAX);
        let upper = ptr.offset(2048);
        let result = device.copy_from_peer(ptr, nobody, upper, 64, DEFAULT);
        refused(result, "a peer that is not there");
        device.free_segment(ptr)?;
        return Ok(Outcome::Skipped("no peer"));
    };
    let bytes = 2 * MIB;
    let peer = there.properties().index;
    let (near, far) = (here.alloc_segment(bytes)?, there.alloc_segment(bytes)?);
    let (own, remote) = (here.create_stream(0)?, there.create_stream(0)?);
    let (read_done, written) = (here.create_event()?, there.create_event()?);
    for seed in 1..5 {
        keep_busy(&**there, far, bytes, remote)?;
        there.copy_from_host(far, &pattern(seed, bytes), remote)?;
        there.record_event(written, remote)?;
        here.wait_event(own, written)?;
        here.copy_from_peer(near, peer, far, bytes, own)?;
        // The next round writes only after this one has read.
        here.record_event(read_done, own)?;
        there.wait_event(remote, read_done)?;
        keep_busy(&**there, far, bytes, remote)?;
        let read = get(&**here, near, bytes, own)?;
        expect_bytes(&read, &pattern(seed, bytes), "a copy from a peer");
    }
    let nobody = DeviceIndex(u32::MAX);
    let result = here.copy_from_peer(near, nobody, far, bytes, own);
    refused(result, "a peer that is not there");
    let result = here.copy_from_peer(near, peer, near, bytes, own);
    refused(result, "a source that is not the peer's");
    let result = here.copy_from_peer(far, peer, far, bytes, own);
    refused(result, "a destination that is the peer's");
    refused(here.query_stream(remote), "a stream of the peer");
    refused(here.record_event(written, own), "an event of the peer");
    here.synchronize()?;
    there.synchronize()?;
    here.free_segment(near)?;
    there.free_segment(far)?;
    here.destroy_stream(own)?;
    there.destroy_stream(remote)?;
    here.destroy_event(read_done)?;
    there.destroy_event(written)?;
    Ok(Outcome::Passed)
}
