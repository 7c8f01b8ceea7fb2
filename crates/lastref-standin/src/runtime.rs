//! The runtime's interface: `libcudart.so`, of CUDA 12 and 13. Where the two differ under one name, what programs built
//! for either really call is served: those built for 12 call the changed functions by names that end in `_v2` or `_v3`.
#![expect(non_snake_case, reason = "the names of the C interface")]

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_uint};
use std::sync::OnceLock;

use lastref_alloc::{Extent2d, FillValue};

use crate::abi::{
    self, CUmemAccessDesc, CUmemLocation, CUmemPoolProps, Callback, ChannelDesc,
    CudaPointerAttributes, Dim3, In, LaunchConfig, Opaque, Out, StreamCallback, Text,
};
use crate::driver::{
    call_all, capture_info, create_pool, disable_peer, enable_peer, host_function, launch_graph,
    pool_attribute, set_pool_attribute,
};
use crate::entry::{exports, plain_exports};
use crate::error::{Code, Outcome};
use crate::memory::Kind;
use crate::names::{self, Found};
use crate::state::{self, Current, State, runtime};
use crate::streams::{CaptureMode, GREATEST_PRIORITY, LEAST_PRIORITY, On, Op, Side};
use crate::sync::{Mutex, lock};
use crate::{device, properties};

/// The version of the runtime that the program brought: the driver's, unless the program's is of another generation.
pub(crate) fn version() -> i32 {
    static MAJOR: OnceLock<Option<i32>> = OnceLock::new();
    let driver = device::driver_version();
    let major = MAJOR.get_or_init(|| {
        let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
        let (_, rest) = maps.split_once("libcudart.so.")?;
        let digits = rest.split(|c: char| !c.is_ascii_digit()).next()?;
        digits.parse().ok()
    });
    match *major {
        Some(major) if major != driver / 1000 => major * 1000,
        _ => driver,
    }
}

/// A runtime wants a driver that is not of an older generation.
pub(crate) fn check_versions() -> Outcome {
    if version() / 1000 > device::driver_version() / 1000 {
        return Err(Code::INSUFFICIENT_DRIVER);
    }
    Ok(())
}

/// A call in the context that the runtime chooses.
fn in_context<R>(body: impl FnOnce(&mut State, Current) -> Result<R, Code>) -> Result<R, Code> {
    runtime(|state| {
        let current = state.runtime_current()?;
        body(state, current)
    })
}

fn on_stream<R>(
    stream: Opaque,
    body: impl FnOnce(&mut State, On) -> Result<R, Code>,
) -> Result<R, Code> {
    in_context(|state, current| {
        let on = state.stream(current, stream)?;
        body(state, on)
    })
}

fn enter(body: &mut dyn FnMut(&mut State) -> Outcome) -> Outcome {
    runtime(body)
}

/// Whether addresses are what the kind of a copy says. Host memory may be anything that is not a device's.
fn check_kind(state: &State, dst: u64, src: u64, kind: c_int) -> Outcome {
    let on_device = |address: u64| matches!(state.side(address), Side::Device(_));
    let is_managed = |address: u64| {
        let region = state.region(address);
        region.is_some_and(|(_, region)| matches!(region.kind, Kind::Managed))
    };
    let fits = |address: u64, wants_device: bool| {
        on_device(address) == wants_device || is_managed(address)
    };
    let ok = match kind {
        0 => fits(dst, false) && fits(src, false),
        1 => fits(dst, true) && fits(src, false),
        2 => fits(dst, false) && fits(src, true),
        3 => fits(dst, true) && fits(src, true),
        4 => true,
        _ => false,
    };
    if ok { Ok(()) } else { Err(Code::INVALID_VALUE) }
}

fn copy(dst: u64, src: u64, bytes: u64, kind: c_int, stream: Opaque, wait: bool) -> Outcome {
    on_stream(stream, |state, on| {
        if bytes == 0 {
            return Ok(());
        }
        check_kind(state, dst, src, kind)?;
        if wait {
            state.forbid_while_capturing()?;
        }
        state.submit(on, Op::Copy { dst, src, bytes })?;
        if wait {
            state.synchronize_stream(on)
        } else {
            Ok(())
        }
    })
}

#[expect(clippy::too_many_arguments, reason = "as many as the C functions have")]
fn copy_rows(
    dst: u64,
    dst_pitch: u64,
    src: u64,
    src_pitch: u64,
    bytes: u64,
    height: u64,
    kind: c_int,
    stream: Opaque,
    wait: bool,
) -> Outcome {
    on_stream(stream, |state, on| {
        if bytes > dst_pitch || bytes > src_pitch {
            return Err(Code::INVALID_VALUE);
        }
        if bytes == 0 || height == 0 {
            return Ok(());
        }
        check_kind(state, dst, src, kind)?;
        for row in 0..height {
            let (dst, src) = (dst + row * dst_pitch, src + row * src_pitch);
            state.submit(on, Op::Copy { dst, src, bytes })?;
        }
        if wait {
            state.synchronize_stream(on)
        } else {
            Ok(())
        }
    })
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the C interface passes the byte as an int"
)]
fn fill(dst: u64, value: c_int, pitch: u64, width: u64, height: u64, stream: Opaque) -> Outcome {
    let extent = Extent2d {
        width_bytes: width,
        height,
        dst_pitch: pitch,
        src_pitch: pitch,
    };
    let value = FillValue::U8(value as u8);
    on_stream(stream, |state, on| {
        state.submit(on, Op::Fill { dst, value, extent })
    })
}

fn kernel(stream: Opaque) -> Outcome {
    on_stream(stream, |state, on| state.submit(on, Op::Kernel))
}

fn allocate(out: Out<u64>, bytes: u64, kind: Kind) -> Outcome {
    in_context(|state, current| {
        // As the runtime has it, nothing is at no address.
        let ptr = if bytes == 0 {
            0
        } else {
            state.allocate(current, bytes, kind)?
        };
        out.set(ptr)
    })
}

fn allocate_host(out: Out<u64>, bytes: u64, flags: c_uint) -> Outcome {
    in_context(|state, current| {
        let ptr = if bytes == 0 {
            0
        } else {
            state.allocate_host(current, bytes, flags)?
        };
        out.set(ptr)
    })
}

fn entry_point(
    symbol: Text,
    out: Out<u64>,
    version: c_int,
    flags: u64,
    status: Out<c_int>,
) -> Outcome {
    const OWN_STREAM: u64 = 2;
    let symbol = symbol.get()?;
    let version = version.min(device::driver_version());
    let (address, number) = match names::driver_function(&symbol, version, flags & OWN_STREAM != 0)
    {
        Found::At(address) => (address, 0),
        Found::Nowhere => (0, 1),
        Found::TooNew => (0, 2),
    };
    if address == 0 {
        crate::log::note(&format!(
            "there is no {symbol} in version {version} of the driver"
        ));
    }
    out.set(address)?;
    if status.is_null() && address == 0 {
        return Err(Code::NOT_FOUND);
    }
    status.set_if_wanted(number);
    Ok(())
}

// ---- variables of kernels ---------------------------------------------------------------------------------

/// A variable of a program's kernels: its size, and where it is on each device once somebody has asked.
#[derive(Debug, Default)]
struct Variable {
    bytes: u64,
    places: HashMap<usize, u64>,
}

/// By the address of what stands for it on the host. Filled while programs are loaded, before anything else.
static VARIABLES: Mutex<Option<HashMap<u64, Variable>>> = Mutex::new(None);

/// Where a variable is on the current device, and its size. It takes memory from when it is first asked for.
fn variable(state: &mut State, current: Current, symbol: Opaque) -> Result<(u64, u64), Code> {
    let mut variables = lock(&VARIABLES);
    let found = variables.as_mut().and_then(|all| all.get_mut(&symbol));
    let variable = found.ok_or(Code::INVALID_SYMBOL)?;
    let known = variable.places.get(&current.device).copied();
    if let Some(place) = known.filter(|place| state.regions.contains_key(place)) {
        return Ok((place, variable.bytes));
    }
    let place = state.allocate(current, variable.bytes.max(1), Kind::Segment)?;
    variable.places.insert(current.device, place);
    Ok((place, variable.bytes))
}

/// The address at an offset in a variable, where that many bytes are in it.
fn in_variable(
    state: &mut State,
    current: Current,
    symbol: Opaque,
    offset: u64,
    bytes: u64,
) -> Result<u64, Code> {
    let (place, all) = variable(state, current, symbol)?;
    let end = offset.checked_add(bytes).ok_or(Code::INVALID_VALUE)?;
    if end > all {
        return Err(Code::INVALID_VALUE);
    }
    Ok(place + offset)
}

fn copy_variable(
    symbol: Opaque,
    host: u64,
    bytes: u64,
    offset: u64,
    to_device: bool,
    stream: Opaque,
    wait: bool,
) -> Outcome {
    on_stream(stream, |state, on| {
        let current = Current {
            context: on.context,
            device: on.device,
        };
        let place = in_variable(state, current, symbol, offset, bytes)?;
        let (dst, src) = if to_device {
            (place, host)
        } else {
            (host, place)
        };
        state.submit(on, Op::Copy { dst, src, bytes })?;
        if wait {
            state.synchronize_stream(on)
        } else {
            Ok(())
        }
    })
}

// ---- launches in CUDA's language: `kernel<<<grid, block>>>(...)` --------------------------------------------

#[derive(Clone, Copy, Debug)]
struct CallConfiguration {
    grid: Dim3,
    block: Dim3,
    shared_bytes: u64,
    stream: Opaque,
}

thread_local! {
    static CONFIGURATIONS: RefCell<Vec<CallConfiguration>> = const { RefCell::new(Vec::new()) };
}

/// What a program's code is registered as; nobody looks inside.
static FAT_BINARY: u64 = 0;

plain_exports! {
    Runtime;

    fn cudaGetLastError() -> c_int { state::clear_runtime_error() } or 999;
    fn cudaPeekAtLastError() -> c_int { state::runtime_error() } or 999;
    fn cudaGetErrorName(error: c_int) -> u64 {
        let name = Code(error).runtime_name().unwrap_or("unrecognized error code\0");
        abi::address_of(name.as_ptr().cast())
    } or 0;
    fn cudaGetErrorString(error: c_int) -> u64 {
        let text = Code(error).text().unwrap_or("unrecognized error code\0");
        abi::address_of(text.as_ptr().cast())
    } or 0;
    fn __cudaRegisterFatBinary(_image: Opaque) -> u64 {
        abi::address_of((&raw const FAT_BINARY).cast())
    } or 0;
    fn __cudaRegisterFatBinaryEnd(_handle: Opaque) -> () {} or ();
    fn __cudaUnregisterFatBinary(_handle: Opaque) -> () {} or ();
    fn __cudaRegisterFunction() -> () {} or ();
    fn __cudaRegisterVar(
        _handle: Opaque, symbol: Opaque, _address: Opaque, _name: Opaque, _external: c_int, bytes: u64,
        _constant: c_int, _global: c_int,
    ) -> () {
        let places = HashMap::new();
        let variable = Variable { bytes, places };
        lock(&VARIABLES).get_or_insert_default().insert(symbol, variable);
    } or ();
    fn __cudaRegisterManagedVar() -> () {
        crate::log::note("__cudaRegisterManagedVar: managed variables are not supported");
    } or ();
    fn __cudaRegisterHostVar() -> () {} or ();
    fn __cudaRegisterUnifiedTable() -> () {} or ();
    fn __cudaInitModule(_handle: Opaque) -> c_char { 1 } or 0;
    fn cudaCreateChannelDesc(x: c_uint, y: c_uint, z: c_uint, w: c_uint, kind: c_int) -> ChannelDesc {
        ChannelDesc { bits: Dim3 { x, y, z }, w, kind }
    } or ChannelDesc { bits: Dim3 { x: 0, y: 0, z: 0 }, w: 0, kind: 0 };
}

exports! {
    Runtime;

    // ---- versions ---------------------------------------------------------------------------------------

    fn cudaDriverGetVersion(out: Out<c_int>) {
        out.set(device::driver_version())
    }
    fn cudaRuntimeGetVersion(out: Out<c_int>) {
        out.set(version())
    }
    fn [cudaGetDriverEntryPoint_ptsz] cudaGetDriverEntryPoint(
        symbol: Text, out: Out<u64>, flags: u64, status: Out<c_int>,
    ) {
        entry_point(symbol, out, version(), flags, status)
    }
    fn [cudaGetDriverEntryPointByVersion_ptsz] cudaGetDriverEntryPointByVersion(
        symbol: Text, out: Out<u64>, version: c_uint, flags: u64, status: Out<c_int>,
    ) {
        entry_point(symbol, out, c_int::try_from(version).unwrap_or(c_int::MAX), flags, status)
    }
    fn cudaProfilerStart() { Ok(()) }
    fn cudaProfilerStop() { Ok(()) }

    // ---- devices ----------------------------------------------------------------------------------------

    fn cudaGetDeviceCount(count: Out<c_int>) {
        count.set(0)?;
        runtime(|state| count.set(c_int::try_from(state.gpus.len()).unwrap_or(0)))
    }
    fn cudaGetDevice(device: Out<c_int>) {
        runtime(|state| device.set(c_int::try_from(state.chosen_device()).unwrap_or(0)))
    }
    fn cudaSetDevice(device: c_int) {
        runtime(|state| {
            let device = state.device(device)?;
            state.choose_device(device).map(|_| ())
        })
    }
    fn cudaInitDevice(device: c_int, _device_flags: c_uint, _flags: c_uint) {
        runtime(|state| {
            let device = state.device(device)?;
            if !state.contexts.contains_key(&state.gpus[device].primary) {
                state.gpus[device].retained_by_runtime = true;
                state.retain_primary(device);
            }
            Ok(())
        })
    }
    fn cudaChooseDevice(device: Out<c_int>, _wanted: Opaque) {
        runtime(|_| device.set(0))
    }
    fn cudaDeviceReset() {
        in_context(|state, current| state.reset_primary(current.device))
    }
    fn cudaDeviceSynchronize() {
        in_context(|state, current| state.synchronize_device(current.device))
    }
    fn cudaDeviceGetAttribute(value: Out<c_int>, number: c_int, device: c_int) {
        runtime(|state| {
            let device = state.device(device)?;
            value.set(device::attribute(&state.gpus[device], number).ok_or(Code::INVALID_VALUE)?)
        })
    }
    fn cudaGetDeviceProperties(out: Out<u8>, device: c_int) {
        runtime(|state| {
            let device = state.device(device)?;
            properties::device_properties(&state.gpus[device], 13, out)
        })
    }
    fn cudaGetDeviceProperties_v2(out: Out<u8>, device: c_int) {
        runtime(|state| {
            let device = state.device(device)?;
            properties::device_properties(&state.gpus[device], 12, out)
        })
    }
    fn cudaDeviceGetPCIBusId(id: Out<c_char>, room: c_int, device: c_int) {
        runtime(|state| {
            let device = state.device(device)?;
            let text = state::pci_bus_id(state.gpus[device].physical);
            id.set_text(&text, usize::try_from(room).unwrap_or(0))
        })
    }
    fn cudaDeviceGetByPCIBusId(out: Out<c_int>, id: Text) {
        let id = id.get()?.to_lowercase();
        runtime(|state| {
            let is_it = |gpu: &state::Gpu| state::pci_bus_id(gpu.physical).ends_with(&id);
            let device = state.gpus.iter().position(is_it).ok_or(Code::INVALID_DEVICE)?;
            out.set(c_int::try_from(device).unwrap_or(0))
        })
    }
    fn cudaDeviceGetStreamPriorityRange(least: Out<c_int>, greatest: Out<c_int>) {
        runtime(|_| {
            least.set_if_wanted(LEAST_PRIORITY);
            greatest.set_if_wanted(GREATEST_PRIORITY);
            Ok(())
        })
    }
    fn cudaDeviceCanAccessPeer(can: Out<c_int>, device: c_int, peer: c_int) {
        runtime(|state| {
            let (device, peer) = (state.device(device)?, state.device(peer)?);
            can.set(c_int::from(device != peer))
        })
    }
    fn cudaDeviceGetP2PAttribute(value: Out<c_int>, number: c_int, device: c_int, peer: c_int) {
        const ACCESS_SUPPORTED: c_int = 2;
        runtime(|state| {
            let (device, peer) = (state.device(device)?, state.device(peer)?);
            value.set(c_int::from(number == ACCESS_SUPPORTED && device != peer))
        })
    }
    fn cudaDeviceEnablePeerAccess(peer: c_int, flags: c_uint) {
        in_context(|state, current| {
            if flags != 0 {
                return Err(Code::INVALID_VALUE);
            }
            let peer = state.device(peer)?;
            enable_peer(state, current.device, peer)
        })
    }
    fn cudaDeviceDisablePeerAccess(peer: c_int) {
        in_context(|state, current| {
            let peer = state.device(peer)?;
            disable_peer(state, current.device, peer)
        })
    }
    fn cudaSetDeviceFlags(_flags: c_uint) { runtime(|_| Ok(())) }
    fn cudaGetDeviceFlags(flags: Out<c_uint>) { runtime(|_| flags.set(0)) }
    fn cudaSetValidDevices(_devices: Opaque, _count: c_int) { runtime(|_| Ok(())) }
    fn cudaDeviceSetLimit(_limit: c_int, _value: u64) { runtime(|_| Ok(())) }
    fn cudaDeviceGetLimit(value: Out<u64>, _limit: c_int) { runtime(|_| value.set(0)) }
    fn cudaDeviceSetCacheConfig(_config: c_int) { runtime(|_| Ok(())) }
    fn cudaDeviceGetCacheConfig(config: Out<c_int>) { runtime(|_| config.set(0)) }
    fn cudaDeviceSetSharedMemConfig(_config: c_int) { runtime(|_| Ok(())) }
    fn cudaDeviceGetSharedMemConfig(config: Out<c_int>) { runtime(|_| config.set(0)) }
    fn cudaCtxResetPersistingL2Cache() { runtime(|_| Ok(())) }

    // ---- memory -----------------------------------------------------------------------------------------

    fn cudaMemGetInfo(free: Out<u64>, total: Out<u64>) {
        in_context(|state, current| {
            let info = state.memory_info(current.device)?;
            free.set(info.free_bytes)?;
            total.set(info.total_bytes)
        })
    }
    fn cudaMalloc(out: Out<u64>, bytes: u64) {
        allocate(out, bytes, Kind::Segment)
    }
    fn cudaMallocManaged(out: Out<u64>, bytes: u64, _flags: c_uint) {
        allocate(out, bytes, Kind::Managed)
    }
    fn cudaMallocPitch(out: Out<u64>, pitch: Out<u64>, width: u64, height: u64) {
        let row = width.checked_next_multiple_of(512).ok_or(Code::OUT_OF_MEMORY)?;
        let bytes = row.checked_mul(height).ok_or(Code::OUT_OF_MEMORY)?;
        allocate(out, bytes, Kind::Segment)?;
        pitch.set(row)
    }
    fn cudaFree(address: u64) {
        in_context(|state, _| state.free(address))
    }
    fn cudaMallocHost(out: Out<u64>, bytes: u64) {
        allocate_host(out, bytes, 0)
    }
    fn cudaHostAlloc(out: Out<u64>, bytes: u64, flags: c_uint) {
        allocate_host(out, bytes, flags)
    }
    fn cudaFreeHost(address: u64) {
        in_context(|state, _| state.free_host(address))
    }
    fn cudaHostRegister(address: u64, bytes: u64, _flags: c_uint) {
        in_context(|state, current| state.register_host(current, address, bytes))
    }
    fn cudaHostUnregister(address: u64) {
        in_context(|state, _| state.unregister_host(address))
    }
    fn cudaHostGetDevicePointer(out: Out<u64>, address: u64, _flags: c_uint) {
        in_context(|state, _| {
            if state.side(address) != Side::Lent {
                return Err(Code::INVALID_VALUE);
            }
            out.set(address)
        })
    }
    fn cudaHostGetFlags(out: Out<c_uint>, address: u64) {
        in_context(|state, _| match state.region(address).map(|(_, region)| &region.kind) {
            Some(Kind::Host { flags, .. }) => out.set(*flags),
            Some(Kind::Registered) => out.set(0),
            _ => Err(Code::INVALID_VALUE),
        })
    }
    fn cudaPointerGetAttributes(out: Out<CudaPointerAttributes>, address: u64) {
        const NO_DEVICE: c_int = -2;
        runtime(|state| {
            let found = state.region(address).map(|(_, region)| {
                let kind = match region.kind {
                    Kind::Host { .. } | Kind::Registered => 1,
                    Kind::Managed => 3,
                    _ => 2,
                };
                (kind, c_int::try_from(region.device).unwrap_or(0))
            });
            let (kind, device) = found.unwrap_or((0, NO_DEVICE));
            out.set(CudaPointerAttributes {
                kind,
                device,
                device_pointer: if kind == 0 { 0 } else { address },
                host_pointer: if kind == 2 { 0 } else { address },
            })
        })
    }
    fn cudaMemAdvise() { runtime(|_| Ok(())) }
    fn cudaMemAdvise_v2() { runtime(|_| Ok(())) }
    fn [cudaMemPrefetchAsync_ptsz] cudaMemPrefetchAsync() { runtime(|_| Ok(())) }
    fn [cudaMemPrefetchAsync_v2_ptsz] cudaMemPrefetchAsync_v2() { runtime(|_| Ok(())) }
    fn [cudaStreamAttachMemAsync_ptsz] cudaStreamAttachMemAsync(
        stream: Opaque, _address: u64, _bytes: u64, _flags: c_uint,
    ) {
        on_stream(stream, |_, _| Ok(()))
    }
    fn cudaGetSymbolAddress(out: Out<u64>, symbol: Opaque) {
        in_context(|state, current| out.set(variable(state, current, symbol)?.0))
    }
    fn cudaGetSymbolSize(out: Out<u64>, symbol: Opaque) {
        in_context(|state, current| out.set(variable(state, current, symbol)?.1))
    }

    // ---- memory pools -----------------------------------------------------------------------------------

    fn cudaDeviceGetDefaultMemPool(out: Out<Opaque>, device: c_int) {
        runtime(|state| out.set(state.default_pool(device)?))
    }
    fn cudaDeviceGetMemPool(out: Out<Opaque>, device: c_int) {
        runtime(|state| out.set(state.current_pool(device)?))
    }
    fn cudaDeviceSetMemPool(device: c_int, pool: Opaque) {
        runtime(|state| state.set_current_pool(device, pool))
    }
    fn cudaMemPoolCreate(out: Out<Opaque>, props: In<CUmemPoolProps>) {
        runtime(|state| out.set(create_pool(state, props.get()?)?))
    }
    fn cudaMemPoolDestroy(pool: Opaque) {
        runtime(|state| state.destroy_pool(pool))
    }
    fn cudaMemPoolGetAttribute(pool: Opaque, number: c_int, out: Out<u8>) {
        runtime(|state| pool_attribute(state, pool, number, out))
    }
    fn cudaMemPoolSetAttribute(pool: Opaque, number: c_int, value: Out<u8>) {
        runtime(|state| set_pool_attribute(state, pool, number, value))
    }
    fn cudaMemPoolTrimTo(pool: Opaque, kept: u64) {
        runtime(|state| state.trim_pool(pool, kept))
    }
    fn cudaMemPoolSetAccess(pool: Opaque, _who: In<CUmemAccessDesc>, _count: u64) {
        runtime(|state| state.pool(pool).map(|_| ()))
    }
    fn cudaMemPoolGetAccess(flags: Out<c_int>, pool: Opaque, location: In<CUmemLocation>) {
        runtime(|state| flags.set(state.pool_access(pool, location.get()?.id)?))
    }
    fn [cudaMallocAsync_ptsz] cudaMallocAsync(out: Out<u64>, bytes: u64, stream: Opaque) {
        on_stream(stream, |state, on| {
            let pool = state.gpus[on.device].current_pool;
            let ptr = if bytes == 0 { 0 } else { state.allocate_from_pool(pool, bytes, on)? };
            out.set(ptr)
        })
    }
    fn [cudaMallocFromPoolAsync_ptsz] cudaMallocFromPoolAsync(
        out: Out<u64>, bytes: u64, pool: Opaque, stream: Opaque,
    ) {
        on_stream(stream, |state, on| {
            let ptr = if bytes == 0 { 0 } else { state.allocate_from_pool(pool, bytes, on)? };
            out.set(ptr)
        })
    }
    fn [cudaFreeAsync_ptsz] cudaFreeAsync(address: u64, stream: Opaque) {
        on_stream(stream, |state, on| state.free_to_pool(address, on))
    }
    fn cudaDeviceGetGraphMemAttribute(device: c_int, _number: c_int, value: Out<u64>) {
        // Graphs allocate nothing of their own here.
        runtime(|state| {
            state.device(device)?;
            value.set(0)
        })
    }
    fn cudaDeviceSetGraphMemAttribute(device: c_int, _number: c_int, _value: In<u64>) {
        runtime(|state| state.device(device).map(|_| ()))
    }
    fn cudaDeviceGraphMemTrim(device: c_int) {
        runtime(|state| state.device(device).map(|_| ()))
    }

    // ---- streams ----------------------------------------------------------------------------------------

    fn cudaStreamCreate(out: Out<Opaque>) {
        in_context(|state, current| out.set(state.create_stream(current, 0, LEAST_PRIORITY)?))
    }
    fn cudaStreamCreateWithFlags(out: Out<Opaque>, flags: c_uint) {
        in_context(|state, current| out.set(state.create_stream(current, flags, LEAST_PRIORITY)?))
    }
    fn cudaStreamCreateWithPriority(out: Out<Opaque>, flags: c_uint, priority: c_int) {
        in_context(|state, current| out.set(state.create_stream(current, flags, priority)?))
    }
    fn cudaStreamDestroy(stream: Opaque) {
        in_context(|state, _| state.destroy_stream(stream))
    }
    fn [cudaStreamGetPriority_ptsz] cudaStreamGetPriority(stream: Opaque, priority: Out<c_int>) {
        on_stream(stream, |state, on| {
            priority.set(state.streams.get(&on.key).map_or(LEAST_PRIORITY, |stream| stream.priority))
        })
    }
    fn [cudaStreamGetFlags_ptsz] cudaStreamGetFlags(stream: Opaque, flags: Out<c_uint>) {
        on_stream(stream, |state, on| {
            let stream = state.streams.get(&on.key);
            flags.set(stream.map_or(0, |stream| u32::from(stream.non_blocking)))
        })
    }
    fn [cudaStreamGetId_ptsz] cudaStreamGetId(stream: Opaque, id: Out<u64>) {
        on_stream(stream, |_, on| id.set(on.id.0))
    }
    fn [cudaStreamGetDevice_ptsz] cudaStreamGetDevice(stream: Opaque, device: Out<c_int>) {
        on_stream(stream, |_, on| device.set(c_int::try_from(on.device).unwrap_or(0)))
    }
    fn [cudaStreamSetAttribute_ptsz] cudaStreamSetAttribute(stream: Opaque, _number: c_int, _value: Opaque) {
        on_stream(stream, |_, _| Ok(()))
    }
    fn [cudaStreamCopyAttributes_ptsz] cudaStreamCopyAttributes(to: Opaque, from: Opaque) {
        on_stream(to, |_, _| Ok(()))?;
        on_stream(from, |_, _| Ok(()))
    }
    fn [cudaStreamQuery_ptsz] cudaStreamQuery(stream: Opaque) {
        on_stream(stream, |state, on| {
            if state.is_stream_idle(on)? { Ok(()) } else { Err(Code::NOT_READY) }
        })
    }
    fn [cudaStreamSynchronize_ptsz] cudaStreamSynchronize(stream: Opaque) {
        on_stream(stream, |state, on| state.synchronize_stream(on))
    }
    fn [cudaStreamWaitEvent_ptsz] cudaStreamWaitEvent(stream: Opaque, event: Opaque, _flags: c_uint) {
        on_stream(stream, |state, on| state.wait_event(on, event))
    }
    fn [cudaStreamAddCallback_ptsz] cudaStreamAddCallback(
        stream: Opaque, function: StreamCallback, data: Opaque, _flags: c_uint,
    ) {
        let on = on_stream(stream, |_, on| Ok(on))?;
        crate::streams::call_stream_host(enter, on, stream, function, data)
    }
    fn [cudaLaunchHostFunc_ptsz] cudaLaunchHostFunc(stream: Opaque, function: Callback, data: Opaque) {
        let on = on_stream(stream, |_, on| Ok(on))?;
        host_function(enter, on, function, data)
    }

    // ---- events -----------------------------------------------------------------------------------------

    fn cudaEventCreate(out: Out<Opaque>) {
        in_context(|state, current| out.set(state.create_event(current, 0)?))
    }
    fn cudaEventCreateWithFlags(out: Out<Opaque>, flags: c_uint) {
        in_context(|state, current| out.set(state.create_event(current, flags)?))
    }
    fn cudaEventDestroy(event: Opaque) {
        runtime(|state| state.destroy_event(event))
    }
    fn [cudaEventRecord_ptsz] cudaEventRecord(event: Opaque, stream: Opaque) {
        on_stream(stream, |state, on| state.record_event(event, on))
    }
    fn [cudaEventRecordWithFlags_ptsz] cudaEventRecordWithFlags(event: Opaque, stream: Opaque, _flags: c_uint) {
        on_stream(stream, |state, on| state.record_event(event, on))
    }
    fn cudaEventQuery(event: Opaque) {
        runtime(|state| if state.is_event_done(event)? { Ok(()) } else { Err(Code::NOT_READY) })
    }
    fn cudaEventSynchronize(event: Opaque) {
        runtime(|state| state.synchronize_event(event))
    }
    fn cudaEventElapsedTime(milliseconds: Out<f32>, start: Opaque, end: Opaque) {
        runtime(|state| milliseconds.set(state.elapsed_milliseconds(start, end)?))
    }
    fn cudaEventElapsedTime_v2(milliseconds: Out<f32>, start: Opaque, end: Opaque) {
        runtime(|state| milliseconds.set(state.elapsed_milliseconds(start, end)?))
    }

    // ---- copies and fills -------------------------------------------------------------------------------

    fn [cudaMemcpy_ptds] cudaMemcpy(dst: u64, src: u64, bytes: u64, kind: c_int) {
        copy(dst, src, bytes, kind, 0, true)
    }
    fn [cudaMemcpyAsync_ptsz] cudaMemcpyAsync(dst: u64, src: u64, bytes: u64, kind: c_int, stream: Opaque) {
        copy(dst, src, bytes, kind, stream, false)
    }
    fn cudaMemcpyPeer(dst: u64, to: c_int, src: u64, from: c_int, bytes: u64) {
        runtime(|state| state.device(to).and_then(|_| state.device(from)).map(|_| ()))?;
        copy(dst, src, bytes, 4, 0, true)
    }
    fn cudaMemcpyPeerAsync(dst: u64, to: c_int, src: u64, from: c_int, bytes: u64, stream: Opaque) {
        runtime(|state| state.device(to).and_then(|_| state.device(from)).map(|_| ()))?;
        copy(dst, src, bytes, 4, stream, false)
    }
    fn [cudaMemcpy2D_ptds] cudaMemcpy2D(
        dst: u64, dst_pitch: u64, src: u64, src_pitch: u64, width: u64, height: u64, kind: c_int,
    ) {
        copy_rows(dst, dst_pitch, src, src_pitch, width, height, kind, 0, true)
    }
    fn [cudaMemcpy2DAsync_ptsz] cudaMemcpy2DAsync(
        dst: u64, dst_pitch: u64, src: u64, src_pitch: u64, width: u64, height: u64, kind: c_int, stream: Opaque,
    ) {
        copy_rows(dst, dst_pitch, src, src_pitch, width, height, kind, stream, false)
    }
    fn [cudaMemcpyToSymbol_ptds] cudaMemcpyToSymbol(symbol: Opaque, src: u64, bytes: u64, offset: u64, _kind: c_int) {
        copy_variable(symbol, src, bytes, offset, true, 0, true)
    }
    fn [cudaMemcpyToSymbolAsync_ptsz] cudaMemcpyToSymbolAsync(
        symbol: Opaque, src: u64, bytes: u64, offset: u64, _kind: c_int, stream: Opaque,
    ) {
        copy_variable(symbol, src, bytes, offset, true, stream, false)
    }
    fn [cudaMemcpyFromSymbol_ptds] cudaMemcpyFromSymbol(dst: u64, symbol: Opaque, bytes: u64, offset: u64, _kind: c_int) {
        copy_variable(symbol, dst, bytes, offset, false, 0, true)
    }
    fn [cudaMemcpyFromSymbolAsync_ptsz] cudaMemcpyFromSymbolAsync(
        dst: u64, symbol: Opaque, bytes: u64, offset: u64, _kind: c_int, stream: Opaque,
    ) {
        copy_variable(symbol, dst, bytes, offset, false, stream, false)
    }
    fn [cudaMemset_ptds] cudaMemset(dst: u64, value: c_int, bytes: u64) {
        fill(dst, value, bytes, bytes, 1, 0)
    }
    fn [cudaMemsetAsync_ptsz] cudaMemsetAsync(dst: u64, value: c_int, bytes: u64, stream: Opaque) {
        fill(dst, value, bytes, bytes, 1, stream)
    }
    fn [cudaMemset2D_ptds] cudaMemset2D(dst: u64, pitch: u64, value: c_int, width: u64, height: u64) {
        fill(dst, value, pitch, width, height, 0)
    }
    fn [cudaMemset2DAsync_ptsz] cudaMemset2DAsync(
        dst: u64, pitch: u64, value: c_int, width: u64, height: u64, stream: Opaque,
    ) {
        fill(dst, value, pitch, width, height, stream)
    }

    // ---- captures and graphs ----------------------------------------------------------------------------

    fn [cudaStreamBeginCapture_ptsz] cudaStreamBeginCapture(stream: Opaque, mode: c_int) {
        let mode = CaptureMode::from_number(mode)?;
        on_stream(stream, |state, on| state.begin_capture(on, mode))
    }
    fn [cudaStreamEndCapture_ptsz] cudaStreamEndCapture(stream: Opaque, graph: Out<Opaque>) {
        on_stream(stream, |state, on| {
            graph.set_if_wanted(0);
            graph.set(state.end_capture(on)?)
        })
    }
    fn [cudaStreamIsCapturing_ptsz] cudaStreamIsCapturing(stream: Opaque, status: Out<c_int>) {
        on_stream(stream, |state, on| status.set(state.capture_status(on)?.0))
    }
    fn [cudaStreamGetCaptureInfo_ptsz] cudaStreamGetCaptureInfo(
        stream: Opaque, status: Out<c_int>, id: Out<u64>, graph: Out<Opaque>, dependencies: Out<Opaque>,
        edges: Out<Opaque>, num_dependencies: Out<u64>,
    ) {
        on_stream(stream, |state, on| {
            capture_info(state, on, status, id, graph, dependencies, edges, num_dependencies)
        })
    }
    fn [cudaStreamGetCaptureInfo_v2_ptsz] cudaStreamGetCaptureInfo_v2(
        stream: Opaque, status: Out<c_int>, id: Out<u64>, graph: Out<Opaque>, dependencies: Out<Opaque>,
        num_dependencies: Out<u64>,
    ) {
        on_stream(stream, |state, on| {
            capture_info(state, on, status, id, graph, dependencies, Out::null(), num_dependencies)
        })
    }
    fn [cudaStreamGetCaptureInfo_v3_ptsz] cudaStreamGetCaptureInfo_v3(
        stream: Opaque, status: Out<c_int>, id: Out<u64>, graph: Out<Opaque>, dependencies: Out<Opaque>,
        edges: Out<Opaque>, num_dependencies: Out<u64>,
    ) {
        on_stream(stream, |state, on| {
            capture_info(state, on, status, id, graph, dependencies, edges, num_dependencies)
        })
    }
    fn cudaThreadExchangeStreamCaptureMode(mode: Out<c_int>) {
        let wanted = CaptureMode::from_number(mode.get()?)?;
        mode.set(state::exchange_capture_mode(wanted).number())
    }
    fn cudaGraphInstantiate(out: Out<Opaque>, graph: Opaque, _flags: u64) {
        runtime(|state| out.set(state.instantiate(graph)?))
    }
    fn cudaGraphInstantiateWithFlags(out: Out<Opaque>, graph: Opaque, _flags: u64) {
        runtime(|state| out.set(state.instantiate(graph)?))
    }
    fn [cudaGraphLaunch_ptsz] cudaGraphLaunch(graph: Opaque, stream: Opaque) {
        let on = on_stream(stream, |_, on| Ok(on))?;
        launch_graph(enter, graph, on)
    }
    fn [cudaGraphUpload_ptsz] cudaGraphUpload(graph: Opaque, stream: Opaque) {
        on_stream(stream, |state, _| state.graph(graph).map(|_| ()))
    }
    fn cudaGraphGetNodes(graph: Opaque, nodes: Out<Opaque>, count: Out<u64>) {
        runtime(|state| state.graph_nodes(graph, nodes, count))
    }
    fn cudaGraphDestroy(graph: Opaque) {
        runtime(|state| state.destroy_graph(graph)).map(call_all)
    }
    fn cudaGraphExecDestroy(graph: Opaque) {
        runtime(|state| state.destroy_graph(graph)).map(call_all)
    }
    fn cudaUserObjectCreate(
        out: Out<Opaque>, data: Opaque, destroy: Callback, references: c_uint, _flags: c_uint,
    ) {
        runtime(|state| out.set(state.create_user_object(destroy, data, references)))
    }
    fn cudaUserObjectRetain(object: Opaque, count: c_uint) {
        runtime(|state| state.retain_user_object(object, count))
    }
    fn cudaUserObjectRelease(object: Opaque, count: c_uint) {
        runtime(|state| state.release_user_object(object, count)).map(call_all)
    }
    fn cudaGraphRetainUserObject(graph: Opaque, object: Opaque, count: c_uint, flags: c_uint) {
        const MOVE: c_uint = 1;
        runtime(|state| state.keep_with_graph(graph, object, count, flags & MOVE != 0))
    }

    // ---- kernels, which compute nothing -----------------------------------------------------------------

    fn [cudaLaunchKernel_ptsz] cudaLaunchKernel(
        _function: Opaque, _grid: Dim3, _block: Dim3, _arguments: Opaque, _shared: u64, stream: Opaque,
    ) {
        kernel(stream)
    }
    fn [cudaLaunchCooperativeKernel_ptsz] cudaLaunchCooperativeKernel(
        _function: Opaque, _grid: Dim3, _block: Dim3, _arguments: Opaque, _shared: u64, stream: Opaque,
    ) {
        kernel(stream)
    }
    fn [__cudaLaunchKernel_ptsz] __cudaLaunchKernel(
        _function: Opaque, _grid: Dim3, _block: Dim3, _arguments: Opaque, _shared: u64, stream: Opaque,
    ) {
        kernel(stream)
    }
    fn [cudaLaunchKernelExC_ptsz] cudaLaunchKernelExC(
        config: In<LaunchConfig>, _function: Opaque, _arguments: Opaque,
    ) {
        kernel(config.get()?.stream)
    }
    fn __cudaPushCallConfiguration(grid: Dim3, block: Dim3, shared_bytes: u64, stream: Opaque) {
        let configuration = CallConfiguration { grid, block, shared_bytes, stream };
        CONFIGURATIONS.with_borrow_mut(|all| all.push(configuration));
        Ok(())
    }
    fn __cudaPopCallConfiguration(grid: Out<Dim3>, block: Out<Dim3>, shared: Out<u64>, stream: Out<Opaque>) {
        let last = CONFIGURATIONS.with_borrow_mut(Vec::pop).ok_or(Code::MISSING_CONFIGURATION)?;
        grid.set(last.grid)?;
        block.set(last.block)?;
        shared.set(last.shared_bytes)?;
        stream.set(last.stream)
    }
    fn __cudaGetKernel(out: Out<Opaque>, function: Opaque) { out.set(function) }
    fn cudaGetKernel(out: Out<Opaque>, function: Opaque) { out.set(function) }
    fn cudaGetFuncBySymbol(out: Out<Opaque>, function: Opaque) { out.set(function) }
    fn cudaFuncGetAttributes(out: Out<u8>, _function: Opaque) {
        runtime(|_| properties::function_attributes(out))
    }
    fn cudaFuncSetAttribute(_function: Opaque, _number: c_int, _value: c_int) { runtime(|_| Ok(())) }
    fn cudaFuncSetCacheConfig(_function: Opaque, _config: c_int) { runtime(|_| Ok(())) }
    fn cudaFuncSetSharedMemConfig(_function: Opaque, _config: c_int) { runtime(|_| Ok(())) }
    fn cudaKernelSetAttributeForDevice(_kernel: Opaque, _number: c_int, _value: c_int, device: c_int) {
        runtime(|state| state.device(device).map(|_| ()))
    }
    fn cudaLibraryLoadData(out: Out<Opaque>) {
        runtime(|state| {
            let library = state.new_handle();
            state.modules.insert(library);
            out.set(library)
        })
    }
    fn cudaLibraryUnload(library: Opaque) {
        runtime(|state| if state.modules.remove(&library) { Ok(()) } else { Err(Code::INVALID_HANDLE) })
    }
    fn cudaLibraryGetKernel(out: Out<Opaque>, library: Opaque, _name: Text) {
        runtime(|state| {
            if !state.modules.contains(&library) {
                return Err(Code::INVALID_HANDLE);
            }
            out.set(state.new_handle())
        })
    }
    fn cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        count: Out<c_int>, _function: Opaque, _block: c_int, _shared: u64,
    ) {
        runtime(|_| count.set(2))
    }
    fn cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        count: Out<c_int>, _function: Opaque, _block: c_int, _shared: u64, _flags: c_uint,
    ) {
        runtime(|_| count.set(2))
    }
    fn cudaOccupancyAvailableDynamicSMemPerBlock(
        bytes: Out<u64>, _function: Opaque, _blocks: c_int, _block: c_int,
    ) {
        runtime(|_| bytes.set(u64::from(device::SHARED_PER_BLOCK.unsigned_abs())))
    }
}
