//! Simulated GPUs, which stand in only when asked.
//!
//! Two ways to ask: the environment variable `LASTREF_SIM`, read once at the first use of a device,
//! or [`enable`]. From then on [`cuda`](crate::cuda) answers for the simulated devices, whose name
//! says that they are simulated, and one line on standard error says so once.
//!
//! A [`Spec`] says how many and how large: `8GiB`, `2x8GiB`, `11GB`, `11000MiB`, or plain bytes.
//! `KB`, `MB`, `GB` and `TB` count in thousands, `KiB`, `MiB`, `GiB` and `TiB` in 1024ths. Capitals
//! do not matter. A unit that could mean either, such as `G`, is refused. `8GiB,races=true` also looks for
//! uses of memory that nothing puts in order; [`races`] has what was found.

use std::fmt;
use std::str::FromStr;

use crate::alloc::sim::{SimDevice, SimOptions};
use crate::cuda::runtime;
use crate::{Error, Result};

/// The environment variable that asks for simulated GPUs.
pub const VARIABLE: &str = "LASTREF_SIM";

/// How many simulated GPUs there are, and how much memory each has.
///
/// ```
/// use lastref::sim::Spec;
/// let spec: Spec = "2x8GiB".parse()?;
/// assert_eq!((spec.count(), spec.capacity_bytes()), (2, 8 << 30));
/// assert_eq!("11GB".parse::<Spec>()?.capacity_bytes(), 11_000_000_000);
/// assert_eq!(spec.to_string(), "2x8GiB");
/// assert!("8GiB,races=true".parse::<Spec>()?.finds_races());
/// assert!("8G".parse::<Spec>().is_err());
/// # Ok::<(), lastref::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Spec {
    count: u32,
    capacity_bytes: u64,
    find_races: bool,
}

/// More devices than anybody needs; a larger number is a slip.
const MAX_COUNT: u32 = 64;
/// More memory than a device can be given: address space is 2^47 bytes on most machines.
const MAX_BYTES: u64 = 1 << 44;
/// Below one page there is no device to speak of.
const MIN_BYTES: u64 = 2 << 20;

const UNITS: [(&str, u64); 9] = [
    ("tib", 1 << 40),
    ("gib", 1 << 30),
    ("mib", 1 << 20),
    ("kib", 1 << 10),
    ("tb", 1_000_000_000_000),
    ("gb", 1_000_000_000),
    ("mb", 1_000_000),
    ("kb", 1_000),
    ("b", 1),
];

impl Spec {
    /// `count` devices of `capacity_bytes` each.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] for no device, more than 64, less than 2 MiB or more than 16 TiB.
    pub fn new(count: u32, capacity_bytes: u64) -> Result<Self> {
        Self::checked(count, capacity_bytes).map_err(|reason| Error::InvalidSetting {
            setting: "simulated GPU",
            value: format!("{count}x{capacity_bytes}"),
            reason,
        })
    }

    /// How many devices.
    #[must_use]
    pub const fn count(self) -> u32 {
        self.count
    }

    /// Memory of each, in bytes.
    #[must_use]
    pub const fn capacity_bytes(self) -> u64 {
        self.capacity_bytes
    }

    /// Whether they look for races; see [`with_races`](Self::with_races).
    #[must_use]
    pub const fn finds_races(self) -> bool {
        self.find_races
    }

    /// Chooses whether they look for uses of memory that nothing puts in order. Off at first: it costs a
    /// few microseconds for each piece of work.
    #[must_use]
    pub const fn with_races(mut self, find_races: bool) -> Self {
        self.find_races = find_races;
        self
    }

    fn checked(count: u32, capacity_bytes: u64) -> std::result::Result<Self, String> {
        if count == 0 || count > MAX_COUNT {
            return Err(format!("{count} devices, expected 1 to {MAX_COUNT}"));
        }
        if !(MIN_BYTES..=MAX_BYTES).contains(&capacity_bytes) {
            return Err(format!(
                "{capacity_bytes} bytes of memory, expected 2MiB to 16TiB"
            ));
        }
        Ok(Self {
            count,
            capacity_bytes,
            find_races: false,
        })
    }

    /// Reads a spec; the error is the reason alone, without the value.
    pub(crate) fn parse(text: &str) -> std::result::Result<Self, String> {
        const EXAMPLE: &str = "expected a size such as 8GiB, 11GB or 2x8GiB";
        let lower = text.trim().to_ascii_lowercase();
        let (lower, find_races) = match lower.split_once(',') {
            Some((spec, switch)) => match switch.trim() {
                "races=true" => (spec.trim().to_owned(), true),
                "races=false" => (spec.trim().to_owned(), false),
                other => {
                    return Err(format!(
                        "{other:?} is no switch, valid are races=true and races=false"
                    ));
                }
            },
            None => (lower, false),
        };
        let (count, size) = match lower.split_once('x') {
            Some((count, size)) => (
                count
                    .trim()
                    .parse()
                    .map_err(|_| format!("{count:?} is not a number of devices, {EXAMPLE}"))?,
                size.trim(),
            ),
            None => (1, lower.as_str()),
        };
        let digits = size.len() - size.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let (number, unit) = size.split_at(digits);
        let unit = unit.trim();
        if number.is_empty() {
            return Err(format!("{size:?} does not begin with a number, {EXAMPLE}"));
        }
        let bytes_in_unit = match unit {
            "" => 1,
            "k" | "m" | "g" | "t" => {
                return Err(format!(
                    "the unit {unit:?} can mean two things, write {0}iB (1024) or {0}B (1000)",
                    unit.to_ascii_uppercase()
                ));
            }
            _ => UNITS
                .iter()
                .find(|(name, _)| *name == unit)
                .map(|(_, bytes)| *bytes)
                .ok_or_else(|| format!("unknown unit {unit:?}, {EXAMPLE}"))?,
        };
        let capacity_bytes = number
            .parse::<u64>()
            .ok()
            .and_then(|number| number.checked_mul(bytes_in_unit))
            .ok_or_else(|| format!("{size:?} is more than 16TiB"))?;
        Ok(Self::checked(count, capacity_bytes)?.with_races(find_races))
    }

    pub(crate) fn devices(self) -> Result<Vec<SimDevice>> {
        let name = format!("lastref simulated GPU ({})", gib(self.capacity_bytes));
        let options = SimOptions::new(self.capacity_bytes).with_name(name);
        let options = options.with_races(self.find_races);
        Ok(SimDevice::group(vec![options; self.count as usize])?)
    }
}

/// Bytes in GiB with two decimals, as device names have it.
#[expect(clippy::cast_precision_loss, reason = "printed with two decimals")]
pub(crate) fn gib(bytes: u64) -> String {
    format!("{:.2} GiB", bytes as f64 / (1_u64 << 30) as f64)
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const NAMES: [&str; 9] = ["TiB", "GiB", "MiB", "KiB", "TB", "GB", "MB", "KB", "B"];
        if self.count != 1 {
            write!(f, "{}x", self.count)?;
        }
        // The unit that leaves the smallest whole number.
        let (name, bytes) = NAMES
            .iter()
            .zip(UNITS)
            .map(|(name, (_, bytes))| (name, bytes))
            .filter(|(_, bytes)| self.capacity_bytes.is_multiple_of(*bytes))
            .max_by_key(|(_, bytes)| *bytes)
            .unwrap_or((&"B", 1));
        write!(f, "{}{name}", self.capacity_bytes / bytes)?;
        if self.find_races {
            f.write_str(",races=true")?;
        }
        Ok(())
    }
}

impl FromStr for Spec {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::parse(text).map_err(|reason| Error::InvalidSetting {
            setting: "simulated GPU",
            value: text.to_owned(),
            reason,
        })
    }
}

impl TryFrom<&str> for Spec {
    type Error = Error;

    fn try_from(text: &str) -> Result<Self> {
        text.parse()
    }
}

/// Puts simulated GPUs in use for the rest of the process, if no device is in use yet.
///
/// Asking again for the same is fine, also when `LASTREF_SIM` did it first. What the program asks
/// for before its first use of a device wins over `LASTREF_SIM`.
///
/// ```
/// use lastref::{cuda, sim};
/// sim::enable("8GiB")?;
/// assert_eq!(cuda::get_device_name(0)?, "lastref simulated GPU (8.00 GiB)");
/// assert!(sim::enable("16GiB").is_err());
/// # Ok::<(), lastref::Error>(())
/// ```
///
/// # Errors
///
/// [`Error::InvalidSetting`] if the spec cannot be read, or other devices are in use already;
/// [`Error::Device`] if the host refuses the address space.
pub fn enable<S>(spec: S) -> Result<()>
where
    S: TryInto<Spec>,
    Error: From<S::Error>,
{
    runtime::enable(spec.try_into()?)
}

/// What is simulated; `None` if nothing is.
#[must_use]
pub fn spec() -> Option<Spec> {
    runtime::active().ok().and_then(|runtime| runtime.spec)
}

/// The simulated device with this index, to look at its counters or make its calls fail; `None` if
/// there is none.
#[must_use]
pub fn device(index: u32) -> Option<SimDevice> {
    let runtime = runtime::active().ok()?;
    runtime.simulated.get(index as usize).cloned()
}

/// The races that were found so far, where [`Spec::with_races`] or `LASTREF_SIM=8GiB,races=true` asks for
/// that: each says what happened, where, and the cure. Empty before the first use of a device.
///
/// ```
/// use lastref::{Device, Tensor, cuda, sim};
/// sim::enable("8GiB,races=true")?;
/// let side = cuda::Stream::new()?;
/// let tensor = Tensor::zeros_with([1 << 20], Device::Cuda(0))?;
/// side.scope(|| tensor.fill_(1.0))??;
/// assert!(sim::races()[0].starts_with("race between stream 0 and stream"));
/// # Ok::<(), lastref::Error>(())
/// ```
#[must_use]
pub fn races() -> Vec<String> {
    // All devices look together, so that any one knows of all.
    let first = runtime::started().and_then(|runtime| runtime.simulated.first());
    let found = first.map(SimDevice::races).unwrap_or_default();
    found.iter().map(ToString::to_string).collect()
}
