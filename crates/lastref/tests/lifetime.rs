//! When the memory of a tensor on the GPU is freed: at the moment its last handle goes, however
//! that comes about, and not before.
#![expect(clippy::unwrap_used, reason = "an error here is a failed test")]

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};

use common::{MIB, allocated, bytes_on_gpu, in_use, reserved, total_calls, turn};
use lastref::{DType, Device, Tensor, cuda};

common::also_on_a_driver!("8GiB");

/// Checks the three steps after `last handle gone`: freed, cached, gone from the device.
fn freed_cached_given_back(bytes: u64) {
    assert_eq!(allocated(), 0, "freed");
    assert_eq!((reserved(), in_use()), (bytes, bytes), "cached");
    assert_eq!(cuda::empty_cache().unwrap(), bytes);
    assert_eq!((reserved(), in_use()), (0, 0), "gone from the device");
}

#[test]
fn rebinding_frees() {
    let _turn = turn("8GiB");
    let mut t1 = Tensor::empty([4, 5]).unwrap();
    t1 = t1.cuda().unwrap();
    assert_eq!(allocated(), 512);
    assert_eq!(t1.nbytes(), 80);
    let new_value = Tensor::empty([4, 5]).unwrap();
    assert_eq!(allocated(), 512, "not before the rebinding");
    t1 = new_value;
    assert!(!t1.is_cuda());
    freed_cached_given_back(2 << 20);
}

#[test]
fn drop_frees() {
    let _turn = turn("8GiB");
    let tensor = bytes_on_gpu(6 * MIB).unwrap();
    assert_eq!(allocated(), 6 << 20);
    let calls = total_calls(0);
    drop(tensor);
    assert_eq!(total_calls(0), calls, "without a device call");
    freed_cached_given_back(6 << 20);
}

#[test]
fn the_end_of_a_scope_frees() {
    let _turn = turn("8GiB");
    {
        let _tensor = bytes_on_gpu(6 * MIB).unwrap();
        assert_eq!(allocated(), 6 << 20);
    }
    freed_cached_given_back(6 << 20);
}

#[test]
fn shadowing_does_not_free() {
    let _turn = turn("8GiB");
    {
        let t1 = bytes_on_gpu(6 * MIB).unwrap();
        assert!(t1.is_cuda());
        let t1 = Tensor::empty([4, 5]).unwrap();
        assert!(!t1.is_cuda());
        assert_eq!(allocated(), 6 << 20, "the first t1 lives to the end");
    }
    freed_cached_given_back(6 << 20);
}

#[test]
fn replacing_an_element_of_a_container_frees() {
    let _turn = turn("8GiB");
    let mut layers = vec![
        bytes_on_gpu(2 * MIB).unwrap(),
        bytes_on_gpu(4 * MIB).unwrap(),
    ];
    layers[1] = Tensor::empty([1]).unwrap();
    assert_eq!(allocated(), 2 << 20);
    layers.clear();
    freed_cached_given_back(6 << 20);
}

#[test]
fn a_view_keeps_a_big_storage() {
    let _turn = turn("8GiB");
    let big = bytes_on_gpu(100 * MIB).unwrap();
    let weak = big.downgrade();
    let view = big.narrow(0, 7, 1).unwrap();
    assert_eq!((view.nbytes(), view.ref_count()), (1, 2));
    drop(big);
    assert_eq!(allocated(), 100 << 20, "one element keeps all of it");
    assert_eq!(weak.ref_count(), 1);
    assert_eq!(weak.upgrade().unwrap().numel(), 100 << 20);

    let only_this = view.copy().unwrap();
    drop(view);
    assert_eq!(allocated(), 512, "a copy does not");
    assert!(weak.upgrade().is_none());
    drop(only_this);
    assert_eq!(allocated(), 0);
}

#[test]
fn a_clone_copies_no_bytes_and_frees_when_dropped_last_on_another_thread() {
    let _turn = turn("8GiB");
    let tensor = bytes_on_gpu(6 * MIB).unwrap();
    let calls = total_calls(0);
    let clone = tensor.clone();
    assert_eq!(clone.data_ptr(), tensor.data_ptr());
    assert_eq!(total_calls(0), calls);
    assert_eq!(allocated(), 6 << 20);

    let (send, receive) = std::sync::mpsc::channel::<()>();
    let other = std::thread::spawn(move || {
        receive.recv().unwrap();
        let before = allocated();
        drop(clone);
        (before, allocated())
    });
    drop(tensor);
    assert_eq!(allocated(), 6 << 20, "the other thread holds it");
    send.send(()).unwrap();
    assert_eq!(other.join().unwrap(), (6 << 20, 0));
    freed_cached_given_back(6 << 20);
}

#[test]
fn unwinding_frees() {
    let _turn = turn("8GiB");
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        let _tensor = bytes_on_gpu(6 * MIB).unwrap();
        assert_eq!(allocated(), 6 << 20);
        panic!("on purpose");
    }));
    assert_eq!(
        outcome.unwrap_err().downcast_ref::<&str>(),
        Some(&"on purpose")
    );
    freed_cached_given_back(6 << 20);
}

#[test]
fn a_thread_local_tensor_frees_when_its_thread_ends() {
    thread_local! {
        static KEPT: std::cell::RefCell<Option<Tensor>> = const { std::cell::RefCell::new(None) };
    }
    let _turn = turn("8GiB");
    std::thread::spawn(|| {
        // Registered before lastref's own thread-local variables, so destroyed after them.
        KEPT.with(|kept| {
            *kept.borrow_mut() = Some(Tensor::empty([1]).unwrap());
        });
        let side = cuda::Stream::new().unwrap();
        let tensor = side.scope(|| bytes_on_gpu(6 * MIB).unwrap()).unwrap();
        KEPT.with(|kept| *kept.borrow_mut() = Some(tensor));
        assert_eq!(allocated(), 6 << 20);
    })
    .join()
    .unwrap();
    freed_cached_given_back(6 << 20);
}

#[test]
fn many_threads_may_drop_handles_of_one_tensor() {
    let _turn = turn("8GiB");
    for _ in 0..20 {
        let tensor = bytes_on_gpu(2 * MIB).unwrap();
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let own = tensor.clone();
                std::thread::spawn(move || own.view([-1, 2]).unwrap().ref_count())
            })
            .collect();
        drop(tensor);
        for thread in threads {
            assert!(thread.join().unwrap() >= 2);
        }
        assert_eq!(allocated(), 0);
    }
}

#[test]
fn record_stream_keeps_memory_until_the_stream_is_done() {
    let _turn = turn("8GiB");
    let gpu = (DType::U8, Device::Cuda(0));
    let side = cuda::Stream::new().unwrap();
    let tensor = bytes_on_gpu(64 * MIB).unwrap();
    let address = tensor.data_ptr();
    let target = side.scope(|| Tensor::empty_with([64 * MIB], gpu)).unwrap();
    let target = target.unwrap();
    side.wait_stream(&cuda::current_stream(None).unwrap())
        .unwrap();
    common::hold(&side);
    side.scope(|| target.copy_(&tensor)).unwrap().unwrap();
    tensor.record_stream(&side).unwrap();

    drop(tensor);
    let stats = cuda::memory_stats(0).unwrap();
    assert_eq!(stats.allocated_bytes.all.current, 64 << 20, "the target");
    assert_eq!(
        stats.active_bytes.all.current,
        128 << 20,
        "the stream still reads the source"
    );
    let next = bytes_on_gpu(64 * MIB).unwrap();
    assert_ne!(next.data_ptr(), address, "so it is not given away yet");
    drop((next, target));

    cuda::empty_cache().unwrap();
    let stats = cuda::memory_stats(0).unwrap();
    assert_eq!(stats.active_bytes.all.current, 0, "the stream is done");
    assert_eq!(reserved(), 0);
}
