//! What can go wrong, in one enum. Texts name the call, the numbers and what to do.

use thiserror::Error;

use crate::DType;
use crate::alloc::{AllocError, DeviceError, InvalidFraction, OutOfMemoryError};

/// The result of a call in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call failed. A call that returns an error has changed nothing and keeps no memory.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The device is full, or a limit is reached, and nothing more could be given back.
    #[error(transparent)]
    OutOfMemory(Box<OutOfMemoryError>),
    /// The system refused host memory.
    #[error("host memory: the system refused {bytes} bytes")]
    HostOutOfMemory {
        /// Bytes asked for.
        bytes: u64,
    },
    /// A shape is negative or too large, or does not fit the tensor.
    #[error("{call}: {reason}")]
    InvalidShape {
        /// The call.
        call: &'static str,
        /// What is wrong, with the numbers.
        reason: String,
    },
    /// A dimension or an index is outside what the tensor has.
    #[error("{call}: {reason}")]
    IndexOutOfRange {
        /// The call.
        call: &'static str,
        /// What is wrong, with the numbers.
        reason: String,
    },
    /// A tensor has another dtype than the call needs.
    #[error("{call}: the tensor holds {found}, not {expected}; convert it with to_dtype first")]
    DTypeMismatch {
        /// The call.
        call: &'static str,
        /// What it needs.
        expected: DType,
        /// What the tensor holds.
        found: DType,
    },
    /// Another argument that does not fit.
    #[error("{call}: {reason}")]
    InvalidArgument {
        /// The call.
        call: &'static str,
        /// What is wrong, with the numbers.
        reason: String,
    },
    /// The device asked for is not there.
    #[error("{call}: {reason}")]
    NoSuchDevice {
        /// The call.
        call: &'static str,
        /// Which device, and what is there.
        reason: String,
    },
    /// A setting, from the environment or from the program, cannot be understood or comes too late.
    #[error("{setting}={value:?}: {reason}")]
    InvalidSetting {
        /// The setting's name.
        setting: &'static str,
        /// Its value.
        value: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A DLPack tensor cannot be taken over.
    #[error("dlpack: {reason}")]
    Dlpack {
        /// What is wrong, with the numbers.
        reason: String,
    },
    /// A device call failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The allocator refused for another reason: more than the device has, say.
    #[error(transparent)]
    Alloc(AllocError),
    /// A fraction of memory that is not from 0 to 1.
    #[error(transparent)]
    InvalidFraction(#[from] InvalidFraction),
}

impl Error {
    /// Whether device memory was the reason: full now, or never enough.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::OutOfMemory(_) => true,
            Self::Alloc(error) => error.is_out_of_memory(),
            _ => false,
        }
    }

    pub(crate) fn shape(call: &'static str, reason: impl Into<String>) -> Self {
        Self::InvalidShape {
            call,
            reason: reason.into(),
        }
    }

    pub(crate) fn index(call: &'static str, reason: impl Into<String>) -> Self {
        Self::IndexOutOfRange {
            call,
            reason: reason.into(),
        }
    }

    pub(crate) fn argument(call: &'static str, reason: impl Into<String>) -> Self {
        Self::InvalidArgument {
            call,
            reason: reason.into(),
        }
    }

    pub(crate) fn no_device(call: &'static str, reason: impl Into<String>) -> Self {
        Self::NoSuchDevice {
            call,
            reason: reason.into(),
        }
    }

    pub(crate) fn dlpack(reason: impl Into<String>) -> Self {
        Self::Dlpack {
            reason: reason.into(),
        }
    }
}

impl From<AllocError> for Error {
    fn from(error: AllocError) -> Self {
        match error {
            AllocError::OutOfMemory(error) => Self::OutOfMemory(error),
            AllocError::Device(error) => Self::Device(error),
            other => Self::Alloc(other),
        }
    }
}
