//! Streams, events, copies between devices and what goes through the host.

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};

use common::{MIB, allocated_on, hold, turn};
use lastref::alloc::StreamId;
use lastref::alloc::sim::Call;
use lastref::{DType, Device, Tensor, cuda};

const TWO: &str = "2x4GiB";

common::also_on_a_driver!(TWO);

const GPU: Device = Device::Cuda(0);
const OTHER: Device = Device::Cuda(1);

#[test]
fn work_goes_to_the_current_stream() {
    let _turn = turn(TWO);
    let side = cuda::Stream::new().unwrap();
    assert_ne!(side.id(), StreamId::DEFAULT);
    let tensor = side
        .scope(|| {
            assert_eq!(cuda::current_stream(None).unwrap(), side);
            Tensor::full_with([1 << 20], 7, (DType::I32, GPU)).unwrap()
        })
        .unwrap();
    assert_eq!(tensor.storage().block().unwrap().stream(), side.id());
    assert_eq!(
        cuda::current_stream(None).unwrap(),
        cuda::Stream::default_of(None).unwrap()
    );
    // Read on the default stream, which knows nothing of the fill: it must be made to wait.
    cuda::current_stream(None)
        .unwrap()
        .wait_stream(&side)
        .unwrap();
    assert_eq!(tensor.to_vec::<i32>().unwrap(), vec![7; 1 << 20]);
}

#[test]
fn reading_waits_for_the_current_stream_only() {
    let _turn = turn(TWO);
    let side = cuda::Stream::new().unwrap();
    let busy = side
        .scope(|| Tensor::zeros_with([MIB], (DType::U8, GPU)).unwrap())
        .unwrap();
    hold(&side);
    side.scope(|| busy.fill_(1).unwrap()).unwrap();
    let own = Tensor::full_with([4], 3, (DType::U8, GPU)).unwrap();
    assert_eq!(own.to_vec::<u8>().unwrap(), [3; 4]);
    assert!(!side.query().unwrap(), "the other fill is not waited for");
    side.synchronize().unwrap();
    assert!(side.query().unwrap());
}

#[test]
fn guards_restore_what_was_current() {
    let _turn = turn(TWO);
    let default = cuda::current_stream(None).unwrap();
    let on_other = cuda::Stream::with(1, -1).unwrap();
    assert_eq!((on_other.device(), on_other.priority()), (1, -1));
    {
        let _stream = on_other.enter();
        assert_eq!(cuda::current_device(), 1);
        assert_eq!("cuda".parse::<Device>().unwrap(), OTHER);
        {
            let _device = cuda::DeviceGuard::new(0).unwrap();
            assert_eq!(cuda::current_device(), 0);
            assert_eq!(cuda::current_stream(None).unwrap(), default);
        }
        assert_eq!(cuda::current_stream(None).unwrap(), on_other);
    }
    assert_eq!(cuda::current_device(), 0);
    assert_eq!(cuda::current_stream(1).unwrap().id(), StreamId::DEFAULT);

    let outcome = catch_unwind(AssertUnwindSafe(|| on_other.scope(|| panic!("on purpose"))));
    assert!(outcome.is_err());
    assert_eq!(cuda::current_device(), 0, "restored by unwinding");
    assert_eq!(cuda::current_stream(1).unwrap().id(), StreamId::DEFAULT);

    let elsewhere = std::thread::spawn(|| {
        cuda::set_device(1).unwrap();
        cuda::current_device()
    });
    assert_eq!(elsewhere.join().unwrap(), 1);
    assert_eq!(cuda::current_device(), 0, "each thread has its own");
}

#[test]
fn streams_come_from_a_pool_in_turn() {
    let _turn = turn(TWO);
    let made: Vec<_> = (0..33).map(|_| cuda::Stream::with(1, 0).unwrap()).collect();
    let mut ids: Vec<_> = made[..32].iter().map(cuda::Stream::id).collect();
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 32, "32 different streams");
    assert_eq!(made[32], made[0], "then the first again");
    assert!(!ids.contains(&cuda::Stream::with(1, -1).unwrap().id()));
}

#[test]
fn events_order_streams_and_measure() {
    let _turn = turn(TWO);
    let (a, b) = (cuda::Stream::new().unwrap(), cuda::Stream::new().unwrap());
    let tensor = a
        .scope(|| Tensor::zeros_with([16 * MIB], (DType::U8, GPU)).unwrap())
        .unwrap();
    let start = a.record_event().unwrap();
    hold(&a);
    for value in 1..=20 {
        a.scope(|| tensor.fill_(value).unwrap()).unwrap();
    }
    let end = a.record_event().unwrap();
    assert!(!end.query().unwrap(), "20 fills are pending");
    b.wait_event(&end).unwrap();
    let bytes = b.scope(|| tensor.to_bytes().unwrap()).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 20), "b waited for a");
    assert!(end.query().unwrap());
    assert!(start.elapsed_time(&end).unwrap() > 0.0);
    assert_eq!(end.device(), Some(0));
    let on_other = cuda::Stream::default_of(1).unwrap();
    let error = end.record(&on_other).unwrap_err().to_string();
    assert!(error.contains("belongs to cuda:0"), "{error}");
}

#[test]
fn copies_between_devices_are_ordered_both_ways() {
    let _turn = turn(TWO);
    let here = cuda::current_stream(0).unwrap();
    let there = cuda::current_stream(1).unwrap();
    let peer_copies = common::calls(1, Call::CopyFromPeer);
    let from = Tensor::zeros_with([256, 256], (DType::I32, GPU)).unwrap();

    hold(&here);
    from.fill_(5).unwrap();
    let to = from.to_device(OTHER).unwrap();
    assert_eq!(to.device(), OTHER);
    assert_eq!(
        to.to_vec::<i32>().unwrap(),
        vec![5; 1 << 16],
        "the copy waits for what wrote the source"
    );

    drop(to);

    // Written again, freed and used again at once, while the copy is pending.
    hold(&there);
    let to = from.to_device(OTHER).unwrap();
    from.fill_(-1).unwrap();
    drop(from);
    let reuse = Tensor::full_with([1 << 16], -2, (DType::I32, GPU)).unwrap();
    cuda::synchronize(0).unwrap();
    assert_eq!(
        to.to_vec::<i32>().unwrap(),
        vec![5; 1 << 16],
        "what writes the source next waits for the copy"
    );

    // A strided source is brought together in memory that is free again at once.
    let from = reuse.view([256, 256]).unwrap().transpose(0, 1).unwrap();
    hold(&there);
    let turned = from.to_device(OTHER).unwrap();
    let again = Tensor::full_with([1 << 17], -3, (DType::I32, GPU)).unwrap();
    cuda::synchronize(0).unwrap();
    assert_eq!(turned.to_vec::<i32>().unwrap(), vec![-2; 1 << 16]);
    drop((from, turned, again));

    assert_eq!(reuse.select(0, 0).unwrap().item::<i32>().unwrap(), -2);
    assert_eq!(common::calls(1, Call::CopyFromPeer) - peer_copies, 3);
    drop((to, reuse));
    assert_eq!((allocated_on(0), allocated_on(1)), (0, 0));
}

#[test]
fn copies_between_devices_fill_strided_views_and_convert() {
    let _turn = turn(TWO);
    let to = Tensor::zeros_with([4, 6], (DType::F64, OTHER)).unwrap();
    let from = Tensor::arange_with(0, 8, 1, (DType::I16, GPU)).unwrap();
    let from = from.view([4, 2]).unwrap();
    to.slice(1, 1, None, 3).unwrap().copy_(&from).unwrap();
    let expected: Vec<f64> = (0..24)
        .map(|at| match (at / 6, at % 6) {
            (row, 1) => f64::from(row * 2),
            (row, 4) => f64::from(row * 2 + 1),
            _ => 0.0,
        })
        .collect();
    assert_eq!(to.to_vec::<f64>().unwrap(), expected);
}

#[test]
fn what_rows_can_express_does_not_go_through_the_host() {
    let _turn = turn(TWO);
    let square = Tensor::arange_with(0, 4096, 1, (DType::I64, GPU)).unwrap();
    let square = square.view([64, 64]).unwrap();
    let before = cuda::copy_counts();

    let column = square.select(1, 3).unwrap().copy().unwrap();
    let block = square.narrow(1, 8, 16).unwrap().copy().unwrap();
    let turned = square.transpose(0, 1).unwrap().contiguous().unwrap();
    square.slice(1, 0, None, 2).unwrap().fill_(-1).unwrap();
    assert_eq!(cuda::copy_counts(), before, "all on the device");

    let expected: Vec<i64> = (0..64).map(|row| row * 64 + 3).collect();
    assert_eq!(column.to_vec::<i64>().unwrap(), expected);
    assert_eq!(block.select(0, 1).unwrap().to_vec::<i64>().unwrap()[0], 72);
    assert_eq!(
        turned.select(0, 3).unwrap().to_vec::<i64>().unwrap(),
        expected
    );

    let converted = square.to_dtype(DType::F32).unwrap();
    let after = cuda::copy_counts();
    assert_eq!(after.staged_copies, before.staged_copies + 1);
    assert_eq!(after.staged_bytes, before.staged_bytes + 4096 * 8);
    assert_eq!(
        converted.select(0, 0).unwrap().to_vec::<f32>().unwrap()[..2],
        [-1.0, 1.0]
    );

    let turned = square
        .view([2, 16, 128])
        .unwrap()
        .permute([2, 1, 0])
        .unwrap();
    let twice = turned.expand([2, 128, 16, 2]).unwrap();
    let on_device = twice.copy().unwrap();
    assert_eq!(
        cuda::copy_counts(),
        after,
        "64 copies of rows are within the limit"
    );
    let thrice = turned.expand([3, 128, 16, 2]).unwrap();
    let staged = thrice.copy().unwrap();
    assert_eq!(
        cuda::copy_counts().staged_copies,
        after.staged_copies + 1,
        "96 are not"
    );
    let staged = staged.narrow(0, 0, 2).unwrap();
    assert_eq!(staged.to_bytes().unwrap(), on_device.to_bytes().unwrap());
}

#[test]
fn exports_of_simulated_memory_are_host_memory_after_the_stream() {
    if common::on_driver() {
        return; // Its memory is no host memory.
    }
    use lastref::dlpack::{self, dlpark};
    let _turn = turn(TWO);
    let side = cuda::Stream::new().unwrap();
    let tensor = side
        .scope(|| Tensor::zeros_with([MIB], (DType::U8, GPU)).unwrap())
        .unwrap();
    hold(&side);
    let exported = side
        .scope(|| {
            tensor.fill_(30).unwrap();
            tensor.to_dlpack().unwrap()
        })
        .unwrap();
    assert!(side.query().unwrap(), "waited for");
    assert_eq!(
        exported.validate().unwrap().device(),
        dlpark::ffi::DLDevice::CPU
    );
    // SAFETY: exported above, and nothing else touches it now.
    let imported = unsafe { dlpack::import(exported) }.unwrap();
    assert!(!imported.is_cuda() && imported.storage().is_foreign());
    assert_eq!(imported.data_ptr(), tensor.data_ptr());
    assert_eq!(imported.to_vec::<u8>().unwrap(), vec![30; 1 << 20]);
    assert_eq!(tensor.ref_count(), 2);
    drop(tensor);
    assert_eq!(allocated_on(0), 1 << 20, "the export keeps it");
    std::thread::spawn(move || drop(imported)).join().unwrap();
    assert_eq!(allocated_on(0), 0);
}

/// An import of one's own export is another storage on the same memory.
#[test]
fn copies_between_two_storages_on_the_same_memory_read_before_they_write() {
    if common::on_driver() {
        return; // Its memory is no host memory.
    }
    use lastref::dlpack;
    let _turn = turn(TWO);
    for device in [Device::Cpu, GPU] {
        let own = Tensor::arange_with(0, 100, 1, (DType::I16, device)).unwrap();
        // SAFETY: exported here, and only this test uses it.
        let again = unsafe { dlpack::import(own.to_dlpack().unwrap()) }.unwrap();
        assert!(!again.same_storage(&own));
        let (first, last) = (own.narrow(0, 0, 99), own.narrow(0, 1, 99));
        let (again_first, again_last) = (again.narrow(0, 0, 99), again.narrow(0, 1, 99));

        again_last.unwrap().copy_(&first.unwrap()).unwrap();
        let expected: Vec<i16> = [0].into_iter().chain(0..99).collect();
        assert_eq!(own.to_vec::<i16>().unwrap(), expected);

        last.unwrap().copy_(&again_first.unwrap()).unwrap();
        let expected: Vec<i16> = [0, 0].into_iter().chain(0..98).collect();
        assert_eq!(own.to_vec::<i16>().unwrap(), expected);
        assert_eq!(again.to_vec::<i16>().unwrap(), expected);
    }
}

#[test]
fn memory_goes_without_asking_to_a_stream_that_waits_for_the_one_it_was_freed_on() {
    let _turn = turn(TWO);
    let (a, b) = (cuda::Stream::new().unwrap(), cuda::Stream::new().unwrap());
    let make = |stream: &cuda::Stream| {
        let tensor = stream.scope(|| Tensor::empty_with([48 * MIB], (DType::U8, GPU)).unwrap());
        tensor.unwrap()
    };
    let tensor = make(&a);
    let at = tensor.data_ptr();
    hold(&a);
    a.scope(|| tensor.fill_(1).unwrap()).unwrap();
    drop(tensor);
    b.wait_stream(&a).unwrap();
    // A driver does not count.
    let asked = || {
        let device = lastref::sim::device(0);
        device.map(|device| device.counters().calls(Call::QueryEvent))
    };
    let before = asked();
    assert_eq!(make(&b).data_ptr(), at);
    assert_eq!(asked(), before);
    assert!(!a.query().unwrap(), "and nobody waited");
    a.synchronize().unwrap();
}
