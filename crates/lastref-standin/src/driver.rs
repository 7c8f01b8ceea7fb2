//! The driver's interface: `libcuda.so.1`.
#![expect(non_snake_case, reason = "the names of the C interface")]

use std::ffi::{c_char, c_int, c_uint};

use lastref_alloc::{Device as _, Extent2d, FillValue};

use crate::abi::{
    self, CUlaunchConfig, CUmemAccessDesc, CUmemAllocationProp, CUmemLocation, CUmemPoolProps,
    CUuuid, Callback, CudaMemcpy2d, In, Memcpy2dSide, Opaque, Out, StreamCallback, Text,
};
use crate::device;
use crate::entry::exports;
use crate::error::{Code, Outcome};
use crate::log;
use crate::memory::{Kind, PAGE_BYTES, Pool};
use crate::names::{self, Found};
use crate::state::{self, DEVICE_NAME, State, driver};
use crate::streams::{CaptureMode, GREATEST_PRIORITY, LEAST_PRIORITY, On, Op};

/// A call on a stream, in the current context.
fn on_stream<R>(
    stream: Opaque,
    body: impl FnOnce(&mut State, On) -> Result<R, Code>,
) -> Result<R, Code> {
    driver(|state| {
        let current = state.current()?;
        let on = state.stream(current, stream)?;
        body(state, on)
    })
}

/// A copy that is done when the call returns.
fn copy_now(dst: u64, src: u64, bytes: u64) -> Outcome {
    on_stream(0, |state, on| {
        state.forbid_while_capturing()?;
        state.submit(on, Op::Copy { dst, src, bytes })?;
        state.synchronize_stream(on)
    })
}

fn copy(dst: u64, src: u64, bytes: u64, stream: Opaque) -> Outcome {
    on_stream(stream, |state, on| {
        state.submit(on, Op::Copy { dst, src, bytes })
    })
}

/// A copy one side of which must be device memory.
fn is_device(address: u64, bytes: u64) -> Outcome {
    driver(|state| {
        if bytes == 0 || matches!(state.side(address), crate::streams::Side::Device(_)) {
            return Ok(());
        }
        log::note(&format!("{address:#x} is not device memory"));
        Err(Code::INVALID_VALUE)
    })
}

fn fill_rows(
    dst: u64,
    value: FillValue,
    pitch: u64,
    width: u64,
    height: u64,
    stream: Opaque,
) -> Outcome {
    let width_bytes = width
        .checked_mul(value.bytes())
        .ok_or(Code::INVALID_VALUE)?;
    if !dst.is_multiple_of(value.bytes()) {
        return Err(Code::INVALID_VALUE);
    }
    let extent = Extent2d {
        width_bytes,
        height,
        dst_pitch: pitch,
        src_pitch: pitch,
    };
    on_stream(stream, |state, on| {
        state.submit(on, Op::Fill { dst, value, extent })
    })
}

fn fill(dst: u64, value: FillValue, count: u64, stream: Opaque) -> Outcome {
    let pitch = count.saturating_mul(value.bytes());
    fill_rows(dst, value, pitch, count, 1, stream)
}

fn wait_for(stream: Opaque) -> Outcome {
    on_stream(stream, |state, on| state.synchronize_stream(on))
}

fn kernel(stream: Opaque) -> Outcome {
    on_stream(stream, |state, on| state.submit(on, Op::Kernel))
}

/// The rows of a two-dimensional copy, one copy each.
pub(crate) fn copy_rows(copy: &CudaMemcpy2d, stream: Opaque, wait: bool) -> Outcome {
    const ARRAY: c_int = 3;
    const HOST: c_int = 1;
    let start = |side: &Memcpy2dSide| {
        if side.memory_type == ARRAY {
            log::note("cuMemcpy2D: arrays are not supported");
            return Err(Code::NOT_SUPPORTED);
        }
        let base = if side.memory_type == HOST {
            side.host
        } else {
            side.device
        };
        let pitch = if side.pitch == 0 {
            copy.width_bytes
        } else {
            side.pitch
        };
        if pitch < copy.width_bytes {
            return Err(Code::INVALID_VALUE);
        }
        Ok((base + side.y * pitch + side.x_bytes, pitch))
    };
    let ((dst, dst_pitch), (src, src_pitch)) = (start(&copy.dst)?, start(&copy.src)?);
    rows(
        dst,
        dst_pitch,
        src,
        src_pitch,
        copy.width_bytes,
        copy.height,
        stream,
        wait,
    )
}

#[expect(clippy::too_many_arguments, reason = "as many as the C functions have")]
fn rows(
    dst: u64,
    dst_pitch: u64,
    src: u64,
    src_pitch: u64,
    bytes: u64,
    height: u64,
    stream: Opaque,
    wait: bool,
) -> Outcome {
    on_stream(stream, |state, on| {
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

fn attributes_of(function: Opaque, number: c_int) -> Result<c_int, Code> {
    driver(|state| {
        if !state.functions.contains_key(&function) {
            return Err(Code::INVALID_HANDLE);
        }
        Ok(match number {
            0 => device::MAX_THREADS_PER_BLOCK,
            // Registers.
            4 => 32,
            // The versions of the code.
            5 | 6 => device::MAJOR * 10 + device::MINOR,
            _ => 0,
        })
    })
}

fn load_module(out: Out<Opaque>) -> Outcome {
    driver(|state| {
        state.current()?;
        let module = state.new_handle();
        state.modules.insert(module);
        out.set(module)
    })
}

fn function_of(out: Out<Opaque>, module: Opaque, name: &str) -> Outcome {
    driver(|state| {
        if !state.modules.contains(&module) {
            return Err(Code::INVALID_HANDLE);
        }
        let function = state.new_handle();
        // A caller may keep the name for as long as the process runs, and there are few.
        let name: &'static str = Box::leak(format!("{name}\0").into_boxed_str());
        state.functions.insert(function, name);
        out.set(function)
    })
}

fn get_proc_address(
    symbol: Text,
    out: Out<u64>,
    version: c_int,
    flags: u64,
    status: Out<c_int>,
) -> Outcome {
    const OWN_STREAM: u64 = 2;
    let symbol = symbol.get()?;
    let version = version.min(device::driver_version());
    let found = names::driver_function(&symbol, version, flags & OWN_STREAM != 0);
    let (address, number) = match found {
        Found::At(address) => (address, 0),
        Found::Nowhere => (0, 1),
        Found::TooNew => (0, 2),
    };
    if address == 0 {
        log::note(&format!(
            "cuGetProcAddress: there is no {symbol} in version {version}"
        ));
    }
    out.set(address)?;
    if !status.is_null() {
        return status.set(number);
    }
    if address == 0 {
        Err(Code::NOT_FOUND)
    } else {
        Ok(())
    }
}

/// An answer about an address, whose kind depends on the question.
fn pointer_attribute(state: &State, out: Out<u8>, number: c_int, address: u64) -> Outcome {
    let Some((start, region)) = state.region(address) else {
        return Err(Code::INVALID_VALUE);
    };
    let gpu = &state.gpus[region.device];
    let is_managed = matches!(region.kind, Kind::Managed);
    match number {
        1 => out.cast::<u64>().set(if region.context == 0 {
            gpu.primary
        } else {
            region.context
        }),
        2 => out
            .cast::<c_uint>()
            .set(if region.is_host() { 1 } else { 2 }),
        3 => out.cast::<u64>().set(address),
        4 if region.is_host() || is_managed => out.cast::<u64>().set(address),
        6 | 10 | 15 => out.cast::<c_int>().set(0),
        7 => out.cast::<u64>().set(start),
        8 => out.cast::<c_uint>().set(u32::from(is_managed)),
        9 => out
            .cast::<c_int>()
            .set(c_int::try_from(region.device).unwrap_or(0)),
        11 => out.cast::<u64>().set(start),
        12 => out.cast::<u64>().set(region.bytes),
        13 => out.cast::<c_uint>().set(1),
        14 => out.cast::<u64>().set(0),
        16 => out.cast::<u64>().set(3),
        17 => match region.kind {
            Kind::Pool { pool, .. } => out.cast::<u64>().set(pool),
            _ => out.cast::<u64>().set(0),
        },
        _ => Err(Code::INVALID_VALUE),
    }
}

/// A number of a pool; the three flags about reuse are shorter than the others.
pub(crate) fn pool_attribute(
    state: &mut State,
    pool: Opaque,
    number: c_int,
    out: Out<u8>,
) -> Outcome {
    let pool = state.pool(pool)?;
    let [reserved, most_reserved, used, most_used] = pool.stats();
    let long = match number {
        1..=3 => {
            let flag = pool.reuse[usize::try_from(number - 1).unwrap_or(0)];
            return out.cast::<c_int>().set(flag);
        }
        4 => pool.release_threshold,
        5 => reserved,
        6 => most_reserved,
        7 => used,
        8 => most_used,
        _ => return Err(Code::INVALID_VALUE),
    };
    out.cast::<u64>().set(long)
}

pub(crate) fn set_pool_attribute(
    state: &mut State,
    pool: Opaque,
    number: c_int,
    value: Out<u8>,
) -> Outcome {
    let pool = state.pool(pool)?;
    match number {
        1..=3 => {
            let flag = value.cast::<c_int>().get()?;
            pool.reuse[usize::try_from(number - 1).unwrap_or(0)] = flag;
        }
        4 => pool.release_threshold = value.cast::<u64>().get()?,
        // Only 0, which makes the peak begin anew.
        6 | 8 if value.cast::<u64>().get()? == 0 => pool.reset_peaks(),
        _ => return Err(Code::INVALID_VALUE),
    }
    Ok(())
}

pub(crate) fn create_pool(state: &mut State, props: CUmemPoolProps) -> Result<u64, Code> {
    const ON_DEVICE: c_int = 1;
    if props.location.kind != ON_DEVICE || props.handle_types != 0 {
        log::note(
            "memory pools: only those of a device, without handles for other processes, are supported",
        );
        return Err(Code::NOT_SUPPORTED);
    }
    let device = state.device(props.location.id)?;
    let pool = state.new_handle();
    state.pools.insert(pool, Pool::new(device));
    Ok(pool)
}

pub(crate) fn enable_peer(state: &mut State, device: usize, peer: usize) -> Outcome {
    if device == peer {
        return Err(Code::INVALID_DEVICE);
    }
    if !state.gpus[device].peers.insert(peer) {
        return Err(Code::PEER_ACCESS_ALREADY_ENABLED);
    }
    Ok(())
}

pub(crate) fn disable_peer(state: &mut State, device: usize, peer: usize) -> Outcome {
    if state.gpus[device].peers.remove(&peer) {
        Ok(())
    } else {
        Err(Code::PEER_ACCESS_NOT_ENABLED)
    }
}

/// Launches a graph: its work in the order in which it was captured.
pub(crate) fn launch_graph(
    enter: impl Fn(&mut dyn FnMut(&mut State) -> Outcome) -> Outcome,
    graph: Opaque,
    on: On,
) -> Outcome {
    let mut ops = None;
    enter(&mut |state| {
        ops = Some(std::sync::Arc::clone(&state.graph(graph)?.ops));
        Ok(())
    })?;
    for op in ops.iter().flat_map(|ops| ops.iter()) {
        if let Op::Host { function, data } = *op {
            crate::streams::call_host(&enter, on, function, data)?;
        } else {
            enter(&mut |state| state.submit(on, *op))?;
        }
    }
    Ok(())
}

/// Calls a function of the caller's when a stream comes to it, or when the graph does that the stream is captured into.
pub(crate) fn host_function(
    enter: impl Fn(&mut dyn FnMut(&mut State) -> Outcome) -> Outcome,
    on: On,
    function: Callback,
    data: Opaque,
) -> Outcome {
    if function.is_none() {
        return Err(Code::INVALID_VALUE);
    }
    let mut captured = false;
    enter(&mut |state| {
        captured = state.capture_status(on)?.0 != 0;
        state.submit(on, Op::Host { function, data })
    })?;
    if captured {
        return Ok(());
    }
    crate::streams::call_host(enter, on, function, data)
}

/// Calls the functions of objects that have gone, with no lock held.
pub(crate) fn call_all(functions: Vec<(Callback, Opaque)>) {
    for (function, data) in functions {
        function.call(data);
    }
}

fn enter(body: &mut dyn FnMut(&mut State) -> Outcome) -> Outcome {
    driver(body)
}

#[expect(clippy::too_many_arguments, reason = "as many as the C functions have")]
pub(crate) fn capture_info(
    state: &mut State,
    on: On,
    status: Out<c_int>,
    id: Out<u64>,
    graph: Out<Opaque>,
    dependencies: Out<Opaque>,
    edges: Out<Opaque>,
    num_dependencies: Out<u64>,
) -> Outcome {
    let (number, capture) = state.capture_status(on)?;
    status.set(number)?;
    if number == 1 {
        id.set_if_wanted(capture);
        let of = state
            .captures
            .get(&capture)
            .map_or(0, |capture| capture.graph);
        graph.set_if_wanted(of);
        // The order of a capture is that of submission; there are no nodes to depend on.
        dependencies.set_if_wanted(0);
        edges.set_if_wanted(0);
        num_dependencies.set_if_wanted(0);
    }
    Ok(())
}

exports! {
    Driver;

    // ---- the driver -------------------------------------------------------------------------------------

    fn cuInit(flags: c_uint) {
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        state::initialise()
    }
    fn cuDriverGetVersion(version: Out<c_int>) {
        version.set(device::driver_version())
    }
    fn cuGetErrorName(error: c_int, out: Out<u64>) {
        let name = Code(error).driver_name();
        out.set(name.map_or(0, |name| abi::address_of(name.as_ptr().cast())))?;
        name.map(|_| ()).ok_or(Code::INVALID_VALUE)
    }
    fn cuGetErrorString(error: c_int, out: Out<u64>) {
        let text = Code(error).text();
        out.set(text.map_or(0, |text| abi::address_of(text.as_ptr().cast())))?;
        text.map(|_| ()).ok_or(Code::INVALID_VALUE)
    }
    fn cuGetProcAddress(symbol: Text, out: Out<u64>, version: c_int, flags: u64) {
        get_proc_address(symbol, out, version, flags, Out::null())
    }
    fn cuGetProcAddress_v2(symbol: Text, out: Out<u64>, version: c_int, flags: u64, status: Out<c_int>) {
        get_proc_address(symbol, out, version, flags, status)
    }
    fn cuGetExportTable(table: Out<u64>, _id: In<CUuuid>) {
        table.set_if_wanted(0);
        log::note("cuGetExportTable: there are no private tables; a library with a CUDA runtime of its own will not start");
        Err(Code::NOT_FOUND)
    }
    fn cuProfilerStart() { Ok(()) }
    fn cuProfilerStop() { Ok(()) }

    // ---- devices ----------------------------------------------------------------------------------------

    fn cuDeviceGetCount(count: Out<c_int>) {
        driver(|state| count.set(c_int::try_from(state.gpus.len()).unwrap_or(0)))
    }
    fn cuDeviceGet(out: Out<c_int>, ordinal: c_int) {
        driver(|state| {
            state.device(ordinal)?;
            out.set(ordinal)
        })
    }
    fn cuDeviceGetName(name: Out<c_char>, room: c_int, device: c_int) {
        driver(|state| {
            state.device(device)?;
            name.set_text(DEVICE_NAME, usize::try_from(room).unwrap_or(0))
        })
    }
    fn cuDeviceTotalMem_v2(bytes: Out<u64>, device: c_int) {
        driver(|state| {
            let device = state.device(device)?;
            bytes.set(state.gpus[device].sim.properties().total_bytes)
        })
    }
    fn cuDeviceGetAttribute(value: Out<c_int>, number: c_int, device: c_int) {
        driver(|state| {
            let device = state.device(device)?;
            value.set(device::attribute(&state.gpus[device], number).ok_or(Code::INVALID_VALUE)?)
        })
    }
    fn cuDeviceComputeCapability(major: Out<c_int>, minor: Out<c_int>, device: c_int) {
        driver(|state| {
            state.device(device)?;
            major.set(device::MAJOR)?;
            minor.set(device::MINOR)
        })
    }
    fn cuDeviceGetUuid(out: Out<CUuuid>, device: c_int) {
        driver(|state| {
            let device = state.device(device)?;
            out.set(CUuuid(state::uuid(state.gpus[device].physical)))
        })
    }
    fn cuDeviceGetUuid_v2(out: Out<CUuuid>, device: c_int) {
        driver(|state| {
            let device = state.device(device)?;
            out.set(CUuuid(state::uuid(state.gpus[device].physical)))
        })
    }
    fn cuDeviceGetPCIBusId(id: Out<c_char>, room: c_int, device: c_int) {
        driver(|state| {
            let device = state.device(device)?;
            let text = state::pci_bus_id(state.gpus[device].physical);
            id.set_text(&text, usize::try_from(room).unwrap_or(0))
        })
    }
    fn cuDeviceGetByPCIBusId(out: Out<c_int>, id: Text) {
        let id = id.get()?.to_lowercase();
        driver(|state| {
            let is_it = |gpu: &state::Gpu| state::pci_bus_id(gpu.physical).ends_with(&id);
            let device = state.gpus.iter().position(is_it).ok_or(Code::INVALID_DEVICE)?;
            out.set(c_int::try_from(device).unwrap_or(0))
        })
    }
    fn cuDeviceCanAccessPeer(can: Out<c_int>, device: c_int, peer: c_int) {
        driver(|state| {
            let (device, peer) = (state.device(device)?, state.device(peer)?);
            can.set(c_int::from(device != peer))
        })
    }
    fn cuDeviceGetP2PAttribute(value: Out<c_int>, number: c_int, device: c_int, peer: c_int) {
        const ACCESS_SUPPORTED: c_int = 2;
        driver(|state| {
            let (device, peer) = (state.device(device)?, state.device(peer)?);
            value.set(c_int::from(number == ACCESS_SUPPORTED && device != peer))
        })
    }

    // ---- contexts ---------------------------------------------------------------------------------------

    fn cuDevicePrimaryCtxRetain(out: Out<Opaque>, device: c_int) {
        driver(|state| {
            let device = state.device(device)?;
            out.set(state.retain_primary(device))
        })
    }
    fn cuDevicePrimaryCtxRelease_v2(device: c_int) {
        driver(|state| {
            let device = state.device(device)?;
            state.release_primary(device)
        })
    }
    fn cuDevicePrimaryCtxReset_v2(device: c_int) {
        driver(|state| {
            let device = state.device(device)?;
            state.reset_primary(device)
        })
    }
    fn cuDevicePrimaryCtxSetFlags_v2(device: c_int, flags: c_uint) {
        driver(|state| {
            let device = state.device(device)?;
            state.gpus[device].primary_flags = flags;
            Ok(())
        })
    }
    fn cuDevicePrimaryCtxGetState(device: c_int, flags: Out<c_uint>, active: Out<c_int>) {
        driver(|state| {
            let device = state.device(device)?;
            let gpu = &state.gpus[device];
            flags.set(gpu.primary_flags)?;
            active.set(c_int::from(state.contexts.contains_key(&gpu.primary)))
        })
    }
    fn cuCtxCreate_v2(out: Out<Opaque>, _flags: c_uint, device: c_int) {
        driver(|state| {
            let device = state.device(device)?;
            out.set(state.create_context(device))
        })
    }
    fn cuCtxCreate_v3(out: Out<Opaque>, _params: Opaque, _count: c_int, _flags: c_uint, device: c_int) {
        driver(|state| {
            let device = state.device(device)?;
            out.set(state.create_context(device))
        })
    }
    fn cuCtxCreate_v4(out: Out<Opaque>, _params: Opaque, _flags: c_uint, device: c_int) {
        driver(|state| {
            let device = state.device(device)?;
            out.set(state.create_context(device))
        })
    }
    fn cuCtxDestroy_v2(context: Opaque) {
        driver(|state| {
            if state.context(context)?.primary {
                return Err(Code::INVALID_CONTEXT);
            }
            state.destroy_context(context)?;
            if State::current_handle() == context {
                State::pop_current()?;
            }
            Ok(())
        })
    }
    fn cuCtxGetCurrent(out: Out<Opaque>) {
        driver(|_| out.set(State::current_handle()))
    }
    fn cuCtxSetCurrent(context: Opaque) {
        driver(|state| {
            if context != 0 {
                state.context(context)?;
            }
            State::set_current(context);
            Ok(())
        })
    }
    fn cuCtxPushCurrent_v2(context: Opaque) {
        driver(|state| {
            state.context(context)?;
            State::push_current(context);
            Ok(())
        })
    }
    fn cuCtxPopCurrent_v2(out: Out<Opaque>) {
        driver(|_| {
            let context = State::pop_current()?;
            out.set_if_wanted(context);
            Ok(())
        })
    }
    fn cuCtxGetDevice(out: Out<c_int>) {
        driver(|state| out.set(c_int::try_from(state.current()?.device).unwrap_or(0)))
    }
    fn cuCtxGetDevice_v2(out: Out<c_int>, context: Opaque) {
        driver(|state| {
            let context = if context == 0 { State::current_handle() } else { context };
            out.set(c_int::try_from(state.context(context)?.device).unwrap_or(0))
        })
    }
    fn cuCtxGetFlags(flags: Out<c_uint>) {
        driver(|state| {
            let device = state.current()?.device;
            flags.set(state.gpus[device].primary_flags)
        })
    }
    fn cuCtxSetFlags(_flags: c_uint) {
        driver(|state| state.current().map(|_| ()))
    }
    fn cuCtxGetId(context: Opaque, id: Out<u64>) {
        driver(|state| {
            let context = if context == 0 { State::current_handle() } else { context };
            state.context(context)?;
            id.set(context)
        })
    }
    fn cuCtxGetApiVersion(_context: Opaque, version: Out<c_uint>) {
        version.set(3020)
    }
    fn cuCtxSynchronize() {
        driver(|state| {
            let device = state.current()?.device;
            state.synchronize_device(device)
        })
    }
    fn cuCtxSynchronize_v2(context: Opaque) {
        driver(|state| {
            let context = if context == 0 { State::current_handle() } else { context };
            let device = state.context(context)?.device;
            state.synchronize_device(device)
        })
    }
    fn cuCtxGetStreamPriorityRange(least: Out<c_int>, greatest: Out<c_int>) {
        driver(|state| {
            state.current()?;
            least.set_if_wanted(LEAST_PRIORITY);
            greatest.set_if_wanted(GREATEST_PRIORITY);
            Ok(())
        })
    }
    fn cuCtxGetCacheConfig(out: Out<c_int>) {
        driver(|state| {
            state.current()?;
            out.set(0)
        })
    }
    fn cuCtxSetCacheConfig(_config: c_int) {
        driver(|state| state.current().map(|_| ()))
    }
    fn cuCtxGetLimit(value: Out<u64>, _limit: c_int) {
        driver(|state| {
            state.current()?;
            value.set(0)
        })
    }
    fn cuCtxSetLimit(_limit: c_int, _value: u64) {
        driver(|state| state.current().map(|_| ()))
    }
    fn cuCtxEnablePeerAccess(context: Opaque, flags: c_uint) {
        driver(|state| {
            let (device, peer) = (state.current()?.device, state.context(context)?.device);
            if flags != 0 {
                return Err(Code::INVALID_VALUE);
            }
            enable_peer(state, device, peer)
        })
    }
    fn cuCtxDisablePeerAccess(context: Opaque) {
        driver(|state| {
            let (device, peer) = (state.current()?.device, state.context(context)?.device);
            disable_peer(state, device, peer)
        })
    }

    // ---- memory -----------------------------------------------------------------------------------------

    fn cuMemGetInfo_v2(free: Out<u64>, total: Out<u64>) {
        driver(|state| {
            let device = state.current()?.device;
            let info = state.memory_info(device)?;
            free.set(info.free_bytes)?;
            total.set(info.total_bytes)
        })
    }
    fn cuMemAlloc_v2(out: Out<u64>, bytes: u64) {
        driver(|state| {
            let current = state.current()?;
            out.set(state.allocate(current, bytes, Kind::Segment)?)
        })
    }
    fn cuMemAllocPitch_v2(out: Out<u64>, pitch: Out<u64>, width: u64, height: u64, _element: c_uint) {
        driver(|state| {
            let current = state.current()?;
            let row = width.checked_next_multiple_of(512).ok_or(Code::OUT_OF_MEMORY)?;
            let bytes = row.checked_mul(height).ok_or(Code::OUT_OF_MEMORY)?;
            out.set(state.allocate(current, bytes, Kind::Segment)?)?;
            pitch.set(row)
        })
    }
    fn cuMemAllocManaged(out: Out<u64>, bytes: u64, _flags: c_uint) {
        driver(|state| {
            let current = state.current()?;
            out.set(state.allocate(current, bytes, Kind::Managed)?)
        })
    }
    fn cuMemFree_v2(address: u64) {
        driver(|state| {
            state.current()?;
            state.free(address)
        })
    }
    fn cuMemGetAddressRange_v2(base: Out<u64>, bytes: Out<u64>, address: u64) {
        driver(|state| {
            let (start, region) = state.region(address).ok_or(Code::NOT_FOUND)?;
            base.set_if_wanted(start);
            bytes.set_if_wanted(region.bytes);
            Ok(())
        })
    }
    fn cuMemAllocHost_v2(out: Out<u64>, bytes: u64) {
        driver(|state| {
            let current = state.current()?;
            out.set(state.allocate_host(current, bytes, 0)?)
        })
    }
    fn cuMemHostAlloc(out: Out<u64>, bytes: u64, flags: c_uint) {
        driver(|state| {
            let current = state.current()?;
            out.set(state.allocate_host(current, bytes, flags)?)
        })
    }
    fn cuMemFreeHost(address: u64) {
        driver(|state| {
            state.current()?;
            state.free_host(address)
        })
    }
    fn cuMemHostGetDevicePointer_v2(out: Out<u64>, address: u64, _flags: c_uint) {
        driver(|state| {
            let is_host = state.region(address).is_some_and(|(_, region)| region.is_host());
            if !is_host {
                return Err(Code::INVALID_VALUE);
            }
            out.set(address)
        })
    }
    fn cuMemHostGetFlags(out: Out<c_uint>, address: u64) {
        driver(|state| match state.region(address) {
            Some((_, region)) => match region.kind {
                Kind::Host { flags, .. } => out.set(flags),
                Kind::Registered => out.set(0),
                _ => Err(Code::INVALID_VALUE),
            },
            None => Err(Code::INVALID_VALUE),
        })
    }
    fn cuMemHostRegister_v2(address: u64, bytes: u64, _flags: c_uint) {
        driver(|state| {
            let current = state.current()?;
            state.register_host(current, address, bytes)
        })
    }
    fn cuMemHostUnregister(address: u64) {
        driver(|state| {
            state.current()?;
            state.unregister_host(address)
        })
    }
    fn cuPointerGetAttribute(out: Out<u8>, number: c_int, address: u64) {
        driver(|state| pointer_attribute(state, out, number, address))
    }
    fn cuPointerGetAttributes(count: c_uint, numbers: In<c_int>, out: In<Out<u8>>, address: u64) {
        driver(|state| {
            for index in 0..count as usize {
                let (number, out) = (numbers.get_nth(index)?, out.get_nth(index)?);
                // What is not known about an address is 0, and no error.
                if pointer_attribute(state, out, number, address).is_err() {
                    let is_long = matches!(number, 1 | 3 | 4 | 7 | 11 | 12 | 14 | 16 | 17);
                    if is_long { out.cast::<u64>().set(0)? } else { out.cast::<c_int>().set(0)? }
                }
            }
            Ok(())
        })
    }
    fn cuPointerSetAttribute(_value: In<u8>, _number: c_int, address: u64) {
        driver(|state| state.region(address).map(|_| ()).ok_or(Code::INVALID_VALUE))
    }
    fn cuMemAdvise(_address: u64, _bytes: u64, _advice: c_int, _device: c_int) {
        driver(|state| state.current().map(|_| ()))
    }
    fn cuMemAdvise_v2(_address: u64, _bytes: u64, _advice: c_int, _location: CUmemLocation) {
        driver(|state| state.current().map(|_| ()))
    }
    fn [cuMemPrefetchAsync_ptsz] cuMemPrefetchAsync(_address: u64, _bytes: u64, _device: c_int, stream: Opaque) {
        on_stream(stream, |_, _| Ok(()))
    }
    fn [cuMemPrefetchAsync_v2_ptsz] cuMemPrefetchAsync_v2(
        _address: u64, _bytes: u64, _location: CUmemLocation, _flags: c_uint, stream: Opaque,
    ) {
        on_stream(stream, |_, _| Ok(()))
    }
    fn [cuStreamAttachMemAsync_ptsz] cuStreamAttachMemAsync(stream: Opaque, _address: u64, _bytes: u64, _flags: c_uint) {
        on_stream(stream, |_, _| Ok(()))
    }

    // ---- virtual memory ---------------------------------------------------------------------------------

    fn cuMemGetAllocationGranularity(out: Out<u64>, _prop: In<CUmemAllocationProp>, _kind: c_int) {
        driver(|_| out.set(PAGE_BYTES))
    }
    fn cuMemAddressReserve(out: Out<u64>, bytes: u64, alignment: u64, _hint: u64, flags: u64) {
        driver(|state| {
            if flags != 0 {
                return Err(Code::INVALID_VALUE);
            }
            out.set(state.reserve(bytes, alignment)?)
        })
    }
    fn cuMemAddressFree(address: u64, bytes: u64) {
        driver(|state| state.release_range(address, bytes))
    }
    fn cuMemCreate(out: Out<Opaque>, bytes: u64, prop: In<CUmemAllocationProp>, flags: u64) {
        driver(|state| {
            if flags != 0 {
                return Err(Code::INVALID_VALUE);
            }
            out.set(state.create_physical(bytes, prop.get()?)?)
        })
    }
    fn cuMemRelease(handle: Opaque) {
        driver(|state| state.release_physical(handle))
    }
    fn cuMemMap(address: u64, bytes: u64, offset: u64, handle: Opaque, flags: u64) {
        driver(|state| {
            if flags != 0 {
                return Err(Code::INVALID_VALUE);
            }
            state.map(address, bytes, offset, handle)
        })
    }
    fn cuMemUnmap(address: u64, bytes: u64) {
        driver(|state| state.unmap(address, bytes))
    }
    fn cuMemSetAccess(address: u64, bytes: u64, who: In<CUmemAccessDesc>, count: u64) {
        driver(|state| {
            let who: Vec<_> = (0..abi::size(count)).map(|index| who.get_nth(index)).collect::<Result<_, _>>()?;
            state.set_access(address, bytes, &who)
        })
    }
    fn cuMemGetAccess(flags: Out<u64>, location: In<CUmemLocation>, address: u64) {
        driver(|state| {
            let location = location.get()?;
            let (_, region) = state.region(address).ok_or(Code::INVALID_VALUE)?;
            let own = state.device(location.id)? == region.device;
            flags.set(if own { 3 } else { 0 })
        })
    }
    fn cuMemRetainAllocationHandle(out: Out<Opaque>, address: u64) {
        driver(|state| out.set(state.retain_physical(address)?))
    }
    fn cuMemGetAllocationPropertiesFromHandle(out: Out<CUmemAllocationProp>, handle: Opaque) {
        driver(|state| {
            let physical = state.physical.get(&handle).ok_or(Code::INVALID_VALUE)?;
            out.set(physical.prop)
        })
    }

    // ---- memory pools -----------------------------------------------------------------------------------

    fn cuDeviceGetDefaultMemPool(out: Out<Opaque>, device: c_int) {
        driver(|state| out.set(state.default_pool(device)?))
    }
    fn cuDeviceGetMemPool(out: Out<Opaque>, device: c_int) {
        driver(|state| out.set(state.current_pool(device)?))
    }
    fn cuDeviceSetMemPool(device: c_int, pool: Opaque) {
        driver(|state| state.set_current_pool(device, pool))
    }
    fn cuMemPoolCreate(out: Out<Opaque>, props: In<CUmemPoolProps>) {
        driver(|state| out.set(create_pool(state, props.get()?)?))
    }
    fn cuMemPoolDestroy(pool: Opaque) {
        driver(|state| state.destroy_pool(pool))
    }
    fn cuMemPoolGetAttribute(pool: Opaque, number: c_int, out: Out<u8>) {
        driver(|state| pool_attribute(state, pool, number, out))
    }
    fn cuMemPoolSetAttribute(pool: Opaque, number: c_int, value: Out<u8>) {
        driver(|state| set_pool_attribute(state, pool, number, value))
    }
    fn cuMemPoolTrimTo(pool: Opaque, kept: u64) {
        driver(|state| state.trim_pool(pool, kept))
    }
    fn cuMemPoolSetAccess(pool: Opaque, _who: In<CUmemAccessDesc>, _count: u64) {
        driver(|state| state.pool(pool).map(|_| ()))
    }
    fn cuMemPoolGetAccess(flags: Out<c_int>, pool: Opaque, location: In<CUmemLocation>) {
        driver(|state| flags.set(state.pool_access(pool, location.get()?.id)?))
    }
    fn [cuMemAllocAsync_ptsz] cuMemAllocAsync(out: Out<u64>, bytes: u64, stream: Opaque) {
        on_stream(stream, |state, on| {
            if bytes == 0 {
                return Err(Code::INVALID_VALUE);
            }
            let pool = state.gpus[on.device].current_pool;
            out.set(state.allocate_from_pool(pool, bytes, on)?)
        })
    }
    fn [cuMemAllocFromPoolAsync_ptsz] cuMemAllocFromPoolAsync(out: Out<u64>, bytes: u64, pool: Opaque, stream: Opaque) {
        on_stream(stream, |state, on| {
            if bytes == 0 {
                return Err(Code::INVALID_VALUE);
            }
            out.set(state.allocate_from_pool(pool, bytes, on)?)
        })
    }
    fn [cuMemFreeAsync_ptsz] cuMemFreeAsync(address: u64, stream: Opaque) {
        on_stream(stream, |state, on| state.free_to_pool(address, on))
    }

    // ---- streams ----------------------------------------------------------------------------------------

    fn cuStreamCreate(out: Out<Opaque>, flags: c_uint) {
        driver(|state| {
            let current = state.current()?;
            out.set(state.create_stream(current, flags, LEAST_PRIORITY)?)
        })
    }
    fn cuStreamCreateWithPriority(out: Out<Opaque>, flags: c_uint, priority: c_int) {
        driver(|state| {
            let current = state.current()?;
            out.set(state.create_stream(current, flags, priority)?)
        })
    }
    fn cuStreamDestroy_v2(stream: Opaque) {
        driver(|state| state.destroy_stream(stream))
    }
    fn [cuStreamGetPriority_ptsz] cuStreamGetPriority(stream: Opaque, priority: Out<c_int>) {
        on_stream(stream, |state, on| {
            priority.set(state.streams.get(&on.key).map_or(LEAST_PRIORITY, |stream| stream.priority))
        })
    }
    fn [cuStreamGetFlags_ptsz] cuStreamGetFlags(stream: Opaque, flags: Out<c_uint>) {
        on_stream(stream, |state, on| {
            let stream = state.streams.get(&on.key);
            flags.set(stream.map_or(0, |stream| u32::from(stream.non_blocking)))
        })
    }
    fn [cuStreamGetId_ptsz] cuStreamGetId(stream: Opaque, id: Out<u64>) {
        on_stream(stream, |_, on| id.set(on.id.0))
    }
    fn [cuStreamGetDevice_ptsz] cuStreamGetDevice(stream: Opaque, device: Out<c_int>) {
        on_stream(stream, |_, on| device.set(c_int::try_from(on.device).unwrap_or(0)))
    }
    fn [cuStreamGetCtx_ptsz] cuStreamGetCtx(stream: Opaque, context: Out<Opaque>) {
        on_stream(stream, |_, on| context.set(on.context))
    }
    fn [cuStreamQuery_ptsz] cuStreamQuery(stream: Opaque) {
        on_stream(stream, |state, on| {
            if state.is_stream_idle(on)? { Ok(()) } else { Err(Code::NOT_READY) }
        })
    }
    fn [cuStreamSynchronize_ptsz] cuStreamSynchronize(stream: Opaque) {
        wait_for(stream)
    }
    fn [cuStreamWaitEvent_ptsz] cuStreamWaitEvent(stream: Opaque, event: Opaque, _flags: c_uint) {
        on_stream(stream, |state, on| state.wait_event(on, event))
    }
    fn [cuStreamAddCallback_ptsz] cuStreamAddCallback(
        stream: Opaque, function: StreamCallback, data: Opaque, _flags: c_uint,
    ) {
        let on = on_stream(stream, |_, on| Ok(on))?;
        crate::streams::call_stream_host(enter, on, stream, function, data)
    }
    fn [cuLaunchHostFunc_ptsz] cuLaunchHostFunc(stream: Opaque, function: Callback, data: Opaque) {
        let on = on_stream(stream, |_, on| Ok(on))?;
        host_function(enter, on, function, data)
    }

    // ---- events -----------------------------------------------------------------------------------------

    fn cuEventCreate(out: Out<Opaque>, flags: c_uint) {
        driver(|state| {
            let current = state.current()?;
            out.set(state.create_event(current, flags)?)
        })
    }
    fn cuEventDestroy_v2(event: Opaque) {
        driver(|state| state.destroy_event(event))
    }
    fn [cuEventRecord_ptsz] cuEventRecord(event: Opaque, stream: Opaque) {
        on_stream(stream, |state, on| state.record_event(event, on))
    }
    fn [cuEventRecordWithFlags_ptsz] cuEventRecordWithFlags(event: Opaque, stream: Opaque, _flags: c_uint) {
        on_stream(stream, |state, on| state.record_event(event, on))
    }
    fn cuEventQuery(event: Opaque) {
        driver(|state| if state.is_event_done(event)? { Ok(()) } else { Err(Code::NOT_READY) })
    }
    fn cuEventSynchronize(event: Opaque) {
        driver(|state| state.synchronize_event(event))
    }
    fn cuEventElapsedTime(milliseconds: Out<f32>, start: Opaque, end: Opaque) {
        driver(|state| milliseconds.set(state.elapsed_milliseconds(start, end)?))
    }
    fn cuEventElapsedTime_v2(milliseconds: Out<f32>, start: Opaque, end: Opaque) {
        driver(|state| milliseconds.set(state.elapsed_milliseconds(start, end)?))
    }

    // ---- copies and fills -------------------------------------------------------------------------------

    fn [cuMemcpy_ptds] cuMemcpy(dst: u64, src: u64, bytes: u64) {
        copy_now(dst, src, bytes)
    }
    fn [cuMemcpyAsync_ptsz] cuMemcpyAsync(dst: u64, src: u64, bytes: u64, stream: Opaque) {
        copy(dst, src, bytes, stream)
    }
    fn [cuMemcpyHtoD_v2_ptds] cuMemcpyHtoD_v2(dst: u64, src: u64, bytes: u64) {
        is_device(dst, bytes)?;
        copy_now(dst, src, bytes)
    }
    fn [cuMemcpyHtoDAsync_v2_ptsz] cuMemcpyHtoDAsync_v2(dst: u64, src: u64, bytes: u64, stream: Opaque) {
        is_device(dst, bytes)?;
        copy(dst, src, bytes, stream)
    }
    fn [cuMemcpyDtoH_v2_ptds] cuMemcpyDtoH_v2(dst: u64, src: u64, bytes: u64) {
        is_device(src, bytes)?;
        copy_now(dst, src, bytes)
    }
    fn [cuMemcpyDtoHAsync_v2_ptsz] cuMemcpyDtoHAsync_v2(dst: u64, src: u64, bytes: u64, stream: Opaque) {
        is_device(src, bytes)?;
        copy(dst, src, bytes, stream)
    }
    fn [cuMemcpyDtoD_v2_ptds] cuMemcpyDtoD_v2(dst: u64, src: u64, bytes: u64) {
        is_device(dst, bytes)?;
        is_device(src, bytes)?;
        copy(dst, src, bytes, 0)
    }
    fn [cuMemcpyDtoDAsync_v2_ptsz] cuMemcpyDtoDAsync_v2(dst: u64, src: u64, bytes: u64, stream: Opaque) {
        is_device(dst, bytes)?;
        is_device(src, bytes)?;
        copy(dst, src, bytes, stream)
    }
    fn [cuMemcpyPeer_ptds] cuMemcpyPeer(dst: u64, _to: Opaque, src: u64, _from: Opaque, bytes: u64) {
        copy_now(dst, src, bytes)
    }
    fn [cuMemcpyPeerAsync_ptsz] cuMemcpyPeerAsync(
        dst: u64, _to: Opaque, src: u64, _from: Opaque, bytes: u64, stream: Opaque,
    ) {
        copy(dst, src, bytes, stream)
    }
    fn [cuMemcpy2D_v2_ptds] cuMemcpy2D_v2(what: In<CudaMemcpy2d>) {
        copy_rows(&what.get()?, 0, true)
    }
    fn [cuMemcpy2DUnaligned_v2_ptds] cuMemcpy2DUnaligned_v2(what: In<CudaMemcpy2d>) {
        copy_rows(&what.get()?, 0, true)
    }
    fn [cuMemcpy2DAsync_v2_ptsz] cuMemcpy2DAsync_v2(what: In<CudaMemcpy2d>, stream: Opaque) {
        copy_rows(&what.get()?, stream, false)
    }
    fn [cuMemsetD8_v2_ptds] cuMemsetD8_v2(dst: u64, value: u8, count: u64) {
        fill(dst, FillValue::U8(value), count, 0)
    }
    fn [cuMemsetD16_v2_ptds] cuMemsetD16_v2(dst: u64, value: u16, count: u64) {
        fill(dst, FillValue::U16(value), count, 0)
    }
    fn [cuMemsetD32_v2_ptds] cuMemsetD32_v2(dst: u64, value: u32, count: u64) {
        fill(dst, FillValue::U32(value), count, 0)
    }
    fn [cuMemsetD8Async_ptsz] cuMemsetD8Async(dst: u64, value: u8, count: u64, stream: Opaque) {
        fill(dst, FillValue::U8(value), count, stream)
    }
    fn [cuMemsetD16Async_ptsz] cuMemsetD16Async(dst: u64, value: u16, count: u64, stream: Opaque) {
        fill(dst, FillValue::U16(value), count, stream)
    }
    fn [cuMemsetD32Async_ptsz] cuMemsetD32Async(dst: u64, value: u32, count: u64, stream: Opaque) {
        fill(dst, FillValue::U32(value), count, stream)
    }
    fn [cuMemsetD2D8_v2_ptds] cuMemsetD2D8_v2(dst: u64, pitch: u64, value: u8, width: u64, height: u64) {
        fill_rows(dst, FillValue::U8(value), pitch, width, height, 0)
    }
    fn [cuMemsetD2D16_v2_ptds] cuMemsetD2D16_v2(dst: u64, pitch: u64, value: u16, width: u64, height: u64) {
        fill_rows(dst, FillValue::U16(value), pitch, width, height, 0)
    }
    fn [cuMemsetD2D32_v2_ptds] cuMemsetD2D32_v2(dst: u64, pitch: u64, value: u32, width: u64, height: u64) {
        fill_rows(dst, FillValue::U32(value), pitch, width, height, 0)
    }
    fn [cuMemsetD2D8Async_ptsz] cuMemsetD2D8Async(
        dst: u64, pitch: u64, value: u8, width: u64, height: u64, stream: Opaque,
    ) {
        fill_rows(dst, FillValue::U8(value), pitch, width, height, stream)
    }
    fn [cuMemsetD2D16Async_ptsz] cuMemsetD2D16Async(
        dst: u64, pitch: u64, value: u16, width: u64, height: u64, stream: Opaque,
    ) {
        fill_rows(dst, FillValue::U16(value), pitch, width, height, stream)
    }
    fn [cuMemsetD2D32Async_ptsz] cuMemsetD2D32Async(
        dst: u64, pitch: u64, value: u32, width: u64, height: u64, stream: Opaque,
    ) {
        fill_rows(dst, FillValue::U32(value), pitch, width, height, stream)
    }

    // ---- captures and graphs ----------------------------------------------------------------------------

    fn [cuStreamBeginCapture_v2_ptsz] cuStreamBeginCapture_v2(stream: Opaque, mode: c_int) {
        let mode = CaptureMode::from_number(mode)?;
        on_stream(stream, |state, on| state.begin_capture(on, mode))
    }
    fn [cuStreamEndCapture_ptsz] cuStreamEndCapture(stream: Opaque, graph: Out<Opaque>) {
        on_stream(stream, |state, on| {
            graph.set_if_wanted(0);
            graph.set(state.end_capture(on)?)
        })
    }
    fn [cuStreamIsCapturing_ptsz] cuStreamIsCapturing(stream: Opaque, status: Out<c_int>) {
        on_stream(stream, |state, on| status.set(state.capture_status(on)?.0))
    }
    fn [cuStreamGetCaptureInfo_ptsz] cuStreamGetCaptureInfo(stream: Opaque, status: Out<c_int>, id: Out<u64>) {
        on_stream(stream, |state, on| {
            capture_info(state, on, status, id, Out::null(), Out::null(), Out::null(), Out::null())
        })
    }
    fn [cuStreamGetCaptureInfo_v2_ptsz] cuStreamGetCaptureInfo_v2(
        stream: Opaque, status: Out<c_int>, id: Out<u64>, graph: Out<Opaque>, dependencies: Out<Opaque>,
        num_dependencies: Out<u64>,
    ) {
        on_stream(stream, |state, on| {
            capture_info(state, on, status, id, graph, dependencies, Out::null(), num_dependencies)
        })
    }
    fn [cuStreamGetCaptureInfo_v3_ptsz] cuStreamGetCaptureInfo_v3(
        stream: Opaque, status: Out<c_int>, id: Out<u64>, graph: Out<Opaque>, dependencies: Out<Opaque>,
        edges: Out<Opaque>, num_dependencies: Out<u64>,
    ) {
        on_stream(stream, |state, on| {
            capture_info(state, on, status, id, graph, dependencies, edges, num_dependencies)
        })
    }
    fn cuThreadExchangeStreamCaptureMode(mode: Out<c_int>) {
        let wanted = CaptureMode::from_number(mode.get()?)?;
        mode.set(state::exchange_capture_mode(wanted).number())
    }
    fn cuGraphInstantiateWithFlags(out: Out<Opaque>, graph: Opaque, _flags: u64) {
        driver(|state| out.set(state.instantiate(graph)?))
    }
    fn [cuGraphLaunch_ptsz] cuGraphLaunch(graph: Opaque, stream: Opaque) {
        let on = on_stream(stream, |_, on| Ok(on))?;
        launch_graph(enter, graph, on)
    }
    fn [cuGraphUpload_ptsz] cuGraphUpload(graph: Opaque, stream: Opaque) {
        on_stream(stream, |state, _| state.graph(graph).map(|_| ()))
    }
    fn cuGraphGetNodes(graph: Opaque, nodes: Out<Opaque>, count: Out<u64>) {
        driver(|state| state.graph_nodes(graph, nodes, count))
    }
    fn cuUserObjectCreate(out: Out<Opaque>, data: Opaque, destroy: Callback, references: c_uint, _flags: c_uint) {
        driver(|state| out.set(state.create_user_object(destroy, data, references)))
    }
    fn cuUserObjectRetain(object: Opaque, count: c_uint) {
        driver(|state| state.retain_user_object(object, count))
    }
    fn cuUserObjectRelease(object: Opaque, count: c_uint) {
        driver(|state| state.release_user_object(object, count)).map(call_all)
    }
    fn cuGraphRetainUserObject(graph: Opaque, object: Opaque, count: c_uint, flags: c_uint) {
        const MOVE: c_uint = 1;
        driver(|state| state.keep_with_graph(graph, object, count, flags & MOVE != 0))
    }
    fn cuGraphDestroy(graph: Opaque) {
        driver(|state| state.destroy_graph(graph)).map(call_all)
    }
    fn cuGraphExecDestroy(graph: Opaque) {
        driver(|state| state.destroy_graph(graph)).map(call_all)
    }

    // ---- modules and kernels, which compute nothing -----------------------------------------------------

    fn cuModuleLoad(out: Out<Opaque>, _path: Text) {
        load_module(out)
    }
    fn cuModuleLoadData(out: Out<Opaque>, _image: Opaque) {
        load_module(out)
    }
    fn cuModuleLoadDataEx(out: Out<Opaque>, _image: Opaque, _count: c_uint, _options: Opaque, _values: Opaque) {
        load_module(out)
    }
    fn cuModuleLoadFatBinary(out: Out<Opaque>, _image: Opaque) {
        load_module(out)
    }
    fn cuModuleUnload(module: Opaque) {
        driver(|state| if state.modules.remove(&module) { Ok(()) } else { Err(Code::INVALID_HANDLE) })
    }
    fn cuModuleGetFunction(out: Out<Opaque>, module: Opaque, name: Text) {
        function_of(out, module, &name.get()?)
    }
    fn cuModuleGetLoadingMode(out: Out<c_int>) {
        const LAZY: c_int = 2;
        out.set(LAZY)
    }
    fn cuLibraryLoadData(
        out: Out<Opaque>, _image: Opaque, _options: Opaque, _values: Opaque, _count: c_uint, _more: Opaque,
        _more_values: Opaque, _more_count: c_uint,
    ) {
        driver(|state| {
            let library = state.new_handle();
            state.modules.insert(library);
            out.set(library)
        })
    }
    fn cuLibraryUnload(library: Opaque) {
        driver(|state| if state.modules.remove(&library) { Ok(()) } else { Err(Code::INVALID_HANDLE) })
    }
    fn cuLibraryGetKernel(out: Out<Opaque>, library: Opaque, name: Text) {
        function_of(out, library, &name.get()?)
    }
    fn cuLibraryGetModule(out: Out<Opaque>, library: Opaque) {
        driver(|state| if state.modules.contains(&library) { out.set(library) } else { Err(Code::INVALID_HANDLE) })
    }
    fn cuKernelGetFunction(out: Out<Opaque>, kernel: Opaque) {
        driver(|state| if state.functions.contains_key(&kernel) { out.set(kernel) } else { Err(Code::INVALID_HANDLE) })
    }
    fn cuKernelGetAttribute(value: Out<c_int>, number: c_int, kernel: Opaque, _device: c_int) {
        value.set(attributes_of(kernel, number)?)
    }
    fn cuKernelSetAttribute(number: c_int, _value: c_int, kernel: Opaque, _device: c_int) {
        attributes_of(kernel, number).map(|_| ())
    }
    fn cuFuncGetAttribute(value: Out<c_int>, number: c_int, function: Opaque) {
        value.set(attributes_of(function, number)?)
    }
    fn cuFuncSetAttribute(function: Opaque, number: c_int, _value: c_int) {
        attributes_of(function, number).map(|_| ())
    }
    fn cuFuncSetCacheConfig(function: Opaque, _config: c_int) {
        attributes_of(function, 0).map(|_| ())
    }
    fn cuFuncGetName(out: Out<u64>, function: Opaque) {
        driver(|state| {
            let name = state.functions.get(&function).ok_or(Code::INVALID_HANDLE)?;
            out.set(abi::address_of(name.as_ptr().cast()))
        })
    }
    fn [cuLaunchKernel_ptsz] cuLaunchKernel(
        function: Opaque, _grid_x: c_uint, _grid_y: c_uint, _grid_z: c_uint, _block_x: c_uint, _block_y: c_uint,
        _block_z: c_uint, _shared: c_uint, stream: Opaque, _arguments: Opaque, _extra: Opaque,
    ) {
        attributes_of(function, 0)?;
        kernel(stream)
    }
    fn [cuLaunchKernelEx_ptsz] cuLaunchKernelEx(
        config: In<CUlaunchConfig>, function: Opaque, _arguments: Opaque, _extra: Opaque,
    ) {
        attributes_of(function, 0)?;
        kernel(config.get()?.stream)
    }
    fn [cuLaunchCooperativeKernel_ptsz] cuLaunchCooperativeKernel(
        function: Opaque, _grid_x: c_uint, _grid_y: c_uint, _grid_z: c_uint, _block_x: c_uint, _block_y: c_uint,
        _block_z: c_uint, _shared: c_uint, stream: Opaque, _arguments: Opaque,
    ) {
        attributes_of(function, 0)?;
        kernel(stream)
    }
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(count: Out<c_int>, _function: Opaque, _block: c_int, _shared: u64) {
        count.set(2)
    }
    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        count: Out<c_int>, _function: Opaque, _block: c_int, _shared: u64, _flags: c_uint,
    ) {
        count.set(2)
    }
    fn cuOccupancyMaxPotentialBlockSize(
        grid: Out<c_int>, block: Out<c_int>, _function: Opaque, _shared_of: Opaque, _shared: u64, _limit: c_int,
    ) {
        grid.set(2 * device::MULTIPROCESSORS)?;
        block.set(device::MAX_THREADS_PER_BLOCK)
    }
}
