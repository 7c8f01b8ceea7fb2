//! The one state behind all libraries: devices, contexts, and what threads have chosen.
//!
//! ```text
//! State ── gpus      a simulated device each, with its primary context and memory pools
//!       ├─ contexts  those that exist now
//!       ├─ streams, events, captures, graphs         (streams.rs)
//!       └─ regions, reserved ranges, physical memory (memory.rs)
//! ```
//!
//! The same file, loaded under several names through symbolic links, is one library to the loader, so that a process has
//! one state whichever name a library was looked for under.
//!
//! # Invariants
//!
//! 1. A handle is a number that is never used again. It is looked up, never followed.
//! 2. Everything in the tables belongs to a context in `contexts`; when a context goes, so does all of it.
//!
//! # Locks
//!
//! One lock for the state, taken for the length of a call. Under it the lock of the simulated devices is taken. Functions
//! of the caller's are called with neither held.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashMap};

use lastref_alloc::Device as _;
use lastref_alloc::sim::{LatencyTable, SimDevice, SimOptions};

use crate::entry;
use crate::error::{Code, Outcome};
use crate::log;
use crate::memory::{Physical, Pool, Region, ReservedRange};
use crate::session::Session;
use crate::settings::{Settings, settings};
use crate::streams::{Capture, CaptureMode, Event, Graph, Stream, UserObject};
use crate::sync::{Mutex, lock};

/// The name of every device, which says what it is.
pub(crate) const DEVICE_NAME: &str = "lastref stand-in (no GPU)";

/// A device that programs see.
#[derive(Debug)]
pub(crate) struct Gpu {
    pub(crate) sim: SimDevice,
    /// Its place among all devices, those that `CUDA_VISIBLE_DEVICES` hides included.
    pub(crate) physical: u32,
    /// The handle of the primary context, the same each time it is made.
    pub(crate) primary: u64,
    pub(crate) primary_retained: u32,
    pub(crate) primary_flags: u32,
    pub(crate) retained_by_runtime: bool,
    pub(crate) default_pool: u64,
    pub(crate) current_pool: u64,
    /// Streams that wait for the legacy default stream, and it for them.
    pub(crate) blocking: Vec<lastref_alloc::StreamId>,
    /// A stream for work that was asked for on a stream of another device.
    pub(crate) helper: Option<lastref_alloc::StreamId>,
    errors_seen: usize,
    /// Work has touched memory it had no right to: nothing works any more in this process.
    broken: Option<Code>,
    pub(crate) peers: BTreeSet<usize>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Context {
    pub(crate) device: usize,
    pub(crate) primary: bool,
}

/// The context that a call is made in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Current {
    pub(crate) context: u64,
    pub(crate) device: usize,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) gpus: Vec<Gpu>,
    pub(crate) contexts: HashMap<u64, Context>,
    pub(crate) streams: HashMap<u64, Stream>,
    pub(crate) events: HashMap<u64, Event>,
    pub(crate) captures: HashMap<u64, Capture>,
    pub(crate) graphs: HashMap<u64, Graph>,
    pub(crate) regions: BTreeMap<u64, Region>,
    pub(crate) ranges: BTreeMap<u64, ReservedRange>,
    pub(crate) physical: HashMap<u64, Physical>,
    pub(crate) pools: HashMap<u64, Pool>,
    /// Modules and libraries, and the functions got from them, by name.
    pub(crate) modules: BTreeSet<u64>,
    pub(crate) functions: HashMap<u64, &'static str>,
    pub(crate) user_objects: HashMap<u64, UserObject>,
    pub(crate) kernels_launched: u64,
    pub(crate) session: Option<Session>,
    next_handle: u64,
}

static STATE: Mutex<Option<State>> = Mutex::new(None);

thread_local! {
    static CONTEXTS: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
    /// What `cudaSetDevice` chose last.
    static RUNTIME_DEVICE: Cell<usize> = const { Cell::new(0) };
    static RUNTIME_ERROR: Cell<i32> = const { Cell::new(0) };
    static CAPTURE_MODE: Cell<CaptureMode> = const { Cell::new(CaptureMode::Global) };
}

pub(crate) fn note_runtime_error(code: Code) {
    RUNTIME_ERROR.set(code.0);
}

/// The last error of the runtime on this thread.
pub(crate) fn runtime_error() -> i32 {
    RUNTIME_ERROR.get()
}

pub(crate) fn clear_runtime_error() -> i32 {
    RUNTIME_ERROR.replace(0)
}

pub(crate) fn capture_mode() -> CaptureMode {
    CAPTURE_MODE.get()
}

pub(crate) fn exchange_capture_mode(mode: CaptureMode) -> CaptureMode {
    CAPTURE_MODE.replace(mode)
}

/// A call of the driver: `cuInit` must have been called.
pub(crate) fn driver<R>(body: impl FnOnce(&mut State) -> Result<R, Code>) -> Result<R, Code> {
    let mut state = lock(&STATE);
    body(state.as_mut().ok_or(Code::NOT_INITIALIZED)?)
}

/// A call of the runtime, which initialises by itself.
pub(crate) fn runtime<R>(body: impl FnOnce(&mut State) -> Result<R, Code>) -> Result<R, Code> {
    initialise()?;
    crate::runtime::check_versions()?;
    driver(body)
}

/// A look at the state, if there is one.
pub(crate) fn peek<R>(body: impl FnOnce(&mut State) -> R) -> Option<R> {
    lock(&STATE).as_mut().map(body)
}

/// What `cuInit` does.
pub(crate) fn initialise() -> Outcome {
    let mut state = lock(&STATE);
    if state.is_some() {
        return Ok(());
    }
    let settings = settings().map_err(|_| Code::NO_DEVICE)?;
    let made = State::new(settings)?;
    if made.gpus.is_empty() {
        return Err(Code::NO_DEVICE);
    }
    if !settings.quiet {
        let (count, mib) = (made.gpus.len(), settings.memory_bytes >> 20);
        let plural = if count == 1 { "" } else { "s" };
        log::say(&format!(
            "no GPU is used: {count} device{plural} of {mib} MiB in host memory, kernels compute nothing"
        ));
    }
    entry::watch_forks();
    *state = Some(made);
    Ok(())
}

/// The places of the visible devices among all, by `CUDA_VISIBLE_DEVICES`: up to the first that is none.
fn visible(devices: u32, variable: Option<&str>) -> Vec<u32> {
    let Some(list) = variable else {
        return (0..devices).collect();
    };
    let mut chosen = Vec::new();
    for item in list.split(',').map(str::trim) {
        let by_uuid = |index: &u32| !item.is_empty() && uuid_text(*index).starts_with(item);
        let index = match item.parse::<u32>() {
            Ok(index) => Some(index).filter(|index| *index < devices),
            Err(_) if item.starts_with("GPU-") => (0..devices).find(by_uuid),
            Err(_) => None,
        };
        match index {
            Some(index) if !chosen.contains(&index) => chosen.push(index),
            // One given twice makes CUDA see none at all.
            Some(_) => return Vec::new(),
            None => break,
        }
    }
    chosen
}

/// The UUID of a device, made of what it is and its place.
pub(crate) fn uuid(physical: u32) -> [u8; 16] {
    let mut bytes = *b"lastref\0standin\0";
    bytes[15] = u8::try_from(physical).unwrap_or(u8::MAX);
    bytes
}

pub(crate) fn uuid_text(physical: u32) -> String {
    let hex = |bytes: &[u8]| -> String { bytes.iter().map(|byte| format!("{byte:02x}")).collect() };
    let uuid = uuid(physical);
    let (a, b, c, d, e) = (
        &uuid[..4],
        &uuid[4..6],
        &uuid[6..8],
        &uuid[8..10],
        &uuid[10..],
    );
    format!("GPU-{}-{}-{}-{}-{}", hex(a), hex(b), hex(c), hex(d), hex(e))
}

pub(crate) fn pci_bus_id(physical: u32) -> String {
    format!("0000:{:02x}:00.0", physical + 1)
}

impl State {
    fn new(settings: &Settings) -> Result<Self, Code> {
        let variable = std::env::var("CUDA_VISIBLE_DEVICES").ok();
        let visible = visible(settings.devices, variable.as_deref());
        let options = SimOptions::new(settings.memory_bytes)
            .with_virtual_memory(settings.virtual_memory)
            .with_seed(settings.seed)
            .with_latencies(LatencyTable::a100())
            .with_name(format!("{DEVICE_NAME}, simulated"))
            // A call submits one piece of work at most, and two run on average: what is pending stays bounded.
            .with_max_ops_per_step(4);
        let sims = SimDevice::group(vec![options; visible.len()])?;
        let mut state = Self {
            gpus: Vec::new(),
            contexts: HashMap::new(),
            streams: HashMap::new(),
            events: HashMap::new(),
            captures: HashMap::new(),
            graphs: HashMap::new(),
            regions: BTreeMap::new(),
            ranges: BTreeMap::new(),
            physical: HashMap::new(),
            pools: HashMap::new(),
            modules: BTreeSet::new(),
            functions: HashMap::new(),
            user_objects: HashMap::new(),
            kernels_launched: 0,
            session: settings.shared.as_deref().and_then(Session::open),
            next_handle: 0x5a00_0000,
        };
        for (device, (sim, physical)) in sims.into_iter().zip(visible).enumerate() {
            if settings.late {
                sim.delay_events(u32::MAX);
            }
            sim.set_other_process_bytes(settings.other_bytes);
            let primary = state.new_handle();
            let pool = state.new_handle();
            state.pools.insert(pool, Pool::new(device));
            state.gpus.push(Gpu {
                sim,
                physical,
                primary,
                primary_retained: 0,
                primary_flags: 0,
                retained_by_runtime: false,
                default_pool: pool,
                current_pool: pool,
                blocking: Vec::new(),
                helper: None,
                errors_seen: 0,
                broken: None,
                peers: BTreeSet::new(),
            });
        }
        Ok(state)
    }

    pub(crate) fn new_handle(&mut self) -> u64 {
        self.next_handle += 16;
        self.next_handle
    }

    /// The device that a caller's ordinal means.
    pub(crate) fn device(&self, ordinal: i32) -> Result<usize, Code> {
        let device = usize::try_from(ordinal).ok();
        device
            .filter(|&device| device < self.gpus.len())
            .ok_or(Code::INVALID_DEVICE)
    }

    /// The device at a place among all of them, if it is visible.
    pub(crate) fn device_at(&self, physical: u32) -> Option<usize> {
        self.gpus.iter().position(|gpu| gpu.physical == physical)
    }

    // ---- contexts ---------------------------------------------------------------------------

    /// The thread's current context, 0 for none.
    pub(crate) fn current_handle() -> u64 {
        CONTEXTS.with_borrow(|stack| stack.last().copied().unwrap_or(0))
    }

    pub(crate) fn set_current(context: u64) {
        CONTEXTS.with_borrow_mut(|stack| {
            stack.pop();
            if context != 0 {
                stack.push(context);
            }
        });
    }

    pub(crate) fn push_current(context: u64) {
        CONTEXTS.with_borrow_mut(|stack| stack.push(context));
    }

    pub(crate) fn pop_current() -> Result<u64, Code> {
        CONTEXTS
            .with_borrow_mut(Vec::pop)
            .ok_or(Code::INVALID_CONTEXT)
    }

    /// The context that a driver's call is made in.
    pub(crate) fn current(&self) -> Result<Current, Code> {
        let context = Self::current_handle();
        if context == 0 {
            return Err(Code::INVALID_CONTEXT);
        }
        let device = self.context(context)?.device;
        Ok(Current { context, device })
    }

    pub(crate) fn context(&self, context: u64) -> Result<Context, Code> {
        let found = *self
            .contexts
            .get(&context)
            .ok_or(Code::CONTEXT_IS_DESTROYED)?;
        self.gpus[found.device].broken.map_or(Ok(found), Err)
    }

    /// The context that a runtime's call is made in: the current one, or the chosen device's primary one, which is made
    /// if there is none yet.
    pub(crate) fn runtime_current(&mut self) -> Result<Current, Code> {
        let handle = Self::current_handle();
        if handle != 0 && self.contexts.contains_key(&handle) {
            return self.current();
        }
        self.choose_device(RUNTIME_DEVICE.get())
    }

    /// What `cudaSetDevice` does.
    pub(crate) fn choose_device(&mut self, device: usize) -> Result<Current, Code> {
        RUNTIME_DEVICE.set(device);
        let gpu = self.gpus.get_mut(device).ok_or(Code::INVALID_DEVICE)?;
        let context = gpu.primary;
        if !gpu.retained_by_runtime {
            gpu.retained_by_runtime = true;
            self.retain_primary(device);
        }
        Self::set_current(context);
        self.current()
    }

    /// The device that `cudaGetDevice` says, without making a context.
    pub(crate) fn chosen_device(&self) -> usize {
        let current = self.contexts.get(&Self::current_handle());
        current.map_or(RUNTIME_DEVICE.get(), |context| context.device)
    }

    pub(crate) fn retain_primary(&mut self, device: usize) -> u64 {
        let gpu = &mut self.gpus[device];
        gpu.primary_retained += 1;
        let context = gpu.primary;
        let primary = true;
        self.contexts.insert(context, Context { device, primary });
        context
    }

    pub(crate) fn release_primary(&mut self, device: usize) -> Outcome {
        let gpu = &mut self.gpus[device];
        if gpu.primary_retained == 0 {
            return Err(Code::INVALID_CONTEXT);
        }
        gpu.primary_retained -= 1;
        if gpu.primary_retained == 0 {
            let context = gpu.primary;
            self.destroy_context(context)?;
        }
        Ok(())
    }

    /// Makes the primary context anew: all that was in it is gone.
    pub(crate) fn reset_primary(&mut self, device: usize) -> Outcome {
        let gpu = &mut self.gpus[device];
        gpu.primary_retained = 0;
        gpu.retained_by_runtime = false;
        let context = gpu.primary;
        if self.contexts.contains_key(&context) {
            self.destroy_context(context)?;
        }
        Ok(())
    }

    pub(crate) fn create_context(&mut self, device: usize) -> u64 {
        let handle = self.new_handle();
        let primary = false;
        self.contexts.insert(handle, Context { device, primary });
        Self::push_current(handle);
        handle
    }

    /// Destroys a context and all that belongs to it (invariant 2).
    pub(crate) fn destroy_context(&mut self, context: u64) -> Outcome {
        let device = self
            .contexts
            .get(&context)
            .ok_or(Code::CONTEXT_IS_DESTROYED)?
            .device;
        self.gpus[device].sim.synchronize()?;
        self.captures.clear();
        let of = |owner: u64| owner == context;
        let streams: Vec<u64> = self
            .streams
            .iter()
            .filter(|(_, s)| of(s.context))
            .map(|(h, _)| *h)
            .collect();
        for stream in streams {
            self.destroy_stream(stream)?;
        }
        let events: Vec<u64> = self
            .events
            .iter()
            .filter(|(_, e)| of(e.context))
            .map(|(h, _)| *h)
            .collect();
        for event in events {
            self.destroy_event(event)?;
        }
        self.free_all_of(context)?;
        self.contexts.remove(&context);
        // A new context begins without the errors of the old one.
        self.gpus[device].broken = None;
        Ok(())
    }

    // ---- what went wrong ----------------------------------------------------------------------

    /// Whether work of the device has touched memory it had no right to. Found out when something waits for it, and for
    /// good.
    pub(crate) fn check_work(&mut self, device: usize) -> Outcome {
        let gpu = &mut self.gpus[device];
        if gpu.sim.num_errors() > gpu.errors_seen {
            for error in &gpu.sim.errors()[gpu.errors_seen..] {
                log::note(&format!("illegal access: {error}"));
            }
            gpu.errors_seen = gpu.sim.num_errors();
            gpu.broken = Some(Code::ILLEGAL_ADDRESS);
        }
        gpu.broken.map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_hidden_as_cuda_hides_them() {
        assert_eq!(visible(3, None), [0, 1, 2]);
        assert_eq!(visible(3, Some("2,0")), [2, 0]);
        assert_eq!(visible(3, Some("1,7,0")), [1]);
        assert_eq!(visible(3, Some("-1")), [] as [u32; 0]);
        assert_eq!(visible(3, Some("")), [] as [u32; 0]);
        assert_eq!(visible(3, Some("1,1")), [] as [u32; 0]);
        assert_eq!(visible(3, Some(&uuid_text(1))), [1]);
    }
}
