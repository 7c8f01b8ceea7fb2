//! The runtime's, the management library's and the stand-in's own functions, called as C programs call them.

#[macro_use]
mod support;

use std::ffi::{c_char, c_int, c_void};

use support::{alone, library_path, start, text};

const MIB: u64 = 1 << 20;
const MEMORY: (&str, &str) = ("LASTREF_STANDIN_MEMORY", "64MiB");
const HOST_TO_DEVICE: c_int = 1;
const DEVICE_TO_HOST: c_int = 2;
const ANY: c_int = 4;

fn malloc(bytes: u64) -> Result<u64, c_int> {
    let mut ptr = 7;
    let result = call!(cudaMalloc(&mut ptr => *mut u64, bytes => u64));
    if result == 0 { Ok(ptr) } else { Err(result) }
}

fn free_bytes() -> u64 {
    let (mut free, mut total) = (0, 0);
    assert_eq!(
        call!(cudaMemGetInfo(&mut free => *mut u64, &mut total => *mut u64)),
        0
    );
    assert_eq!(total, 64 * MIB);
    free
}

fn copy(dst: u64, src: u64, bytes: usize, kind: c_int) -> c_int {
    call!(cudaMemcpy(dst => u64, src => u64, bytes => usize, kind => c_int))
}

/// A number that a function of the stand-in's own returns for a name.
fn calls(name: &std::ffi::CStr) -> u64 {
    type Function = unsafe extern "C" fn(*const c_char) -> u64;
    let function: Function = support::symbol("lastref_standin_calls");
    // SAFETY: the function takes text.
    unsafe { function(name.as_ptr()) }
}

fn number(name: &str) -> u64 {
    let function: unsafe extern "C" fn(c_int) -> u64 = support::symbol(name);
    // SAFETY: the function takes nothing, or a device.
    unsafe { function(0) }
}

#[test]
fn the_runtime_initialises_by_itself_and_keeps_its_last_error() {
    alone(
        "the_runtime_initialises_by_itself_and_keeps_its_last_error",
        &[MEMORY],
        || {
            let mut count = 0;
            assert_eq!(call!(cudaGetDeviceCount(&mut count => *mut c_int)), 0);
            assert_eq!(count, 1);
            let ptr = malloc(3 * MIB).unwrap();
            assert_eq!(free_bytes(), 60 * MIB);
            assert_eq!(malloc(61 * MIB), Err(2));
            assert_eq!(call!(cudaPeekAtLastError()), 2);
            assert_eq!(call!(cudaGetLastError()), 2);
            assert_eq!(call!(cudaGetLastError()), 0);
            assert_eq!(malloc(0), Ok(0));
            assert_eq!(call!(cudaFree(0 => u64)), 0);
            assert_eq!(call!(cudaFree(ptr + 1 => u64)), 1);
            assert_eq!(call!(cudaFree(ptr => u64)), 0);
            assert_eq!(free_bytes(), 64 * MIB);
            assert_eq!(call!(cudaSetDevice(1 => c_int)), 101);
            let name = |error: c_int| {
                type Function = unsafe extern "C" fn(c_int) -> *const c_char;
                let function: Function = support::symbol("cudaGetErrorName");
                // SAFETY: the function takes a number.
                text(unsafe { function(error) })
            };
            assert_eq!(name(2), "cudaErrorMemoryAllocation");
            assert_eq!(name(12_345), "unrecognized error code");
        },
    );
}

#[test]
fn both_interfaces_have_one_state() {
    alone("both_interfaces_have_one_state", &[MEMORY], || {
        let ptr = malloc(2 * MIB).unwrap();
        // The runtime has made the primary context current.
        assert_eq!(support::mem_info().0, 62 * MIB);
        assert_eq!(call!(cuMemFree_v2(ptr => u64)), 0);
        assert_eq!(free_bytes(), 64 * MIB);
        let context = start(0);
        let mut current = 0;
        assert_eq!(call!(cuCtxGetCurrent(&mut current => *mut u64)), 0);
        assert_eq!(current, context);
    });
}

#[test]
fn one_file_under_several_names_is_one_library() {
    alone(
        "one_file_under_several_names_is_one_library",
        &[MEMORY],
        || {
            malloc(2 * MIB).unwrap();
            let folder = std::env::temp_dir().join(format!("lastref-links-{}", std::process::id()));
            std::fs::create_dir(&folder).unwrap();
            let link = folder.join("libcuda.so.1");
            std::os::unix::fs::symlink(library_path(), &link).unwrap();
            // SAFETY: loading it runs no code of its own.
            let other = unsafe { libloading::Library::new(&link) }.unwrap();
            let (mut free, mut total) = (0_u64, 0_u64);
            type Function = unsafe extern "C" fn(*mut u64, *mut u64) -> c_int;
            // SAFETY: that is its type.
            let function = unsafe { other.get::<Function>(b"cuMemGetInfo_v2\0") }.unwrap();
            // SAFETY: both numbers have a place.
            let result = unsafe { function(&mut free, &mut total) };
            std::fs::remove_dir_all(folder).unwrap();
            assert_eq!((result, free), (0, 62 * MIB));
        },
    );
}

#[test]
fn copies_are_what_their_kind_says() {
    alone("copies_are_what_their_kind_says", &[MEMORY], || {
        let host: Vec<u8> = (0..=255).collect();
        let mut back = vec![0_u8; 256];
        let (from, to) = (host.as_ptr() as u64, back.as_mut_ptr() as u64);
        let ptr = malloc(256).unwrap();
        assert_eq!(copy(ptr, from, 256, HOST_TO_DEVICE), 0);
        assert_eq!(copy(to, ptr, 256, DEVICE_TO_HOST), 0);
        assert_eq!(host, back);
        assert_eq!(copy(to, from, 256, HOST_TO_DEVICE), 1);
        assert_eq!(copy(ptr, from, 256, DEVICE_TO_HOST), 1);
        assert_eq!(copy(ptr, from, 256, 9), 1);
        assert_eq!(copy(ptr, from, 257, ANY), 1, "past the end");
        assert_eq!(
            call!(cudaMemset(ptr => u64, 0x105 => c_int, 16 => usize)),
            0
        );
        assert_eq!(copy(to, ptr, 256, ANY), 0);
        assert_eq!(&back[..17], [[5; 16].as_slice(), &[16]].concat());
        let two = call!(cudaMemcpy2D(
            to => u64, 2 => usize, ptr + 16 => u64, 16 => usize, 2 => usize, 3 => usize, DEVICE_TO_HOST => c_int
        ));
        assert_eq!(two, 0);
        assert_eq!(&back[..6], [16, 17, 32, 33, 48, 49]);
    });
}

#[test]
fn addresses_tell_what_they_are() {
    alone("addresses_tell_what_they_are", &[MEMORY], || {
        #[repr(C)]
        #[derive(Default)]
        struct Attributes {
            kind: c_int,
            device: c_int,
            device_pointer: u64,
            host_pointer: u64,
            reserved: [i64; 8],
        }
        let ask = |address: u64| {
            let mut out = Attributes::default();
            let result =
                call!(cudaPointerGetAttributes(&mut out => *mut Attributes, address => u64));
            assert_eq!(result, 0);
            (out.kind, out.device, out.device_pointer, out.host_pointer)
        };
        let ptr = malloc(10).unwrap();
        assert_eq!(ask(ptr + 9), (2, 0, ptr + 9, 0));
        let mut host = 0;
        assert_eq!(
            call!(cudaHostAlloc(&mut host => *mut u64, 10 => u64, 0 => u32)),
            0
        );
        assert_eq!(ask(host), (1, 0, host, host));
        assert_eq!(call!(cudaFreeHost(host => u64)), 0);
        assert_eq!(ask(host), (0, -2, 0, host));
        let mut managed = 0;
        assert_eq!(
            call!(cudaMallocManaged(&mut managed => *mut u64, 10 => u64, 1 => u32)),
            0
        );
        assert_eq!(ask(managed), (3, 0, managed, managed));
    });
}

#[test]
fn kernels_are_counted() {
    alone("kernels_are_counted", &[MEMORY], || {
        #[repr(C)]
        #[derive(Clone, Copy)]
        struct Dim3(u32, u32, u32);
        let one = Dim3(1, 1, 1);
        let none = std::ptr::null_mut::<c_void>();
        assert_eq!(number("lastref_standin_kernels"), 0);
        let pushed = call!(__cudaPushCallConfiguration(
            Dim3(4, 5, 6) => Dim3, one => Dim3, 9 => usize, 0 => u64
        ));
        assert_eq!(pushed, 0);
        let (mut grid, mut block, mut shared, mut stream) = (one, Dim3(0, 0, 0), 0, 7);
        let popped = call!(__cudaPopCallConfiguration(
            &mut grid => *mut Dim3, &mut block => *mut Dim3, &mut shared => *mut usize, &mut stream => *mut u64
        ));
        assert_eq!(
            (popped, grid.0, grid.2, block.1, shared, stream),
            (0, 4, 6, 1, 9, 0)
        );
        let launched = call!(cudaLaunchKernel(
            8 => u64, one => Dim3, one => Dim3, none => *mut c_void, 0 => usize, 0 => u64
        ));
        assert_eq!(launched, 0);
        assert_eq!(call!(cudaDeviceSynchronize()), 0);
        assert_eq!(number("lastref_standin_kernels"), 1);
        assert_eq!(number("lastref_standin_pending"), 0);
        assert_eq!(calls(c"cudaLaunchKernel"), 1);
        // Products are kernels too.
        assert_eq!(call!(cublasSgemm_v2()), 0);
        assert_eq!(number("lastref_standin_kernels"), 2);
    });
}

#[test]
fn variables_of_kernels_have_a_place() {
    alone("variables_of_kernels_have_a_place", &[MEMORY], || {
        static STANDS_FOR_IT: u64 = 0;
        let symbol = std::ptr::from_ref(&STANDS_FOR_IT) as u64;
        type Register = unsafe extern "C" fn(u64, u64, u64, u64, c_int, usize, c_int, c_int);
        let register: Register = support::symbol("__cudaRegisterVar");
        // SAFETY: as the compiler's code calls it.
        unsafe { register(0, symbol, 0, 0, 0, 8, 0, 0) };
        let value = 42_u64;
        let from = std::ptr::from_ref(&value) as u64;
        let put = |bytes: usize, offset: usize| {
            call!(cudaMemcpyToSymbol(
                symbol => u64, from => u64, bytes => usize, offset => usize, HOST_TO_DEVICE => c_int
            ))
        };
        assert_eq!((put(8, 0), put(8, 1)), (0, 1));
        let (mut place, mut bytes) = (0, 0);
        assert_eq!(
            call!(cudaGetSymbolAddress(&mut place => *mut u64, symbol => u64)),
            0
        );
        assert_eq!(
            call!(cudaGetSymbolSize(&mut bytes => *mut usize, symbol => u64)),
            0
        );
        assert_eq!(bytes, 8);
        let mut back = 0_u64;
        assert_eq!(
            copy(
                std::ptr::from_mut(&mut back) as u64,
                place,
                8,
                DEVICE_TO_HOST
            ),
            0
        );
        assert_eq!(back, 42);
        assert_eq!(
            call!(cudaGetSymbolAddress(&mut place => *mut u64, symbol + 1 => u64)),
            13
        );
    });
}

#[test]
fn objects_go_with_the_graphs_that_refer_to_them() {
    extern "C" fn note(data: *mut c_void) {
        // SAFETY: the test below passes a number of its own.
        unsafe { *data.cast::<i32>() += 1 };
    }
    type Function = extern "C" fn(*mut c_void);
    alone(
        "objects_go_with_the_graphs_that_refer_to_them",
        &[MEMORY],
        || {
            let (mut stream, mut graph, mut launchable, mut object) = (0, 0, 0, 0);
            let mut gone = 0;
            let data = std::ptr::from_mut(&mut gone).cast::<c_void>();
            assert_eq!(call!(cudaStreamCreate(&mut stream => *mut u64)), 0);
            assert_eq!(call!(cudaStreamBeginCapture(stream => u64, 0 => c_int)), 0);
            assert_eq!(
                call!(cudaStreamEndCapture(stream => u64, &mut graph => *mut u64)),
                0
            );
            let made = call!(cudaUserObjectCreate(
                &mut object => *mut u64, data => *mut c_void, note => Function, 1 => u32, 1 => u32
            ));
            assert_eq!(made, 0);
            let kept =
                call!(cudaGraphRetainUserObject(graph => u64, object => u64, 1 => u32, 1 => u32));
            assert_eq!(kept, 0);
            let made =
                call!(cudaGraphInstantiate(&mut launchable => *mut u64, graph => u64, 0 => u64));
            assert_eq!(made, 0);
            assert_eq!(call!(cudaGraphDestroy(graph => u64)), 0);
            // SAFETY: `gone` outlives the test, and nothing else uses it now.
            assert_eq!(unsafe { *data.cast::<i32>() }, 0);
            assert_eq!(call!(cudaGraphExecDestroy(launchable => u64)), 0);
            // SAFETY: as above.
            assert_eq!(unsafe { *data.cast::<i32>() }, 1);
        },
    );
}

#[test]
fn what_is_not_supported_says_so_once() {
    let errors = alone(
        "what_is_not_supported_says_so_once",
        &[MEMORY, ("LASTREF_STANDIN_LOG", "1")],
        || {
            let mut handle = [0_u8; 64];
            for _ in 0..2 {
                let result = call!(cudaIpcGetMemHandle(handle.as_mut_ptr() => *mut u8, 1 => u64));
                assert_eq!(result, 801);
            }
            assert_eq!(call!(cuMemExportToShareableHandle()), 801);
            assert_eq!(call!(nvmlDeviceGetPowerUsage()), 3);
        },
    );
    if let Some(errors) = errors {
        assert_eq!(
            errors
                .matches("cudaIpcGetMemHandle is not supported")
                .count(),
            1,
            "{errors}"
        );
        assert!(
            errors.contains("cuMemExportToShareableHandle is not supported"),
            "{errors}"
        );
    }
}

#[test]
fn nvml_says_who_holds_how_much() {
    #[repr(C)]
    #[derive(Clone, Copy, Default, PartialEq, Debug)]
    struct Process {
        pid: u32,
        used: u64,
    }
    let variables = [
        MEMORY,
        ("LASTREF_STANDIN_OTHER_MEMORY", "6MiB"),
        ("LASTREF_STANDIN_DEVICES", "2"),
        ("CUDA_VISIBLE_DEVICES", "1"),
    ];
    alone("nvml_says_who_holds_how_much", &variables, || {
        assert_eq!(call!(nvmlInit_v2()), 0);
        let (mut count, mut device, mut room) = (0, 0, 1);
        assert_eq!(call!(nvmlDeviceGetCount_v2(&mut count => *mut u32)), 0);
        assert_eq!(count, 2, "also what CUDA does not see");
        assert_eq!(
            call!(nvmlDeviceGetHandleByIndex_v2(2 => u32, &mut device => *mut u64)),
            2
        );
        assert_eq!(
            call!(nvmlDeviceGetHandleByIndex_v2(1 => u32, &mut device => *mut u64)),
            0
        );
        malloc(2 * MIB).unwrap();
        assert_eq!(free_bytes(), 56 * MIB);
        let mut found = [Process::default(); 2];
        let mut ask = |room: &mut u32| {
            call!(nvmlDeviceGetComputeRunningProcesses(
                device => u64, room => *mut u32, found.as_mut_ptr() => *mut Process
            ))
        };
        assert_eq!((ask(&mut room), room), (7, 2));
        assert_eq!((ask(&mut room), room), (0, 2));
        let own = Process {
            pid: std::process::id(),
            used: 2 * MIB,
        };
        assert_eq!(
            found,
            [
                own,
                Process {
                    pid: 1,
                    used: 6 * MIB
                }
            ]
        );
        let mut memory = [0_u64; 3];
        assert_eq!(
            call!(nvmlDeviceGetMemoryInfo(device => u64, memory.as_mut_ptr() => *mut u64)),
            0
        );
        assert_eq!(memory, [64 * MIB, 56 * MIB, 8 * MIB]);
        let mut id = [0 as c_char; 64];
        assert_eq!(
            call!(cudaDeviceGetPCIBusId(id.as_mut_ptr() => *mut c_char, 64 => c_int, 0 => c_int)),
            0
        );
        assert_eq!(text(id.as_ptr()), "0000:02:00.0");
        let mut again = 0;
        let by_id = call!(nvmlDeviceGetHandleByPciBusId_v2(id.as_ptr() => *const c_char, &mut again => *mut u64));
        assert_eq!((by_id, again), (0, device));
        let named =
            call!(nvmlDeviceGetName(device => u64, id.as_mut_ptr() => *mut c_char, 64 => u32));
        assert_eq!(
            (named, text(id.as_ptr()).as_str()),
            (0, "lastref stand-in (no GPU)")
        );
    });
}
