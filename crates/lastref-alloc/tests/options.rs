//! Settings, and that each one does what it says.
#![expect(clippy::unwrap_used, reason = "an error here is a failed test")]
#![cfg(target_os = "linux")]

use lastref_alloc::sim::{Call, SimDevice, SimOptions};
use lastref_alloc::{AllocatorOptions, CachingAllocator, Device, FillValue, StreamId};

const MIB: u64 = 1 << 20;
const S0: StreamId = StreamId::DEFAULT;

fn with(options: &str) -> CachingAllocator<SimDevice> {
    let device = SimDevice::new(SimOptions::new(256 * MIB)).unwrap();
    let options: AllocatorOptions = options.parse().unwrap();
    CachingAllocator::with_options(device, &options)
}

#[test]
fn expandable_segments_chooses_the_kind_of_memory() {
    for (options, segments) in [
        ("", 0),
        ("expandable_segments:True", 0),
        ("expandable_segments:False", 1),
    ] {
        let allocator = with(options);
        let _block = allocator.alloc(MIB, S0).unwrap();
        let calls = allocator.device().counters().calls(Call::AllocSegment);
        assert_eq!(calls, segments, "{options}");
    }
}

#[test]
fn limits_hold_from_the_start_and_when_changed() {
    for (options, limit) in [
        ("", None),
        ("memory_limit_mb:64", Some(64 * MIB)),
        ("per_process_memory_fraction:0.25", Some(64 * MIB)),
        ("per_process_memory_fraction:1", None),
    ] {
        let allocator = with(options);
        assert_eq!(allocator.memory_limit(), limit, "{options}");
        assert_eq!(allocator.alloc(65 * MIB, S0).is_err(), limit.is_some());
        allocator
            .change_options(&"memory_limit_mb:32".parse().unwrap())
            .unwrap();
        allocator.empty_cache().unwrap();
        assert!(allocator.alloc(33 * MIB, S0).is_err());
        assert!(allocator.alloc(32 * MIB, S0).is_ok());
        let none = "per_process_memory_fraction:1".parse().unwrap();
        allocator.change_options(&none).unwrap();
        assert_eq!(allocator.memory_limit(), None);
    }
}

#[test]
fn the_history_is_as_long_as_was_asked_for() {
    let allocator = with("history_entries:3");
    let entries = |allocator: &CachingAllocator<SimDevice>| {
        (0..5).for_each(|_| drop(allocator.alloc(MIB, S0).unwrap()));
        allocator.snapshot().device_traces[0].len()
    };
    assert_eq!(entries(&allocator), 3);
    let more = "history_entries:4".parse().unwrap();
    allocator.change_options(&more).unwrap();
    assert_eq!(entries(&allocator), 4);
    assert_eq!(entries(&with("")), 0);
}

#[test]
fn a_change_touches_only_what_it_names_and_never_the_kind_of_memory() {
    let allocator = with("memory_limit_mb:64,history_entries:2");
    let change = |text: &str| allocator.change_options(&text.parse().unwrap());
    change("history_entries:5").unwrap();
    assert_eq!(allocator.memory_limit(), Some(64 * MIB));
    change("expandable_segments:True,memory_limit_mb:65").unwrap();
    assert_eq!(allocator.memory_limit(), Some(65 * MIB));
    let error = change("memory_limit_mb:1,expandable_segments:False").unwrap_err();
    assert!(
        error.to_string().contains("set it from the start"),
        "{error}"
    );
    assert_eq!(allocator.memory_limit(), Some(65 * MIB), "nothing changed");

    let allocator = with("expandable_segments:False");
    let change = |text: &str| allocator.change_options(&text.parse().unwrap());
    assert!(change("expandable_segments:True").is_err());
    change("expandable_segments:False").unwrap();
}

#[test]
fn the_slack_and_the_wait_are_settings_too() {
    // A stretch that is free and idle, and one that work still uses.
    let fill = |options: &str| {
        let allocator = with(&format!("wait_before_growing:False,{options}"));
        let blocks = [40, 2, 40, 2].map(|mib| allocator.alloc(mib * MIB, S0).unwrap());
        let [first, keep, second, last] = blocks;
        drop((first, second));
        let large = allocator.alloc(60 * MIB, S0).unwrap();
        let reserved = allocator.stats().reserved_bytes.all.current;
        drop((keep, last, large));
        reserved
    };
    assert_eq!(
        fill("waste_slack_per_mille:0"),
        84 * MIB,
        "idle pages are moved"
    );
    assert_eq!(
        fill("waste_slack_per_mille:1000"),
        144 * MIB,
        "there is slack for new ones"
    );
    for (wait, waits) in [("True", 1), ("False", 0)] {
        let allocator = with(&format!("stream_waits:never,wait_before_growing:{wait}"));
        let device = allocator.device().clone();
        let side = device.create_stream(0).unwrap();
        let block = allocator.alloc(40 * MIB, side).unwrap();
        for _ in 0..2000 {
            device
                .fill(block.ptr(), FillValue::U8(1), 64, side)
                .unwrap();
        }
        drop(block);
        let _other = allocator.alloc(40 * MIB, S0).unwrap();
        let counted = allocator.stats().num_waits_before_growing;
        assert_eq!(counted, waits, "{wait}");
    }
}
