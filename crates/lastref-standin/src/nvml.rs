//! The management library's interface, `libnvidia-ml.so.1`: which devices there are, and who holds how much of them.
//!
//! It counts all devices, whatever `CUDA_VISIBLE_DEVICES` hides from CUDA. A device's handle is its place plus one.
#![expect(non_snake_case, reason = "the names of the C interface")]

use std::ffi::{c_char, c_int, c_uint};
use std::sync::OnceLock;

use crate::abi::{self, In, Opaque, Out, Text};
use crate::device;
use crate::entry::{exports, plain_exports};
use crate::error::{Code, Outcome};
use crate::session::Session;
use crate::settings::settings;
use crate::state::{self, DEVICE_NAME, State};

/// Memory that settings give to another process, as who.
const OTHER_PROCESS: u32 = 1;

fn count() -> u32 {
    settings().map_or(0, |settings| settings.devices)
}

/// The place of a device among all.
fn place(handle: Opaque) -> Result<u32, Code> {
    let place = handle
        .checked_sub(1)
        .and_then(|place| u32::try_from(place).ok());
    place
        .filter(|place| *place < count())
        .ok_or(Code::INVALID_VALUE)
}

/// The session, for looking: this process may use no device at all.
fn session() -> Option<&'static Session> {
    static SESSION: OnceLock<Option<Session>> = OnceLock::new();
    let open = || Session::open(settings().ok()?.shared.as_deref()?);
    SESSION.get_or_init(open).as_ref()
}

/// Who holds how much of a device.
fn processes(place: u32) -> Vec<(u32, u64)> {
    let this = std::process::id();
    let own = state::peek(|state: &mut State| {
        let device = state.device_at(place)?;
        let has_context = state
            .contexts
            .values()
            .any(|context| context.device == device);
        has_context.then(|| state.used_bytes(device))
    });
    let own = own.flatten().map(|used| (this, used));
    let mut all: Vec<(u32, u64)> = own.into_iter().collect();
    for held in session().map(Session::all).unwrap_or_default() {
        if held.device == place && held.process != this {
            all.push((held.process, held.bytes));
        }
    }
    let other_bytes = settings().map_or(0, |settings| settings.other_bytes);
    if other_bytes > 0 {
        all.push((OTHER_PROCESS, other_bytes));
    }
    all
}

/// Total and used bytes of a device.
fn memory(place: u32) -> (u64, u64) {
    let total = settings().map_or(0, |settings| settings.memory_bytes);
    let used: u64 = processes(place).iter().map(|(_, used)| used).sum();
    (total, used.min(total))
}

/// `nvmlProcessInfo_v1_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Process1 {
    pid: u32,
    used: u64,
}

/// `nvmlProcessInfo_v2_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Process2 {
    pid: u32,
    used: u64,
    gpu_instance: u32,
    compute_instance: u32,
}

fn list<T>(
    handle: Opaque,
    room: Out<c_uint>,
    out: Out<T>,
    make: impl Fn(u32, u64) -> T,
) -> Outcome {
    let all = processes(place(handle)?);
    let room_for = room.get()? as usize;
    room.set(c_uint::try_from(all.len()).unwrap_or(c_uint::MAX))?;
    if room_for < all.len() {
        return Err(Code::NVML_INSUFFICIENT_SIZE);
    }
    for (index, (pid, used)) in all.into_iter().enumerate() {
        out.set_nth(index, make(pid, used))?;
    }
    Ok(())
}

fn processes_2(handle: Opaque, room: Out<c_uint>, out: Out<Process2>) -> Outcome {
    list(handle, room, out, |pid, used| Process2 {
        pid,
        used,
        gpu_instance: u32::MAX,
        compute_instance: u32::MAX,
    })
}

fn no_processes(handle: Opaque, room: Out<c_uint>) -> Outcome {
    place(handle)?;
    room.set(0)
}

fn init() -> Outcome {
    if count() == 0 {
        Err(Code::NO_DEVICE)
    } else {
        Ok(())
    }
}

fn handle_by_pci(id: Text, out: Out<Opaque>) -> Outcome {
    // NVML writes the domain with eight digits, CUDA with four.
    let id = id.get()?.to_lowercase();
    let is_it = |place: &u32| id.ends_with(&state::pci_bus_id(*place));
    let place = (0..count()).find(is_it).ok_or(Code::NOT_FOUND)?;
    out.set(u64::from(place) + 1)
}

fn handle_by_index(index: c_uint, out: Out<Opaque>) -> Outcome {
    if index >= count() {
        return Err(Code::INVALID_VALUE);
    }
    out.set(u64::from(index) + 1)
}

/// `nvmlPciInfo_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct PciInfo {
    bus_id_legacy: [u8; 16],
    domain: u32,
    bus: u32,
    device: u32,
    pci_device_id: u32,
    pci_subsystem_id: u32,
    bus_id: [u8; 32],
}

fn pci_info(handle: Opaque, out: Out<PciInfo>) -> Outcome {
    fn text<const N: usize>(text: &str) -> [u8; N] {
        let mut bytes = [0; N];
        bytes
            .iter_mut()
            .zip(text.bytes())
            .for_each(|(to, from)| *to = from);
        bytes
    }
    let place = place(handle)?;
    let id = state::pci_bus_id(place);
    out.set(PciInfo {
        bus_id_legacy: text(&id),
        domain: 0,
        bus: place + 1,
        device: 0,
        pci_device_id: 0,
        pci_subsystem_id: 0,
        bus_id: text(&format!("0000{id}")),
    })
}

plain_exports! {
    Nvml;

    fn nvmlErrorString(error: c_int) -> u64 {
        let text = match error {
            0 => "The operation was successful\0",
            1 => "NVML was not first initialized with nvmlInit()\0",
            2 => "A supplied argument is invalid\0",
            3 => "The requested operation is not available on target device\0",
            6 => "A query to find an object was unsuccessful\0",
            7 => "An input argument is not large enough\0",
            9 => "NVIDIA driver is not loaded\0",
            _ => "An internal driver error occurred\0",
        };
        abi::address_of(text.as_ptr().cast())
    } or 0;
}

exports! {
    Nvml;

    fn nvmlInit() { init() }
    fn nvmlInit_v2() { init() }
    fn nvmlInitWithFlags(_flags: c_uint) { init() }
    fn nvmlShutdown() { Ok(()) }
    fn nvmlSystemGetDriverVersion(out: Out<c_char>, room: c_uint) {
        out.set_text("lastref stand-in", room as usize)
    }
    fn nvmlSystemGetNVMLVersion(out: Out<c_char>, room: c_uint) {
        out.set_text("lastref stand-in", room as usize)
    }
    fn nvmlSystemGetCudaDriverVersion(out: Out<c_int>) {
        out.set(device::driver_version())
    }
    fn nvmlSystemGetCudaDriverVersion_v2(out: Out<c_int>) {
        out.set(device::driver_version())
    }
    fn nvmlDeviceGetCount(out: Out<c_uint>) { out.set(count()) }
    fn nvmlDeviceGetCount_v2(out: Out<c_uint>) { out.set(count()) }
    fn nvmlDeviceGetHandleByIndex(index: c_uint, out: Out<Opaque>) { handle_by_index(index, out) }
    fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, out: Out<Opaque>) { handle_by_index(index, out) }
    fn nvmlDeviceGetHandleByPciBusId(id: Text, out: Out<Opaque>) { handle_by_pci(id, out) }
    fn nvmlDeviceGetHandleByPciBusId_v2(id: Text, out: Out<Opaque>) { handle_by_pci(id, out) }
    fn nvmlDeviceGetHandleByUUID(id: Text, out: Out<Opaque>) {
        let id = id.get()?;
        let place = (0..count()).find(|place| state::uuid_text(*place) == id).ok_or(Code::NOT_FOUND)?;
        out.set(u64::from(place) + 1)
    }
    fn nvmlDeviceGetName(handle: Opaque, out: Out<c_char>, room: c_uint) {
        place(handle)?;
        out.set_text(DEVICE_NAME, room as usize)
    }
    fn nvmlDeviceGetUUID(handle: Opaque, out: Out<c_char>, room: c_uint) {
        out.set_text(&state::uuid_text(place(handle)?), room as usize)
    }
    fn nvmlDeviceGetIndex(handle: Opaque, out: Out<c_uint>) { out.set(place(handle)?) }
    fn nvmlDeviceGetMinorNumber(handle: Opaque, out: Out<c_uint>) { out.set(place(handle)?) }
    fn nvmlDeviceGetPciInfo(handle: Opaque, out: Out<PciInfo>) { pci_info(handle, out) }
    fn nvmlDeviceGetPciInfo_v2(handle: Opaque, out: Out<PciInfo>) { pci_info(handle, out) }
    fn nvmlDeviceGetPciInfo_v3(handle: Opaque, out: Out<PciInfo>) { pci_info(handle, out) }
    fn nvmlDeviceGetCudaComputeCapability(handle: Opaque, major: Out<c_int>, minor: Out<c_int>) {
        place(handle)?;
        major.set(device::MAJOR)?;
        minor.set(device::MINOR)
    }
    fn nvmlDeviceGetMemoryInfo(handle: Opaque, out: Out<[u64; 3]>) {
        let (total, used) = memory(place(handle)?);
        out.set([total, total - used, used])
    }
    fn nvmlDeviceGetMemoryInfo_v2(handle: Opaque, out: Out<[u64; 5]>) {
        let (total, used) = memory(place(handle)?);
        // The first number is the version of the structure, and the caller's.
        let [version, ..] = out.get()?;
        out.set([version, total, 0, total - used, used])
    }
    fn nvmlDeviceGetUtilizationRates(handle: Opaque, out: Out<[c_uint; 2]>) {
        place(handle)?;
        out.set([0; 2])
    }
    fn nvmlDeviceGetComputeRunningProcesses(handle: Opaque, room: Out<c_uint>, out: Out<Process1>) {
        list(handle, room, out, |pid, used| Process1 { pid, used })
    }
    fn nvmlDeviceGetComputeRunningProcesses_v2(handle: Opaque, room: Out<c_uint>, out: Out<Process2>) {
        processes_2(handle, room, out)
    }
    fn nvmlDeviceGetComputeRunningProcesses_v3(handle: Opaque, room: Out<c_uint>, out: Out<Process2>) {
        processes_2(handle, room, out)
    }
    fn nvmlDeviceGetGraphicsRunningProcesses(handle: Opaque, room: Out<c_uint>) { no_processes(handle, room) }
    fn nvmlDeviceGetGraphicsRunningProcesses_v2(handle: Opaque, room: Out<c_uint>) { no_processes(handle, room) }
    fn nvmlDeviceGetGraphicsRunningProcesses_v3(handle: Opaque, room: Out<c_uint>) { no_processes(handle, room) }
    fn nvmlDeviceGetGpuFabricInfoV(handle: Opaque, _info: In<u8>) {
        // What the caller has set, namely that there is no fabric, stays.
        place(handle).map(|_| ())
    }
}
