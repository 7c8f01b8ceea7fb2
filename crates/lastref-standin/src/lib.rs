//! A stand-in for NVIDIA's libraries: the CUDA driver, the CUDA runtime and NVML, and what PyTorch asks of cuBLAS, over
//! the simulated device of `lastref-alloc`. Real programs run on it without a GPU: memory, streams, events and copies are
//! real; kernels are counted and compute nothing.
//!
//! The crate is one shared object, to be preloaded and to be found under the names of NVIDIA's libraries.
//! `lastref standin -- PROGRAM` arranges both; `docs/standin.md` has the settings. There is nothing here for Rust.
//!
//! ```text
//! driver.rs, runtime.rs, nvml.rs, cublas.rs   the C functions: thin, through entry.rs
//!        │
//! state.rs ── memory.rs ── streams.rs         one state, one lock
//!        │
//! lastref_alloc::sim                          bytes, streams, time
//! ```

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("the stand-in is for 64-bit Linux, as the simulated device is");

mod abi;
mod control;
mod cublas;
mod device;
mod driver;
mod entry;
mod error;
mod log;
mod memory;
mod names;
mod nvml;
mod properties;
mod runtime;
mod session;
mod settings;
mod state;
mod streams;
mod sync;
mod unsupported;

/// All functions that C programs can call.
static EXPORTS: &[&[entry::Export]] = &[
    driver::EXPORTS,
    runtime::EXPORTS,
    runtime::PLAIN_EXPORTS,
    nvml::EXPORTS,
    nvml::PLAIN_EXPORTS,
    cublas::EXPORTS,
    cublas::PLAIN_EXPORTS,
    cublas::settings::EXPORTS,
    cublas::products::EXPORTS,
    control::EXPORTS,
    control::PLAIN_EXPORTS,
    unsupported::driver::EXPORTS,
    unsupported::runtime::EXPORTS,
    unsupported::nvml::EXPORTS,
];
