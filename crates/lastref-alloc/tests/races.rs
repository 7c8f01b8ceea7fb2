//! What the race detector finds, and what it rightly does not.
#![expect(clippy::unwrap_used, reason = "an error here is a failed test")]
#![cfg(target_os = "linux")]

use lastref_alloc::sim::{KernelUse, Race, SimDevice, SimOptions};
use lastref_alloc::{
    AllocatorOptions, Backing, Block, CachingAllocator, Device, DeviceIndex, DevicePtr, EventId,
    Extent2d, FillValue, StreamId,
};

const MIB: u64 = 1 << 20;
const PAGE: u64 = 2 * MIB;
const S0: StreamId = StreamId::DEFAULT;

/// A device on which work runs only when something waits for it.
fn device() -> SimDevice {
    let options = SimOptions::new(256 * MIB).with_races(true);
    SimDevice::new(options.with_max_ops_per_step(0)).unwrap()
}

/// A device, a second stream, and memory.
fn setup() -> (SimDevice, StreamId, DevicePtr) {
    let device = device();
    let side = device.create_stream(0).unwrap();
    let ptr = device.alloc_segment(PAGE).unwrap();
    (device, side, ptr)
}

fn write(device: &SimDevice, ptr: DevicePtr, stream: StreamId) {
    device.fill(ptr, FillValue::U8(1), 64, stream).unwrap();
}

fn read(device: &SimDevice, ptr: DevicePtr, stream: StreamId) {
    let uses = [KernelUse::read(ptr, 64)];
    device.launch("reader", &uses, 1.0, stream).unwrap();
}

fn recorded(device: &SimDevice, stream: StreamId) -> EventId {
    let event = device.create_event().unwrap();
    device.record_event(event, stream).unwrap();
    event
}

fn text(device: &SimDevice) -> String {
    let races: Vec<String> = device.races().iter().map(ToString::to_string).collect();
    races.join("\n")
}

#[test]
fn two_unordered_uses_race_if_one_writes() {
    type Use = fn(&SimDevice, DevicePtr, StreamId);
    let cases: [(Use, Use, usize); 4] = [
        (write, write, 1),
        (write, read, 1),
        (read, write, 1),
        (read, read, 0),
    ];
    for (first, second, wanted) in cases {
        let (device, side, ptr) = setup();
        first(&device, ptr, S0);
        second(&device, ptr.offset(63), side);
        assert_eq!(device.races().len(), wanted, "{}", text(&device));
        // The next byte belongs to nobody.
        let (device, side, ptr) = setup();
        first(&device, ptr, S0);
        second(&device, ptr.offset(64), side);
        assert_eq!(device.races().len(), 0, "{}", text(&device));
    }
}

#[test]
fn a_report_names_both_sites() {
    let (device, side, ptr) = setup();
    let line = line!();
    device.fill(ptr, FillValue::U8(1), 64, S0).unwrap();
    device.copy_from_host(ptr, &[0; 8], side).unwrap();
    let races = device.races();
    let [Race::Access { earlier, later }] = &races[..] else {
        panic!("{races:?}")
    };
    assert_eq!(
        (earlier.what, earlier.stream, earlier.bytes),
        ("fill", S0, 64)
    );
    assert_eq!(
        (later.what, later.stream, later.bytes),
        ("copy_from_host", side, 8)
    );
    assert_eq!((earlier.at.file(), earlier.at.line()), (file!(), line + 1));
    assert_eq!((later.at.file(), later.at.line()), (file!(), line + 2));
    assert!(earlier.sequence < later.sequence);
    let text = text(&device);
    assert!(
        text.contains(&format!("{}:{}", file!(), line + 1)),
        "{text}"
    );
    assert!(text.contains("cure: record an event on stream 0"), "{text}");
    device.clear_races();
    assert!(device.races().is_empty());
}

#[test]
fn one_stream_is_in_order_with_itself() {
    let (device, _, ptr) = setup();
    write(&device, ptr, S0);
    read(&device, ptr, S0);
    write(&device, ptr, S0);
    assert_eq!(text(&device), "");
}

#[test]
fn an_event_orders_what_was_submitted_before_it() {
    let (device, side, ptr) = setup();
    write(&device, ptr, S0);
    let event = recorded(&device, S0);
    write(&device, ptr.offset(1024), S0);
    device.wait_event(side, event).unwrap();
    write(&device, ptr, side);
    assert_eq!(text(&device), "");
    write(&device, ptr.offset(1024), side);
    assert_eq!(device.races().len(), 1, "submitted after the event");
}

#[test]
fn order_passes_on_through_a_third_stream() {
    let (device, side, ptr) = setup();
    let third = device.create_stream(0).unwrap();
    write(&device, ptr, S0);
    device.wait_event(side, recorded(&device, S0)).unwrap();
    device.wait_event(third, recorded(&device, side)).unwrap();
    write(&device, ptr, third);
    assert_eq!(text(&device), "");
    // But not back.
    write(&device, ptr, side);
    assert_eq!(device.races().len(), 1);
}

#[test]
fn an_event_recorded_again_stands_for_the_later_point_alone() {
    let (device, side, ptr) = setup();
    write(&device, ptr, S0);
    let event = recorded(&device, S0);
    device.record_event(event, side).unwrap();
    device.wait_event(side, event).unwrap();
    write(&device, ptr, side);
    assert_eq!(device.races().len(), 1);
    // One that was never recorded stands for nothing.
    let (device, side, ptr) = setup();
    write(&device, ptr, S0);
    device
        .wait_event(side, device.create_event().unwrap())
        .unwrap();
    write(&device, ptr, side);
    assert_eq!(device.races().len(), 1);
}

#[test]
fn waiting_on_the_host_orders_what_is_submitted_later() {
    type Wait = fn(&SimDevice, EventId);
    let waits: [(&str, Wait, usize); 8] = [
        ("nothing", |_, _| {}, 1),
        (
            "synchronize_stream",
            |device, _| device.synchronize_stream(S0).unwrap(),
            0,
        ),
        ("synchronize", |device, _| device.synchronize().unwrap(), 0),
        (
            "synchronize_event",
            |device, event| device.synchronize_event(event).unwrap(),
            0,
        ),
        (
            "query that says no",
            |device, event| assert!(!device.query_event(event).unwrap()),
            1,
        ),
        (
            "query that says yes",
            |device, event| {
                while device.step() {}
                assert!(device.query_event(event).unwrap());
            },
            0,
        ),
        (
            "query of the stream",
            |device, _| {
                assert!(!device.query_stream(S0).unwrap());
                while device.step() {}
                assert!(device.query_stream(S0).unwrap());
            },
            0,
        ),
        (
            "work that happens to be done",
            |device, _| while device.step() {},
            1,
        ),
    ];
    for (name, wait, wanted) in waits {
        let (device, side, ptr) = setup();
        write(&device, ptr, S0);
        let event = recorded(&device, S0);
        wait(&device, event);
        write(&device, ptr, side);
        assert_eq!(device.races().len(), wanted, "{name}: {}", text(&device));
    }
}

#[test]
fn a_copy_to_the_host_reads_and_then_orders() {
    let (device, side, ptr) = setup();
    let elsewhere = ptr.offset(4096);
    write(&device, elsewhere, S0);
    device.copy_to_host(&mut [0; 8], ptr, S0).unwrap();
    write(&device, elsewhere, side);
    assert_eq!(text(&device), "", "the copy waited for its stream");
    write(&device, ptr.offset(8192), side);
    device
        .copy_to_host(&mut [0; 8], ptr.offset(8192), S0)
        .unwrap();
    assert_eq!(device.races().len(), 1);
}

#[test]
fn copies_read_their_source_and_write_their_destination() {
    let (device, side, ptr) = setup();
    let (src, dst) = (ptr, ptr.offset(4096));
    device.copy(dst, src, 64, S0).unwrap();
    read(&device, src, side);
    assert_eq!(text(&device), "");
    write(&device, src, side);
    assert_eq!(device.races().len(), 1, "over what is read");
    device.clear_races();
    read(&device, dst, side);
    assert_eq!(device.races().len(), 1, "what is written");
}

#[test]
fn rows_are_told_apart() {
    let (device, side, ptr) = setup();
    let columns = Extent2d {
        width_bytes: 16,
        height: 4,
        dst_pitch: 64,
        src_pitch: 64,
    };
    device.fill_2d(ptr, FillValue::U8(1), columns, S0).unwrap();
    device
        .fill_2d(ptr.offset(16), FillValue::U8(1), columns, side)
        .unwrap();
    assert_eq!(text(&device), "");
    device
        .fill_2d(ptr.offset(8), FillValue::U8(1), columns, side)
        .unwrap();
    assert_eq!(device.races().len(), 1, "once for all rows");
    device.clear_races();
    // The rows of a copy's source lie closer than those of its destination.
    let closer = Extent2d {
        src_pitch: 16,
        ..columns
    };
    device
        .copy_2d(ptr.offset(32), ptr.offset(4096), closer, side)
        .unwrap();
    assert_eq!(text(&device), "");
    device
        .copy_2d(ptr.offset(32), ptr.offset(4), columns, side)
        .unwrap();
    assert_eq!(device.races().len(), 1);
}

#[test]
fn a_peer_reads_in_the_other_devices_memory() {
    let options = || {
        SimOptions::new(64 * MIB)
            .with_races(true)
            .with_max_ops_per_step(0)
    };
    let devices = SimDevice::group(vec![options(), options()]).unwrap();
    let (here, there) = (&devices[0], &devices[1]);
    let (dst, src) = (
        here.alloc_segment(PAGE).unwrap(),
        there.alloc_segment(PAGE).unwrap(),
    );
    write(there, src, S0);
    here.copy_from_peer(dst, DeviceIndex(1), src, 64, S0)
        .unwrap();
    let races = here.races();
    let [Race::Access { earlier, later }] = &races[..] else {
        panic!("{races:?}")
    };
    assert_eq!((earlier.device, later.device), (1, 0));
    here.clear_races();
    // The peer waits for its own streams only.
    there.free_segment(src).unwrap();
    let races = here.races();
    assert!(
        matches!(&races[..], [Race::Unmapped { call: "free_segment", used }] if used.device == 0),
        "{races:?}"
    );
    here.clear_races();
    // What is at the same address now is another segment.
    let again = there.alloc_segment(PAGE).unwrap();
    write(there, again, S0);
    assert_eq!(text(here), "");
}

#[test]
fn unmapping_under_work_is_found_and_a_page_keeps_its_past() {
    let device = device();
    let side = device.create_stream(0).unwrap();
    let range = device.reserve_range(4 * PAGE).unwrap();
    let page = device.create_page().unwrap();
    let map = |at: DevicePtr, page| {
        device.map_page(at, page).unwrap();
        device.set_access(at, PAGE).unwrap();
    };
    map(range, page);
    write(&device, range, S0);
    device.unmap_page(range).unwrap();
    let races = device.races();
    assert!(
        matches!(
            &races[..],
            [Race::Unmapped {
                call: "unmap_page",
                ..
            }]
        ),
        "{races:?}"
    );
    device.clear_races();
    // The same bytes at another address.
    map(range.offset(PAGE), page);
    write(&device, range.offset(PAGE), side);
    assert_eq!(device.races().len(), 1);
    device.clear_races();
    // Waited for: nothing to say.
    device.synchronize().unwrap();
    device.unmap_page(range.offset(PAGE)).unwrap();
    assert_eq!(text(&device), "");
    // Another page in the same slot of the device is another page.
    map(range, page);
    write(&device, range, S0);
    device.unmap_page(range).unwrap();
    device.destroy_page(page).unwrap();
    device.clear_races();
    map(range, device.create_page().unwrap());
    write(&device, range, side);
    assert_eq!(text(&device), "");
}

#[test]
fn a_freed_segment_waits_and_is_forgotten() {
    let (device, side, ptr) = setup();
    write(&device, ptr, S0);
    device.free_segment(ptr).unwrap();
    assert_eq!(text(&device), "");
    let again = device.alloc_segment(PAGE).unwrap();
    write(&device, again, side);
    assert_eq!(text(&device), "");
}

/// An allocator for each kind of memory, and a second and third stream.
fn allocators() -> Vec<(CachingAllocator<SimDevice>, StreamId, StreamId)> {
    [Backing::Auto, Backing::Segments]
        .map(|backing| {
            let device = device();
            let side = device.create_stream(0).unwrap();
            let third = device.create_stream(0).unwrap();
            let options = AllocatorOptions::new().with_backing(backing);
            (
                CachingAllocator::with_options(device, &options),
                side,
                third,
            )
        })
        .into()
}

fn use_on(block: &Block<SimDevice>, stream: StreamId) {
    write(block.allocator().device(), block.ptr(), stream);
}

#[test]
fn a_block_freed_while_an_unrecorded_stream_uses_it_is_reported_and_held_back() {
    for (allocator, side, third) in allocators() {
        let device = allocator.device().clone();
        let line = line!();
        let block = allocator.alloc(64 * MIB, S0).unwrap();
        use_on(&block, side);
        device.wait_event(third, recorded(&device, side)).unwrap();
        use_on(&block, third);
        block.record_stream(side).unwrap();
        let ptr = block.ptr();
        assert_eq!(text(&device), "");
        drop(block);
        let races = device.races();
        let [Race::FreedInUse { block, used, .. }] = &races[..] else {
            panic!("{races:?}")
        };
        assert_eq!((block.at.file(), block.at.line()), (file!(), line + 1));
        assert_eq!(
            (block.ptr, block.bytes, used.stream),
            (ptr, 64 * MIB, third)
        );
        let said = races[0].to_string();
        for part in [
            format!("block {ptr} used on stream {third}, freed without record_stream"),
            format!("stream {third} was not recorded"),
            format!("cure: record_stream({third})"),
        ] {
            assert!(said.contains(&part), "{said}");
        }
        // The recorded stream being done is not enough.
        device.synchronize_stream(side).unwrap();
        let next = allocator.alloc(64 * MIB, S0).unwrap();
        assert_ne!(next.ptr(), ptr);
        use_on(&next, S0);
        device.synchronize_stream(third).unwrap();
        assert_eq!(allocator.alloc(64 * MIB, S0).unwrap().ptr(), ptr);
        assert_eq!(device.races().len(), 1, "{}", text(&device));
    }
}

#[test]
fn without_the_report_the_recorded_stream_would_have_been_enough() {
    for (allocator, side, _) in allocators() {
        let device = allocator.device().clone();
        let block = allocator.alloc(64 * MIB, S0).unwrap();
        use_on(&block, side);
        block.record_stream(side).unwrap();
        let ptr = block.ptr();
        drop(block);
        let next = allocator.alloc(64 * MIB, S0).unwrap();
        assert_ne!(next.ptr(), ptr);
        device.synchronize_stream(side).unwrap();
        assert_eq!(allocator.alloc(64 * MIB, S0).unwrap().ptr(), ptr);
        assert_eq!(text(&device), "");
    }
}

#[test]
fn a_use_by_a_peer_is_reported_for_its_own_block() {
    let options = || {
        let options = SimOptions::new(64 * MIB).with_races(true);
        options.with_max_ops_per_step(0)
    };
    let devices = SimDevice::group(vec![options(), options()]).unwrap();
    let (here, there) = (&devices[0], &devices[1]);
    let dst = here.alloc_segment(PAGE).unwrap();
    let allocator = CachingAllocator::new(there.clone());
    let block = allocator.alloc(4 * MIB, S0).unwrap();
    here.copy_from_peer(dst, DeviceIndex(1), block.ptr(), 64, S0)
        .unwrap();
    let ptr = block.ptr();
    // A stream of another device cannot be recorded; the memory is not held back.
    drop(block);
    let races = here.races();
    assert!(matches!(&races[..], [Race::FreedInUse { .. }]), "{races:?}");
    here.clear_races();
    let next = allocator.alloc(4 * MIB, S0).unwrap();
    assert_eq!(next.ptr(), ptr);
    write(here, dst.offset(MIB), S0);
    drop(next);
    let races = here.races();
    assert!(
        matches!(&races[..], [Race::Reused { .. }]),
        "once, for the block that was used: {races:?}"
    );
}

#[test]
fn memory_above_a_block_is_not_the_blocks() {
    for (allocator, _, _) in allocators() {
        let device = allocator.device().clone();
        // On both sides of what the allocator has, wherever that comes to lie.
        let mut segments = vec![device.alloc_segment(PAGE).unwrap()];
        drop(allocator.alloc(16 * MIB, S0).unwrap());
        segments.push(device.alloc_segment(PAGE).unwrap());
        for ptr in segments {
            write(&device, ptr, S0);
        }
        assert_eq!(text(&device), "");
    }
}

#[test]
fn a_block_made_of_two_is_one_block() {
    for (allocator, _, _) in allocators() {
        let device = allocator.device().clone();
        let (one, two) = (
            allocator.alloc(16 * MIB, S0).unwrap(),
            allocator.alloc(16 * MIB, S0).unwrap(),
        );
        let second = two.ptr();
        drop((one, two));
        let both = allocator.alloc(32 * MIB, S0).unwrap();
        assert!(both.ptr() < second && second < both.ptr().offset(32 * MIB));
        write(&device, second, S0);
        assert_eq!(text(&device), "");
    }
}

#[test]
fn a_use_that_was_recorded_or_waited_for_is_no_race() {
    type Order = fn(&SimDevice, &Block<SimDevice>, StreamId);
    let orders: [Order; 3] = [
        |_, block, side| block.record_stream(side).unwrap(),
        |device, _, side| device.wait_event(S0, recorded(device, side)).unwrap(),
        |device, _, side| device.synchronize_stream(side).unwrap(),
    ];
    for order in orders {
        for (allocator, side, _) in allocators() {
            let device = allocator.device().clone();
            let block = allocator.alloc(64 * MIB, S0).unwrap();
            use_on(&block, side);
            order(&device, &block, side);
            drop(block);
            let next = allocator.alloc(64 * MIB, S0).unwrap();
            use_on(&next, S0);
            assert_eq!(text(&device), "");
        }
    }
}

#[test]
fn memory_that_is_handed_out_too_early_is_reported() {
    for (allocator, side, _) in allocators() {
        let device = allocator.device().clone();
        allocator.disable_clock_check();
        let block = allocator.alloc(64 * MIB, S0).unwrap();
        use_on(&block, S0);
        let ptr = block.ptr();
        drop(block);
        let line = line!();
        let next = allocator.alloc(64 * MIB, side).unwrap();
        assert_eq!(next.ptr(), ptr, "the switch works");
        let races = device.races();
        let [Race::Reused { block, used }] = &races[..] else {
            panic!("{races:?}")
        };
        assert_eq!((block.stream, block.at.line()), (side, line + 1));
        assert_eq!(used.stream, S0);
        assert!(used.block.is_some());
        use_on(&next, side);
        let text = text(&device);
        assert!(text.contains("the memory changed hands"), "{text}");
        assert_eq!(device.races().len(), 2);
    }
}

#[test]
fn a_stream_that_does_not_wait_for_the_blocks_own_races_with_its_past() {
    for (allocator, side, _) in allocators() {
        let device = allocator.device().clone();
        let block = allocator.alloc(64 * MIB, S0).unwrap();
        use_on(&block, S0);
        drop(block);
        let next = allocator.alloc(64 * MIB, S0).unwrap();
        assert_eq!(text(&device), "");
        use_on(&next, side);
        assert_eq!(device.races().len(), 1);
    }
}

#[test]
fn work_on_a_freed_block_is_reported() {
    for (allocator, _, _) in allocators() {
        let device = allocator.device().clone();
        let block = allocator.alloc(64 * MIB, S0).unwrap();
        let ptr = block.ptr();
        drop(block);
        write(&device, ptr.offset(MIB), S0);
        let races = device.races();
        assert!(
            matches!(&races[..], [Race::UsedAfterFree { block, .. }] if block.ptr == ptr),
            "{races:?}"
        );
        device.clear_races();
        // Part of it belongs to another block now, part to none.
        let part = allocator.alloc(MIB, S0).unwrap();
        assert_eq!(part.ptr(), ptr);
        write(&device, ptr, S0);
        assert_eq!(text(&device), "");
    }
}

#[test]
fn without_the_option_nothing_is_looked_at() {
    let device = SimDevice::new(SimOptions::new(64 * MIB)).unwrap();
    assert!(device.block_observer().is_none());
    let side = device.create_stream(0).unwrap();
    let ptr = device.alloc_segment(PAGE).unwrap();
    write(&device, ptr, S0);
    write(&device, ptr, side);
    assert!(device.races().is_empty());
}

#[test]
fn reports_are_bounded_and_the_others_counted() {
    let (device, side, ptr) = setup();
    for n in 0..1010 {
        write(&device, ptr.offset(n * 64), S0);
        write(&device, ptr.offset(n * 64), side);
    }
    assert_eq!((device.races().len(), device.races_left_out()), (1000, 10));
}

#[test]
fn a_kernel_takes_its_time_and_touches_only_memory() {
    let (device, _, ptr) = setup();
    let uses = [
        KernelUse::read(ptr, 64),
        KernelUse::write(ptr.offset(64), 64),
    ];
    let start = recorded(&device, S0);
    device.launch("kernel", &uses, 25.0, S0).unwrap();
    let end = recorded(&device, S0);
    device.synchronize().unwrap();
    assert!(device.elapsed_microseconds(start, end).unwrap() >= 25.0);
    let outside = [KernelUse::read(ptr.offset(PAGE), 1)];
    let error = device.launch("kernel", &outside, 0.0, S0).unwrap_err();
    assert!(error.to_string().starts_with("kernel: "), "{error}");
    assert!(device.launch("kernel", &uses, 0.0, StreamId(77)).is_err());
    let range = device.reserve_range(PAGE).unwrap();
    let page = device.create_page().unwrap();
    device.map_page(range, page).unwrap();
    device.set_access(range, PAGE).unwrap();
    device
        .launch("kernel", &[KernelUse::read(range, 8)], 0.0, S0)
        .unwrap();
    device.unmap_page(range).unwrap();
    device.synchronize().unwrap();
    assert_eq!(device.errors().len(), 1, "{:?}", device.errors());
}
