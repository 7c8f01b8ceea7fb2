//! The devices of this process and their allocators: found once, kept to the end.
//!
//! ```text
//! Runtime (static, never dropped) ──▶ DeviceEntry: CachingAllocator<Arc<dyn Device>>, stream pool
//! ```
//!
//! 1. At most one runtime comes into being in a process; it never changes or goes away. So a
//!    storage can be dropped at any moment, process exit included.
//! 2. No runtime exists before a call needs a device, or [`enable`] makes one.
//!
//! Lock order: `STARTING`, then whatever device creation takes. No lock is held while the devices
//! are used.

use std::sync::{Arc, OnceLock};

use crate::alloc::sim::SimDevice;
use crate::alloc::{AllocatorOptions, CONF_VARIABLE, CachingAllocator, Device};
use crate::cuda::stream::StreamPool;
use crate::sim::{self, Spec};
use crate::sync::{Mutex, lock};
use crate::{Error, Result, gc};

/// The devices in use.
pub(crate) struct Runtime {
    pub(crate) devices: Vec<DeviceEntry>,
    /// What was asked for, where the devices are simulated.
    pub(crate) spec: Option<Spec>,
    /// The simulated devices behind `devices`; empty where they are real.
    pub(crate) simulated: Vec<SimDevice>,
}

/// One device and what belongs to it.
pub(crate) struct DeviceEntry {
    pub(crate) allocator: CachingAllocator<Arc<dyn Device>>,
    pub(crate) pool: StreamPool,
}

static RUNTIME: OnceLock<Runtime> = OnceLock::new();
static STARTING: Mutex<()> = Mutex::new(());
/// `LASTREF_SIM` as found at the first look: nothing, a spec, or the value and what is wrong.
static SETTING: OnceLock<Result<Option<Spec>, (String, String)>> = OnceLock::new();

/// `LASTREF_ALLOC_CONF` as found when the first devices were wanted, or its value and what is wrong.
static CONF: OnceLock<Result<AllocatorOptions, (String, String)>> = OnceLock::new();

/// Why there is no device. Not yet tied to a call.
pub(crate) enum Missing {
    /// Nobody asked for a simulated one, and there is no other kind yet.
    None,
    /// `LASTREF_SIM` cannot be read, or the simulated device could not be made.
    Failed(Error),
}

impl Missing {
    pub(crate) fn into_error(self, call: &'static str) -> Error {
        match self {
            Self::None => Error::no_device(
                call,
                "no CUDA device is available; set LASTREF_SIM=8GiB to use a simulated one",
            ),
            Self::Failed(error) => error,
        }
    }
}

/// The runtime, made now if `LASTREF_SIM` asks for it.
pub(crate) fn active() -> Result<&'static Runtime, Missing> {
    if let Some(runtime) = RUNTIME.get() {
        return Ok(runtime);
    }
    match SETTING.get_or_init(read_setting) {
        Ok(None) => Err(Missing::None),
        Ok(Some(spec)) => {
            start(*spec, &format!("{}={spec}", sim::VARIABLE)).map_err(Missing::Failed)
        }
        Err((value, reason)) => Err(Missing::Failed(Error::InvalidSetting {
            setting: sim::VARIABLE,
            value: value.clone(),
            reason: reason.clone(),
        })),
    }
}

/// The runtime, if there is one by now.
pub(crate) fn started() -> Option<&'static Runtime> {
    RUNTIME.get()
}

/// The entry of one device.
pub(crate) fn device(call: &'static str, index: u32) -> Result<&'static DeviceEntry> {
    let runtime = active().map_err(|missing| missing.into_error(call))?;
    runtime.devices.get(index as usize).ok_or_else(|| {
        Error::no_device(
            call,
            format!(
                "there is no cuda:{index}, this process has {} CUDA device(s), counted from 0",
                runtime.devices.len()
            ),
        )
    })
}

/// What `sim::enable` does.
pub(crate) fn enable(spec: Spec) -> Result<()> {
    let runtime = start(spec, "asked for by sim::enable")?;
    if runtime.spec == Some(spec) {
        return Ok(());
    }
    Err(Error::InvalidSetting {
        setting: "sim::enable",
        value: spec.to_string(),
        reason: match runtime.spec {
            Some(other) => format!("simulated GPUs are in use already, {other}"),
            None => "a GPU is in use already".to_owned(),
        },
    })
}

/// The runtime, made of simulated devices if there is none.
fn start(spec: Spec, why: &str) -> Result<&'static Runtime> {
    let _starting = lock(&STARTING);
    if let Some(runtime) = RUNTIME.get() {
        return Ok(runtime);
    }
    let conf = CONF.get_or_init(read_conf).as_ref();
    let options = conf.map_err(|(value, reason)| Error::InvalidSetting {
        setting: CONF_VARIABLE,
        value: value.clone(),
        reason: reason.clone(),
    })?;
    let simulated = spec.devices()?;
    let devices = simulated
        .iter()
        .map(|device| {
            let device: Arc<dyn Device> = Arc::new(device.clone());
            let properties = device.properties();
            gc::set_capacity(properties.index.0, properties.total_bytes);
            let allocator = CachingAllocator::with_options(device, options);
            allocator.add_reclaimer(Arc::new(gc::CollectionRung));
            DeviceEntry {
                allocator,
                pool: StreamPool::default(),
            }
        })
        .collect();
    say(&format!(
        "lastref: using {} simulated GPU{} of {}, no real one ({why})",
        spec.count(),
        if spec.count() == 1 { "" } else { "s" },
        sim::gib(spec.capacity_bytes())
    ));
    Ok(RUNTIME.get_or_init(|| Runtime {
        devices,
        spec: Some(spec),
        simulated,
    }))
}

fn read_setting() -> Result<Option<Spec>, (String, String)> {
    let Some(value) = std::env::var_os(sim::VARIABLE) else {
        return Ok(None);
    };
    let value = value.to_string_lossy();
    if value.is_empty() {
        return Ok(None);
    }
    Spec::parse(&value).map(Some).map_err(|reason| {
        say(&format!("lastref: {}={value:?}: {reason}", sim::VARIABLE));
        (value.into_owned(), reason)
    })
}

fn read_conf() -> Result<AllocatorOptions, (String, String)> {
    AllocatorOptions::from_env().map_err(|reason| {
        let value = std::env::var_os(CONF_VARIABLE).unwrap_or_default();
        say(&format!("lastref: {CONF_VARIABLE}={value:?}: {reason}"));
        (value.to_string_lossy().into_owned(), reason.to_string())
    })
}

#[expect(
    clippy::print_stderr,
    reason = "a user must be told which device is in use, once in a process"
)]
fn say(line: &str) {
    eprintln!("{line}");
}
