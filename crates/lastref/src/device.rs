//! Where a tensor's memory is.

use std::fmt;
use std::str::FromStr;

use crate::{Error, Result, cuda};

/// Where a tensor's memory is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum Device {
    /// Host memory.
    #[default]
    Cpu,
    /// The CUDA device with this index, which may be a simulated one.
    Cuda(u32),
}

impl Device {
    /// Whether it is a CUDA device.
    #[must_use]
    pub const fn is_cuda(self) -> bool {
        matches!(self, Self::Cuda(_))
    }

    /// The index of a CUDA device; `None` for the CPU.
    #[must_use]
    pub const fn index(self) -> Option<u32> {
        match self {
            Self::Cpu => None,
            Self::Cuda(index) => Some(index),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

impl FromStr for Device {
    type Err = Error;

    /// Reads `cpu`, `cuda` (this thread's current device) and `cuda:N`. Whether the device is
    /// there shows when it is used.
    ///
    /// ```
    /// use lastref::Device;
    /// assert_eq!("cuda:1".parse::<Device>()?, Device::Cuda(1));
    /// assert!("gpu".parse::<Device>().is_err());
    /// # Ok::<(), lastref::Error>(())
    /// ```
    fn from_str(text: &str) -> Result<Self> {
        let unknown = || {
            Error::argument(
                "device",
                format!("cannot read {text:?}, expected cpu, cuda or cuda:N such as cuda:0"),
            )
        };
        match text {
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(cuda::current_device())),
            _ => {
                let index = text.strip_prefix("cuda:").ok_or_else(unknown)?;
                if !index.bytes().all(|byte| byte.is_ascii_digit()) {
                    return Err(unknown());
                }
                Ok(Self::Cuda(index.parse().map_err(|_| unknown())?))
            }
        }
    }
}
