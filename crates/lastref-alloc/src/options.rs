//! How an allocator is set up: by builder, or by text as in `LASTREF_ALLOC_CONF`.
//!
//! The text has PyTorch's grammar, `key:value,key:value`, and its names where the meaning is the
//! same. One table, [`KEYS`], has them all; what is not in it is refused, as is a value that does
//! not fit, a key given twice and two keys that say different things about the same.

use std::fmt::Write as _;
use std::str::FromStr;
use std::time::Duration;

use thiserror::Error;

use crate::error::InvalidFraction;

/// The environment variable that holds settings, where a program reads it.
pub const CONF_VARIABLE: &str = "LASTREF_ALLOC_CONF";

/// Where a device's memory comes from.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub enum Backing {
    /// Virtual memory where the device has it, segments otherwise.
    #[default]
    Auto,
    /// Segments, also where the device has virtual memory.
    Segments,
}

/// When a stream may be made to wait, on the device, for others that still use freed memory, so that
/// it can be given that memory.
///
/// The host does not wait, but work that was meant to overlap runs one after the other.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub enum StreamWaits {
    /// Never.
    Never,
    /// Rather than obtain more from the device than the slack allows; see
    /// [`with_slack_per_mille`](AllocatorOptions::with_slack_per_mille).
    #[default]
    BeforeGrowing,
    /// Only where the device is full or the limit is reached.
    AtLimit,
}

/// The most that may be obtained from the device.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Limit {
    Bytes(u64),
    /// From 0 to 1; 1 is no limit.
    Fraction(f64),
}

impl Limit {
    /// In bytes, for a device of `total_bytes`.
    pub(crate) fn bytes(self, total_bytes: u64) -> Option<u64> {
        match self {
            Self::Bytes(bytes) => Some(bytes),
            Self::Fraction(fraction) if fraction >= 1.0 => None,
            #[expect(
                clippy::cast_precision_loss,
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a fraction of a device to within a few bytes; it is not negative"
            )]
            Self::Fraction(fraction) => Some((total_bytes as f64 * fraction) as u64),
        }
    }

    pub(crate) fn fraction(fraction: f64) -> Result<Self, InvalidFraction> {
        if (0.0..=1.0).contains(&fraction) {
            Ok(Self::Fraction(fraction))
        } else {
            Err(InvalidFraction(fraction))
        }
    }
}

/// How an allocator is set up. What is not set has its default.
///
/// # As text
///
/// Options can be parsed from `key:value,key:value`, which is what the environment variable
/// [`LASTREF_ALLOC_CONF`](CONF_VARIABLE) holds. Spaces do not matter; booleans are `True` and
/// `False`.
///
/// | key | value | what it sets | as in PyTorch |
/// |---|---|---|---|
/// | `expandable_segments` | `True` (default), `False` | [`with_backing`](Self::with_backing) | yes |
/// | `per_process_memory_fraction` | 0 to 1 (default) | [`with_memory_fraction`](Self::with_memory_fraction) | yes |
/// | `waste_slack_per_mille` | thousandths, 4 (default) | [`with_slack_per_mille`](Self::with_slack_per_mille) | |
/// | `wait_before_growing` | `True` (default), `False` | [`with_wait_before_growing`](Self::with_wait_before_growing) | |
/// | `stream_waits` | `never`, `before_growing` (default), `at_limit` | [`with_stream_waits`](Self::with_stream_waits) | |
/// | `idle_trim_ms` | milliseconds, 0 (default) for never | [`with_idle_trim`](Self::with_idle_trim) | |
/// | `idle_keep_mb` | MiB, 0 (default) | [`with_idle_keep`](Self::with_idle_keep) | |
/// | `memory_limit_mb` | MiB | [`with_memory_limit`](Self::with_memory_limit) | |
/// | `history_entries` | a count, 0 (default) for none | [`with_history`](Self::with_history) | |
///
/// # Examples
///
/// ```
/// use lastref_alloc::{AllocatorOptions, Backing};
///
/// let options = AllocatorOptions::new().with_backing(Backing::Segments).with_history(10_000);
/// assert_eq!(options, "expandable_segments:False,history_entries:10000".parse()?);
///
/// let error = "expandable:True".parse::<AllocatorOptions>().unwrap_err();
/// assert!(error.to_string().contains("valid are expandable_segments, "));
/// # Ok::<(), lastref_alloc::InvalidOption>(())
/// ```
#[derive(Clone, PartialEq, Default, Debug)]
pub struct AllocatorOptions {
    pub(crate) backing: Option<Backing>,
    pub(crate) max_history_entries: Option<usize>,
    pub(crate) limit: Option<Limit>,
    pub(crate) slack_per_mille: Option<u32>,
    pub(crate) wait_before_growing: Option<bool>,
    pub(crate) stream_waits: Option<StreamWaits>,
    pub(crate) idle_trim: Option<Duration>,
    pub(crate) idle_keep: Option<u64>,
}

impl AllocatorOptions {
    pub(crate) const DEFAULT_SLACK_PER_MILLE: u32 = 4;

    /// The defaults: virtual memory where there is some, no limit, no history.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// What [`LASTREF_ALLOC_CONF`](CONF_VARIABLE) says now; the defaults if it is not set.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`] if it cannot be understood.
    ///
    /// # Examples
    ///
    /// ```
    /// use lastref_alloc::{AllocatorOptions, CachingAllocator, sim::{SimDevice, SimOptions}};
    ///
    /// let device = SimDevice::new(SimOptions::new(1 << 30))?;
    /// let allocator = CachingAllocator::with_options(device, &AllocatorOptions::from_env()?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn from_env() -> Result<Self, InvalidOption> {
        match std::env::var_os(CONF_VARIABLE) {
            Some(value) => value.to_string_lossy().parse(),
            None => Ok(Self::default()),
        }
    }

    /// Chooses where memory comes from. Only a new allocator can be told.
    #[must_use]
    pub const fn with_backing(mut self, backing: Backing) -> Self {
        self.backing = Some(backing);
        self
    }

    /// Keeps the latest `max_entries` entries of history. 0, the default, keeps none.
    #[must_use]
    pub const fn with_history(mut self, max_entries: usize) -> Self {
        self.max_history_entries = Some(max_entries);
        self
    }

    /// Sets by how many thousandths what is reserved may pass the peak of what was in use so far.
    /// Past that, idle pages of virtual memory are moved to where they are needed, and new ones are
    /// created only if there are none. The default is 4. More means fewer moves and more waste.
    #[must_use]
    pub const fn with_slack_per_mille(mut self, slack: u32) -> Self {
        self.slack_per_mille = Some(slack);
        self
    }

    /// Chooses whether an allocation may wait for streams that still use idle pages, when moving
    /// those would keep it within the slack. The default is yes. Before an out-of-memory error it
    /// waits in any case.
    #[must_use]
    pub const fn with_wait_before_growing(mut self, wait: bool) -> Self {
        self.wait_before_growing = Some(wait);
        self
    }

    /// Chooses when a stream may be made to wait, on the device, for others that still use freed
    /// memory.
    #[must_use]
    pub const fn with_stream_waits(mut self, waits: StreamWaits) -> Self {
        self.stream_waits = Some(waits);
        self
    }

    /// Gives cached memory back to the device that was not used for `age`: for programs that run long
    /// and need much only now and then. Zero, the default, is never. It is looked for when blocks are
    /// allocated and freed; a program that may do neither for long calls
    /// [`trim`](crate::CachingAllocator::trim).
    #[must_use]
    pub const fn with_idle_trim(mut self, age: Duration) -> Self {
        self.idle_trim = Some(age);
        self
    }

    /// Keeps this many bytes of cached memory, however long they are not used. The default is 0.
    #[must_use]
    pub const fn with_idle_keep(mut self, bytes: u64) -> Self {
        self.idle_keep = Some(bytes);
        self
    }

    /// Sets the most bytes that may be obtained from the device.
    #[must_use]
    pub const fn with_memory_limit(mut self, bytes: u64) -> Self {
        self.limit = Some(Limit::Bytes(bytes));
        self
    }

    /// Sets the most that may be obtained from the device, as a fraction of its memory; 1 is no
    /// limit.
    ///
    /// # Errors
    ///
    /// [`InvalidFraction`] unless it is a number from 0 to 1.
    pub fn with_memory_fraction(mut self, fraction: f64) -> Result<Self, InvalidFraction> {
        self.limit = Some(Limit::fraction(fraction)?);
        Ok(self)
    }
}

/// Why options cannot be understood, or cannot be changed now.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("{reason}")]
pub struct InvalidOption {
    reason: String,
}

impl InvalidOption {
    pub(crate) fn new(reason: impl Into<String>) -> Self {
        Self {
            reason: reason.into(),
        }
    }
}

/// What a key sets. Two keys that set the same may not be given together.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sets {
    Backing,
    Limit,
    History,
    Slack,
    Wait,
    StreamWaits,
    IdleTrim,
    IdleKeep,
}

struct Key {
    name: &'static str,
    /// What values it takes, for errors.
    takes: &'static str,
    sets: Sets,
    /// Sets the value; `None` if it does not fit.
    set: fn(AllocatorOptions, &str) -> Option<AllocatorOptions>,
}

const KEYS: &[Key] = &[
    Key {
        name: "expandable_segments",
        takes: "True or False",
        sets: Sets::Backing,
        set: |options, value| {
            let backing = match boolean(value)? {
                true => Backing::Auto,
                false => Backing::Segments,
            };
            Some(options.with_backing(backing))
        },
    },
    Key {
        name: "per_process_memory_fraction",
        takes: "a number from 0 to 1",
        sets: Sets::Limit,
        set: |options, value| options.with_memory_fraction(value.parse().ok()?).ok(),
    },
    Key {
        name: "memory_limit_mb",
        takes: "a whole number of MiB",
        sets: Sets::Limit,
        set: |options, value| {
            let bytes = number(value)?.checked_mul(1 << 20)?;
            Some(options.with_memory_limit(bytes))
        },
    },
    Key {
        name: "waste_slack_per_mille",
        takes: "a whole number",
        sets: Sets::Slack,
        set: |options, value| {
            let slack = u32::try_from(number(value)?).ok()?;
            Some(options.with_slack_per_mille(slack))
        },
    },
    Key {
        name: "wait_before_growing",
        takes: "True or False",
        sets: Sets::Wait,
        set: |options, value| Some(options.with_wait_before_growing(boolean(value)?)),
    },
    Key {
        name: "stream_waits",
        takes: "never, before_growing or at_limit",
        sets: Sets::StreamWaits,
        set: |options, value| {
            let waits = match value {
                "never" => StreamWaits::Never,
                "before_growing" => StreamWaits::BeforeGrowing,
                "at_limit" => StreamWaits::AtLimit,
                _ => return None,
            };
            Some(options.with_stream_waits(waits))
        },
    },
    Key {
        name: "idle_trim_ms",
        takes: "a whole number of milliseconds",
        sets: Sets::IdleTrim,
        set: |options, value| Some(options.with_idle_trim(Duration::from_millis(number(value)?))),
    },
    Key {
        name: "idle_keep_mb",
        takes: "a whole number of MiB",
        sets: Sets::IdleKeep,
        set: |options, value| Some(options.with_idle_keep(number(value)?.checked_mul(1 << 20)?)),
    },
    Key {
        name: "history_entries",
        takes: "a whole number",
        sets: Sets::History,
        set: |options, value| Some(options.with_history(usize::try_from(number(value)?).ok()?)),
    },
];

/// PyTorch's keys that have no counterpart, and why. They are refused too: a setting that does
/// nothing would mislead.
const NOT_OURS: &[(&str, &str)] = &[
    (
        "max_split_size_mb",
        "blocks are always split and merged again, there is nothing to limit",
    ),
    (
        "max_non_split_rounding_mb",
        "blocks are always split, there is nothing to round",
    ),
    (
        "large_segment_size_mb",
        "segments grow as they are needed, there is no size to set",
    ),
    (
        "roundup_power2_divisions",
        "blocks of every size fit together, rounding up would only waste",
    ),
    (
        "garbage_collection_threshold",
        "cached memory goes back by itself when it is needed, and with idle_trim_ms when it was not \
         used for long",
    ),
    ("backend", "there is one allocator"),
];

fn boolean(value: &str) -> Option<bool> {
    match value {
        "True" => Some(true),
        "False" => Some(false),
        _ => None,
    }
}

/// Digits only: `u64` would also take a sign.
fn number(value: &str) -> Option<u64> {
    let digits = value.bytes().all(|byte| byte.is_ascii_digit());
    value.parse().ok().filter(|_| digits)
}

/// At most 40 characters of foreign text, quoted so that it stays on its line.
fn quoted(text: &str) -> String {
    let start: String = text.chars().take(40).collect();
    let more = if start.len() < text.len() { "..." } else { "" };
    format!("{start:?}{more}")
}

fn valid_keys() -> String {
    let names: Vec<&str> = KEYS.iter().map(|key| key.name).collect();
    names.join(", ")
}

impl FromStr for AllocatorOptions {
    type Err = InvalidOption;

    fn from_str(text: &str) -> Result<Self, InvalidOption> {
        let mut options = Self::default();
        let mut given: Vec<&Key> = Vec::new();
        if text.trim().is_empty() {
            return Ok(options);
        }
        for pair in text.split(',') {
            let Some((name, value)) = pair.split_once(':') else {
                return Err(InvalidOption::new(format!(
                    "{} is not of the form key:value; valid are {}",
                    quoted(pair.trim()),
                    valid_keys()
                )));
            };
            let (name, value) = (name.trim(), value.trim());
            let key = find(name)?;
            if let Some(other) = given.iter().find(|other| other.sets == key.sets) {
                return Err(InvalidOption::new(if other.name == key.name {
                    format!("{name} is given twice")
                } else {
                    format!("{} and {name} set the same, give one of them", other.name)
                }));
            }
            let set = (key.set)(options, value);
            options = set.ok_or_else(|| {
                InvalidOption::new(format!("{name} takes {}, not {}", key.takes, quoted(value)))
            })?;
            given.push(key);
        }
        Ok(options)
    }
}

fn find(name: &str) -> Result<&'static Key, InvalidOption> {
    if let Some(key) = KEYS.iter().find(|key| key.name == name) {
        return Ok(key);
    }
    let mut reason = format!("there is no setting {}", quoted(name));
    if let Some((_, why)) = NOT_OURS.iter().find(|(other, _)| *other == name) {
        let _ = write!(reason, " here: {why}; leave it out");
    }
    let _ = write!(reason, "; valid are {}", valid_keys());
    Err(InvalidOption::new(reason))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(text: &str) -> Result<AllocatorOptions, String> {
        text.parse()
            .map_err(|error: InvalidOption| error.to_string())
    }

    #[test]
    fn every_key_sets_what_its_builder_sets() {
        let cases = [
            ("", AllocatorOptions::new()),
            (" ", AllocatorOptions::new()),
            (
                "expandable_segments:True",
                AllocatorOptions::new().with_backing(Backing::Auto),
            ),
            (
                "expandable_segments:False",
                AllocatorOptions::new().with_backing(Backing::Segments),
            ),
            (
                "per_process_memory_fraction:0.25",
                AllocatorOptions::new().with_memory_fraction(0.25).unwrap(),
            ),
            (
                "memory_limit_mb:512",
                AllocatorOptions::new().with_memory_limit(512 << 20),
            ),
            (
                "waste_slack_per_mille:15",
                AllocatorOptions::new().with_slack_per_mille(15),
            ),
            (
                "wait_before_growing:False",
                AllocatorOptions::new().with_wait_before_growing(false),
            ),
            (
                "stream_waits:never",
                AllocatorOptions::new().with_stream_waits(StreamWaits::Never),
            ),
            (
                "stream_waits:before_growing",
                AllocatorOptions::new().with_stream_waits(StreamWaits::BeforeGrowing),
            ),
            (
                "stream_waits:at_limit",
                AllocatorOptions::new().with_stream_waits(StreamWaits::AtLimit),
            ),
            (
                "idle_trim_ms:1500,idle_keep_mb:3",
                AllocatorOptions::new()
                    .with_idle_trim(Duration::from_millis(1500))
                    .with_idle_keep(3 << 20),
            ),
            ("history_entries:7", AllocatorOptions::new().with_history(7)),
            (
                " expandable_segments : False ,history_entries:0",
                AllocatorOptions::new()
                    .with_backing(Backing::Segments)
                    .with_history(0),
            ),
        ];
        for (text, wanted) in &cases {
            assert_eq!(parse(text).as_ref(), Ok(wanted), "{text}");
        }
        for key in KEYS {
            let shown = cases.iter().any(|(text, _)| text.contains(key.name));
            assert!(shown, "{} has no case", key.name);
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_with_what_would() {
        let cases = [
            (
                "expandable:True",
                "no setting \"expandable\"; valid are expandable_segments, per_",
            ),
            ("Expandable_Segments:True", "no setting"),
            (
                "expandable_segments",
                "is not of the form key:value; valid are",
            ),
            (
                "expandable_segments:true",
                "takes True or False, not \"true\"",
            ),
            ("expandable_segments:", "takes True or False, not \"\""),
            ("expandable_segments:True,", "\"\" is not of the form"),
            (",", "\"\" is not of the form"),
            (":", "no setting \"\""),
            (
                "per_process_memory_fraction:1.01",
                "takes a number from 0 to 1",
            ),
            (
                "per_process_memory_fraction:-0.1",
                "takes a number from 0 to 1",
            ),
            (
                "per_process_memory_fraction:nan",
                "takes a number from 0 to 1",
            ),
            (
                "per_process_memory_fraction:inf",
                "takes a number from 0 to 1",
            ),
            (
                "memory_limit_mb:99999999999999",
                "takes a whole number of MiB",
            ),
            ("memory_limit_mb:+5", "takes a whole number of MiB"),
            ("memory_limit_mb:1.5", "takes a whole number of MiB"),
            (
                "history_entries:99999999999999999999",
                "takes a whole number",
            ),
            ("waste_slack_per_mille:5000000000", "takes a whole number"),
            ("wait_before_growing:0", "takes True or False"),
            (
                "stream_waits:True",
                "takes never, before_growing or at_limit, not \"True\"",
            ),
            ("idle_trim_ms:-1", "takes a whole number of milliseconds"),
            ("idle_keep_mb:99999999999999", "takes a whole number of MiB"),
            ("history_entries:1:2", "takes a whole number, not \"1:2\""),
            (
                "history_entries:1,history_entries:1",
                "history_entries is given twice",
            ),
            (
                "memory_limit_mb:1,per_process_memory_fraction:1",
                "memory_limit_mb and per_process_memory_fraction set the same",
            ),
            (
                "max_split_size_mb:128",
                "nothing to limit; leave it out; valid are",
            ),
            (
                "roundup_power2_divisions:[256:1,>:8]",
                "rounding up would only waste",
            ),
        ];
        for (text, wanted) in cases {
            let error = parse(text).unwrap_err();
            assert!(error.contains(wanted), "{text}: {error}");
        }
    }

    #[test]
    fn foreign_text_is_cut_and_kept_on_its_line() {
        let error = parse(&"\u{1b}[31mä\n".repeat(100_000)).unwrap_err();
        assert!(
            error.len() < 500 && !error.contains(['\n', '\u{1b}']),
            "{error}"
        );
        let error = parse(&format!("history_entries:{}", "9".repeat(1 << 20))).unwrap_err();
        assert!(error.len() < 200 && error.contains("..."), "{error}");
    }

    proptest! {
        #[test]
        fn any_text_is_parsed_or_refused(text in "[a-zE_:,\\[\\]0-9. \u{e9}\u{0}]{0,80}") {
            if let Err(error) = parse(&text) {
                prop_assert!(error.len() < 1000 && !error.contains('\u{0}'), "{}", error);
            }
        }
    }
}
