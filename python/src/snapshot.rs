//! Memory snapshots for Python: `lastref.snapshot`, and the file that `lastref.cuda` writes.
//!
//! Files are read and written, and advice is found, without the interpreter lock.

use std::fs::File;
use std::path::PathBuf;

use lastref::cuda;
use lastref_cli::{AdviseError, AdviseOptions, advise};
use lastref_snapshot::explain::explain;
use lastref_snapshot::read::{Cause, ReadError};
use lastref_snapshot::stats::Stats;
use lastref_snapshot::{Dump, Snapshot};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::Outcome;

/// A memory snapshot, read from a file.
#[pyclass(name = "Snapshot", module = "lastref._lastref", frozen)]
#[derive(Debug)]
pub(crate) struct PySnapshot(Dump);

fn refused(path: &std::path::Path, error: ReadError) -> PyErr {
    match error.cause {
        Cause::Read(error) => error.into(),
        _ => PyValueError::new_err(format!("{}: {error}", path.display())),
    }
}

fn json(value: &impl serde::Serialize) -> PyResult<String> {
    serde_json::to_string(value)
        .map_err(|error| PyRuntimeError::new_err(format!("snapshot: {error}")))
}

#[pyfunction]
pub(crate) fn snapshot_read(py: Python<'_>, path: PathBuf) -> PyResult<PySnapshot> {
    py.detach(|| {
        let dump = Dump::read(File::open(&path)?);
        dump.map(PySnapshot).map_err(|error| refused(&path, error))
    })
}

#[pymethods]
impl PySnapshot {
    fn stats_json(&self, py: Python<'_>) -> PyResult<String> {
        py.detach(|| json(&Stats::of(&self.0)))
    }

    fn explain_json(&self, py: Python<'_>, capacity_bytes: Option<u64>) -> PyResult<String> {
        py.detach(|| json(&explain(&self.0, capacity_bytes)))
    }

    fn write(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        py.detach(|| Ok(self.0.write(File::create(path)?)?))
    }

    fn pickle<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = py.detach(|| {
            let mut bytes = Vec::new();
            self.0.write(&mut bytes).map(|()| bytes)
        })?;
        Ok(PyBytes::new(py, &bytes))
    }
}

/// As JSON. A signal's handler that raises ends it.
#[pyfunction]
pub(crate) fn snapshot_advise(
    py: Python<'_>,
    paths: Vec<PathBuf>,
    capacity_bytes: Option<u64>,
    settings: Vec<String>,
) -> PyResult<String> {
    let mut options = AdviseOptions::default();
    options.capacity_bytes = capacity_bytes;
    options.settings = settings;
    let mut raised = None;
    let advice = py.detach(|| {
        advise(&paths, &options, &mut || {
            raised = Python::attach(|py| py.check_signals()).err();
            raised.is_none()
        })
    });
    if let Some(raised) = raised {
        return Err(raised);
    }
    advice.map_err(|error| match error {
        AdviseError::Read(error) => error.into(),
        AdviseError::BadInput(text) => PyValueError::new_err(text),
        AdviseError::Failed(text) => PyRuntimeError::new_err(text),
        other => PyRuntimeError::new_err(format!("advise: {other:?}")),
    })
}

/// Writes what the allocators of all devices hold, with their histories, as PyTorch does.
#[pyfunction]
pub(crate) fn cuda_dump_snapshot(py: Python<'_>, path: PathBuf) -> Outcome {
    py.detach(|| {
        let mut all = Snapshot::default();
        for device in 0..cuda::device_count() {
            all.join(cuda::memory_snapshot(device)?);
        }
        let written = File::create(path).and_then(|file| all.write(file));
        Ok(written.map_err(PyErr::from)?)
    })
}
