//! GPUs for the tests of a file, which run one at a time: simulated ones, and once more the ones that the
//! stand-in for the driver plays ([`also_on_a_driver`]), with counts of memory and calls from the driver.
#![allow(
    dead_code,
    unused_imports,
    unused_macros,
    clippy::allow_attributes,
    reason = "each test file uses a part"
)]
#![expect(clippy::unwrap_used, reason = "an error here is a failed test")]

#[path = "../../../lastref-cuda/tests/common/mod.rs"]
pub(crate) mod standin;

use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

use lastref::alloc::CheckLevel;
use lastref::alloc::sim::{Call, SimDevice};
use lastref::{Tensor, cuda, sim};
use standin::Standin;

/// Set where the driver is to be used instead of simulated GPUs.
const DRIVER: &str = "LASTREF_TEST_DRIVER";

/// A test that runs all tests of its file again, on the GPUs that `spec` names, which the stand-in plays.
macro_rules! also_on_a_driver {
    ($spec:expr) => {
        #[test]
        fn also_on_a_driver() {
            common::run_on_a_driver($spec);
        }
    };
}
pub(crate) use also_on_a_driver;

pub(crate) fn run_on_a_driver(spec: &str) {
    if on_driver() {
        return;
    }
    let (count, memory) = spec.split_once('x').unwrap_or(("1", spec));
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--nocapture", "--test-threads=1"])
        .env("LD_LIBRARY_PATH", standin::folder("standin"))
        .env_remove(sim::VARIABLE)
        .env(DRIVER, "1")
        .env("LASTREF_STANDIN_DEVICES", count)
        .env("LASTREF_STANDIN_MEMORY", memory)
        .env("LASTREF_STANDIN_QUIET", "1")
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}\n{}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

pub(crate) fn on_driver() -> bool {
    std::env::var_os(DRIVER).is_some()
}

pub(crate) const KIB: i64 = 1 << 10;
pub(crate) const MIB: i64 = 1 << 20;
pub(crate) const GIB: i64 = 1 << 30;

static TURN: Mutex<()> = Mutex::new(());

/// The device, for the length of a test: empty at its start, found in order at its end.
pub(crate) struct Turn {
    _turn: MutexGuard<'static, ()>,
}

/// Waits for this test's turn on the GPUs that `spec` names.
pub(crate) fn turn(spec: &str) -> Turn {
    if on_driver() {
        let spec: sim::Spec = spec.parse().unwrap();
        assert_eq!(sim::spec(), None, "the driver's");
        assert_eq!(cuda::device_count(), spec.count());
        let total = cuda::get_device_properties(0).unwrap().total_bytes;
        assert_eq!(total, spec.capacity_bytes());
    } else {
        sim::enable(spec).unwrap();
    }
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    cuda::set_device(0).unwrap();
    cuda::empty_cache().unwrap();
    for index in 0..cuda::device_count() {
        assert_eq!(allocated_on(index), 0, "an earlier test left a tensor");
        assert_eq!(cuda::memory_reserved(index).unwrap(), 0);
        cuda::reset_peak_memory_stats(index).unwrap();
        cuda::reset_accumulated_memory_stats(index).unwrap();
        assert_eq!(in_use_on(index), 0);
        if !on_driver() {
            simulated(index).reset_counters();
        }
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
            if !on_driver() {
                assert_eq!(simulated(index).errors(), Vec::<String>::new());
            }
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
    // An event that says "not yet" to every query; work behind it waits.
    if on_driver() {
        Standin::new().delay_events(true);
        stream.record_event().unwrap();
        Standin::new().delay_events(false);
    } else {
        let device = simulated(stream.device());
        device.delay_events(u32::MAX);
        stream.record_event().unwrap();
        device.clear_faults();
    }
}

/// How often the device has been asked for anything.
pub(crate) fn total_calls(index: u32) -> u64 {
    if on_driver() {
        Standin::new().calls("*")
    } else {
        simulated(index).counters().total_calls()
    }
}

/// How often the device has been asked for this; the driver counts all devices together.
pub(crate) fn calls(index: u32, call: Call) -> u64 {
    if !on_driver() {
        return simulated(index).counters().calls(call);
    }
    Standin::new().calls(match call {
        Call::CreatePage => "cuMemCreate",
        Call::UnmapPage => "cuMemUnmap",
        Call::CopyToHost => "cuMemcpyDtoHAsync",
        Call::CopyFromPeer => "cuMemcpyPeerAsync",
        other => panic!("{other:?} has no function named here"),
    })
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
    in_use_on(0)
}

pub(crate) fn in_use_on(index: u32) -> u64 {
    let info = cuda::mem_get_info(index).unwrap();
    info.total_bytes - info.free_bytes
}

/// A tensor of so many bytes on device 0.
pub(crate) fn bytes_on_gpu(bytes: i64) -> lastref::Result<Tensor> {
    use lastref::{DType, Device};
    Tensor::empty_with([bytes], (DType::U8, Device::Cuda(0)))
}
