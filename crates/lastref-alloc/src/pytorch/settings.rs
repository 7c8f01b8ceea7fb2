//! The settings of PyTorch's allocator, read from the text that PyTorch reads.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// The environment variable that PyTorch reads them from. It has a newer name too,
/// `PYTORCH_ALLOC_CONF`; where both are set, this one counts.
pub const SETTINGS_VARIABLE: &str = "PYTORCH_CUDA_ALLOC_CONF";

const MIB: u64 = 1 << 20;
/// Sizes from 1 MiB to 64 GiB, one interval for each power of two.
const INTERVALS: usize = 16;
/// A segment for requests below this has a size of its own.
pub(super) const MIN_LARGE: u64 = 10 * MIB;
const MIN_BLOCK: u64 = 512;

/// Keys that PyTorch knows and that change nothing about device memory.
const WITHOUT_EFFECT: [&str; 12] = [
    "expandable_segments_reserve_by_class",
    "graph_capture_record_stream_reuse",
    "pinned_free_catch_all",
    "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
];

/// Settings of PyTorch's native allocator, as in `PYTORCH_CUDA_ALLOC_CONF`.
///
/// The text is `key:value,key:value`, spaces do not matter, and of a key given twice the last counts.
/// Keys that change nothing about device memory, such as those of pinned host memory, are read and
/// kept out. What PyTorch refuses is refused; so is a number with something behind it, which PyTorch
/// reads up to there.
///
/// | key | value |
/// |---|---|
/// | `expandable_segments` | `True`, `False` |
/// | `expandable_segments_reserve` | address space of one, a fraction of the device or `40G` (2.15) |
/// | `max_split_size_mb` | MiB, at least the large segment |
/// | `max_non_split_rounding_mb` | MiB, at least the large segment |
/// | `large_segment_size_mb` | MiB, more than 10 |
/// | `roundup_power2_divisions` | a power of two, or `[256:1,512:2,>:8]` by size in MiB |
/// | `garbage_collection_threshold` | between 0 and 1; nothing happens without the next |
/// | `per_process_memory_fraction` | 0 to 1 |
/// | `throw_on_cudamalloc_oom` | `True`, `False` |
///
/// # Examples
///
/// ```
/// use lastref_alloc::pytorch::Settings;
///
/// let settings: Settings = "max_split_size_mb:128, roundup_power2_divisions:[256:1,>:4]".parse()?;
/// assert_eq!(settings.to_string(), "max_split_size_mb:128,roundup_power2_divisions:[256:1,>:4]");
/// assert!("max_split_size_mb:5".parse::<Settings>().is_err());
/// # Ok::<(), lastref_alloc::pytorch::InvalidSettings>(())
/// ```
#[derive(Clone, PartialEq, Debug)]
pub struct Settings {
    pub(super) expandable: bool,
    pub(super) reserve: Option<Reserve>,
    /// `u64::MAX` is no limit.
    pub(super) max_split: u64,
    /// Half set: it follows the large segment unless named.
    non_split_rounding: Option<u64>,
    pub(super) large_segment: u64,
    divisions: [u64; INTERVALS],
    /// 0 is off.
    pub(super) gc_threshold: f64,
    pub(super) fraction: f64,
    /// Fail at the limit without giving anything back first.
    pub(super) refuses_early: bool,
}

/// Address space that one expandable segment reserves.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Reserve {
    Fraction(f64),
    Gibibytes(f64),
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            expandable: false,
            reserve: None,
            max_split: u64::MAX,
            non_split_rounding: None,
            large_segment: 20 * MIB,
            divisions: [0; INTERVALS],
            gc_threshold: 0.0,
            fraction: 1.0,
            refuses_early: false,
        }
    }
}

impl Settings {
    /// The size of the block that serves a request.
    pub(super) fn round(&self, bytes: u64) -> u64 {
        if bytes < MIN_BLOCK {
            return MIN_BLOCK;
        }
        let divisions = self.divisions_for(bytes);
        // It wraps there too.
        if divisions > 1 && bytes > MIN_BLOCK.wrapping_mul(divisions) {
            round_to_division(bytes, divisions)
        } else {
            bytes.next_multiple_of(MIN_BLOCK)
        }
    }

    fn divisions_for(&self, bytes: u64) -> u64 {
        let interval = bytes.ilog2().saturating_sub(MIB.ilog2()) as usize;
        self.divisions[interval.min(INTERVALS - 1)]
    }

    pub(super) fn non_split_rounding(&self) -> u64 {
        self.non_split_rounding.unwrap_or(self.large_segment)
    }

    /// The most that may be taken from a device of this capacity, if less than all.
    pub(super) fn limit(&self, capacity: u64) -> Option<u64> {
        (self.fraction < 1.0).then(|| part(self.fraction, capacity))
    }

    /// The address space of one expandable segment.
    pub(super) fn address_space(&self, capacity: u64) -> u64 {
        let full = capacity.saturating_add(capacity / 8);
        match self.reserve {
            None => full,
            Some(Reserve::Fraction(fraction)) => part(fraction, capacity).min(full),
            Some(Reserve::Gibibytes(count)) => part(count, 1 << 30).min(full),
        }
    }

    /// Whether cached segments are collected by age: a threshold alone does nothing.
    pub(super) fn collects(&self) -> bool {
        self.gc_threshold > 0.0 && self.fraction < 1.0
    }

    fn set(&mut self, key: &str, value: &Value<'_>) -> Result<(), InvalidSettings> {
        match key {
            "expandable_segments" => self.expandable = value.boolean(key)?,
            "expandable_segments_reserve" => self.reserve = value.reserve(key)?,
            "max_split_size_mb" => {
                self.max_split = value.mebibytes(key, self.large_segment / MIB)?;
            }
            "max_non_split_rounding_mb" => {
                let least = self.large_segment / MIB;
                self.non_split_rounding = Some(value.mebibytes(key, least)?);
            }
            "roundup_power2_divisions" => self.divisions = value.divisions(key)?,
            "garbage_collection_threshold" => {
                let within = |threshold| threshold > 0.0 && threshold < 1.0;
                self.gc_threshold = value.fraction(key, "between 0 and 1", within)?;
            }
            "per_process_memory_fraction" => {
                let within = |fraction| (0.0..=1.0).contains(&fraction);
                self.fraction = value.fraction(key, "from 0 to 1", within)?;
            }
            "throw_on_cudamalloc_oom" => self.refuses_early = value.boolean(key)?,
            // Read before all others, since it bounds them.
            "large_segment_size_mb" => {}
            "backend" => {
                let backend = value.word(key)?;
                if backend != "native" {
                    return Err(InvalidSettings(format!(
                        "backend {backend:?}: only the native one is modelled"
                    )));
                }
            }
            _ if WITHOUT_EFFECT.contains(&key) => {}
            _ => {
                return Err(InvalidSettings(format!(
                    "unknown key {key:?}; see PyTorch's page on memory management for those of \
                     {SETTINGS_VARIABLE}"
                )));
            }
        }
        Ok(())
    }
}

/// A part of a number of bytes, cut to whole ones.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "as PyTorch computes it; the fraction is not negative, and the cast saturates"
)]
pub(super) fn part(fraction: f64, bytes: u64) -> u64 {
    (fraction * bytes as f64) as u64
}

/// Rounds up to the next of so many equal steps between two powers of two.
fn round_to_division(bytes: u64, divisions: u64) -> u64 {
    if bytes.is_power_of_two() {
        return bytes;
    }
    let floor = 1 << bytes.ilog2();
    let step: u64 = floor >> divisions.ilog2();
    if step == 0 {
        floor.saturating_mul(2)
    } else {
        bytes.checked_next_multiple_of(step).unwrap_or(u64::MAX)
    }
}

/// Why a text is no setting of PyTorch's allocator.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("{0}")]
pub struct InvalidSettings(String);

/// A value as it stands in the text: a word, or a list in brackets.
enum Value<'a> {
    Word(&'a str),
    List(Vec<(&'a str, &'a str)>),
}

impl<'a> Value<'a> {
    fn word(&self, key: &str) -> Result<&'a str, InvalidSettings> {
        match self {
            Self::Word(word) => Ok(word),
            Self::List(_) => Err(InvalidSettings(format!(
                "{key} takes one value, not a list"
            ))),
        }
    }

    fn boolean(&self, key: &str) -> Result<bool, InvalidSettings> {
        match self.word(key)? {
            "True" => Ok(true),
            "False" => Ok(false),
            other => Err(InvalidSettings(format!(
                "{key}:{other} is neither True nor False"
            ))),
        }
    }

    fn number(key: &str, word: &str) -> Result<u64, InvalidSettings> {
        word.parse()
            .map_err(|_| InvalidSettings(format!("{key}: {word:?} is not a whole number")))
    }

    fn mebibytes(&self, key: &str, least: u64) -> Result<u64, InvalidSettings> {
        let count = Self::number(key, self.word(key)?)?;
        if count < least {
            return Err(InvalidSettings(format!(
                "{key}:{count} is too small, it must be at least {least}"
            )));
        }
        Ok(count.min(u64::MAX / MIB) * MIB)
    }

    fn float(key: &str, word: &str) -> Result<f64, InvalidSettings> {
        word.parse()
            .map_err(|_| InvalidSettings(format!("{key}: {word:?} is not a number")))
    }

    fn fraction(
        &self,
        key: &str,
        range: &str,
        within: impl Fn(f64) -> bool,
    ) -> Result<f64, InvalidSettings> {
        let word = self.word(key)?;
        let number = Self::float(key, word)?;
        if within(number) {
            Ok(number)
        } else {
            Err(InvalidSettings(format!("{key}:{word} is not {range}")))
        }
    }

    /// PyTorch warns of a value it cannot read and goes on without; a typing error is better found.
    fn reserve(&self, key: &str) -> Result<Option<Reserve>, InvalidSettings> {
        let word = self.word(key)?;
        let gibibytes = word.strip_suffix(['G', 'g']);
        let number = Self::float(key, gibibytes.unwrap_or(word))?;
        if !(number.is_finite() && number > 0.0) {
            return Err(InvalidSettings(format!("{key}:{word} is not above 0")));
        }
        Ok(Some(if gibibytes.is_some() {
            Reserve::Gibibytes(number)
        } else {
            Reserve::Fraction(number)
        }))
    }

    fn divisions(&self, key: &str) -> Result<[u64; INTERVALS], InvalidSettings> {
        let power_of_two = |word: &str, zero: bool| {
            let number = Self::number(key, word)?;
            if number.is_power_of_two() || (zero && number == 0) {
                Ok(number)
            } else {
                Err(InvalidSettings(format!(
                    "{key}: {number} is not a power of two"
                )))
            }
        };
        let pairs = match self {
            Self::Word(word) => return Ok([power_of_two(word, false)?; INTERVALS]),
            Self::List(pairs) => pairs,
        };
        let mut divisions = [0; INTERVALS];
        let mut last = None;
        for (boundary, value) in pairs {
            let value = power_of_two(value, true)?;
            if *boundary == ">" {
                divisions[last.unwrap_or(0) + 1..].fill(value);
                continue;
            }
            let interval = power_of_two(boundary, false)?.ilog2() as usize;
            let interval = interval.min(INTERVALS - 1);
            // Smaller sizes are treated as the first that is named.
            if last.is_none() {
                divisions[..interval].fill(value);
            }
            divisions[interval] = value;
            last = Some(interval);
        }
        Ok(divisions)
    }
}

impl FromStr for Settings {
    type Err = InvalidSettings;

    fn from_str(text: &str) -> Result<Self, InvalidSettings> {
        let tokens = tokens(text);
        let pairs = pairs(&tokens)?;
        let mut settings = Self::default();
        for (key, value) in &pairs {
            if *key == "large_segment_size_mb" {
                let more_than = MIN_LARGE / MIB;
                settings.large_segment = value.mebibytes(key, more_than + 1)?;
            }
        }
        for (key, value) in &pairs {
            settings.set(key, value)?;
        }
        Ok(settings)
    }
}

/// Words and the characters `,` `:` `[` `]`, white space left out, in words too.
fn tokens(text: &str) -> Vec<String> {
    let mut tokens = Vec::new();
    let mut word = String::new();
    for character in text.chars() {
        if matches!(character, ',' | ':' | '[' | ']') {
            if !word.is_empty() {
                tokens.push(std::mem::take(&mut word));
            }
            tokens.push(character.into());
        } else if !character.is_whitespace() {
            word.push(character);
        }
    }
    if !word.is_empty() {
        tokens.push(word);
    }
    tokens
}

fn pairs(tokens: &[String]) -> Result<Vec<(&str, Value<'_>)>, InvalidSettings> {
    let mut rest = tokens.iter().map(String::as_str);
    let mut pairs = Vec::new();
    while let Some(key) = rest.next() {
        let word = |token: Option<&'_ str>| token.is_some_and(|token| !is_mark(token));
        if is_mark(key) || rest.next() != Some(":") {
            return Err(InvalidSettings(format!(
                "expected a key and a colon at {key:?}"
            )));
        }
        let value = match rest.next() {
            Some("[") => Value::List(list(key, &mut rest)?),
            Some(value) if word(Some(value)) => Value::Word(value),
            _ => return Err(InvalidSettings(format!("{key} has no value"))),
        };
        pairs.push((key, value));
        match rest.next() {
            None | Some(",") => {}
            Some(other) => {
                return Err(InvalidSettings(format!(
                    "expected a comma after the value of {key}, found {other:?}"
                )));
            }
        }
    }
    Ok(pairs)
}

fn list<'a>(
    key: &str,
    rest: &mut impl Iterator<Item = &'a str>,
) -> Result<Vec<(&'a str, &'a str)>, InvalidSettings> {
    let wrong = |what: &str| InvalidSettings(format!("the list of {key} {what}"));
    let mut list = Vec::new();
    loop {
        let name = match rest.next() {
            Some("]") => return Ok(list),
            Some(name) if !is_mark(name) => name,
            Some(_) => return Err(wrong("is not name:value,name:value")),
            None => return Err(wrong("has no end")),
        };
        let (colon, value) = (rest.next(), rest.next());
        match (colon, value) {
            (Some(":"), Some(value)) if !is_mark(value) => list.push((name, value)),
            (_, None) => return Err(wrong("has no end")),
            _ => return Err(wrong("is not name:value,name:value")),
        }
        match rest.next() {
            Some(",") => {}
            Some("]") => return Ok(list),
            Some(_) => return Err(wrong("is not name:value,name:value")),
            None => return Err(wrong("has no end")),
        }
    }
}

fn is_mark(token: &str) -> bool {
    matches!(token, "," | ":" | "[" | "]")
}

/// The text that sets these in PyTorch; empty for the defaults.
impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let default = Self::default();
        let mut comma = "";
        let mut key = |f: &mut fmt::Formatter<'_>, key: &str, value: &dyn fmt::Display| {
            write!(f, "{comma}{key}:{value}")?;
            comma = ",";
            Ok::<_, fmt::Error>(())
        };
        if self.expandable {
            key(f, "expandable_segments", &"True")?;
        }
        match self.reserve {
            None => {}
            Some(Reserve::Fraction(fraction)) => {
                key(f, "expandable_segments_reserve", &fraction)?;
            }
            Some(Reserve::Gibibytes(count)) => {
                key(f, "expandable_segments_reserve", &format_args!("{count}G"))?;
            }
        }
        if self.large_segment != default.large_segment {
            key(f, "large_segment_size_mb", &(self.large_segment / MIB))?;
        }
        if self.max_split != default.max_split {
            key(f, "max_split_size_mb", &(self.max_split / MIB))?;
        }
        if let Some(rounding) = self.non_split_rounding {
            key(f, "max_non_split_rounding_mb", &(rounding / MIB))?;
        }
        if self.divisions != default.divisions {
            let divisions = DivisionsText(&self.divisions);
            key(f, "roundup_power2_divisions", &divisions)?;
        }
        if self.gc_threshold > 0.0 {
            key(f, "garbage_collection_threshold", &self.gc_threshold)?;
        }
        if self.fraction < 1.0 {
            key(f, "per_process_memory_fraction", &self.fraction)?;
        }
        if self.refuses_early {
            key(f, "throw_on_cudamalloc_oom", &"True")?;
        }
        Ok(())
    }
}

/// One number where one says it all, else a list of the intervals where the number changes.
struct DivisionsText<'a>(&'a [u64; INTERVALS]);

impl fmt::Display for DivisionsText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let divisions = self.0;
        if divisions.iter().all(|value| *value == divisions[0]) && divisions[0] > 0 {
            return write!(f, "{}", divisions[0]);
        }
        // Below the first that is named all are as that one, and above the last as `>` says. Between
        // them each is named: one that is not has no divisions.
        let tail = divisions[INTERVALS - 1];
        let changes = |value: &u64| *value != divisions[0];
        let first = divisions.iter().position(changes).unwrap_or(1) - 1;
        let last = divisions.iter().rposition(|value| *value != tail);
        f.write_str("[")?;
        for (interval, value) in divisions.iter().enumerate() {
            if (first..=last.unwrap_or(0)).contains(&interval) {
                write!(f, "{}:{value},", 1_u64 << interval)?;
            }
        }
        write!(f, ">:{tail}]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn parsed(text: &str) -> Settings {
        text.parse().unwrap()
    }

    #[test]
    fn sizes_are_rounded_as_pytorch_rounds_them() {
        let plain = Settings::default();
        for (bytes, rounded) in [
            (1, 512),
            (512, 512),
            (513, 1024),
            (3 * MIB + 1, 3 * MIB + 512),
        ] {
            assert_eq!(plain.round(bytes), rounded);
        }
        // PyTorch's own example: 1200 between 1024 and 2048, four steps.
        assert_eq!(round_to_division(1200, 4), 1280);
        let eighths = parsed("roundup_power2_divisions:8");
        assert_eq!(
            eighths.round(4096),
            4096,
            "512 for each division is left alone"
        );
        assert_eq!(eighths.round(4097), 4608);
        assert_eq!(eighths.round(65 * MIB), 72 * MIB);
        assert_eq!(eighths.round(64 * MIB), 64 * MIB);
        let halves = parsed("roundup_power2_divisions:2");
        assert_eq!(halves.round(65 * MIB), 96 * MIB);
        assert_eq!(
            parsed("roundup_power2_divisions:1").round(65 * MIB + 1),
            65 * MIB + 512
        );
    }

    #[test]
    fn divisions_are_by_interval() {
        let by_size = parsed("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]");
        assert_eq!(by_size.divisions[..8], [1; 8]);
        assert_eq!(by_size.divisions[8..], [1, 2, 4, 8, 8, 8, 8, 8]);
        assert_eq!(by_size.round(300 * MIB), 300 * MIB);
        assert_eq!(by_size.round(520 * MIB), 768 * MIB);
        assert_eq!(by_size.round(1 << 20), 1 << 20);
        // Beyond the intervals the last one counts.
        assert_eq!(by_size.divisions_for(u64::MAX), 8);
    }

    #[test]
    fn what_is_printed_is_read_again_as_the_same() {
        for text in [
            "",
            "expandable_segments:True",
            "max_split_size_mb:128,max_non_split_rounding_mb:64",
            "roundup_power2_divisions:8",
            "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
            "roundup_power2_divisions:[64:8]",
            "large_segment_size_mb:64,garbage_collection_threshold:0.8,per_process_memory_fraction:0.5",
            "expandable_segments:True,expandable_segments_reserve:40G",
            "expandable_segments:True,expandable_segments_reserve:0.5",
        ] {
            let settings = parsed(text);
            assert_eq!(settings, parsed(&settings.to_string()), "{settings}");
        }
        assert_eq!(parsed("").to_string(), "");
        assert_eq!(
            parsed("backend:native, expandable_segments:False,").to_string(),
            ""
        );
    }

    #[test]
    fn the_large_segment_bounds_the_others_wherever_it_stands() {
        let text = "max_split_size_mb:32,large_segment_size_mb:64";
        let error = text.parse::<Settings>().unwrap_err().to_string();
        assert!(error.contains("at least 64"), "{error}");
        let settings = parsed("max_split_size_mb:128,large_segment_size_mb:64");
        assert_eq!(settings.non_split_rounding(), 64 * MIB);
    }

    #[test]
    fn what_pytorch_refuses_is_refused() {
        for text in [
            "max_split_size:128",
            "max_split_size_mb:19",
            "max_split_size_mb:abc",
            "max_split_size_mb:-1",
            "max_split_size_mb",
            "max_split_size_mb:",
            "max_split_size_mb:[1:2]",
            "large_segment_size_mb:10",
            "expandable_segments:true",
            "roundup_power2_divisions:3",
            "roundup_power2_divisions:0",
            "roundup_power2_divisions:[3:4]",
            "roundup_power2_divisions:[4:3]",
            "roundup_power2_divisions:[4:4",
            "roundup_power2_divisions:[4 4]",
            "garbage_collection_threshold:0",
            "garbage_collection_threshold:1",
            "garbage_collection_threshold:nan",
            "per_process_memory_fraction:1.5",
            "expandable_segments_reserve:0G",
            "backend:cudaMallocAsync",
            "expandable_segments:True max_split_size_mb:128",
            ":",
            "[",
        ] {
            assert!(text.parse::<Settings>().is_err(), "{text}");
        }
    }

    #[test]
    fn hostile_text_is_refused_or_read_and_nothing_else() {
        let _ = parsed(&format!("max_split_size_mb:{}", u64::MAX)).round(u64::MAX / 2);
        let long = "[".repeat(100_000);
        assert!(long.parse::<Settings>().is_err());
        let _ = parsed("roundup_power2_divisions:9223372036854775808").round(u64::MAX / 2);
    }
}
