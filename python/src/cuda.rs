//! Streams, events and the functions behind `lastref.cuda`, `lastref.sim`.
//!
//! What may wait for the device runs without the interpreter lock.

use lastref::{cuda, sim};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::device::{CudaIndex, PyDevice};
use crate::error::{Failure, Outcome};

/// A stream: work on it happens in the order of submission.
///
/// `Stream()` gives a stream of the current device from a pool of 32; `Stream(device, priority)` one
/// of another device, served first if the priority is below 0.
#[pyclass(name = "Stream", module = "lastref", frozen, eq, hash, weakref)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct PyStream(pub(crate) cuda::Stream);

#[pymethods]
impl PyStream {
    #[new]
    #[pyo3(signature = (device=CudaIndex(None), priority=0), text_signature = "(device=None, priority=0)")]
    fn new(device: CudaIndex, priority: i32) -> Outcome<Self> {
        Ok(Self(cuda::Stream::with(device.0, priority)?))
    }

    /// Waits until all work of this stream is done. Other Python threads run meanwhile.
    fn synchronize(&self, py: Python<'_>) -> Outcome {
        Ok(py.detach(|| self.0.synchronize())?)
    }

    /// Whether all its work is done. Does not wait.
    fn query(&self) -> Outcome<bool> {
        Ok(self.0.query()?)
    }

    /// Makes later work on this stream wait for the event. Does not wait on the host.
    fn wait_event(&self, event: &PyEvent) -> Outcome {
        Ok(self.0.wait_event(&event.0)?)
    }

    /// Makes later work on this stream wait for the work another one has now.
    fn wait_stream(&self, stream: &Self) -> Outcome {
        Ok(self.0.wait_stream(&stream.0)?)
    }

    /// Records the work this stream has now in the event, or in a new one, and returns that.
    #[pyo3(signature = (event=None))]
    fn record_event<'py>(
        &self,
        py: Python<'py>,
        event: Option<Bound<'py, PyEvent>>,
    ) -> Outcome<Bound<'py, PyEvent>> {
        let event = match event {
            Some(event) => event,
            None => Bound::new(py, PyEvent(cuda::Event::new()))?,
        };
        event.get().0.record(&self.0)?;
        Ok(event)
    }

    /// The device it belongs to.
    #[getter]
    fn device(&self) -> PyDevice {
        lastref::Device::Cuda(self.0.device()).into()
    }

    /// The index of the device it belongs to.
    #[getter]
    fn device_index(&self) -> u32 {
        self.0.device()
    }

    /// Its number on its device; 0 is the default stream.
    #[getter]
    fn stream_id(&self) -> u64 {
        self.0.id().0
    }

    /// 0, or -1 where it is served first.
    #[getter]
    fn priority(&self) -> i32 {
        self.0.priority()
    }

    fn __repr__(&self) -> String {
        format!(
            "<lastref.cuda.Stream device=cuda:{} stream_id={}>",
            self.0.device(),
            self.0.id()
        )
    }
}

/// A point in a stream's work that can be waited for and timed.
#[pyclass(name = "Event", module = "lastref", frozen, weakref)]
#[derive(Debug)]
pub(crate) struct PyEvent(cuda::Event);

#[pymethods]
impl PyEvent {
    /// All events here can be timed; `enable_timing` is there for programs written for PyTorch.
    #[new]
    #[pyo3(signature = (enable_timing=false))]
    fn new(enable_timing: bool) -> Self {
        let _ = enable_timing;
        Self(cuda::Event::new())
    }

    /// Records the work the stream has now; by default the current stream.
    #[pyo3(signature = (stream=None))]
    fn record(&self, stream: Option<&PyStream>) -> Outcome {
        match stream {
            Some(stream) => self.0.record(&stream.0)?,
            None => self.0.record(&cuda::current_stream(None)?)?,
        }
        Ok(())
    }

    /// Makes later work on the stream wait for the event; by default the current stream.
    #[pyo3(signature = (stream=None))]
    fn wait(&self, stream: Option<&PyStream>) -> Outcome {
        match stream {
            Some(stream) => self.0.wait(&stream.0)?,
            None => self.0.wait(&cuda::current_stream(None)?)?,
        }
        Ok(())
    }

    /// Waits until the recorded work is done. Other Python threads run meanwhile.
    fn synchronize(&self, py: Python<'_>) -> Outcome {
        Ok(py.detach(|| self.0.synchronize())?)
    }

    /// Whether the recorded work is done; True if nothing was recorded. Does not wait.
    fn query(&self) -> Outcome<bool> {
        Ok(self.0.query()?)
    }

    /// Milliseconds of device time from this event to another; both must be done.
    fn elapsed_time(&self, end_event: &Self) -> Outcome<f64> {
        Ok(self.0.elapsed_time(&end_event.0)?)
    }

    /// The device it was recorded on, or None.
    #[getter]
    fn device(&self) -> Option<PyDevice> {
        self.0
            .device()
            .map(|index| lastref::Device::Cuda(index).into())
    }

    fn __repr__(&self) -> String {
        match self.0.device() {
            Some(index) => format!("<lastref.cuda.Event device=cuda:{index}>"),
            None => "<lastref.cuda.Event not recorded>".to_owned(),
        }
    }
}

/// A private pool of a device's memory: tensors made in it lie apart from all others, and what it has
/// free serves its own tensors only.
///
/// `MemPool()` is a pool of the current device, `MemPool(device=1)` of another one. Use it with
/// `lastref.cuda.use_mem_pool`. Tensors may outlive it. Before an out-of-memory error what it has free
/// goes back to the device like all cached memory.
#[pyclass(name = "MemPool", module = "lastref", frozen, weakref)]
#[derive(Debug)]
pub(crate) struct PyMemPool(cuda::MemPool);

#[pymethods]
impl PyMemPool {
    #[new]
    #[pyo3(signature = (*, device=CudaIndex(None)), text_signature = "(*, device=None)")]
    fn new(device: CudaIndex) -> Outcome<Self> {
        Ok(Self(cuda::MemPool::new(device.0)?))
    }

    /// Its number, as torch gives it: a pair, of which the first is 0.
    #[getter]
    fn id(&self) -> (u32, u32) {
        (0, self.0.id())
    }

    /// The device it belongs to.
    #[getter]
    fn device(&self) -> PyDevice {
        lastref::Device::Cuda(self.0.device()).into()
    }

    /// Bytes in its tensors, rounding included.
    fn memory_allocated(&self) -> u64 {
        self.0.memory_allocated()
    }

    /// Bytes it has obtained from the device.
    fn memory_reserved(&self) -> u64 {
        self.0.memory_reserved()
    }

    fn __repr__(&self) -> String {
        format!(
            "<lastref.cuda.MemPool device=cuda:{} id=(0, {})>",
            self.0.device(),
            self.0.id()
        )
    }
}

/// What an open `use_mem_pool` holds. Made, closed and dropped on one thread.
#[pyclass(name = "_MemPoolScope", module = "lastref", unsendable)]
#[derive(Debug)]
pub(crate) struct PyMemPoolScope {
    scope: Option<cuda::MemPoolContext>,
}

#[pymethods]
impl PyMemPoolScope {
    /// Opens a scope on this thread.
    #[new]
    fn new(pool: &PyMemPool, device: CudaIndex) -> Outcome<Self> {
        let own = pool.0.device();
        if let Some(other) = device.0.filter(|other| *other != own) {
            return Err(Failure::Python(PyValueError::new_err(format!(
                "use_mem_pool: the pool is on cuda:{own}, not on cuda:{other}"
            ))));
        }
        Ok(Self {
            scope: Some(cuda::use_mem_pool(&pool.0)),
        })
    }

    /// Closes it.
    fn close(&mut self) {
        self.scope = None;
    }
}

#[pyfunction]
pub(crate) fn cuda_is_available() -> bool {
    cuda::is_available()
}

#[pyfunction]
pub(crate) fn cuda_device_count() -> u32 {
    cuda::device_count()
}

#[pyfunction]
pub(crate) fn cuda_current_device() -> u32 {
    cuda::current_device()
}

#[pyfunction]
pub(crate) fn cuda_set_device(device: CudaIndex) -> Outcome {
    match device.0 {
        Some(index) => Ok(cuda::set_device(index)?),
        None => Ok(()),
    }
}

#[pyfunction]
pub(crate) fn cuda_get_device_name(device: CudaIndex) -> Outcome<String> {
    Ok(cuda::get_device_name(device.0)?)
}

#[pyfunction]
pub(crate) fn cuda_get_device_properties(device: CudaIndex) -> Outcome<(String, u64, bool)> {
    let properties = cuda::get_device_properties(device.0)?;
    Ok((
        properties.name,
        properties.total_bytes,
        properties.simulated,
    ))
}

#[pyfunction]
pub(crate) fn cuda_synchronize(py: Python<'_>, device: CudaIndex) -> Outcome {
    Ok(py.detach(|| cuda::synchronize(device.0))?)
}

#[pyfunction]
pub(crate) fn cuda_current_stream(device: CudaIndex) -> Outcome<PyStream> {
    Ok(PyStream(cuda::current_stream(device.0)?))
}

#[pyfunction]
pub(crate) fn cuda_default_stream(device: CudaIndex) -> Outcome<PyStream> {
    Ok(PyStream(cuda::Stream::default_of(device.0)?))
}

#[pyfunction]
pub(crate) fn cuda_set_stream(stream: &PyStream) -> Outcome {
    Ok(cuda::set_stream(&stream.0)?)
}

#[pyfunction]
pub(crate) fn cuda_empty_cache(py: Python<'_>) -> Outcome {
    py.detach(cuda::empty_cache)?;
    Ok(())
}

#[pyfunction]
pub(crate) fn cuda_trim(py: Python<'_>) -> Outcome<u64> {
    Ok(py.detach(cuda::trim)?)
}

#[pyfunction]
pub(crate) fn cuda_memory_allocated(device: CudaIndex) -> Outcome<u64> {
    Ok(cuda::memory_allocated(device.0)?)
}

#[pyfunction]
pub(crate) fn cuda_max_memory_allocated(device: CudaIndex) -> Outcome<u64> {
    Ok(cuda::max_memory_allocated(device.0)?)
}

#[pyfunction]
pub(crate) fn cuda_memory_reserved(device: CudaIndex) -> Outcome<u64> {
    Ok(cuda::memory_reserved(device.0)?)
}

#[pyfunction]
pub(crate) fn cuda_max_memory_reserved(device: CudaIndex) -> Outcome<u64> {
    Ok(cuda::max_memory_reserved(device.0)?)
}

#[pyfunction]
pub(crate) fn cuda_memory_stats(py: Python<'_>, device: CudaIndex) -> Outcome<Bound<'_, PyDict>> {
    let dict = PyDict::new(py);
    for (key, value) in cuda::memory_stats(device.0)?.torch_keys() {
        dict.set_item(key, value)?;
    }
    Ok(dict)
}

#[pyfunction]
pub(crate) fn cuda_memory_summary(device: CudaIndex) -> Outcome<String> {
    Ok(cuda::memory_summary(device.0)?)
}

#[pyfunction]
pub(crate) fn cuda_memory_snapshot_json(device: CudaIndex) -> Outcome<String> {
    let snapshot = cuda::memory_snapshot(device.0)?;
    serde_json::to_string(&snapshot.segments).map_err(|error| {
        Failure::Python(PyRuntimeError::new_err(format!("memory_snapshot: {error}")))
    })
}

#[pyfunction]
pub(crate) fn cuda_reset_peak_memory_stats(device: CudaIndex) -> Outcome {
    Ok(cuda::reset_peak_memory_stats(device.0)?)
}

#[pyfunction]
pub(crate) fn cuda_reset_accumulated_memory_stats(device: CudaIndex) -> Outcome {
    Ok(cuda::reset_accumulated_memory_stats(device.0)?)
}

#[pyfunction]
pub(crate) fn cuda_mem_get_info(device: CudaIndex) -> Outcome<(u64, u64)> {
    let info = cuda::mem_get_info(device.0)?;
    Ok((info.free_bytes, info.total_bytes))
}

#[pyfunction]
pub(crate) fn cuda_set_per_process_memory_fraction(fraction: f64, device: CudaIndex) -> Outcome {
    if !(0.0..=1.0).contains(&fraction) {
        return Err(Failure::Python(PyValueError::new_err(format!(
            "set_per_process_memory_fraction: expected a fraction from 0 to 1, not {fraction}"
        ))));
    }
    Ok(cuda::set_per_process_memory_fraction(fraction, device.0)?)
}

#[pyfunction]
pub(crate) fn cuda_get_per_process_memory_fraction(device: CudaIndex) -> Outcome<f64> {
    let allocator = cuda::allocator(device.0)?;
    let total = allocator.device().properties().total_bytes;
    #[expect(
        clippy::cast_precision_loss,
        reason = "the quotient is a fraction from 0 to 1"
    )]
    Ok(allocator
        .memory_limit()
        .map_or(1.0, |limit| limit.min(total) as f64 / total as f64))
}

#[pyfunction]
pub(crate) fn cuda_set_allocator_settings(settings: &str) -> Outcome {
    // As for `sim_enable`.
    if let Err(error) = settings.parse::<lastref::alloc::AllocatorOptions>() {
        let text = format!("_set_allocator_settings: {error}");
        return Err(Failure::Python(PyValueError::new_err(text)));
    }
    Ok(cuda::set_allocator_settings(settings)?)
}

#[pyfunction]
pub(crate) fn sim_enable(spec: &str) -> Outcome {
    // A text that is no spec is the caller's mistake; that it comes too late is not in the text.
    if let Err(error) = spec.parse::<sim::Spec>() {
        return Err(Failure::Python(PyValueError::new_err(error.to_string())));
    }
    Ok(sim::enable(spec)?)
}

#[pyfunction]
pub(crate) fn sim_races() -> Vec<String> {
    sim::races()
}

#[pyfunction]
pub(crate) fn sim_is_enabled() -> bool {
    sim::spec().is_some()
}
