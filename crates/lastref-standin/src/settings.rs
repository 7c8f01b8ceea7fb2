//! What the environment asks for. Read once, at the first call.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use crate::error::Code;
use crate::names;
use crate::sync::{AtomicU64, Ordering};

const PREFIX: &str = "LASTREF_STANDIN_";
const DEFAULT_MEMORY: u64 = 80 << 30;
const MAX_DEVICES: u32 = 64;
/// The version of the driver that is played unless another is asked for.
const DEFAULT_DRIVER: i32 = 13_020;

/// Where notes on what the stand-in cannot do go.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Log {
    Nowhere,
    StandardError,
    File(PathBuf),
}

/// A failure on demand: of the n-th call of a function, and perhaps of all after it.
#[derive(Debug)]
pub(crate) struct Fault {
    /// `None` for any function.
    name: Option<String>,
    /// Calls left until it fires; 0 once it has.
    left: AtomicU64,
    from_then_on: bool,
    code: Option<Code>,
}

impl Fault {
    pub(crate) fn nth(
        name: Option<String>,
        n: u64,
        from_then_on: bool,
        code: Option<Code>,
    ) -> Self {
        Self {
            name,
            left: AtomicU64::new(n),
            from_then_on,
            code,
        }
    }

    /// What the call of `name` now in progress is to return, if it is this one's turn.
    pub(crate) fn strike(&self, name: &str) -> Option<Code> {
        if self
            .name
            .as_ref()
            .is_some_and(|wanted| !names::same(wanted, name))
        {
            return None;
        }
        let step = |left: u64| match left {
            0 => None,
            1 if self.from_then_on => Some(1),
            left => Some(left - 1),
        };
        let before = self
            .left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, step);
        (before == Ok(1)).then(|| self.code.unwrap_or_else(|| likely_error(name)))
    }
}

/// What usually goes wrong in a function.
fn likely_error(name: &str) -> Code {
    let takes_memory = ["Alloc", "Malloc", "MemCreate"];
    if takes_memory.iter().any(|part| name.contains(part)) {
        Code::OUT_OF_MEMORY
    } else {
        Code::UNKNOWN
    }
}

/// The settings, all of them checked.
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) memory_bytes: u64,
    pub(crate) other_bytes: u64,
    pub(crate) devices: u32,
    pub(crate) late: bool,
    pub(crate) quiet: bool,
    pub(crate) virtual_memory: bool,
    pub(crate) driver_version: i32,
    pub(crate) missing: Vec<String>,
    pub(crate) latencies: Vec<(String, Duration)>,
    pub(crate) faults: Vec<Fault>,
    pub(crate) log: Log,
    pub(crate) shared: Option<PathBuf>,
    pub(crate) seed: u64,
}

/// The settings, or what is wrong with them.
pub(crate) fn settings() -> Result<&'static Settings, &'static str> {
    static SETTINGS: OnceLock<Result<Settings, String>> = OnceLock::new();
    let read = SETTINGS.get_or_init(|| Settings::read(std::env::vars_os()));
    read.as_ref().map_err(String::as_str)
}

impl Settings {
    fn read(variables: impl Iterator<Item = (OsString, OsString)>) -> Result<Self, String> {
        let mut settings = Self {
            memory_bytes: DEFAULT_MEMORY,
            other_bytes: 0,
            devices: 1,
            late: false,
            quiet: false,
            virtual_memory: true,
            driver_version: DEFAULT_DRIVER,
            missing: Vec::new(),
            latencies: Vec::new(),
            faults: Vec::new(),
            log: Log::Nowhere,
            shared: None,
            seed: 0,
        };
        for (name, value) in variables {
            let Some(name) = name.to_str().filter(|name| name.starts_with(PREFIX)) else {
                continue;
            };
            let value = value.to_string_lossy();
            settings
                .set(&name[PREFIX.len()..], value.trim())
                .map_err(|reason| format!("{name}={value}: {reason}"))?;
        }
        if settings.other_bytes > settings.memory_bytes {
            return Err(format!(
                "{PREFIX}OTHER_MEMORY: {} bytes are more than the device has, {}",
                settings.other_bytes, settings.memory_bytes
            ));
        }
        Ok(settings)
    }

    fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        match name {
            "MEMORY" => {
                self.memory_bytes = bytes(value)?;
                if !(2 << 20..=1 << 44).contains(&self.memory_bytes) {
                    return Err("expected 2MiB to 16TiB".to_owned());
                }
            }
            "OTHER_MEMORY" => self.other_bytes = bytes(value)?,
            "DEVICES" => {
                self.devices = number(value)?;
                if self.devices > MAX_DEVICES {
                    return Err(format!("expected 0 to {MAX_DEVICES} devices"));
                }
            }
            "LATE" => self.late = flag(value)?,
            "QUIET" => self.quiet = flag(value)?,
            "VIRTUAL_MEMORY" => self.virtual_memory = flag(value)?,
            "DRIVER" => self.driver_version = version(value)?,
            "MISSING" => {
                for name in items(value) {
                    known(name)?;
                    self.missing.push(name.to_owned());
                }
            }
            "LATENCY" => {
                for item in items(value) {
                    let (name, time) = item
                        .split_once('=')
                        .ok_or_else(|| format!("{item:?} is not NAME=MICROSECONDS"))?;
                    known(name)?;
                    let microseconds: u64 = number(time)?;
                    let time = Duration::from_micros(microseconds);
                    self.latencies.push((name.to_owned(), time));
                }
            }
            "FAIL" => {
                for item in items(value) {
                    self.faults.push(fault(item)?);
                }
            }
            "LOG" => {
                self.log = match value {
                    "" | "0" => Log::Nowhere,
                    "1" => Log::StandardError,
                    path => Log::File(PathBuf::from(path)),
                }
            }
            "SHARED" => self.shared = (!value.is_empty()).then(|| PathBuf::from(value)),
            "SEED" => self.seed = number(value)?,
            // The command's: where this library is.
            "LIBRARY" => {}
            _ => {
                return Err(
                    "there is no such setting; valid are MEMORY, DEVICES, OTHER_MEMORY, LATE, LATENCY, FAIL, \
                     VIRTUAL_MEMORY, MISSING, DRIVER, SHARED, LOG, QUIET and SEED, each after LASTREF_STANDIN_"
                        .to_owned(),
                );
            }
        }
        Ok(())
    }
}

fn items(value: &str) -> impl Iterator<Item = &str> {
    value
        .split(',')
        .map(str::trim)
        .filter(|item| !item.is_empty())
}

fn number<T: std::str::FromStr>(value: &str) -> Result<T, String> {
    let parsed = value.trim().parse();
    parsed.map_err(|_| format!("{value:?} is not a number, or too large"))
}

fn flag(value: &str) -> Result<bool, String> {
    match value {
        "" | "0" => Ok(false),
        "1" => Ok(true),
        _ => Err("expected 0 or 1".to_owned()),
    }
}

fn known(name: &str) -> Result<(), String> {
    if names::is_known(name) {
        Ok(())
    } else {
        Err(format!("there is no function {name:?} in the stand-in"))
    }
}

fn bytes(value: &str) -> Result<u64, String> {
    const UNITS: [(&str, u64); 5] = [
        ("TiB", 1 << 40),
        ("GiB", 1 << 30),
        ("MiB", 1 << 20),
        ("KiB", 1 << 10),
        ("", 1),
    ];
    let digits = value.trim_end_matches(|c: char| !c.is_ascii_digit());
    let unit = value[digits.len()..].trim();
    let (_, scale) = UNITS
        .iter()
        .find(|(name, _)| *name == unit)
        .ok_or_else(|| {
            format!("unknown unit {unit:?}, expected a size such as 11000MiB or 80GiB")
        })?;
    number::<u64>(digits)?
        .checked_mul(*scale)
        .ok_or_else(|| "too large".to_owned())
}

/// `12.4`, or `12040` as the driver says it.
fn version(value: &str) -> Result<i32, String> {
    let wrong = || "expected a version of CUDA such as 12.4".to_owned();
    let (major, minor): (i32, i32) = match value.split_once('.') {
        Some((major, minor)) => (number(major)?, number(minor)?),
        None => {
            let all: i32 = number(value)?;
            (all / 1000, all % 1000 / 10)
        }
    };
    if !(1..100).contains(&major) || !(0..100).contains(&minor) {
        return Err(wrong());
    }
    Ok(major * 1000 + minor * 10)
}

/// `NAME:N`, with `+` for all calls after it too and `=CODE` for the result.
fn fault(item: &str) -> Result<Fault, String> {
    let wrong = || format!("{item:?} is not NAME:N, NAME:N+ or NAME:N=CODE");
    let (name, rest) = item.split_once(':').ok_or_else(wrong)?;
    let (count, code) = match rest.split_once('=') {
        Some((count, code)) => (count, Some(Code(number(code)?))),
        None => (rest, None),
    };
    let digits = count.trim_end_matches('+');
    let n: u64 = number(digits)?;
    if n == 0 || code == Some(Code(0)) {
        return Err(wrong());
    }
    if name != "*" {
        known(name)?;
    }
    let name = (name != "*").then(|| name.to_owned());
    Ok(Fault::nth(name, n, digits.len() < count.len(), code))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<Settings, String> {
        let pairs = pairs.iter().map(|(name, value)| {
            let name = OsString::from(format!("{PREFIX}{name}"));
            (name, OsString::from(value))
        });
        Settings::read(pairs)
    }

    #[test]
    fn settings_are_read() {
        let settings = read(&[
            ("MEMORY", "11000MiB"),
            ("DEVICES", "2"),
            ("DRIVER", "12.4"),
            ("VIRTUAL_MEMORY", "0"),
            ("LATENCY", "cudaMalloc=50"),
            ("LOG", "1"),
            ("LIBRARY", "/usr/lib/liblastref_standin.so"),
        ])
        .unwrap();
        assert_eq!(settings.memory_bytes, 11_000 << 20);
        assert_eq!(settings.devices, 2);
        assert_eq!(settings.driver_version, 12_040);
        assert!(!settings.virtual_memory);
        let fifty = Duration::from_micros(50);
        assert_eq!(settings.latencies, [("cudaMalloc".to_owned(), fifty)]);
        assert_eq!(settings.log, Log::StandardError);
        assert_eq!(version("12040"), Ok(12_040));
    }

    #[test]
    fn what_cannot_be_understood_is_refused_with_the_variable_and_the_reason() {
        for (name, value, reason) in [
            ("MEMORY", "11G", "unknown unit \"G\""),
            ("MEMORY", "1MiB", "expected 2MiB to 16TiB"),
            ("MEMORY", "", "not a number"),
            ("DEVICES", "-1", "not a number"),
            ("DEVICES", "65", "0 to 64"),
            ("LATE", "yes", "expected 0 or 1"),
            ("DRIVER", "new", "not a number"),
            ("DRIVER", "0.1", "expected a version"),
            ("MISSING", "cuFancy", "no function \"cuFancy\""),
            ("LATENCY", "cudaMalloc", "not NAME=MICROSECONDS"),
            ("FAIL", "cudaMalloc", "not NAME:N"),
            ("FAIL", "cudaMalloc:0", "not NAME:N"),
            ("FAIL", "cuFancy:1", "no function \"cuFancy\""),
            ("FANCY", "1", "no such setting"),
        ] {
            let error = read(&[(name, value)]).unwrap_err();
            assert!(
                error.starts_with(&format!("{PREFIX}{name}={value}: ")),
                "{error}"
            );
            assert!(error.contains(reason), "{error}");
        }
        let error = read(&[("MEMORY", "1GiB"), ("OTHER_MEMORY", "2GiB")]).unwrap_err();
        assert!(error.contains("more than the device has"), "{error}");
    }

    #[test]
    fn faults_fire_at_their_call_and_not_before() {
        let strikes = |text: &str, calls: &[&str]| -> Vec<Option<i32>> {
            let fault = fault(text).unwrap();
            calls
                .iter()
                .map(|name| fault.strike(name).map(|code| code.0))
                .collect()
        };
        let two = ["cudaMalloc", "cudaFree", "cudaMalloc", "cudaMalloc"];
        assert_eq!(strikes("cudaMalloc:2", &two), [None, None, Some(2), None]);
        assert_eq!(
            strikes("cudaMalloc:2+=719", &two),
            [None, None, Some(719), Some(719)]
        );
        assert_eq!(strikes("*:2", &two), [None, Some(999), None, None]);
        // The version at the end of a name does not matter.
        assert_eq!(strikes("cuMemAlloc:1", &["cuMemAlloc_v2"]), [Some(2)]);
    }
}
