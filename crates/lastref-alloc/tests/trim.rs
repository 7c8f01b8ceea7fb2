//! Giving back what was not used for long: off by default, by age and by what is to be kept. Time is set,
//! not waited for.
#![expect(clippy::unwrap_used, reason = "an error here is a failed test")]
#![cfg(target_os = "linux")]

use std::time::Duration;

use lastref_alloc::sim::{KernelUse, SimDevice, SimOptions};
use lastref_alloc::{AllocatorOptions, Backing, CachingAllocator, CheckLevel, Device, StreamId};

const MIB: u64 = 1 << 20;
const S0: StreamId = StreamId::DEFAULT;

type Allocator = CachingAllocator<SimDevice>;

fn each(settings: &str) -> [Allocator; 2] {
    [Backing::Auto, Backing::Segments].map(|backing| {
        let options: AllocatorOptions = settings.parse().unwrap();
        let sim = SimOptions::new(1 << 30).with_max_ops_per_step(0);
        let device = SimDevice::new(sim).unwrap();
        let allocator = CachingAllocator::with_options(device, &options.with_backing(backing));
        at(&allocator, 0);
        allocator
    })
}

/// From now on it is so many milliseconds after the start.
fn at(allocator: &Allocator, ms: u64) {
    allocator.set_time(Duration::from_millis(ms));
}

fn use_briefly(allocator: &Allocator, mib: u64) {
    drop(allocator.alloc(mib * MIB, S0).unwrap());
}

fn reserved(allocator: &Allocator) -> u64 {
    allocator.check_invariants(CheckLevel::Device).unwrap();
    let reserved = allocator.stats().reserved_bytes.all.current;
    assert_eq!(reserved, allocator.device().counters().held_bytes);
    reserved / MIB
}

#[test]
fn nothing_is_trimmed_unless_that_is_set() {
    for settings in ["", "idle_trim_ms:0", "idle_keep_mb:1"] {
        for allocator in each(settings) {
            use_briefly(&allocator, 64);
            at(&allocator, 1_000_000);
            use_briefly(&allocator, 1);
            assert_eq!(allocator.trim(), 0);
            assert_eq!(reserved(&allocator), 64, "{settings}");
            assert_eq!(allocator.stats().num_trims, 0);
        }
    }
}

#[test]
fn what_was_not_used_for_the_age_goes_back_when_a_block_is_freed() {
    for allocator in each("idle_trim_ms:1000") {
        let blocks = [100, 40, 60].map(|mib| Some(allocator.alloc(mib * MIB, S0).unwrap()));
        let [large, keep, small] = blocks;
        drop(large);
        for ms in (100..900).step_by(100) {
            at(&allocator, ms);
            use_briefly(&allocator, 1);
        }
        // Allocating what is cached uses it.
        drop(small);
        assert_eq!(reserved(&allocator), 200);
        at(&allocator, 1400);
        use_briefly(&allocator, 60);
        let stats = allocator.stats();
        // Where blocks of 1 MiB lie in the large one, all of that was used.
        assert!(stats.num_trims <= 1 && reserved(&allocator) >= 100);
        at(&allocator, 3000);
        use_briefly(&allocator, 40);
        assert!(reserved(&allocator) <= 100, "40 are held, 60 were cached");
        let stats = allocator.stats();
        assert!((1..=3).contains(&stats.num_trims));
        assert!(stats.num_trimmed_bytes >= 100 * MIB);
        drop(keep);
    }
}

#[test]
fn trim_gives_back_exactly_what_is_older_than_the_age() {
    for allocator in each("idle_trim_ms:1000") {
        let keep = [(); 3].map(|()| {
            let block = allocator.alloc(40 * MIB, S0).unwrap();
            (block, allocator.alloc(33 * MIB, S0).unwrap())
        });
        let all = reserved(&allocator);
        let [(first, a), (second, b), (third, c)] = keep;
        at(&allocator, 100);
        drop(first);
        at(&allocator, 700);
        drop(second);
        at(&allocator, 1050);
        drop(third);
        at(&allocator, 1099);
        assert_eq!(allocator.trim(), 0);
        at(&allocator, 1700 - 1);
        assert!(allocator.trim() <= 41 * MIB, "the first");
        let left = all - reserved(&allocator);
        assert!((38..=40).contains(&left), "the first alone: {left}");
        at(&allocator, 1700 + 1000 / 8);
        assert!(
            allocator.trim() > 0,
            "the second, an eighth of the age late at most"
        );
        at(&allocator, 2050);
        assert!(allocator.trim() > 0, "the last, at once");
        assert_eq!(allocator.stats().num_trims, 3);
        assert!(all - reserved(&allocator) >= 114);
        drop((a, b, c));
    }
}

#[test]
fn what_is_to_be_kept_stays_however_old() {
    for allocator in each("idle_trim_ms:1000,idle_keep_mb:50") {
        let blocks = [40, 40, 40].map(|mib| allocator.alloc(mib * MIB, S0).unwrap());
        drop(blocks);
        at(&allocator, 5000);
        allocator.trim();
        let left = reserved(&allocator);
        // With segments, whole ones.
        assert!(left == 50 || left == 80, "{left}");
        assert_eq!(allocator.trim(), 0);
        allocator
            .change_options(&"idle_keep_mb:0".parse().unwrap())
            .unwrap();
        at(&allocator, 10_000);
        allocator.trim();
        assert_eq!(reserved(&allocator), 0);
    }
}

#[test]
fn memory_that_work_uses_is_not_trimmed_and_nobody_waits() {
    for allocator in each("idle_trim_ms:1000") {
        let device = allocator.device();
        let block = allocator.alloc(40 * MIB, S0).unwrap();
        let used = KernelUse::write(block.ptr(), 40 * MIB);
        device.launch("kernel", &[used], 5.0, S0).unwrap();
        drop(block);
        at(&allocator, 5000);
        assert_eq!(allocator.trim(), 0);
        assert!(device.pending_ops() > 0);
        device.synchronize().unwrap();
        assert_eq!(allocator.trim(), 40 * MIB);
    }
}

#[test]
fn what_threads_keep_is_trimmed_too() {
    for allocator in each("idle_trim_ms:1000") {
        for _ in 0..3 {
            drop(allocator.alloc(1000, S0).unwrap());
        }
        at(&allocator, 5000);
        allocator.trim();
        at(&allocator, 6000);
        assert_eq!(allocator.trim(), 2 * MIB);
        assert_eq!(reserved(&allocator), 0);
    }
}

#[test]
fn the_age_can_be_set_and_unset_later() {
    for allocator in each("") {
        use_briefly(&allocator, 40);
        allocator
            .change_options(&"idle_trim_ms:1000".parse().unwrap())
            .unwrap();
        at(&allocator, 999);
        assert_eq!(allocator.trim(), 0, "counted from when it was set");
        at(&allocator, 1000);
        assert_eq!(allocator.trim(), 40 * MIB);
        use_briefly(&allocator, 40);
        allocator
            .change_options(&"idle_trim_ms:0".parse().unwrap())
            .unwrap();
        at(&allocator, 1_000_000);
        assert_eq!(allocator.trim(), 0);
    }
}
