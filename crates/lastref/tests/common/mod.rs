//! One simulated GPU for the tests of a file, which run one at a time.
#![allow(
    dead_code,
    clippy::allow_attributes,
    reason = "each test file uses a part"
)]
#![expect(clippy::unwrap_used, reason = "an error here is a failed test")]

use std::sync::{Mutex, MutexGuard, PoisonError};

use lastref::alloc::CheckLevel;
use lastref::alloc::sim::SimDevice;
use lastref::{Tensor, cuda, sim};

pub(crate) const KIB: i64 = 1 << 10;
pub(crate) const MIB: i64 = 1 << 20;
pub(crate) const GIB: i64 = 1 << 30;

static TURN: Mutex<()> = Mutex::new(());

/// The device, for the length of a test: empty at its start, found in order at its end.
pub(crate) struct Turn {
    _turn: MutexGuard<'static, ()>,
}

/// Waits for this test's turn on the simulated GPUs that `spec` names.
pub(crate) fn turn(spec: &str) -> Turn {
    sim::enable(spec).unwrap();
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    cuda::set_device(0).unwrap();
    cuda::empty_cache().unwrap();
    for index in 0..cuda::device_count() {
        assert_eq!(allocated_on(index), 0, "an earlier test left a tensor");
        assert_eq!(cuda::memory_reserved(index).unwrap(), 0);
        cuda::reset_peak_memory_stats(index).unwrap();
        cuda::reset_accumulated_memory_stats(index).unwrap();
        simulated(index).reset_counters();
    }
    Turn { _turn: turn }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        for index in 0..cuda::device_count() {
            cuda::synchronize(index).unwrap();
            assert_eq!(simulated(index).errors(), Vec::<String>::new());
            cuda::allocator(index)
                .unwrap()
                .check_invariants(CheckLevel::Device)
                .unwrap();
        }
    }
}

pub(crate) fn simulated(index: u32) -> SimDevice {
    sim::device(index).unwrap()
}

/// Keeps what is submitted to `stream` from now on pending until something waits for it.
pub(crate) fn hold(stream: &cuda::Stream) {
    let device = simulated(stream.device());
    device.delay_events(u32::MAX);
    // An event that says "not yet" to every query; work behind it waits.
    stream.record_event().unwrap();
    device.clear_faults();
}

pub(crate) fn allocated() -> u64 {
    allocated_on(0)
}

pub(crate) fn allocated_on(index: u32) -> u64 {
    cuda::memory_allocated(index).unwrap()
}

pub(crate) fn reserved() -> u64 {
    cuda::memory_reserved(0).unwrap()
}

/// What the device itself says is in use.
pub(crate) fn in_use() -> u64 {
    let info = cuda::mem_get_info(0).unwrap();
    info.total_bytes - info.free_bytes
}

/// A tensor of so many bytes on device 0.
pub(crate) fn bytes_on_gpu(bytes: i64) -> lastref::Result<Tensor> {
    use lastref::{DType, Device};
    Tensor::empty_with([bytes], (DType::U8, Device::Cuda(0)))
}
