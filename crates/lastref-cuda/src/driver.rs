//! The driver: found once, looked over once, and known to be dead at the right moments.
//!
//! cudarc looks a function up when it is first called, and panics if it is not there. So every
//! function in [`SYMBOLS`] is looked up before the first call, in the library that cudarc will open.
//!
//! # Invariants
//!
//! 1. No function of the driver is called unless [`driver`] has returned one: then the library is
//!    loaded for good and has every function of [`SYMBOLS`], and no other function is called by this
//!    crate.
//! 2. Nothing is called in a forked child of a process that had started the driver, nor once the
//!    process is on its way out: [`life`] says so, and what is held then is left to the system.
//! 3. `LIFE` only ever leaves [`Life::On`], never returns to it.

use std::ffi::c_int;
use std::sync::OnceLock;

use cudarc::driver::{result, sys};
use libloading::Library;
use thiserror::Error;

use crate::raw::{self, Failure};
use crate::sync::{AtomicU8, Ordering};

/// The oldest driver that will do: that of CUDA 11.4. cudarc's bindings begin there.
pub const MIN_CUDA_VERSION: i32 = 11_040;

/// Library names in the order in which cudarc tries them, so that the library looked over is the one
/// it will use. (It tries others too, which no driver on Linux has.)
const LIBRARIES: [&str; 2] = ["libcuda.so", "libcuda.so.1"];

/// Every function of the driver that this crate calls, and those that cudarc's safe layer needs to
/// launch a kernel on our memory.
pub const SYMBOLS: &[&str] = &[
    "cuCtxEnablePeerAccess",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuDeviceCanAccessPeer",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem_v2",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventElapsedTime",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuInit",
    "cuLaunchKernel",
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemAllocAsync",
    "cuMemAlloc_v2",
    "cuMemCreate",
    "cuMemFreeAsync",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemGetAllocationGranularity",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemMap",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemcpy2DAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyPeerAsync",
    "cuMemsetD16Async",
    "cuMemsetD2D16Async",
    "cuMemsetD2D32Async",
    "cuMemsetD2D8Async",
    "cuMemsetD32Async",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamIsCapturing",
    "cuStreamQuery",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuThreadExchangeStreamCaptureMode",
];

/// Why CUDA cannot be used in this process.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum Unavailable {
    /// This machine has no driver. The usual case without a GPU.
    #[error("there is no CUDA driver: neither libcuda.so nor libcuda.so.1 was found")]
    NoDriver,
    /// The driver sees no device, or `CUDA_VISIBLE_DEVICES` leaves none.
    #[error("the CUDA driver sees no device{}", visible_devices())]
    NoDevice,
    /// The driver's library is there and cannot be loaded.
    #[error("the CUDA driver cannot be loaded: {reason}; install it anew")]
    Unloadable {
        /// The dynamic loader's words, which name the library.
        reason: String,
    },
    /// The driver is older than [`MIN_CUDA_VERSION`].
    #[error(
        "the CUDA driver ({library}) is too old: it is for CUDA {}, lastref needs one for {} or newer (version 470); update it",
        version_text(*.version),
        version_text(MIN_CUDA_VERSION)
    )]
    TooOld {
        /// The library's name.
        library: &'static str,
        /// What it says it is for: 11020 is CUDA 11.2.
        version: i32,
    },
    /// The driver lacks a function that drivers of its version have.
    #[error(
        "the CUDA driver ({library}) is broken: it has no function {symbol}; install it anew, with the library that belongs to the kernel module"
    )]
    MissingSymbol {
        /// The library's name.
        library: &'static str,
        /// The function.
        symbol: &'static str,
    },
    /// The driver would not start.
    #[error("the CUDA driver ({library}) does not start: {call}: error {code}, {text}{hint}")]
    Failed {
        /// The library's name.
        library: &'static str,
        /// The call that failed.
        call: &'static str,
        /// The driver's code.
        code: i32,
        /// The driver's text.
        text: String,
        /// What to do, where that is known; begins with `; `.
        hint: &'static str,
    },
}

impl Unavailable {
    /// Whether there is nothing to be told: no driver or no device, as opposed to a broken one.
    #[must_use]
    pub const fn is_usual(&self) -> bool {
        matches!(self, Self::NoDriver | Self::NoDevice)
    }
}

fn visible_devices() -> String {
    std::env::var("CUDA_VISIBLE_DEVICES")
        .map(|value| format!(" (CUDA_VISIBLE_DEVICES={value:?})"))
        .unwrap_or_default()
}

fn version_text(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// The driver, started.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Driver {
    /// What it is for: 12090 is CUDA 12.9.
    pub(crate) version: i32,
    pub(crate) num_devices: i32,
}

/// The driver of this process, looked for at the first call.
pub(crate) fn driver() -> Result<Driver, &'static Unavailable> {
    static DRIVER: OnceLock<Result<Driver, Unavailable>> = OnceLock::new();
    DRIVER.get_or_init(start).as_ref().copied()
}

fn start() -> Result<Driver, Unavailable> {
    let (library, name) = load()?;
    if !has(&library, "cuDriverGetVersion") {
        return Err(Unavailable::MissingSymbol {
            library: name,
            symbol: "cuDriverGetVersion",
        });
    }
    let failed = |failure: Failure| failure.unavailable(name);
    // An old driver lacks functions too; its age is what to say then.
    let version = version_before_start(&library).map_err(|code| Unavailable::Failed {
        library: name,
        call: "cuDriverGetVersion",
        code,
        text: "the version cannot be read".to_owned(),
        hint: "",
    })?;
    if version < MIN_CUDA_VERSION {
        return Err(Unavailable::TooOld {
            library: name,
            version,
        });
    }
    if let Some(symbol) = SYMBOLS.iter().find(|symbol| !has(&library, symbol)) {
        return Err(Unavailable::MissingSymbol {
            library: name,
            symbol,
        });
    }
    // The library stays: cudarc's own handle on it is made at the first call only.
    static KEPT: OnceLock<Library> = OnceLock::new();
    KEPT.get_or_init(|| library);
    raw::init().map_err(failed)?;
    watch_the_end();
    let num_devices = raw::device_count().map_err(failed)?;
    if num_devices == 0 {
        return Err(Unavailable::NoDevice);
    }
    Ok(Driver {
        version,
        num_devices,
    })
}

/// The first library that is there, and its name.
fn load() -> Result<(Library, &'static str), Unavailable> {
    for name in LIBRARIES {
        // SAFETY: the library is NVIDIA's driver by its name, whose initialisers any CUDA program runs.
        match unsafe { Library::new(name) } {
            Ok(library) => return Ok((library, name)),
            Err(error) => {
                let reason = text_of(&error);
                // The loader names what it could not find: this library, or one that this one needs.
                let absent = format!("{name}: cannot open shared object file: No such file");
                if !reason.starts_with(&absent) {
                    return Err(Unavailable::Unloadable { reason });
                }
            }
        }
    }
    Err(Unavailable::NoDriver)
}

/// The loader's own words, which libloading keeps one level down.
fn text_of(error: &libloading::Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(inner) = source {
        text = inner.to_string();
        source = inner.source();
    }
    text
}

fn has(library: &Library, symbol: &str) -> bool {
    // SAFETY: the address is not used, only whether there is one.
    unsafe { library.get::<*const ()>(symbol.as_bytes()) }.is_ok()
}

/// Asks by our own handle: cudarc's would panic if the driver were missing more.
fn version_before_start(library: &Library) -> Result<i32, i32> {
    type GetVersion = unsafe extern "C" fn(*mut c_int) -> c_int;
    // SAFETY: the function has had this signature since CUDA 2.2.
    let get = unsafe { library.get::<GetVersion>(b"cuDriverGetVersion") }.map_err(|_| -1)?;
    let mut version = 0;
    // SAFETY: the pointer is valid for the call; it needs no start before.
    match unsafe { get(&raw mut version) } {
        0 => Ok(version),
        code => Err(code),
    }
}

// ---- the end ------------------------------------------------------------------------------

/// Whether the driver may be called.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Life {
    /// It may.
    On,
    /// This is a forked child: the driver belongs to the parent.
    Forked,
    /// The process is exiting, or the driver has said that it is shutting down.
    Exiting,
}

static LIFE: AtomicU8 = AtomicU8::new(0);

pub(crate) fn life() -> Life {
    match LIFE.load(Ordering::Relaxed) {
        0 => Life::On,
        1 => Life::Forked,
        _ => Life::Exiting,
    }
}

/// From now on nothing is called.
pub(crate) fn the_driver_is_going() {
    LIFE.fetch_max(2, Ordering::Relaxed);
}

extern "C" fn at_exit() {
    the_driver_is_going();
}

extern "C" fn in_child() {
    LIFE.fetch_max(1, Ordering::Relaxed);
}

/// Has the C library tell us. What it calls does nothing but store to an atomic, which is allowed
/// both after a fork and at exit. Handlers run in reverse: ours before those that the driver
/// registered when it was loaded.
fn watch_the_end() {
    // SAFETY: the handler is a function of this library, which is never unloaded by itself.
    let exit = unsafe { libc::atexit(at_exit) };
    // SAFETY: as above.
    let fork = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    if exit != 0 || fork != 0 {
        log::warn!(
            "lastref-cuda: the C library keeps no note of exit ({exit}) or fork ({fork}): the driver may be called too late"
        );
    }
}

impl Failure {
    pub(crate) fn unavailable(self, library: &'static str) -> Unavailable {
        use sys::CUresult as R;
        let result::DriverError(code) = self.code;
        let hint = match code {
            R::CUDA_ERROR_NO_DEVICE => return Unavailable::NoDevice,
            R::CUDA_ERROR_STUB_LIBRARY => {
                "; this is the CUDA toolkit's stub, for linking only: take its folder out of LD_LIBRARY_PATH"
            }
            R::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => {
                "; the library does not fit the kernel module: reboot, or install the driver anew"
            }
            R::CUDA_ERROR_SYSTEM_NOT_READY => "; start nvidia-fabricmanager",
            R::CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE => {
                "; the compatibility library does not support this GPU: take it out of LD_LIBRARY_PATH"
            }
            R::CUDA_ERROR_UNKNOWN => {
                "; the kernel module may not be loaded (`nvidia-smi` shows it), or /dev/nvidia-uvm is missing"
            }
            _ => "",
        };
        Unavailable::Failed {
            library,
            call: self.call,
            code: self.code(),
            text: self.text(),
            hint,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_told_as_people_write_them() {
        assert_eq!(version_text(11_040), "11.4");
        assert_eq!(version_text(13_020), "13.2");
        let old = Unavailable::TooOld {
            library: "libcuda.so.1",
            version: 10_020,
        };
        assert_eq!(
            old.to_string(),
            "the CUDA driver (libcuda.so.1) is too old: it is for CUDA 10.2, lastref needs one for 11.4 or newer (version 470); update it"
        );
    }

    #[test]
    fn symbols_are_listed_once_in_order() {
        assert!(SYMBOLS.is_sorted_by(|a, b| a < b));
    }
}
