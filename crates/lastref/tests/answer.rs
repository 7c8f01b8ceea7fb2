//! Each sentence of docs/answer.md, proved. The Python tests of the same names prove them there.
#![expect(clippy::unwrap_used, reason = "an error here is a failed test")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::{GIB, KIB, MIB, allocated, bytes_on_gpu, calls, in_use, reserved, total_calls, turn};
use lastref::alloc::sim::Call;
use lastref::gc::{self, Gc, Phase, Reason, Slot, Trace};
use lastref::{Device, Error, Tensor, cuda, sim};

common::also_on_a_driver!("8GiB");

#[test]
fn the_old_tensor_is_not_moved() {
    let _turn = turn("8GiB");
    let mut t1 = Tensor::full([4, 5], 7.0).unwrap().cuda().unwrap();
    let old = t1.clone();
    let (address, bytes) = (old.data_ptr(), old.to_bytes().unwrap());

    t1 = Tensor::empty([4, 5]).unwrap();

    assert!(!t1.is_cuda());
    assert!(old.is_cuda(), "the variable refers to another tensor now");
    assert_eq!(old.device(), Device::Cuda(0));
    assert_eq!(old.data_ptr(), address);
    assert_eq!(old.to_bytes().unwrap(), bytes);
}

#[test]
fn freed_at_once_when_no_reference_remains() {
    let _turn = turn("8GiB");
    let mut t1 = bytes_on_gpu(400 * MIB).unwrap();
    let other = t1.clone();
    assert_eq!(allocated(), 400 << 20);
    assert_eq!(t1.ref_count(), 2);

    t1 = Tensor::empty([4, 5]).unwrap();
    assert_eq!(allocated(), 400 << 20, "one reference remains");
    assert!(!t1.is_cuda());
    assert_eq!(other.ref_count(), 1);

    drop(other);
    assert_eq!(allocated(), 0, "no reference remains");
}

#[test]
fn freed_memory_is_cached() {
    let _turn = turn("8GiB");
    let tensor = bytes_on_gpu(400 * MIB).unwrap();
    let address = tensor.data_ptr();
    assert_eq!((reserved(), in_use()), (400 << 20, 400 << 20));

    drop(tensor);
    assert_eq!(allocated(), 0);
    assert_eq!((reserved(), in_use()), (400 << 20, 400 << 20), "kept");

    let next = bytes_on_gpu(400 * MIB).unwrap();
    assert_eq!(next.data_ptr(), address, "and used again");
    assert_eq!(reserved(), 400 << 20);
}

#[test]
fn because_the_driver_is_slow() {
    let _turn = turn("8GiB");
    // The driver of a stand-in does not say how much time its calls take on a GPU.
    let device_microseconds = || sim::device(0).map(|device| device.counters().device_microseconds);

    let (created, before) = (calls(0, Call::CreatePage), device_microseconds());
    let miss = bytes_on_gpu(40 * MIB).unwrap();
    assert!(
        calls(0, Call::CreatePage) > created,
        "a miss asks the device"
    );
    let after = device_microseconds();
    assert!(before.is_none() || after > before);
    drop(miss);

    let asked = total_calls(0);
    let hit = bytes_on_gpu(40 * MIB).unwrap();
    drop(hit);
    assert_eq!(total_calls(0), asked, "a hit makes no device call");
    assert_eq!(device_microseconds(), after);
}

#[test]
fn empty_cache_gives_it_back() {
    let _turn = turn("8GiB");
    let kept = bytes_on_gpu(100 * MIB).unwrap();
    drop(bytes_on_gpu(400 * MIB).unwrap());
    assert_eq!(in_use(), 500 << 20);

    assert_eq!(cuda::empty_cache().unwrap(), 400 << 20);

    assert_eq!(in_use(), 100 << 20, "other programs see it free");
    assert_eq!(reserved(), 100 << 20);
    assert_eq!(allocated(), 100 << 20, "what is referred to stays");
    drop(kept);
}

/// A device with live tensors between holes in the cache: 3 of 8 GiB are live.
fn holes() -> Vec<Tensor> {
    let all: Vec<Tensor> = (0..7).map(|_| bytes_on_gpu(GIB).unwrap()).collect();
    let live = all.into_iter().skip(1).step_by(2).collect();
    assert_eq!(allocated(), 3 << 30);
    assert_eq!(reserved(), 7 << 30);
    live
}

/// The largest tensor that can be made beside the live ones, in MiB.
fn largest_beside_holes(empty_cache_first: bool) -> i64 {
    let (mut fits, mut fails) = (0, 8 * KIB + 1);
    while fails - fits > 1 {
        let middle = i64::midpoint(fits, fails);
        let live = holes();
        if empty_cache_first {
            assert_eq!(cuda::empty_cache().unwrap(), 4 << 30);
        }
        match bytes_on_gpu(middle * MIB) {
            Ok(_) => fits = middle,
            Err(error) => {
                assert!(error.is_out_of_memory(), "{error}");
                fails = middle;
            }
        }
        drop(live);
        cuda::empty_cache().unwrap();
    }
    fits
}

#[test]
fn empty_cache_does_not_enlarge_what_this_process_can_allocate() {
    let _turn = turn("8GiB");
    let without = largest_beside_holes(false);
    let with = largest_beside_holes(true);
    assert_eq!(without, with);
    assert_eq!(without, 5 * KIB, "all that is not live");
}

#[test]
fn given_back_by_itself_before_out_of_memory() {
    let _turn = turn("8GiB");
    let live = holes();
    let unmapped = calls(0, Call::UnmapPage);

    // 4 GiB are cached in holes of 1 GiB, 1 GiB is free on the device: 5 GiB fit in neither.
    let large = bytes_on_gpu(5 * GIB).unwrap();
    assert!(
        calls(0, Call::UnmapPage) > unmapped,
        "cached memory was taken from its place"
    );
    assert_eq!(allocated(), 8 << 30);

    let error = bytes_on_gpu(MIB).unwrap_err();
    let Error::OutOfMemory(report) = &error else {
        panic!("expected out of memory, got {error}");
    };
    assert_eq!(report.requested, 1 << 20);
    assert_eq!(
        report.allocated,
        8 << 30,
        "only what is referred to is left"
    );
    assert_eq!((report.cached, report.device_free), (0, 0));

    drop((live, large));
    assert_eq!(allocated(), 0);
    bytes_on_gpu(MIB).unwrap();
}

#[derive(Trace)]
struct Trainer {
    weights: Tensor,
    myself: Slot<Option<Gc<Trainer>>>,
}

/// An object that holds these bytes and refers to itself; its variable goes at once.
fn dead_cycle(bytes: i64) -> lastref::Result<()> {
    let trainer = Gc::new(Trainer {
        weights: bytes_on_gpu(bytes)?,
        myself: Slot::default(),
    });
    trainer.myself.set(Some(trainer.clone()));
    assert!(trainer.weights.is_cuda());
    Ok(())
}

#[test]
fn a_dead_cycle_stays_allocated_until_the_collector_runs() {
    let _turn = turn("8GiB");
    gc::disable();
    dead_cycle(40 * MIB).unwrap();
    assert_eq!(allocated(), 40 << 20, "nobody can reach it");
    gc::collect(2).unwrap();
    assert_eq!(allocated(), 0);
    gc::enable();
}

#[test]
fn the_collector_runs_by_itself() {
    let _turn = turn("8GiB");
    gc::enable();
    // When bytes have grown: by an eighth of the device, where nothing else is set.
    let freed = Arc::new(AtomicU64::new(0));
    let seen = freed.clone();
    let id = gc::add_callback(move |phase, report| {
        if phase == Phase::Stop && report.reason == Reason::Bytes {
            seen.fetch_add(report.device_bytes_freed, Ordering::SeqCst);
        }
    });
    let until = Instant::now() + Duration::from_secs(20);
    while freed.load(Ordering::SeqCst) == 0 {
        assert!(Instant::now() < until, "no automatic run freed anything");
        dead_cycle(512 * MIB).unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(gc::remove_callback(id));
    // Ten times what the device has, and nobody collects by hand.
    for _ in 0..80 {
        dead_cycle(GIB).unwrap();
    }
    gc::disable();
    for _ in 0..80 {
        dead_cycle(GIB).unwrap(); // Before an error it runs all the same.
    }
    assert!(cuda::max_memory_allocated(None).unwrap() <= 8 << 30);
    gc::set_before_out_of_memory(false);
    gc::collect(2).unwrap();
    let made = (0..80).take_while(|_| dead_cycle(GIB).is_ok()).count();
    assert_eq!(made, 8, "without it, dead cycles fill the device");
    gc::set_before_out_of_memory(true);
    gc::enable();
    gc::collect(2).unwrap();
}

#[test]
fn the_collector_can_be_queried_configured_and_run_by_hand() {
    let _turn = turn("8GiB");
    gc::disable();
    assert!(!gc::is_enabled());
    gc::set_byte_threshold(0, Some(GIB as u64));
    assert_eq!(gc::get_byte_threshold(0), GIB as u64);
    gc::set_byte_threshold(0, None);
    let before = gc::stats()[2];
    dead_cycle(40 * MIB).unwrap();
    let report = gc::collect(2).unwrap();
    assert_eq!((report.objects, report.device_bytes_freed), (1, 40 << 20));
    let after = gc::stats()[2];
    assert_eq!(after.collected, before.collected + 1);
    assert_eq!(
        after.device_bytes_freed,
        before.device_bytes_freed + (40 << 20)
    );
    gc::enable();
}

#[test]
fn collect_then_empty_cache_leaves_nothing() {
    let _turn = turn("8GiB");
    for _ in 0..3 {
        dead_cycle(GIB).unwrap();
    }
    gc::collect(2).unwrap();
    cuda::empty_cache().unwrap();
    assert_eq!((allocated(), reserved(), in_use()), (0, 0, 0));
}
