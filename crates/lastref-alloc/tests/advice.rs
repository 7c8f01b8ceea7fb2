//! What a person is told: which blocks are in the way, and what a program had better not do.
#![expect(clippy::unwrap_used, reason = "an error here is a failed test")]
#![cfg(target_os = "linux")]

use lastref_alloc::sim::{Call, Fault, SimDevice, SimOptions};
use lastref_alloc::{
    AllocError, AllocatorOptions, Backing, Block, CachingAllocator, Device, FillValue,
    OutOfMemoryError, StreamId,
};

const MIB: u64 = 1 << 20;
const S0: StreamId = StreamId::DEFAULT;

fn segments(capacity: u64) -> CachingAllocator<SimDevice> {
    let device = SimDevice::new(SimOptions::new(capacity)).unwrap();
    let options = AllocatorOptions::new().with_backing(Backing::Segments);
    CachingAllocator::with_options(device, &options)
}

fn fails(allocator: &CachingAllocator<SimDevice>, bytes: u64) -> OutOfMemoryError {
    match allocator.alloc(bytes, S0).unwrap_err() {
        AllocError::OutOfMemory(error) => *error,
        other => panic!("{other}"),
    }
}

fn take(allocator: &CachingAllocator<SimDevice>, sizes: &[u64]) -> Vec<Option<Block<SimDevice>>> {
    let take = |size: &u64| Some(allocator.alloc(size * MIB, S0).unwrap());
    sizes.iter().map(take).collect()
}

#[test]
fn the_stretch_with_the_least_in_it_is_named() {
    let allocator = segments(200 * MIB);
    drop(allocator.alloc(200 * MIB, S0).unwrap());
    let mut blocks = take(&allocator, &[60, 10, 30, 20, 40, 5, 35]);
    // 60 | 10 free | 30 | 20 free | 40 | 5 | 35 free
    for n in [1, 3, 6] {
        blocks[n] = None;
    }
    // Between 10 and 20 free bytes lie 30: the least that is held in any stretch of 55.
    let error = fails(&allocator, 55 * MIB);
    let pinned = error.pinned.as_ref().unwrap();
    let held: Vec<u64> = pinned
        .blocks
        .iter()
        .map(|block| block.bytes / MIB)
        .collect();
    assert_eq!(held, [30]);
    assert_eq!(pinned.free_bytes, 30 * MIB);
    let text = error.to_string();
    let at = blocks[2].as_ref().unwrap().ptr();
    assert!(
        text.contains("in pieces: 30.00 MiB of it is pinned by 1 block of 30.00 MiB in all:"),
        "{text}"
    );
    assert!(
        text.contains(&format!("30.00 MiB  at {at} on stream 0")),
        "{text}"
    );
}

#[test]
fn a_block_that_a_stream_may_still_use_is_in_the_way_too() {
    let allocator = segments(64 * MIB);
    let device = allocator.device().clone();
    drop(allocator.alloc(64 * MIB, S0).unwrap());
    let mut blocks = take(&allocator, &[20, 10, 34]);
    let side = device.create_stream(0).unwrap();
    let middle = blocks[1].as_ref().unwrap();
    let at = middle.ptr();
    middle.record_stream(side).unwrap();
    device.fill(at, FillValue::U8(0), 1, side).unwrap();
    // The work never ends as far as the allocator can tell.
    device.inject(Fault::nth(Call::QueryEvent, 1).from_then_on());
    device.inject(Fault::nth(Call::SynchronizeStream, 1).from_then_on());
    blocks.iter_mut().for_each(|block| *block = None);
    let error = fails(&allocator, 60 * MIB);
    let text = error.to_string();
    assert_eq!(error.pinned.unwrap().blocks.len(), 1);
    assert!(
        text.contains(&format!("at {at} on stream 0, pending")),
        "{text}"
    );
}

#[test]
fn where_no_segment_is_long_enough_partly_free_ones_are_named() {
    let allocator = segments(128 * MIB);
    let mut blocks = take(&allocator, &[40, 10, 50, 6]);
    // Segments of 40, 32, 50: 10 and 6 share one. All that is left to the device is 6.
    blocks[0] = None;
    blocks[1] = None;
    let error = fails(&allocator, 70 * MIB);
    let pinned = error.pinned.unwrap();
    let held: Vec<u64> = pinned
        .blocks
        .iter()
        .map(|block| block.bytes / MIB)
        .collect();
    assert_eq!(held, [6]);
    assert_eq!(pinned.free_bytes, 26 * MIB);
    // The segment with the most to give comes first, and full ones do not come at all.
    let allocator = segments(128 * MIB);
    let mut blocks = take(&allocator, &[20, 12, 30, 2, 10, 22, 32]);
    blocks[0] = None;
    blocks[2] = None;
    let pinned = fails(&allocator, 50 * MIB).pinned.unwrap();
    let held: Vec<u64> = pinned
        .blocks
        .iter()
        .map(|block| block.bytes / MIB)
        .collect();
    assert_eq!(held, [2, 12]);
    assert_eq!(pinned.free_bytes, 50 * MIB);
}

#[test]
fn too_little_memory_has_nothing_in_the_way_and_a_long_list_is_cut() {
    let allocator = segments(200 * MIB);
    drop(allocator.alloc(200 * MIB, S0).unwrap());
    let mut blocks = take(&allocator, &[5; 40]);
    assert_eq!(fails(&allocator, 60 * MIB).pinned, None);
    blocks.iter_mut().step_by(2).for_each(|block| *block = None);
    let error = fails(&allocator, 90 * MIB);
    assert_eq!(error.pinned.as_ref().unwrap().blocks.len(), 9);
    let error = fails(&allocator, 100 * MIB);
    assert_eq!(error.pinned.as_ref().unwrap().blocks.len(), 10);
    assert!(!error.to_string().contains("more"), "{error}");
    drop(blocks);
    let mut blocks = take(&allocator, &[2; 100]);
    blocks.iter_mut().step_by(2).for_each(|block| *block = None);
    let error = fails(&allocator, 60 * MIB);
    let text = error.to_string();
    assert_eq!(error.pinned.unwrap().blocks.len(), 15);
    assert!(text.contains("\n    and 5 more"), "{text}");
}

#[test]
fn a_limit_in_the_way_is_not_fragmentation() {
    let allocator = segments(200 * MIB);
    allocator.set_memory_limit(Some(64 * MIB));
    let _blocks = take(&allocator, &[30, 20]);
    let error = fails(&allocator, 20 * MIB);
    assert_eq!(error.pinned, None, "{error}");
}

#[test]
fn emptying_the_cache_each_step_is_counted_and_advised_against() {
    for backing in [Backing::Auto, Backing::Segments] {
        let device = SimDevice::new(SimOptions::new(1 << 30)).unwrap();
        let options = AllocatorOptions::new().with_backing(backing);
        let allocator = CachingAllocator::with_options(device, &options);
        let step = |bytes| drop(allocator.alloc(bytes, S0).unwrap());
        let empty = || allocator.empty_cache().unwrap();
        let numbers = || {
            let stats = allocator.stats();
            let numbers = stats.empty_cache;
            let text = stats.advice().join("\n");
            let numbers = [
                numbers.num_calls,
                numbers.bytes_released / MIB,
                numbers.bytes_refilled / MIB,
            ];
            (numbers, text)
        };
        empty();
        assert_eq!(numbers(), ([0, 0, 0], String::new()), "nothing to release");
        step(100 * MIB);
        empty();
        assert_eq!(numbers(), ([1, 100, 0], String::new()));
        step(60 * MIB);
        assert_eq!(numbers(), ([1, 100, 60], String::new()));
        empty();
        // More than was released is growth, not a refill.
        step(200 * MIB);
        assert_eq!(numbers(), ([2, 160, 120], String::new()));
        empty();
        let (counted, text) = numbers();
        assert_eq!(counted, [3, 360, 120]);
        let wanted = "empty_cache released what the next step re-allocated, 3 times, 360 MiB: ";
        assert!(text.starts_with(wanted), "{text}");
        allocator.reset_accumulated_stats();
        assert_eq!(numbers(), ([0, 0, 0], String::new()));
        // Calls after which little is obtained again do what they are for.
        for mib in [300, 64, 32, 32] {
            step(mib * MIB);
            empty();
        }
        assert_eq!(numbers().1, "");
        let keys = allocator.stats().torch_keys();
        assert!(keys.contains(&("empty_cache_calls".to_owned(), 4)));
        assert!(keys.contains(&("empty_cache_bytes_released".to_owned(), 428 * MIB)));
        assert!(keys.contains(&("empty_cache_bytes_refilled".to_owned(), 128 * MIB)));
    }
}
