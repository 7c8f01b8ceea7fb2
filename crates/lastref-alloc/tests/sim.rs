//! What is special to the simulated device. What it shares with others is in the contract.
#![cfg(all(target_os = "linux", target_pointer_width = "64"))]
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use lastref_alloc::sim::{Call, Cost, Fault, LatencyTable, SimDevice, SimOptions};
use lastref_alloc::{
    Device, DeviceError, DeviceIndex, DevicePtr, DeviceResult, FillValue, PageId, StreamId,
};

const PAGE: u64 = 2 << 20;
const DEFAULT: StreamId = StreamId::DEFAULT;

/// A device of 1 GiB on which work runs only when something waits for it.
fn lazy() -> SimDevice {
    SimDevice::new(SimOptions::new(1 << 30).with_max_ops_per_step(0)).expect("a memory file")
}

/// Maps a new page at the start of a new range and opens it.
fn mapped_page(device: &SimDevice) -> (DevicePtr, PageId) {
    let range = device.reserve_range(PAGE).expect("addresses");
    let page = device.create_page().expect("a page");
    device.map_page(range, page).expect("a mapping");
    device.set_access(range, PAGE).expect("access");
    (range, page)
}

fn is_driver(result: &DeviceResult<impl Sized>, wanted: i32) -> bool {
    matches!(result, Err(DeviceError::Driver { code, .. }) if *code == wanted)
}

// ---- memory -------------------------------------------------------------------------------

fn host_mappings_of(range: DevicePtr, bytes: u64) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("/proc is mounted");
    let inside = |line: &&str| {
        let start = line.split('-').next().unwrap_or_default();
        let start = u64::from_str_radix(start, 16).unwrap_or_default();
        (range.0..range.0 + bytes).contains(&start)
    };
    maps.lines().filter(inside).count()
}

fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("/proc is mounted");
    let line = status.lines().find(|line| line.starts_with("VmRSS"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1));
    kib.and_then(|kib| kib.parse::<u64>().ok()).expect("VmRSS") * 1024
}

#[test]
fn a_large_device_costs_what_is_touched() {
    let device = SimDevice::new(SimOptions::new(80 << 30)).unwrap();
    let before = resident_bytes();
    let segment = device.alloc_segment(40 << 30).unwrap();
    let pages = (39_u64 << 30) / PAGE;
    let range = device.reserve_range(160 << 30).unwrap();
    for i in 0..pages {
        let page = device.create_page().unwrap();
        device.map_page(range.offset(i * PAGE), page).unwrap();
    }
    device.set_access(range, pages * PAGE).unwrap();
    assert_eq!(device.counters().held_bytes, 79 << 30);
    assert_eq!(device.host_page_bytes(), 0, "nothing is touched yet");
    for i in [0, pages / 2, pages - 1] {
        device.write_bytes(range.offset(i * PAGE), &[1]).unwrap();
    }
    // Of a segment, the host's own pages are touched, however large it would like them to be.
    for i in 0..100 {
        device
            .write_bytes(segment.offset(i * 7 * PAGE), &[1])
            .unwrap();
    }
    let touched = device.host_page_bytes();
    assert!(
        (1..=3 * PAGE).contains(&touched),
        "{touched} bytes for three"
    );
    let grown = resident_bytes().saturating_sub(before);
    assert!(grown < 64 << 20, "{grown} bytes of the host for so little");
}

#[test]
fn pages_side_by_side_need_one_host_mapping() {
    let device = lazy();
    let range = device.reserve_range(128 * PAGE).unwrap();
    let mut pages = Vec::new();
    for i in 0..128 {
        pages.push(device.create_page().unwrap());
        device
            .map_page(range.offset(i * PAGE), pages[pages.len() - 1])
            .unwrap();
    }
    device.set_access(range, 128 * PAGE).unwrap();
    assert_eq!(host_mappings_of(range, 128 * PAGE), 1);
    // The lowest slots are used again first, so that this stays so.
    for i in 32..96 {
        device.unmap_page(range.offset(i * PAGE)).unwrap();
        device
            .destroy_page(pages[usize::try_from(i).unwrap()])
            .unwrap();
    }
    assert_eq!(host_mappings_of(range, 128 * PAGE), 3);
    for i in 32..96 {
        let page = device.create_page().unwrap();
        device.map_page(range.offset(i * PAGE), page).unwrap();
        device.set_access(range.offset(i * PAGE), PAGE).unwrap();
    }
    assert_eq!(host_mappings_of(range, 128 * PAGE), 1);
}

#[test]
fn a_destroyed_page_gives_its_host_memory_back() {
    let device = lazy();
    let (first, page) = mapped_page(&device);
    let (second, _) = mapped_page(&device);
    let full = vec![7; usize::try_from(PAGE).unwrap()];
    device.write_bytes(first, &full).unwrap();
    device.write_bytes(second, &full).unwrap();
    assert_eq!(device.host_page_bytes(), 2 * PAGE);
    device.unmap_page(first).unwrap();
    assert_eq!(
        device.host_page_bytes(),
        2 * PAGE,
        "an unmapped page keeps its bytes"
    );
    device.destroy_page(page).unwrap();
    assert_eq!(device.host_page_bytes(), PAGE);
    assert_eq!(
        device.read_bytes(second, full.len()).unwrap(),
        full,
        "the other stays"
    );
}

#[test]
fn the_last_handle_unmaps_everything() {
    let device = lazy();
    let (range, _) = mapped_page(&device);
    let segment = device.alloc_segment(PAGE).unwrap();
    // Anything may be mapped there afterwards, but not all of it by us and of this file.
    let ours = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let start = format!("{:x}-", range.0);
        maps.lines()
            .any(|line| line.starts_with(&start) && line.contains("lastref-sim"))
    };
    let other = device.clone();
    drop(device);
    assert!(ours(), "a handle is left");
    other.write_bytes(segment, &[1]).unwrap();
    drop(other);
    assert!(!ours());
}

#[test]
fn segments_are_counted_in_steps_of_two_mib() {
    let device = lazy();
    for (bytes, taken) in [(1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE)] {
        let before = device.memory_info().unwrap().free_bytes;
        let ptr = device.alloc_segment(bytes).unwrap();
        assert_eq!(before - device.memory_info().unwrap().free_bytes, taken);
        // But what was not asked for is not theirs.
        let past = device.fill(ptr, FillValue::U8(1), bytes + 1, DEFAULT);
        assert!(
            matches!(past, Err(DeviceError::InvalidArgument { .. })),
            "{past:?}"
        );
        device.free_segment(ptr).unwrap();
    }
}

#[test]
fn a_full_device_says_so_and_loses_nothing() {
    let device = SimDevice::new(SimOptions::new(4 * PAGE + 100)).unwrap();
    let pages: Vec<_> = (0..4).map(|_| device.create_page().unwrap()).collect();
    let wanted = DeviceError::OutOfMemory {
        call: "create_page",
        requested: PAGE,
        free: 100,
        total: 4 * PAGE + 100,
    };
    assert_eq!(device.create_page(), Err(wanted));
    assert!(device.alloc_segment(1).unwrap_err().is_out_of_memory());
    device.destroy_page(pages[2]).unwrap();
    device.alloc_segment(PAGE).unwrap();
    assert!(device.create_page().unwrap_err().is_out_of_memory());
    assert_eq!(device.counters().held_bytes, 4 * PAGE);
}

#[test]
fn another_process_takes_from_what_is_free() {
    let device = lazy();
    device.set_other_process_bytes((1 << 30) - PAGE);
    assert_eq!(device.memory_info().unwrap().free_bytes, PAGE);
    let page = device.create_page().unwrap();
    assert!(device.create_page().unwrap_err().is_out_of_memory());
    device.set_other_process_bytes(1 << 40);
    assert_eq!(device.memory_info().unwrap().free_bytes, 0);
    device.destroy_page(page).unwrap();
    device.set_other_process_bytes(0);
    assert_eq!(device.memory_info().unwrap().free_bytes, 1 << 30);
}

#[test]
fn a_page_is_mapped_in_one_place_at_a_time() {
    let device = lazy();
    let range = device.reserve_range(2 * PAGE).unwrap();
    let page = device.create_page().unwrap();
    device.map_page(range, page).unwrap();
    let again = device.map_page(range.offset(PAGE), page);
    assert!(
        matches!(again, Err(DeviceError::InvalidArgument { .. })),
        "{again:?}"
    );
}

#[test]
fn what_the_host_refuses_is_a_driver_error() {
    let device = lazy();
    // Above the address space of any 64-bit Linux.
    let range = device.reserve_range(1 << 60);
    let Err(DeviceError::Driver { call, text, .. }) = &range else {
        panic!("{range:?}");
    };
    assert_eq!(*call, "reserve_range");
    assert!(text.contains("vm.max_map_count"), "{text}");
    let huge = SimDevice::new(SimOptions::new(u64::MAX)).map(drop);
    assert!(matches!(huge, Err(DeviceError::Driver { .. })), "{huge:?}");
}

// ---- time ---------------------------------------------------------------------------------

#[test]
fn work_is_pending_when_the_call_returns() {
    // With any number of pieces a call: what was just submitted is never one of them.
    for most in [0, 1, 50] {
        let options = SimOptions::new(1 << 30).with_max_ops_per_step(most);
        let device = SimDevice::new(options).unwrap();
        let ptr = device.alloc_segment(8).unwrap();
        device.copy_from_host(ptr, b"original", DEFAULT).unwrap();
        assert_eq!(device.pending_ops(), 1);
        assert_eq!(device.read_bytes(ptr, 8).unwrap(), [0; 8]);
        assert!(device.step());
        assert_eq!(device.read_bytes(ptr, 8).unwrap(), b"original");
        assert!(!device.step(), "nothing is left");
    }
}

#[test]
fn synchronizing_one_stream_leaves_others_pending() {
    let device = lazy();
    let other = device.create_stream(0).unwrap();
    let ptr = device.alloc_segment(64).unwrap();
    for stream in [DEFAULT, other] {
        device.fill(ptr, FillValue::U8(1), 64, stream).unwrap();
    }
    device.synchronize_stream(DEFAULT).unwrap();
    assert_eq!(device.pending_ops(), 1);
    assert!(!device.query_stream(other).unwrap());
    device.synchronize().unwrap();
    assert_eq!(device.pending_ops(), 0);
}

/// Which of two streams wrote last, over many unordered writes.
fn interleaving(seed: u64, most: u32) -> Vec<u8> {
    let options = SimOptions::new(1 << 30);
    let options = options.with_seed(seed).with_max_ops_per_step(most);
    let device = SimDevice::new(options).unwrap();
    let streams: Vec<_> = (0..3).map(|_| device.create_stream(0).unwrap()).collect();
    let ptr = device.alloc_segment(64).unwrap();
    for slot in 0..64 {
        for (&stream, value) in streams.iter().zip(1..) {
            let at = ptr.offset(slot);
            device.fill(at, FillValue::U8(value), 1, stream).unwrap();
        }
    }
    device.synchronize().unwrap();
    device.read_bytes(ptr, 64).unwrap()
}

#[test]
fn a_seed_gives_one_interleaving() {
    for most in [0, 2, 7] {
        assert_eq!(interleaving(1, most), interleaving(1, most));
        let seeds: std::collections::BTreeSet<_> = (0..8).map(|s| interleaving(s, most)).collect();
        assert!(seeds.len() > 4, "{} of 8 seeds differ", seeds.len());
    }
    let last = interleaving(3, 2);
    for value in 1..=3 {
        assert!(last.contains(&value), "stream {value} never came last");
    }
}

#[test]
fn streams_of_higher_priority_go_first() {
    let device = lazy();
    let low = device.create_stream(1).unwrap();
    let high = device.create_stream(-1).unwrap();
    let ptr = device.alloc_segment(64).unwrap();
    for value in 0..8 {
        for stream in [low, high] {
            device.fill(ptr, FillValue::U8(value), 64, stream).unwrap();
        }
    }
    for _ in 0..8 {
        assert!(!device.query_stream(high).unwrap());
        device.step();
    }
    assert!(device.query_stream(high).unwrap());
    assert_eq!(device.pending_ops(), 8);
}

#[test]
fn a_wait_across_streams_runs_what_it_needs_and_no_more() {
    let device = lazy();
    let streams: Vec<_> = (0..4).map(|_| device.create_stream(0).unwrap()).collect();
    let event = device.create_event().unwrap();
    let ptr = device.alloc_segment(4).unwrap();
    // Each stream waits for the one before it; the last has nobody waiting for it.
    for (stream, at) in streams.iter().zip(0..) {
        device.wait_event(*stream, event).unwrap();
        device
            .fill(ptr.offset(at), FillValue::U8(1), 1, *stream)
            .unwrap();
        device.record_event(event, *stream).unwrap();
    }
    device.synchronize_stream(streams[2]).unwrap();
    assert_eq!(device.read_bytes(ptr, 4).unwrap(), [1, 1, 1, 0]);
    assert_eq!(device.pending_ops(), 3, "wait, fill and record of the last");
}

#[test]
fn late_events_take_so_many_queries() {
    let device = SimDevice::new(SimOptions::new(1 << 30)).unwrap();
    let event = device.create_event().unwrap();
    device.delay_events(25);
    device.record_event(event, DEFAULT).unwrap();
    for _ in 0..25 {
        assert!(!device.query_event(event).unwrap());
    }
    while !device.query_event(event).unwrap() {}
    // Who waits does not wait for the queries.
    device.record_event(event, DEFAULT).unwrap();
    device.synchronize_stream(DEFAULT).unwrap();
    assert!(device.query_event(event).unwrap());
    // Stepping ends too.
    device.record_event(event, DEFAULT).unwrap();
    let steps = std::iter::repeat_with(|| device.step()).take_while(|&done| done);
    assert_eq!(steps.count(), 26);
    device.clear_faults();
    device.record_event(event, DEFAULT).unwrap();
    assert!(!device.step(), "an idle stream has nothing to wait for");
    assert!(device.query_event(event).unwrap());
}

// ---- costs --------------------------------------------------------------------------------

#[test]
fn costs_add_up_without_waiting() {
    let start = std::time::Instant::now();
    let hour = 3.6e9;
    let table = LatencyTable::free()
        .with_call(Call::CreatePage, Cost::fixed(193.0))
        .with_call(Call::SetAccess, Cost::fixed(36.0))
        .with_call(
            Call::AllocSegment,
            Cost {
                fixed: 50.0,
                per_mib: 2.0,
            },
        )
        .with_call(Call::MemoryInfo, Cost::fixed(hour));
    let options = SimOptions::new(1 << 30).with_latencies(table);
    let device = SimDevice::new(options).unwrap();
    let range = device.reserve_range(4 * PAGE).unwrap();
    for i in 0..4 {
        let page = device.create_page().unwrap();
        device.map_page(range.offset(i * PAGE), page).unwrap();
    }
    device.set_access(range, 4 * PAGE).unwrap();
    let mut wanted = 4.0 * 193.0 + 36.0;
    assert!((device.counters().device_microseconds - wanted).abs() < 1e-6);
    device.alloc_segment(8 << 20).unwrap();
    wanted += 50.0 + 8.0 * 2.0;
    assert!((device.counters().device_microseconds - wanted).abs() < 1e-6);
    device.memory_info().unwrap();
    wanted += hour;
    assert!((device.counters().device_microseconds - wanted).abs() < 1e-3);
    assert!(start.elapsed().as_secs() < 60);
}

#[test]
fn moving_a_page_costs_what_was_published() {
    let device = SimDevice::new(SimOptions::new(1 << 30)).unwrap();
    let range = device.reserve_range(2 * PAGE).unwrap();
    let page = device.create_page().unwrap();
    device.map_page(range, page).unwrap();
    device.set_access(range, PAGE).unwrap();
    device.reset_counters();
    device.unmap_page(range).unwrap();
    device.map_page(range.offset(PAGE), page).unwrap();
    device.set_access(range.offset(PAGE), PAGE).unwrap();
    let moved = device.counters().device_microseconds;
    assert!((moved - 63.05).abs() < 1e-6, "{moved} us");
}

#[test]
fn counters_count() {
    let device = SimDevice::new(SimOptions::new(1 << 30)).unwrap();
    let pages: Vec<_> = (0..3).map(|_| device.create_page().unwrap()).collect();
    let segment = device.alloc_segment(1).unwrap();
    assert!(
        device.free_segment(DevicePtr(1)).is_err(),
        "counted all the same"
    );
    let counters = device.counters();
    assert_eq!(counters.calls(Call::CreatePage), 3);
    assert_eq!(counters.calls(Call::FreeSegment), 1);
    assert_eq!(counters.total_calls(), 5);
    assert_eq!((counters.pages, counters.segments), (3, 1));
    assert_eq!(
        (counters.held_bytes, counters.peak_held_bytes),
        (4 * PAGE, 4 * PAGE)
    );
    assert!(counters.host_nanoseconds > 0);

    device.destroy_page(pages[0]).unwrap();
    device.free_segment(segment).unwrap();
    let counters = device.counters();
    assert_eq!(
        (counters.held_bytes, counters.peak_held_bytes),
        (2 * PAGE, 4 * PAGE)
    );
    device.reset_counters();
    let counters = device.counters();
    assert_eq!(counters.total_calls(), 0);
    assert_eq!(counters.host_nanoseconds, 0);
    assert!(counters.device_microseconds.abs() < f64::EPSILON);
    assert_eq!(
        (counters.held_bytes, counters.peak_held_bytes),
        (2 * PAGE, 2 * PAGE)
    );
}

#[test]
fn event_times_follow_the_work() {
    let mut table = LatencyTable::free();
    table.fill = Cost::per_mib(3.0);
    table.device_copy = Cost::per_mib(5.0);
    let options = SimOptions::new(1 << 30).with_latencies(table);
    let device = SimDevice::new(options).unwrap();
    let ptr = device.alloc_segment(4 << 20).unwrap();
    let other = device.create_stream(0).unwrap();
    let events: Vec<_> = (0..4).map(|_| device.create_event().unwrap()).collect();
    let mib = 1 << 20;
    device.record_event(events[0], DEFAULT).unwrap();
    device
        .fill(ptr, FillValue::U8(1), 2 * mib, DEFAULT)
        .unwrap();
    device.record_event(events[1], DEFAULT).unwrap();
    // The other stream is idle until the fill is done.
    device.wait_event(other, events[1]).unwrap();
    device.copy(ptr, ptr.offset(2 * mib), mib, other).unwrap();
    device.record_event(events[2], other).unwrap();
    device.record_event(events[3], DEFAULT).unwrap();
    device.synchronize().unwrap();
    for (event, wanted) in events.iter().zip([0.0, 6.0, 11.0, 6.0]) {
        let elapsed = device.elapsed_microseconds(events[0], *event).unwrap();
        assert!(
            (elapsed - wanted).abs() < 1e-9,
            "{elapsed} us, not {wanted}"
        );
    }
}

#[test]
fn work_begins_after_what_the_host_has_seen_done() {
    let mut table = LatencyTable::free().with_call(Call::QueryStream, Cost::fixed(10.0));
    table.fill = Cost::per_mib(3.0);
    let options = SimOptions::new(1 << 30).with_latencies(table);
    let device = SimDevice::new(options).unwrap();
    let ptr = device.alloc_segment(1 << 20).unwrap();
    let (first, second) = (
        device.create_stream(0).unwrap(),
        device.create_stream(0).unwrap(),
    );
    let (start, end) = (
        device.create_event().unwrap(),
        device.create_event().unwrap(),
    );
    device.record_event(start, first).unwrap();
    device.fill(ptr, FillValue::U8(1), 1 << 20, first).unwrap();
    device.synchronize_stream(first).unwrap();
    device.query_stream(first).unwrap();
    // Nothing on the device orders the two streams, but the host has waited in between.
    device.record_event(end, second).unwrap();
    device.synchronize().unwrap();
    assert_eq!(device.elapsed_microseconds(start, end), Ok(13.0));
}

#[test]
fn an_unfinished_event_has_no_time() {
    let device = lazy();
    let ptr = device.alloc_segment(1).unwrap();
    device.fill(ptr, FillValue::U8(1), 1, DEFAULT).unwrap();
    let event = device.create_event().unwrap();
    device.record_event(event, DEFAULT).unwrap();
    let elapsed = device.elapsed_microseconds(event, event);
    assert!(
        matches!(elapsed, Err(DeviceError::InvalidArgument { .. })),
        "{elapsed:?}"
    );
    device.synchronize_event(event).unwrap();
    assert_eq!(device.elapsed_microseconds(event, event), Ok(0.0));
}

// ---- failures on demand -------------------------------------------------------------------

#[test]
fn the_nth_call_fails_once() {
    let device = lazy();
    let range = device.reserve_range(4 * PAGE).unwrap();
    let pages: Vec<_> = (0..4).map(|_| device.create_page().unwrap()).collect();
    // The third map of a series.
    device.inject(Fault::nth(Call::MapPage, 3).driver(700));
    let map = |i: u64| device.map_page(range.offset(i * PAGE), pages[usize::try_from(i).unwrap()]);
    assert_eq!(map(0), Ok(()));
    assert_eq!(map(1), Ok(()));
    assert!(is_driver(&map(2), 700));
    // Nothing is mapped there, and then it can be.
    assert!(device.set_access(range, 3 * PAGE).is_err());
    assert_eq!(map(2), Ok(()));
    assert_eq!(map(3), Ok(()));
    device.set_access(range, 4 * PAGE).unwrap();
}

#[test]
fn calls_fail_from_then_on_until_cleared() {
    let device = lazy();
    device.inject(
        Fault::nth(Call::CreatePage, 2)
            .from_then_on()
            .out_of_memory(),
    );
    let first = device.create_page().unwrap();
    for _ in 0..3 {
        let free = (1 << 30) - PAGE;
        let wanted = DeviceError::OutOfMemory {
            call: "create_page",
            requested: PAGE,
            free,
            total: 1 << 30,
        };
        assert_eq!(device.create_page(), Err(wanted));
        assert_eq!(device.memory_info().unwrap().free_bytes, free);
    }
    device.destroy_page(first).unwrap();
    device.clear_faults();
    device.create_page().unwrap();
}

#[test]
fn faults_wait_side_by_side() {
    let device = lazy();
    device.inject(Fault::nth(Call::AllocSegment, 2).driver(1));
    device.inject(Fault::nth_of_any(4).driver(2));
    device.alloc_segment(1).unwrap();
    assert!(is_driver(&device.alloc_segment(1), 1));
    device.memory_info().unwrap();
    assert!(is_driver(&device.memory_info(), 2));
    device.memory_info().unwrap();
}

/// Every call once, each of which succeeds alone; what it did is undone again where it can be.
fn every_call(device: &SimDevice) -> Vec<(Call, DeviceResult<()>)> {
    let (range, _) = mapped_page(device);
    let spare_range = device.reserve_range(PAGE).unwrap();
    let spare_page = device.create_page().unwrap();
    let target = device.reserve_range(PAGE).unwrap();
    let loose = device.create_page().unwrap();
    let segment = device.alloc_segment(4096).unwrap();
    let freed = device.alloc_segment(4096).unwrap();
    let stream = device.create_stream(0).unwrap();
    let (event, old) = (
        device.create_event().unwrap(),
        device.create_event().unwrap(),
    );
    device.record_event(event, DEFAULT).unwrap();
    device.synchronize().unwrap();
    let extent = lastref_alloc::Extent2d {
        width_bytes: 16,
        height: 4,
        dst_pitch: 32,
        src_pitch: 32,
    };
    let upper = segment.offset(2048);
    let (mut read, value) = ([0; 16], FillValue::U8(1));
    let own = DeviceIndex(0);
    let mut results = Vec::new();
    for &call in Call::ALL {
        device.inject(Fault::nth(call, 1).driver(42));
        let before = (device.counters(), device.pending_ops());
        let mut run = || match call {
            Call::MemoryInfo => device.memory_info().map(drop),
            Call::AllocSegment => device.alloc_segment(4096).map(drop),
            Call::FreeSegment => device.free_segment(freed),
            Call::ReserveRange => device.reserve_range(PAGE).map(drop),
            Call::ReleaseRange => device.release_range(spare_range, PAGE),
            Call::CreatePage => device.create_page().map(drop),
            Call::DestroyPage => device.destroy_page(spare_page),
            Call::MapPage => device.map_page(target, loose),
            Call::SetAccess => device.set_access(range, PAGE),
            Call::UnmapPage => device.unmap_page(range),
            Call::CreateStream => device.create_stream(0).map(drop),
            Call::DestroyStream => device.destroy_stream(stream),
            Call::QueryStream => device.query_stream(DEFAULT).map(drop),
            Call::SynchronizeStream => device.synchronize_stream(DEFAULT),
            Call::Synchronize => device.synchronize(),
            Call::CreateEvent => device.create_event().map(drop),
            Call::DestroyEvent => device.destroy_event(old),
            Call::RecordEvent => device.record_event(event, DEFAULT),
            Call::QueryEvent => device.query_event(event).map(drop),
            Call::SynchronizeEvent => device.synchronize_event(event),
            Call::WaitEvent => device.wait_event(DEFAULT, event),
            Call::ElapsedMicroseconds => {
                // Alone it needs a finished record; the one above is pending by now.
                device.synchronize()?;
                device.elapsed_microseconds(event, event).map(drop)
            }
            Call::CopyFromHost => device.copy_from_host(segment, &[1; 16], DEFAULT),
            Call::CopyToHost => device.copy_to_host(&mut read, segment, DEFAULT),
            Call::Copy => device.copy(segment, upper, 16, DEFAULT),
            Call::Copy2d => device.copy_2d(segment, upper, extent, DEFAULT),
            Call::CopyFromPeer => device.copy_from_peer(segment, own, upper, 16, DEFAULT),
            Call::Fill => device.fill(segment, value, 16, DEFAULT),
            Call::Fill2d => device.fill_2d(segment, value, extent, DEFAULT),
            other => panic!("{other:?} is missing here"),
        };
        let failed = run();
        assert!(is_driver(&failed, 42), "{call:?}: {failed:?}");
        let after = (device.counters(), device.pending_ops());
        assert_eq!(after.0.calls(call), before.0.calls(call) + 1);
        assert_eq!(after.0.held_bytes, before.0.held_bytes, "{call:?}");
        assert!(after.1 <= before.1, "{call:?} submitted something");
        // It changed nothing, so the same call with the same arguments works.
        results.push((call, run()));
    }
    results
}

#[test]
fn every_call_can_fail_and_then_works() {
    for (call, result) in every_call(&lazy()) {
        assert_eq!(result, Ok(()), "{call:?} after its failure");
    }
}

// ---- faulty work --------------------------------------------------------------------------

#[test]
fn a_page_without_access_is_not_usable() {
    let device = lazy();
    let range = device.reserve_range(PAGE).unwrap();
    let page = device.create_page().unwrap();
    device.map_page(range, page).unwrap();
    let early = device
        .fill(range, FillValue::U8(1), 1, DEFAULT)
        .unwrap_err();
    assert!(early.to_string().contains("no access"), "{early}");
    device.set_access(range, PAGE).unwrap();
    device.fill(range, FillValue::U8(1), 1, DEFAULT).unwrap();
    device.synchronize().unwrap();
    // Mapped anew, access must be set anew.
    device.unmap_page(range).unwrap();
    device.map_page(range, page).unwrap();
    assert!(device.read_bytes(range, 1).is_err());
    assert_eq!(device.errors(), Vec::<String>::new());
}

#[test]
fn unmapping_under_pending_work_is_reported() {
    let device = lazy();
    let (range, page) = mapped_page(&device);
    let segment = device.alloc_segment(64).unwrap();
    device.write_bytes(segment, &[1; 64]).unwrap();
    device.copy(segment, range, 64, DEFAULT).unwrap();
    device.fill(range, FillValue::U8(1), 64, DEFAULT).unwrap();
    device.unmap_page(range).unwrap();
    device.synchronize().unwrap();
    let errors = device.errors();
    assert_eq!(errors.len(), 2, "{errors:?}");
    assert!(errors[0].starts_with("copy on stream 0: ") && errors[1].starts_with("fill on"));
    assert_eq!(
        device.read_bytes(segment, 64).unwrap(),
        [1; 64],
        "the copy was skipped"
    );
    device.destroy_page(page).unwrap();
}

#[test]
fn remapping_under_pending_work_is_reported() {
    let device = lazy();
    let (range, page) = mapped_page(&device);
    device.fill(range, FillValue::U8(9), 64, DEFAULT).unwrap();
    // The same page at the same address, and still not what the work was submitted for.
    device.unmap_page(range).unwrap();
    device.map_page(range, page).unwrap();
    device.set_access(range, PAGE).unwrap();
    device.synchronize().unwrap();
    let errors = device.errors();
    assert!(
        errors.len() == 1 && errors[0].contains("mapped after"),
        "{errors:?}"
    );
    assert_eq!(device.read_bytes(range, 64).unwrap(), [0; 64]);
    // Work submitted since is fine.
    device.fill(range, FillValue::U8(9), 64, DEFAULT).unwrap();
    device.synchronize().unwrap();
    assert_eq!(device.errors().len(), 1);
    assert_eq!(device.read_bytes(range, 64).unwrap(), [9; 64]);
}

#[test]
fn a_peer_reading_freed_memory_is_reported() {
    let options = SimOptions::new(1 << 30).with_max_ops_per_step(0);
    let devices = SimDevice::group(vec![options; 2]).unwrap();
    let (here, there) = (&devices[0], &devices[1]);
    let near = here.alloc_segment(64).unwrap();
    let far = there.alloc_segment(64).unwrap();
    here.copy_from_peer(near, DeviceIndex(1), far, 64, DEFAULT)
        .unwrap();
    // Freeing waits for the work of the owner, not of its peers.
    there.free_segment(far).unwrap();
    here.synchronize().unwrap();
    assert_eq!(here.errors().len(), 1, "{:?}", here.errors());
    assert_eq!(there.errors(), Vec::<String>::new());
}

// ---- several devices ----------------------------------------------------------------------

#[test]
fn devices_of_a_group_are_apart() {
    let options = vec![
        SimOptions::new(1 << 30),
        SimOptions::new(2 << 30).with_name("TITAN X"),
        SimOptions::new(3 << 30).with_virtual_memory(false),
    ];
    let devices = SimDevice::group(options).unwrap();
    for (i, device) in (0..).zip(&devices) {
        assert_eq!(device.properties().index, DeviceIndex(i));
        let info = device.memory_info().unwrap();
        assert_eq!(info.free_bytes, u64::from(i + 1) << 30);
        assert_eq!(info.free_bytes, info.total_bytes);
    }
    assert_eq!(devices[1].properties().name, "TITAN X (simulated)");
    assert_eq!(devices[2].properties().page_bytes, None);
    devices[0].alloc_segment(PAGE).unwrap();
    devices[0].inject(Fault::nth(Call::MemoryInfo, 1));
    assert_eq!(devices[1].memory_info().unwrap().free_bytes, 2 << 30);
    assert!(devices[0].memory_info().is_err());
    assert_eq!(devices[1].counters().segments, 0);
}

#[test]
fn a_wait_reaches_across_devices() {
    let options = SimOptions::new(1 << 30).with_max_ops_per_step(0);
    let devices = SimDevice::group(vec![options; 2]).unwrap();
    let (here, there) = (&devices[0], &devices[1]);
    let (near, far) = (
        here.alloc_segment(4).unwrap(),
        there.alloc_segment(4).unwrap(),
    );
    let event = there.create_event().unwrap();
    there.fill(far, FillValue::U8(5), 4, DEFAULT).unwrap();
    there.record_event(event, DEFAULT).unwrap();
    here.wait_event(DEFAULT, event).unwrap();
    here.copy_from_peer(near, DeviceIndex(1), far, 4, DEFAULT)
        .unwrap();
    assert_eq!((here.pending_ops(), there.pending_ops()), (2, 2));
    here.synchronize().unwrap();
    assert_eq!(here.read_bytes(near, 4).unwrap(), [5; 4]);
}

#[test]
fn a_device_without_contents_checks_all_and_keeps_nothing() {
    let options = SimOptions::new(64 << 20).with_contents(false);
    let device = SimDevice::new(options).unwrap();
    let page_bytes = device.properties().page_bytes.unwrap();
    let range = device.reserve_range(4 * page_bytes).unwrap();
    let page = device.create_page().unwrap();
    let refused = |result: DeviceResult<()>| assert!(result.is_err(), "{result:?}");
    refused(device.copy_from_host(range, &[7; 8], StreamId::DEFAULT));
    device.map_page(range, page).unwrap();
    refused(device.copy_from_host(range, &[7; 8], StreamId::DEFAULT));
    device.set_access(range, page_bytes).unwrap();
    let segment = device.alloc_segment(1 << 20).unwrap();
    for ptr in [range, segment] {
        device
            .copy_from_host(ptr, &[7; 8], StreamId::DEFAULT)
            .unwrap();
        device
            .fill(ptr, FillValue::U8(7), 8, StreamId::DEFAULT)
            .unwrap();
        device
            .copy(ptr.offset(8), ptr, 8, StreamId::DEFAULT)
            .unwrap();
        let mut read = [1; 16];
        device
            .copy_to_host(&mut read, ptr, StreamId::DEFAULT)
            .unwrap();
        assert_eq!(read, [0; 16]);
    }
    refused(device.map_page(range, page));
    refused(device.map_page(range.offset(page_bytes), page));
    refused(device.destroy_page(page));
    assert_eq!(device.host_page_bytes(), 0);
    assert_eq!(device.counters().held_bytes, 2 * page_bytes);
    device.synchronize().unwrap();
    assert_eq!(device.errors(), Vec::<String>::new());
    device.unmap_page(range).unwrap();
    refused(device.set_access(range, page_bytes));
    device.destroy_page(page).unwrap();
    device.free_segment(segment).unwrap();
    device.release_range(range, 4 * page_bytes).unwrap();
    assert_eq!(device.counters().held_bytes, 0);
}

#[test]
fn a_device_without_contents_is_not_bound_by_the_hosts_mappings() {
    // Every other page: as many host mappings, were there any.
    let pages = 100_000;
    let options = SimOptions::new((pages * 2) << 21).with_contents(false);
    let device = SimDevice::new(options).unwrap();
    let page_bytes = device.properties().page_bytes.unwrap();
    let range = device.reserve_range(2 * pages * page_bytes).unwrap();
    for number in 0..pages {
        let page = device.create_page().unwrap();
        device
            .map_page(range.offset(2 * number * page_bytes), page)
            .unwrap();
    }
    assert_eq!(device.counters().held_bytes, pages * page_bytes);
}

#[test]
fn neighbours_are_unmapped_for_little_more_than_one_page() {
    let device = SimDevice::new(SimOptions::new(64 << 20)).unwrap();
    let page_bytes = device.properties().page_bytes.unwrap();
    let range = device.reserve_range(8 * page_bytes).unwrap();
    let mut pages = Vec::new();
    device.create_pages(8, &mut pages).unwrap();
    let cost = |count: usize, one_by_one: bool| {
        device.map_pages(range, &pages[..count]).unwrap();
        let before = device.counters().device_microseconds;
        if one_by_one {
            for number in 0..count as u64 {
                device
                    .unmap_page(range.offset(number * page_bytes))
                    .unwrap();
            }
        } else {
            device.unmap_pages(range, count).unwrap();
        }
        device.counters().device_microseconds - before
    };
    let near = |cost: f64, wanted: f64| assert!((cost - wanted).abs() < 1e-6, "{cost} {wanted}");
    // The prices of `LatencyTable::a100`.
    near(cost(1, false), 25.6);
    near(cost(8, true), 8.0 * 25.6);
    near(cost(8, false), 25.6 + 7.0 * 1.45);
}

#[test]
fn many_pages_at_once_are_as_many_calls_and_fail_where_one_of_them_does() {
    let device = SimDevice::new(SimOptions::new(64 << 20)).unwrap();
    let page_bytes = device.properties().page_bytes.unwrap();
    let range = device.reserve_range(32 * page_bytes).unwrap();
    let mut pages = Vec::new();
    device.inject(Fault::nth(Call::CreatePage, 9).out_of_memory());
    let error = device.create_pages(20, &mut pages).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    assert_eq!(pages.len(), 8);
    device.create_pages(4, &mut pages).unwrap();
    assert_eq!(device.counters().calls(Call::CreatePage), 13);
    assert_eq!(device.counters().held_bytes, 12 * page_bytes);

    device.inject(Fault::nth(Call::MapPage, 6));
    let (done, _) = device.map_pages(range, &pages).unwrap_err();
    assert_eq!(done, 5);
    let rest = range.offset(5 * page_bytes);
    device.map_pages(rest, &pages[5..]).unwrap();
    device.set_access(range, 12 * page_bytes).unwrap();
    device
        .write_bytes(range.offset(12 * page_bytes - 4), &[7; 4])
        .unwrap();

    device.inject(Fault::nth(Call::UnmapPage, 3));
    let (done, _) = device.unmap_pages(range, 12).unwrap_err();
    assert_eq!(done, 2);
    let rest = range.offset(2 * page_bytes);
    assert_eq!(
        device.unmap_pages(rest, 20).unwrap_err().0,
        10,
        "no more are mapped"
    );
    assert_eq!(device.counters().calls(Call::UnmapPage), 3 + 11);
    for page in pages {
        device.destroy_page(page).unwrap();
    }
    assert_eq!(device.errors(), Vec::<String>::new());
}
