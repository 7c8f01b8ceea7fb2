//! Capturing work into graphs: what a simulated device allows meanwhile, and that the allocator keeps
//! to it.
#![expect(clippy::unwrap_used, reason = "an error here is a failed test")]
#![cfg(target_os = "linux")]

use lastref_alloc::ladder::Rung;
use lastref_alloc::sim::{KernelUse, SimDevice, SimOptions};
use lastref_alloc::{
    AllocError, AllocatorOptions, Backing, CachingAllocator, CheckLevel, Device, DeviceError,
    DeviceIndex, DevicePtr, DeviceResult, FillValue, StreamId,
};

const MIB: u64 = 1 << 20;
const S0: StreamId = StreamId::DEFAULT;

fn device() -> SimDevice {
    let options = SimOptions::new(256 * MIB).with_races(true);
    SimDevice::new(options.with_max_ops_per_step(0)).unwrap()
}

fn code<T>(result: DeviceResult<T>) -> i32 {
    match result {
        Err(DeviceError::Driver { code, .. }) => code,
        Err(error) => panic!("{error}"),
        Ok(_) => 0,
    }
}

#[test]
fn captured_work_runs_when_its_graph_is_launched_and_as_often() {
    let device = device();
    let side = device.create_stream(0).unwrap();
    let ptr = device.alloc_segment(MIB).unwrap();
    let word = |at: DevicePtr| device.read_bytes(at, 4).unwrap();
    device.begin_capture(S0).unwrap();
    assert!(device.is_capturing());
    device.fill(ptr, FillValue::U32(7), 1, S0).unwrap();
    device.copy(ptr.offset(64), ptr, 4, S0).unwrap();
    device.copy_from_host(ptr.offset(128), &[9; 4], S0).unwrap();
    device
        .launch("kernel", &[KernelUse::write(ptr, 4)], 1.0, S0)
        .unwrap();
    // Work on another stream runs.
    device
        .fill(ptr.offset(256), FillValue::U32(5), 1, side)
        .unwrap();
    assert_eq!(device.pending_ops(), 1);
    let graph = device.end_capture(S0).unwrap();
    assert!(!device.is_capturing());
    device.synchronize().unwrap();
    assert_eq!(word(ptr), [0; 4], "captured, not run");
    assert_eq!(word(ptr.offset(256)), [5, 0, 0, 0]);
    for _ in 0..2 {
        device.write_bytes(ptr, &[0; 256]).unwrap();
        device.launch_graph(&graph, side).unwrap();
        assert_eq!(device.pending_ops(), 4);
        device.synchronize().unwrap();
        assert_eq!(word(ptr), [7, 0, 0, 0]);
        assert_eq!(word(ptr.offset(64)), [7, 0, 0, 0]);
        assert_eq!(word(ptr.offset(128)), [9; 4]);
    }
    assert!(device.races().is_empty());
    // It uses memory when it is launched, not when it is captured.
    device.launch_graph(&graph, S0).unwrap();
    device.launch_graph(&graph, side).unwrap();
    assert!(!device.races().is_empty());
    device.free_segment(ptr).unwrap();
    assert_eq!(device.errors(), Vec::<String>::new());
    device.launch_graph(&graph, side).unwrap();
    device.synchronize().unwrap();
    assert_eq!(device.errors().len(), 4, "the memory is gone");
}

#[test]
fn asking_or_waiting_for_the_device_breaks_a_capture() {
    type Step = fn(&SimDevice, StreamId) -> i32;
    let forbidden: [(&str, Step); 10] = [
        ("query_event", |device, _| {
            code(device.query_event(device.create_event().unwrap()))
        }),
        ("synchronize_event", |device, _| {
            code(device.synchronize_event(device.create_event().unwrap()))
        }),
        ("query_stream", |device, other| {
            code(device.query_stream(other))
        }),
        ("synchronize_stream", |device, other| {
            code(device.synchronize_stream(other))
        }),
        ("synchronize", |device, _| code(device.synchronize())),
        ("copy_to_host", |device, other| {
            let ptr = device.alloc_segment(MIB).unwrap();
            code(device.copy_to_host(&mut [0; 4], ptr, other))
        }),
        ("free_segment", |device, _| {
            code(device.free_segment(device.alloc_segment(MIB).unwrap()))
        }),
        ("record_event", |device, _| {
            code(device.record_event(device.create_event().unwrap(), S0))
        }),
        ("wait_event", |device, _| {
            code(device.wait_event(S0, device.create_event().unwrap()))
        }),
        ("nothing", |_, _| 900),
    ];
    for (name, step) in forbidden {
        let device = device();
        let other = device.create_stream(0).unwrap();
        device.begin_capture(S0).unwrap();
        assert_eq!(step(&device, other), 900, "{name}");
        let ended = device.end_capture(S0);
        if name == "nothing" {
            assert!(ended.is_ok());
        } else {
            let text = ended.as_ref().unwrap_err().to_string();
            assert!(text.contains(&format!("{name} was called")), "{text}");
            assert_eq!(code(ended), 901);
        }
        device.synchronize().unwrap();
    }
}

#[test]
fn a_capture_leaves_other_streams_and_devices_alone() {
    let options = || SimOptions::new(64 * MIB);
    let devices = SimDevice::group(vec![options(), options()]).unwrap();
    let (device, peer) = (&devices[0], &devices[1]);
    let other = device.create_stream(0).unwrap();
    device.begin_capture(S0).unwrap();
    assert!(!peer.is_capturing());
    peer.synchronize().unwrap();
    let event = device.create_event().unwrap();
    device.record_event(event, other).unwrap();
    device.wait_event(other, event).unwrap();
    let ptr = device.alloc_segment(MIB).unwrap();
    let page = device.create_page().unwrap();
    device.destroy_page(page).unwrap();
    assert!(device.begin_capture(S0).is_err(), "once at a time");
    let graph = device.end_capture(S0).unwrap();
    assert!(device.end_capture(S0).is_err());
    assert!(device.begin_capture(StreamId(77)).is_err());
    assert!(peer.launch_graph(&graph, S0).is_err());
    assert!(device.launch_graph(&graph, StreamId(77)).is_err());
    device.begin_capture(other).unwrap();
    assert_eq!(code(device.destroy_stream(other)), 900);
    assert!(device.end_capture(other).is_err());
    device.destroy_stream(other).unwrap();
    device.free_segment(ptr).unwrap();
    assert_eq!(peer.properties().index, DeviceIndex(1));
}

#[test]
fn the_allocator_asks_and_waits_for_nothing_while_work_is_captured() {
    for backing in [Backing::Auto, Backing::Segments] {
        let device = device();
        let side = device.create_stream(0).unwrap();
        let captured = device.create_stream(0).unwrap();
        let options = AllocatorOptions::new().with_backing(backing);
        let allocator = CachingAllocator::with_options(device.clone(), &options);
        let take = |mib: u64, stream| allocator.alloc(mib * MIB, stream);
        // Free blocks that another stream still uses, pending ones, and others that nobody does.
        let [used, recorded, idle] = [(40, side), (40, S0), (40, S0)].map(|(mib, stream)| {
            let block = take(mib, stream).unwrap();
            device.fill(block.ptr(), FillValue::U8(1), 8, side).unwrap();
            block
        });
        recorded.record_stream(side).unwrap();
        idle.record_stream(side).unwrap();
        drop(idle);
        device.synchronize().unwrap();
        device.fill(used.ptr(), FillValue::U8(1), 8, side).unwrap();
        device
            .fill(recorded.ptr(), FillValue::U8(1), 8, side)
            .unwrap();

        device.begin_capture(captured).unwrap();
        drop((used, recorded));
        // A stream never seen before, a hit, a miss, and a miss that has to climb.
        let mut held = vec![take(30, captured).unwrap(), take(30, S0).unwrap()];
        held.push(take(60, S0).unwrap());
        let error = match take(130, S0).unwrap_err() {
            AllocError::OutOfMemory(error) => *error,
            error => panic!("{error}"),
        };
        let waits: Vec<String> = error
            .rungs
            .iter()
            .filter(|rung| rung.rung == Rung::WaitForStreams)
            .map(ToString::to_string)
            .collect();
        let skipped = "wait for streams that use freed memory: skipped, work is being captured";
        assert!(
            waits.iter().all(|rung| rung.starts_with(skipped)) && !waits.is_empty(),
            "{error}"
        );
        allocator.empty_cache().unwrap();
        let stats = allocator.stats();
        assert_eq!(
            (stats.num_sync_all_streams, stats.num_device_errors),
            (0, 0)
        );
        allocator.check_invariants(CheckLevel::Device).unwrap();
        device.end_capture(captured).unwrap();
        // What was put off is done afterwards.
        drop(held);
        device.synchronize().unwrap();
        allocator.empty_cache().unwrap();
        assert_eq!(device.counters().held_bytes, 0);
        assert!(device.races().is_empty(), "{}", device.races()[0]);
        assert_eq!(device.errors(), Vec::<String>::new());
    }
}

#[test]
fn no_segment_is_freed_while_work_is_captured() {
    let device = device();
    let side = device.create_stream(0).unwrap();
    let options = AllocatorOptions::new().with_backing(Backing::Segments);
    let allocator = CachingAllocator::with_options(device.clone(), &options);
    drop(allocator.alloc(40 * MIB, S0).unwrap());
    // The other stream asked, so that the first block is known to be done with.
    let _large = allocator.alloc(60 * MIB, side).unwrap();
    device.begin_capture(S0).unwrap();
    assert_eq!(allocator.empty_cache().unwrap(), 0);
    device.end_capture(S0).unwrap();
    assert_eq!(allocator.stats().num_device_errors, 0);
    assert_eq!(allocator.empty_cache().unwrap(), 40 * MIB);
}
