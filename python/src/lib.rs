//! The compiled part of the Python package `lastref`. Its public face is in `python/lastref`.
//!
//! | module | what it has |
//! |---|---|
//! | `tensor` | the classes `Tensor` and `UntypedStorage` |
//! | `create` | the functions that make tensors |
//! | `index` | `t[...]` |
//! | `buffer`, `dlpack` | the same memory for NumPy and other libraries |
//! | `dtype`, `device` | the classes of these names, and arguments that stand for them |
//! | `cuda` | streams, events, and what `lastref.cuda` and `lastref.sim` call |
//! | `gc` | Python's cycle collector, run by lastref's; what `lastref.gc` calls |
//! | `snapshot` | memory snapshots read and written, for `lastref.snapshot` |
//! | `torch` | the C functions for the shim under PyTorch's allocator |
//! | `heap` | the graph of Python's objects, for `lastref.torch.holders` |
//! | `args`, `error` | shapes and numbers from Python; exceptions to Python |
//!
//! Lock order: the interpreter lock, then whatever lastref takes. Nothing here is called by lastref
//! with one of its locks held, and what may wait is called without the interpreter lock.

mod args;
mod buffer;
mod create;
mod cuda;
mod device;
mod dlpack;
mod dtype;
mod error;
mod gc;
mod heap;
mod index;
mod snapshot;
mod tensor;
mod torch;

use std::ffi::OsString;

use pyo3::prelude::*;

/// Runs the command `lastref` and gives its exit status. Signals must have their default actions.
#[pyfunction]
fn run_command(py: Python<'_>, arguments: Vec<OsString>) -> u8 {
    py.detach(|| lastref_cli::run(arguments))
}

#[pymodule(gil_used = true)]
mod _lastref {
    #[pymodule_export]
    use super::run_command;
    #[pymodule_export]
    use crate::create::{
        arange, as_tensor, empty, empty_like, from_dlpack, from_numpy, full, full_like, is_tensor,
        ones, ones_like, tensor, zeros, zeros_like,
    };
    #[pymodule_export]
    use crate::cuda::{
        PyEvent, PyMemPool, PyMemPoolScope, PyStream, cuda_current_device, cuda_current_stream,
        cuda_default_stream, cuda_device_count, cuda_empty_cache, cuda_get_device_name,
        cuda_get_device_properties, cuda_get_per_process_memory_fraction, cuda_is_available,
        cuda_max_memory_allocated, cuda_max_memory_reserved, cuda_mem_get_info,
        cuda_memory_allocated, cuda_memory_reserved, cuda_memory_snapshot_json, cuda_memory_stats,
        cuda_memory_summary, cuda_reset_accumulated_memory_stats, cuda_reset_peak_memory_stats,
        cuda_set_allocator_settings, cuda_set_device, cuda_set_per_process_memory_fraction,
        cuda_set_stream, cuda_synchronize, cuda_trim, sim_enable, sim_is_enabled, sim_races,
    };
    #[pymodule_export]
    use crate::device::PyDevice;
    #[pymodule_export]
    use crate::dtype::PyDType;
    #[pymodule_export]
    use crate::error::OutOfMemoryError;
    #[pymodule_export]
    use crate::gc::{
        gc_add_callback, gc_collect, gc_disable, gc_enable, gc_get_before_out_of_memory,
        gc_get_byte_threshold, gc_get_wait_bound, gc_is_enabled, gc_remove_callback,
        gc_set_before_out_of_memory, gc_set_byte_threshold, gc_set_wait_bound, gc_stats,
    };
    #[pymodule_export]
    use crate::heap::{PyHeap, heap_frame_variables, heap_instance_values};
    #[pymodule_export]
    use crate::snapshot::{PySnapshot, cuda_dump_snapshot, snapshot_advise, snapshot_read};
    #[pymodule_export]
    use crate::tensor::{PyStorage, PyTensor, rebuild_tensor};
    #[pymodule_export]
    use crate::torch::{torch_attach, torch_hooks};
    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        crate::dtype::register(module)?;
        crate::gc::register(module.py())
    }
}
