//! The driver's functions, called as C programs call them.

#[macro_use]
mod support;

use std::ffi::{c_char, c_int, c_void};

use support::{alloc, alone, mem_info, start, text};

const MIB: u64 = 1 << 20;
const PAGE: u64 = 2 * MIB;
const MEMORY: (&str, &str) = ("LASTREF_STANDIN_MEMORY", "64MiB");

/// What `cuMemCreate` is told.
#[repr(C)]
struct Prop {
    kind: c_int,
    handle_types: c_int,
    location: [c_int; 2],
    meta: u64,
    flags: [u8; 8],
}

fn prop(device: c_int) -> Prop {
    Prop {
        kind: 1,
        handle_types: 0,
        location: [1, device],
        meta: 0,
        flags: [0; 8],
    }
}

fn create(bytes: u64, device: c_int) -> Result<u64, c_int> {
    let mut handle = 0;
    let result = call!(cuMemCreate(&mut handle => *mut u64, bytes => u64, &prop(device) => *const Prop, 0 => u64));
    if result == 0 { Ok(handle) } else { Err(result) }
}

fn reserve(bytes: u64) -> u64 {
    let mut ptr = 0;
    let result = call!(cuMemAddressReserve(&mut ptr => *mut u64, bytes => u64, 0 => u64, 0 => u64, 0 => u64));
    assert_eq!(result, 0);
    ptr
}

fn map(ptr: u64, bytes: u64, handle: u64, device: c_int) {
    assert_eq!(
        call!(cuMemMap(ptr => u64, bytes => u64, 0 => u64, handle => u64, 0 => u64)),
        0
    );
    let access = [1, device, 3];
    assert_eq!(
        call!(cuMemSetAccess(ptr => u64, bytes => u64, access.as_ptr() => *const c_int, 1 => u64)),
        0
    );
}

fn to_device(ptr: u64, bytes: &[u8]) -> c_int {
    call!(cuMemcpyHtoD_v2(ptr => u64, bytes.as_ptr() => *const u8, bytes.len() => usize))
}

fn from_device(ptr: u64, bytes: usize) -> Vec<u8> {
    let mut back = vec![0; bytes];
    assert_eq!(
        call!(cuMemcpyDtoH_v2(back.as_mut_ptr() => *mut u8, ptr => u64, bytes => usize)),
        0
    );
    back
}

fn stream(flags: u32) -> u64 {
    let mut stream = 0;
    assert_eq!(
        call!(cuStreamCreate(&mut stream => *mut u64, flags => u32)),
        0
    );
    stream
}

fn event() -> u64 {
    let mut event = 0;
    assert_eq!(call!(cuEventCreate(&mut event => *mut u64, 0 => u32)), 0);
    event
}

#[test]
fn devices_say_what_they_are() {
    let errors = alone(
        "devices_say_what_they_are",
        &[MEMORY, ("LASTREF_STANDIN_DEVICES", "2")],
        || {
            let mut count = -1;
            assert_eq!(
                call!(cuDeviceGetCount(&mut count => *mut c_int)),
                3,
                "not initialised yet"
            );
            assert_eq!(call!(cuInit(1 => u32)), 1);
            assert_eq!(call!(cuInit(0 => u32)), 0);
            assert_eq!(call!(cuInit(0 => u32)), 0);
            assert_eq!(call!(cuDeviceGetCount(&mut count => *mut c_int)), 0);
            assert_eq!(count, 2);
            let mut device = -1;
            assert_eq!(call!(cuDeviceGet(&mut device => *mut c_int, 1 => c_int)), 0);
            assert_eq!(
                call!(cuDeviceGet(&mut device => *mut c_int, 2 => c_int)),
                101
            );
            let mut name = [0 as c_char; 64];
            assert_eq!(
                call!(cuDeviceGetName(name.as_mut_ptr() => *mut c_char, 64 => c_int, device => c_int)),
                0
            );
            assert_eq!(text(name.as_ptr()), "lastref stand-in (no GPU)");
            let mut short = [1 as c_char; 8];
            assert_eq!(
                call!(cuDeviceGetName(short.as_mut_ptr() => *mut c_char, 8 => c_int, device => c_int)),
                0
            );
            assert_eq!(text(short.as_ptr()), "lastref");
            let mut total = 0;
            assert_eq!(
                call!(cuDeviceTotalMem_v2(&mut total => *mut u64, device => c_int)),
                0
            );
            assert_eq!(total, 64 * MIB);
            let attribute = |number: c_int| {
                let mut value = -1;
                let result = call!(cuDeviceGetAttribute(&mut value => *mut c_int, number => c_int, device => c_int));
                (result, value)
            };
            assert_eq!(attribute(75), (0, 9));
            assert_eq!(attribute(102), (0, 1), "virtual memory");
            assert_eq!(attribute(10_000).0, 1);
            let mut id = [0 as c_char; 32];
            assert_eq!(
                call!(cuDeviceGetPCIBusId(id.as_mut_ptr() => *mut c_char, 32 => c_int, 1 => c_int)),
                0
            );
            assert_eq!(text(id.as_ptr()), "0000:02:00.0");
            assert_eq!(
                call!(cuDeviceGetByPCIBusId(&mut device => *mut c_int, id.as_ptr() => *const c_char)),
                0
            );
            assert_eq!(device, 1);
            let mut version = 0;
            assert_eq!(call!(cuDriverGetVersion(&mut version => *mut c_int)), 0);
            assert_eq!(version, 13_020);
            // A place for the answer is needed.
            assert_eq!(
                call!(cuDeviceGetCount(std::ptr::null_mut() => *mut c_int)),
                1
            );
        },
    );
    if let Some(errors) = errors {
        let lines: Vec<_> = errors
            .lines()
            .filter(|line| line.contains("stand-in"))
            .collect();
        assert_eq!(
            lines,
            [
                "lastref stand-in: no GPU is used: 2 devices of 64 MiB in host memory, kernels compute nothing"
            ]
        );
    }
}

#[test]
fn errors_have_names_and_texts() {
    alone("errors_have_names_and_texts", &[], || {
        let mut name: *const c_char = std::ptr::null();
        assert_eq!(
            call!(cuGetErrorName(2 => c_int, &mut name => *mut *const c_char)),
            0
        );
        assert_eq!(text(name), "CUDA_ERROR_OUT_OF_MEMORY");
        assert_eq!(
            call!(cuGetErrorString(2 => c_int, &mut name => *mut *const c_char)),
            0
        );
        assert_eq!(text(name), "out of memory");
        assert_eq!(
            call!(cuGetErrorName(12_345 => c_int, &mut name => *mut *const c_char)),
            1
        );
        assert!(name.is_null());
    });
}

#[test]
fn contexts_are_current_on_a_thread() {
    alone("contexts_are_current_on_a_thread", &[MEMORY], || {
        assert_eq!(call!(cuInit(0 => u32)), 0);
        let mut ptr = 0;
        assert_eq!(call!(cuMemAlloc_v2(&mut ptr => *mut u64, 1 => u64)), 201);
        let state = || {
            let (mut flags, mut active) = (9, 9);
            let result = call!(cuDevicePrimaryCtxGetState(
                0 => c_int, &mut flags => *mut u32, &mut active => *mut c_int
            ));
            assert_eq!((result, flags), (0, 0));
            active
        };
        assert_eq!(state(), 0);
        let context = start(0);
        assert_eq!(state(), 1);
        let ptr = alloc(1);
        let other = std::thread::spawn(move || {
            let mut got = 9;
            assert_eq!(call!(cuCtxGetCurrent(&mut got => *mut u64)), 0);
            assert_eq!(call!(cuMemFree_v2(ptr => u64)), 201);
            got
        });
        assert_eq!(other.join().unwrap(), 0, "another thread has none");
        let mut popped = 0;
        assert_eq!(call!(cuCtxPushCurrent_v2(context => u64)), 0);
        assert_eq!(call!(cuCtxPopCurrent_v2(&mut popped => *mut u64)), 0);
        assert_eq!(popped, context);

        // The last release destroys it, and all that was in it.
        assert_eq!(mem_info().0, 62 * MIB);
        let kept = event();
        assert_eq!(call!(cuDevicePrimaryCtxRelease_v2(0 => c_int)), 0);
        assert_eq!(state(), 0);
        assert_eq!(call!(cuMemFree_v2(ptr => u64)), 709);
        assert_eq!(call!(cuDevicePrimaryCtxRelease_v2(0 => c_int)), 201);
        start(0);
        assert_eq!(mem_info().0, 64 * MIB);
        assert_eq!(call!(cuEventQuery(kept => u64)), 400);
    });
}

#[test]
fn segments_are_counted_and_run_out() {
    alone("segments_are_counted_and_run_out", &[MEMORY], || {
        start(0);
        assert_eq!(mem_info(), (64 * MIB, 64 * MIB));
        let ptr = alloc(32 * MIB);
        assert_eq!(mem_info().0, 32 * MIB);
        let mut more = 7;
        assert_eq!(
            call!(cuMemAlloc_v2(&mut more => *mut u64, 33 * MIB => u64)),
            2
        );
        assert_eq!(more, 7);
        assert_eq!(call!(cuMemAlloc_v2(&mut more => *mut u64, 0 => u64)), 1);
        let (mut base, mut bytes) = (0, 0);
        assert_eq!(
            call!(cuMemGetAddressRange_v2(&mut base => *mut u64, &mut bytes => *mut u64, ptr + 5 => u64)),
            0
        );
        assert_eq!((base, bytes), (ptr, 32 * MIB));
        assert_eq!(call!(cuMemFree_v2(ptr + 512 => u64)), 1);
        assert_eq!(call!(cuMemFree_v2(ptr => u64)), 0);
        assert_eq!(call!(cuMemFree_v2(ptr => u64)), 1);
        assert_eq!(call!(cuMemFree_v2(0 => u64)), 0);
        assert_eq!(mem_info().0, 64 * MIB);
    });
}

#[test]
fn virtual_memory_is_mapped_and_given_back() {
    alone("virtual_memory_is_mapped_and_given_back", &[MEMORY], || {
        start(0);
        let range = reserve(16 * PAGE);
        assert_eq!(mem_info().0, 64 * MIB);
        assert_eq!(create(1, 0), Err(1));
        assert_eq!(create(33 * PAGE, 0), Err(2));
        assert_eq!(mem_info().0, 64 * MIB, "what failed half-way is given back");
        let (one, two) = (create(PAGE, 0).unwrap(), create(2 * PAGE, 0).unwrap());
        map(range, PAGE, one, 0);
        map(range + PAGE, 2 * PAGE, two, 0);
        assert_eq!(mem_info().0, 58 * MIB);
        // Across two mappings.
        let bytes: Vec<u8> = (0..=255)
            .cycle()
            .take(3 << 20)
            .map(|byte: u8| byte)
            .collect();
        assert_eq!(to_device(range + 1, &bytes), 0);
        assert_eq!(from_device(range + 1, bytes.len()), bytes);
        assert_ne!(to_device(range + 3 * PAGE - 1, &[1, 2]), 0, "past the end");

        // A handle that is released goes with its mapping.
        assert_eq!(call!(cuMemRelease(two => u64)), 0);
        assert_eq!(mem_info().0, 58 * MIB);
        assert_eq!(
            call!(cuMemUnmap(range + PAGE => u64, PAGE => u64)),
            1,
            "only whole mappings"
        );
        assert_eq!(call!(cuMemUnmap(range => u64, 3 * PAGE => u64)), 0);
        assert_eq!(mem_info().0, 62 * MIB);
        assert_eq!(call!(cuMemAddressFree(range => u64, 15 * PAGE => u64)), 1);
        map(range + 4 * PAGE, PAGE, one, 0);
        assert_eq!(
            call!(cuMemAddressFree(range => u64, 16 * PAGE => u64)),
            1,
            "something is mapped"
        );
        assert_eq!(call!(cuMemUnmap(range + 4 * PAGE => u64, PAGE => u64)), 0);
        assert_eq!(call!(cuMemAddressFree(range => u64, 16 * PAGE => u64)), 0);
        assert_eq!(call!(cuMemRelease(one => u64)), 0);
        assert_eq!(call!(cuMemRelease(one => u64)), 1);
        assert_eq!(mem_info().0, 64 * MIB);
    });
}

#[test]
fn addresses_are_no_devices_until_something_is_mapped() {
    let devices = ("LASTREF_STANDIN_DEVICES", "2");
    alone(
        "addresses_are_no_devices_until_something_is_mapped",
        &[MEMORY, devices],
        || {
            start(0);
            let range = reserve(2 * PAGE);
            let handle = create(PAGE, 1).unwrap();
            map(range, PAGE, handle, 1);
            start(1);
            assert_eq!(mem_info().0, 62 * MIB);
            assert_eq!(to_device(range, b"there"), 0);
            start(0);
            assert_eq!(from_device(range, 5), b"there");
        },
    );
}

#[test]
fn work_comes_later_and_in_order() {
    alone(
        "work_comes_later_and_in_order",
        &[MEMORY, ("LASTREF_STANDIN_LATE", "1")],
        || {
            start(0);
            let (one, two) = (stream(1), stream(1));
            let (ptr, other, done) = (alloc(4 * MIB), alloc(4 * MIB), event());
            assert_eq!(call!(cuEventQuery(done => u64)), 0, "never recorded");
            assert_eq!(
                call!(cuMemsetD32Async(ptr => u64, 7 => u32, MIB => u64, one => u64)),
                0
            );
            assert_eq!(call!(cuEventRecord(done => u64, one => u64)), 0);
            assert_eq!(call!(cuEventQuery(done => u64)), 600);
            assert_eq!(call!(cuStreamQuery(one => u64)), 600);
            assert_eq!(
                call!(cuStreamWaitEvent(two => u64, done => u64, 0 => u32)),
                0
            );
            assert_eq!(
                call!(cuMemcpyDtoDAsync_v2(other => u64, ptr => u64, 4 * MIB => u64, two => u64)),
                0
            );
            assert_eq!(call!(cuStreamSynchronize(two => u64)), 0);
            assert_eq!(
                call!(cuEventQuery(done => u64)),
                0,
                "what the stream waited for is over"
            );
            assert_eq!(from_device(other + 4 * MIB - 4, 4), 7_u32.to_ne_bytes());

            let after = event();
            assert_eq!(call!(cuEventRecord(after => u64, one => u64)), 0);
            let mut milliseconds = -1.0;
            let elapsed =
                |ms: &mut f32| call!(cuEventElapsedTime(ms => *mut f32, done => u64, after => u64));
            assert_eq!(elapsed(&mut milliseconds), 600);
            assert_eq!(call!(cuEventSynchronize(after => u64)), 0);
            assert_eq!(elapsed(&mut milliseconds), 0);
            assert!((0.0..1.0).contains(&milliseconds), "{milliseconds}");
            assert_eq!(call!(cuStreamDestroy_v2(one => u64)), 0);
            assert_eq!(call!(cuStreamQuery(one => u64)), 400);
        },
    );
}

#[test]
fn the_default_stream_waits_for_blocking_streams_and_they_for_it() {
    let name = "the_default_stream_waits_for_blocking_streams_and_they_for_it";
    alone(name, &[MEMORY, ("LASTREF_STANDIN_LATE", "1")], || {
        start(0);
        let (blocking, free) = (stream(0), stream(1));
        let ptr = alloc(64);
        assert_eq!(
            call!(cuMemsetD8Async(ptr => u64, 1 => u8, 64 => u64, blocking => u64)),
            0
        );
        assert_eq!(call!(cuMemsetD8_v2(ptr => u64, 2 => u8, 32 => u64)), 0);
        assert_eq!(
            call!(cuMemsetD8Async(ptr => u64, 3 => u8, 16 => u64, blocking => u64)),
            0
        );
        assert_eq!(call!(cuStreamSynchronize(blocking => u64)), 0);
        let mut back = vec![0_u8; 64];
        // On a stream that waits for nobody.
        let bytes = back.len();
        let result = call!(cuMemcpyDtoHAsync_v2(
            back.as_mut_ptr() => *mut u8, ptr => u64, bytes => usize, free => u64
        ));
        assert_eq!(result, 0);
        assert_eq!(call!(cuStreamSynchronize(free => u64)), 0);
        let wanted: Vec<u8> = [[3; 16], [2; 16], [1; 16], [1; 16]].concat();
        assert_eq!(back, wanted);
    });
}

#[test]
fn pinned_memory_is_copied_when_the_stream_comes_to_it() {
    alone(
        "pinned_memory_is_copied_when_the_stream_comes_to_it",
        &[MEMORY, ("LASTREF_STANDIN_LATE", "1")],
        || {
            start(0);
            let mut host = 0;
            assert_eq!(
                call!(cuMemHostAlloc(&mut host => *mut u64, MIB => u64, 0 => u32)),
                0
            );
            let write = |byte: u8| {
                // SAFETY: the library has just allocated a MiB there.
                unsafe { std::ptr::write_bytes(host as *mut u8, byte, 4) };
            };
            let read = || {
                // SAFETY: as above.
                unsafe { std::ptr::read(host as *const u8) }
            };
            let (one, ptr) = (stream(1), alloc(4));
            let late = event();
            assert_eq!(call!(cuMemsetD8_v2(ptr => u64, 9 => u8, 4 => u64)), 0);
            assert_eq!(call!(cuCtxSynchronize()), 0);
            // Behind an event that is late, nothing runs by itself.
            assert_eq!(call!(cuEventRecord(late => u64, one => u64)), 0);
            write(1);
            let copied = call!(cuMemcpyHtoDAsync_v2(ptr => u64, host => u64, 4 => u64, one => u64));
            assert_eq!(copied, 0);
            write(2);
            assert_eq!(from_device(ptr, 4), [9; 4]);
            assert_eq!(call!(cuStreamSynchronize(one => u64)), 0);
            assert_eq!(
                from_device(ptr, 4),
                [2; 4],
                "read late: what was there at the call is gone"
            );

            assert_eq!(call!(cuEventRecord(late => u64, one => u64)), 0);
            assert_eq!(
                call!(cuMemsetD8Async(ptr => u64, 5 => u8, 4 => u64, one => u64)),
                0
            );
            let copied = call!(cuMemcpyDtoHAsync_v2(host => u64, ptr => u64, 4 => u64, one => u64));
            assert_eq!((copied, read()), (0, 2), "not there yet");
            assert_eq!(call!(cuMemFreeHost(host + 1 => u64)), 1);
            assert_eq!(call!(cuStreamSynchronize(one => u64)), 0);
            assert_eq!(read(), 5);
            // Giving it back waits for what may still write to it.
            assert_eq!(call!(cuEventRecord(late => u64, one => u64)), 0);
            let copied = call!(cuMemcpyDtoHAsync_v2(host => u64, ptr => u64, 4 => u64, one => u64));
            assert_eq!(copied, 0);
            assert_eq!(call!(cuMemFreeHost(host => u64)), 0);
            assert_eq!(call!(cuStreamQuery(one => u64)), 0);

            let mut own = vec![0_u8; 4096];
            let at = own.as_mut_ptr().cast::<c_void>();
            assert_eq!(
                call!(cuMemHostRegister_v2(at => *mut c_void, 4096 => usize, 0 => u32)),
                0
            );
            assert_eq!(
                call!(cuMemHostRegister_v2(at => *mut c_void, 4096 => usize, 0 => u32)),
                712
            );
            assert_eq!(call!(cuMemHostUnregister(at => *mut c_void)), 0);
            assert_eq!(call!(cuMemHostUnregister(at => *mut c_void)), 713);
        },
    );
}

#[test]
fn rows_are_copied_and_filled() {
    alone("rows_are_copied_and_filled", &[MEMORY], || {
        start(0);
        let ptr = alloc(4096);
        assert_eq!(call!(cuMemsetD8_v2(ptr => u64, 0 => u8, 4096 => u64)), 0);
        assert_eq!(
            call!(cuMemsetD2D16_v2(ptr => u64, 64 => u64, 0x0201 => u16, 2 => u64, 3 => u64)),
            0
        );
        assert_eq!(from_device(ptr, 8), [1, 2, 1, 2, 0, 0, 0, 0]);
        assert_eq!(from_device(ptr + 128, 8), [1, 2, 1, 2, 0, 0, 0, 0]);
        assert_eq!(from_device(ptr + 192, 4), [0; 4]);
        // One side of `CUDA_MEMCPY2D`: x, y, type and a gap, host, device, array, pitch.
        let mut host = [0_u8; 8];
        let at = host.as_mut_ptr() as u64;
        let from = [0, 1, 2, 0, ptr, 0, 64_u64];
        let to = [0, 0, 1, at, 0, 0, 4_u64];
        let what: Vec<u64> = [&from[..], &to, &[4, 2]].concat();
        assert_eq!(call!(cuMemcpy2D_v2(what.as_ptr() => *const u64)), 0);
        assert_eq!(host, [1, 2, 1, 2, 1, 2, 1, 2]);
        assert_eq!(
            call!(cuMemsetD32_v2(ptr + 1 => u64, 0 => u32, 1 => u64)),
            1,
            "not aligned"
        );
    });
}

#[test]
fn peers_copy_on_either_devices_stream() {
    let devices = ("LASTREF_STANDIN_DEVICES", "2");
    alone(
        "peers_copy_on_either_devices_stream",
        &[MEMORY, devices],
        || {
            let second = start(1);
            let there = alloc(16);
            let first = start(0);
            let here = alloc(16);
            let one = stream(1);
            assert_eq!(
                call!(cuMemsetD8Async(here => u64, 4 => u8, 16 => u64, one => u64)),
                0
            );
            let result = call!(cuMemcpyPeerAsync(
                there => u64, second => u64, here => u64, first => u64, 16 => u64, one => u64
            ));
            assert_eq!(result, 0);
            assert_eq!(call!(cuStreamSynchronize(one => u64)), 0);
            assert_eq!(from_device(there, 16), [4; 16]);
            let mut can = 0;
            assert_eq!(
                call!(cuDeviceCanAccessPeer(&mut can => *mut c_int, 0 => c_int, 1 => c_int)),
                0
            );
            assert_eq!(can, 1);
            assert_eq!(call!(cuCtxEnablePeerAccess(second => u64, 0 => u32)), 0);
            assert_eq!(call!(cuCtxEnablePeerAccess(second => u64, 0 => u32)), 704);
            assert_eq!(call!(cuCtxDisablePeerAccess(second => u64)), 0);
            assert_eq!(call!(cuCtxDisablePeerAccess(second => u64)), 705);
        },
    );
}

#[test]
fn pools_give_memory_in_the_order_of_a_stream() {
    alone(
        "pools_give_memory_in_the_order_of_a_stream",
        &[MEMORY],
        || {
            start(0);
            let (mut pool, one) = (0, stream(1));
            assert_eq!(
                call!(cuDeviceGetDefaultMemPool(&mut pool => *mut u64, 0 => c_int)),
                0
            );
            let number = |which: c_int| {
                let mut value = 0_u64;
                let result = call!(cuMemPoolGetAttribute(pool => u64, which => c_int, &mut value => *mut u64));
                assert_eq!(result, 0);
                value
            };
            let take = |bytes: u64| {
                let mut ptr = 0;
                let result = call!(cuMemAllocAsync(&mut ptr => *mut u64, bytes => u64, one => u64));
                (result, ptr)
            };
            let (result, ptr) = take(4 * MIB);
            assert_eq!(result, 0);
            assert_eq!((number(7), number(5)), (4 * MIB, 4 * MIB));
            assert_eq!(call!(cuMemFreeAsync(ptr => u64, one => u64)), 0);
            assert_eq!(take(4 * MIB), (0, ptr), "the same stream gets it at once");
            assert_eq!(call!(cuMemFreeAsync(ptr => u64, one => u64)), 0);
            assert_eq!(
                (number(7), number(5)),
                (0, 4 * MIB),
                "kept until something waits"
            );
            assert_eq!(call!(cuStreamSynchronize(one => u64)), 0);
            assert_eq!((number(5), number(6)), (0, 4 * MIB));
            assert_eq!(mem_info().0, 64 * MIB);

            let threshold = u64::MAX;
            assert_eq!(
                call!(cuMemPoolSetAttribute(pool => u64, 4 => c_int, &threshold => *const u64)),
                0
            );
            let (_, ptr) = take(4 * MIB);
            assert_eq!(
                call!(cuMemFree_v2(ptr => u64)),
                0,
                "the plain call frees it too"
            );
            assert_eq!(call!(cuCtxSynchronize()), 0);
            assert_eq!(number(5), 4 * MIB);
            assert_eq!(call!(cuMemPoolTrimTo(pool => u64, 0 => u64)), 0);
            assert_eq!(number(5), 0);
            assert_eq!(take(65 * MIB).0, 2);
            assert_eq!(call!(cuMemFreeAsync(ptr => u64, one => u64)), 1);
        },
    );
}

#[test]
fn captured_work_runs_when_the_graph_is_launched() {
    alone(
        "captured_work_runs_when_the_graph_is_launched",
        &[MEMORY],
        || {
            start(0);
            let (one, two) = (stream(1), stream(1));
            let (fork, join) = (event(), event());
            let ptr = alloc(8);
            assert_eq!(call!(cuMemsetD8_v2(ptr => u64, 0 => u8, 8 => u64)), 0);
            let status = |stream: u64| {
                let (mut status, mut id) = (9, 0);
                let result = call!(cuStreamGetCaptureInfo(
                    stream => u64, &mut status => *mut c_int, &mut id => *mut u64
                ));
                assert_eq!(result, 0);
                status
            };
            assert_eq!(status(one), 0);
            assert_eq!(call!(cuStreamBeginCapture_v2(one => u64, 0 => c_int)), 0);
            assert_eq!((status(one), status(two)), (1, 0));
            assert_eq!(
                call!(cuMemsetD8Async(ptr => u64, 1 => u8, 4 => u64, one => u64)),
                0
            );
            // Another stream joins, and is joined again.
            assert_eq!(call!(cuEventRecord(fork => u64, one => u64)), 0);
            assert_eq!(
                call!(cuStreamWaitEvent(two => u64, fork => u64, 0 => u32)),
                0
            );
            assert_eq!(status(two), 1);
            assert_eq!(
                call!(cuMemsetD8Async(ptr + 4 => u64, 2 => u8, 4 => u64, two => u64)),
                0
            );
            assert_eq!(call!(cuEventRecord(join => u64, two => u64)), 0);
            assert_eq!(call!(cuEventQuery(join => u64)), 907);
            assert_eq!(
                call!(cuStreamWaitEvent(one => u64, join => u64, 0 => u32)),
                0
            );
            let mut graph = 0;
            assert_eq!(
                call!(cuStreamEndCapture(one => u64, &mut graph => *mut u64)),
                0
            );
            assert_eq!((status(one), status(two)), (0, 0));
            assert_eq!(from_device(ptr, 8), [0; 8]);
            let mut nodes = 0;
            let none = std::ptr::null_mut();
            assert_eq!(
                call!(cuGraphGetNodes(graph => u64, none => *mut u64, &mut nodes => *mut u64)),
                0
            );
            assert_eq!(nodes, 2);
            let mut launchable = 0;
            let made = call!(cuGraphInstantiateWithFlags(&mut launchable => *mut u64, graph => u64, 0 => u64));
            assert_eq!(made, 0);
            assert_eq!(call!(cuGraphDestroy(graph => u64)), 0);
            assert_eq!(call!(cuGraphLaunch(launchable => u64, one => u64)), 0);
            assert_eq!(call!(cuStreamSynchronize(one => u64)), 0);
            assert_eq!(from_device(ptr, 8), [1, 1, 1, 1, 2, 2, 2, 2]);
        },
    );
}

#[test]
fn what_must_not_be_done_breaks_a_capture() {
    alone("what_must_not_be_done_breaks_a_capture", &[MEMORY], || {
        start(0);
        let (one, two, done) = (stream(1), stream(1), event());
        let begin = || assert_eq!(call!(cuStreamBeginCapture_v2(one => u64, 0 => c_int)), 0);
        let end = || {
            let mut graph = 0;
            call!(cuStreamEndCapture(one => u64, &mut graph => *mut u64))
        };
        let mut ptr = 0;
        begin();
        assert_eq!(call!(cuMemAlloc_v2(&mut ptr => *mut u64, 1 => u64)), 900);
        assert_eq!(end(), 901);
        begin();
        assert_eq!(call!(cuStreamSynchronize(one => u64)), 900);
        assert_eq!(end(), 901);
        begin();
        // In relaxed mode a thread may.
        let mut mode = 2;
        assert_eq!(
            call!(cuThreadExchangeStreamCaptureMode(&mut mode => *mut c_int)),
            0
        );
        assert_eq!(mode, 0);
        assert_eq!(call!(cuMemAlloc_v2(&mut ptr => *mut u64, 1 => u64)), 0);
        assert_eq!(
            call!(cuThreadExchangeStreamCaptureMode(&mut mode => *mut c_int)),
            0
        );
        assert_eq!(end(), 0);
        begin();
        assert_eq!(call!(cuEventRecord(done => u64, one => u64)), 0);
        assert_eq!(
            call!(cuStreamWaitEvent(two => u64, done => u64, 0 => u32)),
            0
        );
        assert_eq!(end(), 904, "the other stream was not joined");
        assert_eq!(call!(cuEventRecord(done => u64, two => u64)), 0);
        begin();
        assert_eq!(
            call!(cuStreamWaitEvent(one => u64, done => u64, 0 => u32)),
            905
        );
        assert_eq!(end(), 901);
        assert_eq!(
            call!(cuStreamBeginCapture_v2(0 => u64, 0 => c_int)),
            900,
            "the default stream"
        );
    });
}

#[test]
fn kernels_are_counted_and_compute_nothing() {
    alone("kernels_are_counted_and_compute_nothing", &[MEMORY], || {
        start(0);
        let (mut module, mut function) = (0, 0);
        assert_eq!(
            call!(cuModuleLoadData(&mut module => *mut u64, c"ptx".as_ptr() => *const c_char)),
            0
        );
        let found = call!(cuModuleGetFunction(
            &mut function => *mut u64, module => u64, c"scale".as_ptr() => *const c_char
        ));
        assert_eq!(found, 0);
        let launch = |function: u64| {
            call!(cuLaunchKernel(
                function => u64, 1 => u32, 1 => u32, 1 => u32, 32 => u32, 1 => u32, 1 => u32, 0 => u32, 0 => u64,
                std::ptr::null_mut() => *mut c_void, std::ptr::null_mut() => *mut c_void
            ))
        };
        assert_eq!(launch(function), 0);
        assert_eq!(launch(module), 400);
        let mut name: *const c_char = std::ptr::null();
        assert_eq!(
            call!(cuFuncGetName(&mut name => *mut *const c_char, function => u64)),
            0
        );
        assert_eq!(text(name), "scale");
        let mut registers = 0;
        let result =
            call!(cuFuncGetAttribute(&mut registers => *mut c_int, 4 => c_int, function => u64));
        assert_eq!((result, registers), (0, 32));
        assert_eq!(call!(cuModuleUnload(module => u64)), 0);
        assert_eq!(call!(cuModuleUnload(module => u64)), 400);
    });
}

#[test]
fn functions_of_the_caller_are_called_when_the_stream_comes_to_them() {
    extern "C" fn note(data: *mut c_void) {
        // SAFETY: the test below passes a number of its own.
        unsafe { *data.cast::<i32>() += 1 };
    }
    type Function = extern "C" fn(*mut c_void);
    alone(
        "functions_of_the_caller_are_called_when_the_stream_comes_to_them",
        &[MEMORY],
        || {
            start(0);
            let one = stream(1);
            let mut calls = 0;
            let data = std::ptr::from_mut(&mut calls).cast::<c_void>();
            assert_eq!(
                call!(cuLaunchHostFunc(one => u64, note => Function, data => *mut c_void)),
                0
            );
            assert_eq!(call!(cuStreamSynchronize(one => u64)), 0);
            // SAFETY: `calls` outlives the test, and nothing else uses it now.
            assert_eq!(unsafe { *data.cast::<i32>() }, 1);
            // Captured, it is called at each launch and not before.
            assert_eq!(call!(cuStreamBeginCapture_v2(one => u64, 0 => c_int)), 0);
            assert_eq!(
                call!(cuLaunchHostFunc(one => u64, note => Function, data => *mut c_void)),
                0
            );
            let mut graph = 0;
            assert_eq!(
                call!(cuStreamEndCapture(one => u64, &mut graph => *mut u64)),
                0
            );
            // SAFETY: as above.
            assert_eq!(unsafe { *data.cast::<i32>() }, 1);
            assert_eq!(call!(cuGraphLaunch(graph => u64, one => u64)), 0);
            assert_eq!(call!(cuStreamSynchronize(one => u64)), 0);
            // SAFETY: as above.
            assert_eq!(unsafe { *data.cast::<i32>() }, 2);
        },
    );
}

#[test]
fn work_on_memory_that_was_unmapped_is_an_error_for_good() {
    let late = ("LASTREF_STANDIN_LATE", "1");
    alone(
        "work_on_memory_that_was_unmapped_is_an_error_for_good",
        &[MEMORY, late],
        || {
            start(0);
            let (one, done) = (stream(1), event());
            let range = reserve(PAGE);
            map(range, PAGE, create(PAGE, 0).unwrap(), 0);
            assert_eq!(call!(cuEventRecord(done => u64, one => u64)), 0);
            assert_eq!(
                call!(cuMemsetD8Async(range => u64, 1 => u8, 64 => u64, one => u64)),
                0
            );
            assert_eq!(call!(cuMemUnmap(range => u64, PAGE => u64)), 0);
            assert_eq!(call!(cuStreamSynchronize(one => u64)), 700);
            let mut ptr = 0;
            assert_eq!(call!(cuMemAlloc_v2(&mut ptr => *mut u64, 1 => u64)), 700);
            // A new context begins without it.
            assert_eq!(call!(cuDevicePrimaryCtxReset_v2(0 => c_int)), 0);
            start(0);
            alloc(1);
        },
    );
}

#[test]
fn addresses_tell_what_they_are() {
    alone("addresses_tell_what_they_are", &[MEMORY], || {
        let context = start(0);
        let ptr = alloc(1000);
        let ask = |number: c_int, address: u64| {
            let mut value = 0_u64;
            let result = call!(cuPointerGetAttribute(&mut value => *mut u64, number => c_int, address => u64));
            (result, value)
        };
        assert_eq!(ask(1, ptr), (0, context));
        assert_eq!(ask(2, ptr + 1), (0, 2));
        assert_eq!(ask(11, ptr + 999), (0, ptr));
        assert_eq!(ask(12, ptr), (0, 1000));
        assert_eq!(ask(2, ptr + 1000).0, 1);
        let mut host = 0;
        assert_eq!(
            call!(cuMemHostAlloc(&mut host => *mut u64, 10 => u64, 2 => u32)),
            0
        );
        assert_eq!(ask(2, host), (0, 1));
        assert_eq!(ask(4, host), (0, host));
        let mut flags = 0;
        assert_eq!(
            call!(cuMemHostGetFlags(&mut flags => *mut u32, host => u64)),
            0
        );
        assert_eq!(flags, 2);
    });
}

#[test]
fn functions_are_found_by_name_and_version() {
    alone("functions_are_found_by_name_and_version", &[MEMORY], || {
        let ask = |name: &std::ffi::CStr, version: c_int, flags: u64| {
            let (mut address, mut status) = (7_u64, -1);
            let result = call!(cuGetProcAddress_v2(
                name.as_ptr() => *const c_char, &mut address => *mut u64, version => c_int, flags => u64,
                &mut status => *mut c_int
            ));
            (result, address, status)
        };
        let (result, address, status) = ask(c"cuInit", 12_000, 0);
        assert_eq!((result, status), (0, 0));
        // SAFETY: it is the address of that function.
        let function: extern "C" fn(u32) -> c_int =
            unsafe { std::mem::transmute(address as *const c_void) };
        assert_eq!(function(0), 0);
        assert_eq!(ask(c"cuNoSuchThing", 12_000, 0), (0, 0, 1));
        assert_eq!(ask(c"cuMemCreate", 9_000, 0), (0, 0, 2));
        let plain = ask(c"cuMemcpyAsync", 12_000, 0).1;
        let own = ask(c"cuMemcpyAsync", 12_000, 2).1;
        assert!(plain != 0 && own != 0 && plain != own);
        let mut address = 0_u64;
        let old = call!(cuGetProcAddress(
            c"cuNoSuchThing".as_ptr() => *const c_char, &mut address => *mut u64, 11_030 => c_int, 0 => u64
        ));
        assert_eq!(old, 500);
    });
}
