//! Every call to the driver fails once, in turn: nothing panics, nothing is lost, and afterwards all works.
#![cfg(all(target_os = "linux", target_pointer_width = "64"))]
#![expect(clippy::unwrap_used, reason = "an error here is a failed test")]

mod common;

use common::{Standin, run};
use lastref_alloc::{
    AllocatorOptions, Backing, Block, CachingAllocator, CheckLevel, Device, DevicePtr,
    DeviceResult, EventId, Extent2d, FillValue, PageId, StreamId,
};
use lastref_cuda::{CudaDevice, PinnedBuffer, SYMBOLS, stats};

const MIB: u64 = 1 << 20;
const DEFAULT: StreamId = StreamId::DEFAULT;
const OUT_OF_MEMORY: i32 = 2;
const UNKNOWN: i32 = 999;

/// Called while devices are looked for, which `driver.rs` tests, or by cudarc's safe layer only.
const ELSEWHERE: &[&str] = &[
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem_v2",
    "cuDriverGetVersion",
    "cuInit",
    "cuLaunchKernel",
    "cuMemAllocAsync",
    "cuMemFreeAsync",
    "cuMemGetAllocationGranularity",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    // Once for each pair of devices; `peer_access` has it fail.
    "cuCtxEnablePeerAccess",
    "cuDeviceCanAccessPeer",
    // For the text of an error. One whose text fails too is told by its number.
    "cuGetErrorName",
    "cuGetErrorString",
];

/// What a program over the device holds.
#[derive(Default)]
struct Held {
    segments: Vec<DevicePtr>,
    range: Option<(DevicePtr, u64)>,
    pages: Vec<PageId>,
    mapped: Vec<DevicePtr>,
    streams: Vec<StreamId>,
    events: Vec<EventId>,
    pinned: Vec<PinnedBuffer>,
    failures: u32,
}

impl Held {
    fn note<T>(&mut self, result: DeviceResult<T>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                assert!(!error.to_string().is_empty());
                self.failures += 1;
                None
            }
        }
    }

    /// Calls everything once, as far as it can.
    fn program(device: &CudaDevice, peer: &CudaDevice) -> Self {
        let mut held = Self::default();
        for bytes in [3 * MIB, 3 * MIB] {
            if let Some(ptr) = held.note(device.alloc_segment(bytes)) {
                held.segments.push(ptr);
            }
        }
        for _ in 0..2 {
            if let Some(stream) = held.note(device.create_stream(0)) {
                held.streams.push(stream);
            }
            if let Some(event) = held.note(device.create_event()) {
                held.events.push(event);
            }
        }
        held.note(device.memory_info());
        let _ = device.is_capturing();
        held.pages(device);
        held.work(device, peer);
        if let Some(mut pinned) = held.note(device.alloc_pinned(10_000)) {
            held.note(pinned.record_stream(device, DEFAULT));
            held.pinned.push(pinned);
        }
        held.give_back(device);
        held
    }

    fn pages(&mut self, device: &CudaDevice) {
        let Some(page_bytes) = device.properties().page_bytes else {
            return;
        };
        let bytes = 2 * page_bytes;
        let Some(range) = self.note(device.reserve_range(bytes)) else {
            return;
        };
        self.range = Some((range, bytes));
        for at in [range, range.offset(page_bytes)] {
            let Some(page) = self.note(device.create_page()) else {
                continue;
            };
            self.pages.push(page);
            if self.note(device.map_page(at, page)).is_some() {
                self.mapped.push(at);
            }
        }
        if self.note(device.set_access(range, bytes)).is_some() {
            let value = FillValue::U32(7);
            self.note(device.fill(range, value, bytes / 4, DEFAULT));
        }
    }

    fn work(&mut self, device: &CudaDevice, peer: &CudaDevice) {
        let &[a, b] = self.segments.as_slice() else {
            return;
        };
        let (Some(&stream), Some(&event)) = (self.streams.first(), self.events.first()) else {
            return;
        };
        let rows = Extent2d {
            width_bytes: 64,
            height: 4,
            dst_pitch: 128,
            src_pitch: 256,
        };
        self.note(device.copy_from_host(a, &[3; 5000], stream));
        self.note(device.record_event(event, stream));
        self.note(device.wait_event(DEFAULT, event));
        self.note(device.copy(b, a, 5000, DEFAULT));
        self.note(device.copy_2d(b, a, rows, DEFAULT));
        for value in [FillValue::U8(1), FillValue::U16(2), FillValue::U32(3)] {
            self.note(device.fill(a, value, 100, stream));
            self.note(device.fill_2d(b, value, rows, stream));
        }
        let mut read = vec![0; 3 << 20];
        self.note(device.copy_to_host(&mut read, a, stream));
        self.note(device.query_event(event));
        self.note(device.synchronize_event(event));
        if let Some(&end) = self.events.get(1)
            && self.note(device.record_event(end, stream)).is_some()
        {
            self.note(device.synchronize_stream(stream));
            self.note(device.elapsed_microseconds(event, end));
        }
        self.note(device.query_stream(stream));
        if let Some(far) = self.note(peer.alloc_segment(MIB)) {
            let index = peer.properties().index;
            self.note(device.copy_from_peer(a, index, far, MIB, stream));
            self.note(device.synchronize());
            if self.note(peer.free_segment(far)).is_none() {
                peer.free_segment(far).unwrap();
            }
        }
    }

    /// Gives back what is held; what fails is held still.
    fn give_back(&mut self, device: &CudaDevice) {
        self.note(device.synchronize());
        let mut failures = 0;
        let mut fails = |result: DeviceResult<()>| {
            failures += u32::from(result.is_err());
            result.is_err()
        };
        self.mapped.retain(|ptr| fails(device.unmap_page(*ptr)));
        self.pages.retain(|page| fails(device.destroy_page(*page)));
        self.range
            .take_if(|(ptr, bytes)| !fails(device.release_range(*ptr, *bytes)));
        self.segments.retain(|ptr| fails(device.free_segment(*ptr)));
        self.events
            .retain(|event| fails(device.destroy_event(*event)));
        self.streams
            .retain(|stream| fails(device.destroy_stream(*stream)));
        self.pinned.clear();
        self.failures += failures;
        self.note(device.trim_pinned());
    }

    fn is_empty(&self) -> bool {
        self.segments.is_empty()
            && self.range.is_none()
            && self.pages.is_empty()
            && self.streams.is_empty()
            && self.events.is_empty()
    }
}

#[test]
fn every_call_of_a_device_may_fail() {
    run("calls", &[("MEMORY", "256MiB"), ("DEVICES", "2")]);
    let settings = [
        ("MEMORY", "256MiB"),
        ("DEVICES", "2"),
        ("VIRTUAL_MEMORY", "0"),
    ];
    run("calls", &settings);
}

#[test]
#[ignore = "run by the others"]
fn calls() {
    let devices = lastref_cuda::devices().unwrap();
    let (device, peer) = (&devices[0], &devices[1]);
    let standin = Standin::new();
    // The context is made at the first use; if that fails, at the next.
    standin.fail("cuDevicePrimaryCtxRetain", 1, OUT_OF_MEMORY);
    assert!(device.memory_info().is_err());
    let before = device.memory_info().unwrap();

    // Whether peers copy directly is settled once.
    standin.fail("cuCtxEnablePeerAccess", 1, UNKNOWN);
    assert_eq!(
        Held::program(device, peer).failures,
        0,
        "a slower way is no failure"
    );
    assert_eq!(
        Held::program(device, peer).failures,
        0,
        "nothing else fails by itself"
    );

    let mut num_failures = 0;
    for symbol in SYMBOLS {
        if ELSEWHERE.contains(symbol) {
            continue;
        }
        let called = standin.calls(symbol);
        Held::program(device, peer);
        let calls = standin.calls(symbol) - called;
        let is_of_pages = [
            "cuMemAddress",
            "cuMemCreate",
            "cuMemRelease",
            "cuMemMap",
            "cuMemUnmap",
            "cuMemSetAccess",
        ]
        .iter()
        .any(|part| symbol.starts_with(part));
        if is_of_pages && device.properties().page_bytes.is_none() {
            assert_eq!(calls, 0, "{symbol}");
            continue;
        }
        assert!(
            calls > 0,
            "{symbol} is never called: it need not be looked up"
        );
        for n in 1..=calls {
            for code in [UNKNOWN, OUT_OF_MEMORY] {
                standin.fail(symbol, n, code);
                let lost = stats().failed_releases;
                let mut held = Held::program(device, peer);
                let is_told = held.failures > 0 || stats().failed_releases > lost;
                // What is only asked may be answered by doing without.
                let is_quiet = matches!(
                    *symbol,
                    "cuStreamIsCapturing"
                        | "cuEventQuery"
                        | "cuCtxGetCurrent"
                        | "cuCtxSetCurrent"
                        | "cuMemHostAlloc"
                        | "cuMemGetInfo_v2"
                );
                assert!(is_told || is_quiet, "nobody is told of {symbol}, call {n}");
                num_failures += u32::from(is_told);
                standin.clear();
                held.give_back(device);
                assert!(held.is_empty(), "after {symbol}, call {n}, code {code}");
                assert_eq!(device.memory_info().unwrap(), before, "{symbol}, call {n}");
                assert_eq!((standin.used(0), standin.used(1)), (0, 0), "{symbol}, {n}");
            }
        }
        assert_eq!(Held::program(device, peer).failures, 0, "after {symbol}");
    }
    assert!(num_failures > 200, "only {num_failures} failures were told");
}

// ---- the allocator over it -----------------------------------------------------------------

#[test]
fn the_allocator_survives_the_failure_of_every_call() {
    run("allocator", &[("MEMORY", "64MiB")]);
}

/// Sizes that come and go on two streams, on a device that is hardly larger than what is live.
fn go(
    device: &CudaDevice,
    backing: Backing,
    other: StreamId,
) -> (CachingAllocator<CudaDevice>, u32) {
    let options = AllocatorOptions::new().with_backing(backing);
    let allocator = CachingAllocator::with_options(device.clone(), &options);
    let mut live: Vec<Block<CudaDevice>> = Vec::new();
    let mut failures = 0;
    for step in 0..24_u64 {
        let bytes = [9 * MIB, 1000, 5 * MIB + 700, 13 * MIB, 3 * MIB][(step % 5) as usize];
        let stream = if step % 3 == 0 { other } else { DEFAULT };
        match allocator.alloc(bytes, stream) {
            Ok(block) => {
                let _ = device.fill(block.ptr(), FillValue::U8(1), 64, stream);
                live.push(block);
            }
            Err(_) => failures += 1,
        }
        if step % 2 == 1 && live.len() > 2 {
            live.swap_remove((step / 2) as usize % live.len());
        }
        if step % 7 == 6 {
            failures += u32::from(allocator.empty_cache().is_err());
        }
        allocator.check_invariants(CheckLevel::Structure).unwrap();
    }
    drop(live);
    (allocator, failures)
}

#[test]
#[ignore = "run by the others"]
fn allocator() {
    let device = &lastref_cuda::devices().unwrap()[0];
    let standin = Standin::new();
    let other = device.create_stream(0).unwrap();
    let mut num_told = 0;
    for backing in [Backing::Auto, Backing::Segments] {
        let before = standin.calls("*");
        let (allocator, failures) = go(device, backing, other);
        drop(allocator);
        let calls = standin.calls("*") - before;
        for n in 1..=calls {
            for code in [UNKNOWN, OUT_OF_MEMORY] {
                standin.fail("*", n, code);
                let (allocator, now) = go(device, backing, other);
                num_told += u32::from(now > failures);
                standin.clear();
                allocator.check_invariants(CheckLevel::Device).unwrap();
                drop(allocator.alloc(48 * MIB, DEFAULT).unwrap());
                allocator.empty_cache().unwrap();
                allocator.check_invariants(CheckLevel::Device).unwrap();
                assert_eq!(standin.used(0), 0, "{backing:?}, call {n}, code {code}");
            }
        }
    }
    assert!(
        num_told > 20,
        "only {num_told} failures were seen by a caller"
    );
}
