//! What the functions of `lastref::cuda` report and set.

mod common;

use common::{MIB, bytes_on_gpu, turn};
use lastref::{DType, Device, Error, Tensor, cuda};

const TWO: &str = "2x4GiB";

common::also_on_a_driver!(TWO);

#[test]
fn statistics_follow_tensors_on_each_device() {
    let _turn = turn(TWO);
    let a = bytes_on_gpu(30 * MIB + 1).unwrap();
    let b = Tensor::zeros_with([4], (DType::F64, Device::Cuda(1))).unwrap();
    assert_eq!(
        cuda::memory_allocated(0).unwrap(),
        (30 << 20) + 512,
        "rounded to 512, as torch counts"
    );
    assert_eq!(cuda::memory_allocated(1).unwrap(), 512);
    let stats = cuda::memory_stats(0).unwrap();
    assert_eq!(stats.requested_bytes.all.current, (30 << 20) + 1);
    drop(a);
    assert_eq!(cuda::memory_allocated(0).unwrap(), 0);
    assert_eq!(cuda::max_memory_allocated(0).unwrap(), (30 << 20) + 512);
    assert_eq!(cuda::max_memory_reserved(0).unwrap(), 32 << 20);
    cuda::empty_cache().unwrap();
    cuda::reset_peak_memory_stats(0).unwrap();
    assert_eq!(cuda::max_memory_allocated(0).unwrap(), 0);
    assert_eq!(cuda::max_memory_reserved(0).unwrap(), 0);
    let stats = cuda::memory_stats(0).unwrap();
    assert_eq!(stats.allocation.all.allocated, 1);
    cuda::reset_accumulated_memory_stats(0).unwrap();
    let stats = cuda::memory_stats(0).unwrap();
    assert_eq!(stats.allocation.all.allocated, 0);

    // `None` is the current device of this thread.
    let guard = cuda::DeviceGuard::new(1).unwrap();
    assert_eq!(cuda::memory_allocated(None).unwrap(), 512);
    assert_eq!(
        Tensor::zeros([1]).unwrap().cuda().unwrap().device(),
        b.device()
    );
    drop(guard);
    assert_eq!(cuda::memory_allocated(None).unwrap(), 0);
}

#[test]
fn empty_cache_gives_back_the_caches_of_all_devices() {
    let _turn = turn(TWO);
    drop(bytes_on_gpu(10 * MIB).unwrap());
    drop(Tensor::empty_with([20 * MIB], (DType::U8, Device::Cuda(1))).unwrap());
    assert_eq!(cuda::empty_cache().unwrap(), 30 << 20);
    for device in [0, 1] {
        let info = cuda::mem_get_info(device).unwrap();
        assert_eq!(info.free_bytes, info.total_bytes);
    }
}

#[test]
fn a_fraction_limits_this_process() {
    let _turn = turn(TWO);
    cuda::set_per_process_memory_fraction(0.25, 0).unwrap();
    let half = bytes_on_gpu(512 * MIB).unwrap();
    let error = bytes_on_gpu(600 * MIB).unwrap_err();
    let Error::OutOfMemory(report) = &error else {
        panic!("{error}")
    };
    assert_eq!(report.limit, Some(1 << 30));
    assert!(bytes_on_gpu(2048 * MIB).unwrap_err().is_out_of_memory());
    cuda::set_per_process_memory_fraction(1.0, 0).unwrap();
    drop((half, bytes_on_gpu(2048 * MIB).unwrap()));
}

#[test]
fn the_summary_is_a_table_of_the_statistics() {
    let _turn = turn(TWO);
    let kept = bytes_on_gpu(30 * MIB).unwrap();
    let small = bytes_on_gpu(1000).unwrap();
    drop(bytes_on_gpu(60 * MIB).unwrap());
    let table = cuda::memory_summary(None).unwrap();
    for line in table.lines() {
        assert_eq!(line.chars().count(), 77, "{line}");
        assert!(line.starts_with('|') && line.ends_with('|'));
    }
    for line in [
        "|             lastref CUDA memory summary, device ID 0                      |",
        "|           CUDA OOMs: 0              |       allocations retried: 0        |",
        "|        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  |",
        "| Allocated memory      |  30721 KiB |  92161 KiB |  92161 KiB |  61440 KiB |",
        "|       from small pool |   1024 B   |   1024 B   |   1024 B   |      0 B   |",
        "| GPU reserved memory   |  94208 KiB |  94208 KiB |  94208 KiB |      0 B   |",
        "| Allocations           |          2 |          3 |          3 |          1 |",
    ] {
        let squeezed = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(
            table.lines().any(|own| squeezed(own) == squeezed(line)),
            "{line}\n{table}"
        );
    }
    drop((kept, small));
}

#[test]
fn the_summary_advises_against_emptying_the_cache_each_step() {
    let _turn = turn(TWO);
    assert!(!cuda::memory_summary(None).unwrap().contains("advice"));
    for _step in 0..3 {
        drop(bytes_on_gpu(60 * MIB).unwrap());
        cuda::empty_cache().unwrap();
    }
    let table = cuda::memory_summary(None).unwrap();
    let advice =
        "\nadvice: empty_cache released what the next step re-allocated, 3 times, 180 MiB: ";
    assert!(table.contains(advice), "{table}");
}

#[test]
fn the_snapshot_holds_every_segment() {
    let _turn = turn(TWO);
    let kept = bytes_on_gpu(30 * MIB).unwrap();
    let snapshot = cuda::memory_snapshot(None).unwrap();
    let total: u64 = snapshot
        .segments
        .iter()
        .map(|segment| segment.total_bytes)
        .sum();
    assert_eq!(total, cuda::memory_reserved(None).unwrap());
    let live: u64 = snapshot
        .segments
        .iter()
        .map(|segment| segment.allocated_bytes)
        .sum();
    assert_eq!(live, kept.nbytes());
}

/// Two threads that copy between the same two tensors in opposite directions take their locks in
/// one order: this ends.
#[test]
fn copies_in_opposite_directions_do_not_wait_for_each_other() {
    let a = Tensor::zeros([64]).unwrap();
    let b = Tensor::ones([64]).unwrap();
    let start = std::sync::Barrier::new(4);
    std::thread::scope(|scope| {
        for (to, from) in [(&a, &b), (&b, &a), (&a, &b), (&b, &a)] {
            let start = &start;
            scope.spawn(move || {
                start.wait();
                for _ in 0..100_000 {
                    to.copy_(from).unwrap();
                }
            });
        }
    });
    // Each copy is whole, so both hold what one of them held.
    let values = a.to_vec::<f32>().unwrap();
    assert!(values.iter().all(|value| *value == values[0]));
}

#[test]
fn a_pool_takes_the_tensors_of_its_scope() {
    let _turn = turn(TWO);
    let pool = cuda::MemPool::new(None).unwrap();
    assert_eq!((pool.device(), pool.memory_reserved()), (0, 0));
    let outside = bytes_on_gpu(30 * MIB).unwrap();
    let (inside, elsewhere) = {
        let _scope = cuda::use_mem_pool(&pool);
        let other = Tensor::empty([100])
            .unwrap()
            .to_device(Device::Cuda(1))
            .unwrap();
        let thread = std::thread::spawn(|| bytes_on_gpu(20 * MIB).unwrap());
        (
            bytes_on_gpu(40 * MIB).unwrap(),
            [other, thread.join().unwrap()],
        )
    };
    assert_eq!(pool.memory_allocated(), 40 * MIB as u64);
    assert_eq!(pool.stats().allocation.current, 1);
    assert_eq!(cuda::memory_allocated(0).unwrap(), 90 * MIB as u64);
    let reserved = pool.memory_reserved();
    assert!(reserved >= 40 * MIB as u64);
    drop(pool);
    assert_eq!(inside.nbytes(), 40 * MIB as u64);
    drop((outside, inside, elsewhere));
    assert!(cuda::MemPool::new(7).is_err());
}
