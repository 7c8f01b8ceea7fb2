//! The reports that `lastref.torch` writes, `lastref.report/1`: who held the memory of one process, with
//! the ways to it through Python's objects.
//!
//! What is read is what [`Explanation`]s are made of, so that a report and a snapshot are told in the
//! same words:
//!
//! 1. A report is read whole into memory, [`MOST_BYTES`] at most, and what is kept of it is less than
//!    three times that; what it [says](Report::explain) of holders is the ten heaviest.
//! 2. Text in it need not be Unicode (a program's arguments, file names): what is not is replaced.
//! 3. Keys that are not known are passed over, however deep.

use std::collections::HashMap;
use std::fmt;
use std::io::{self, Read};

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, SeqAccess, Visitor};
use thiserror::Error;

use crate::explain::{Explanation, Failure, Holder, LISTED, Memory, Moment, Verdict};

/// The version that is read.
pub const SCHEMA: &str = "lastref.report/1";
/// A larger file is no report. Those of 150 storages with ten ways each take 2 MiB.
pub const MOST_BYTES: u64 = 32 << 20;

/// How many different holders are told apart. The storages that come first are the heaviest.
const MOST_HOLDERS: usize = 4096;
/// More ways to one storage than are ever written.
const MOST_WAYS: usize = 100;
/// A longer way is cut here; its beginning says whose variable it is.
const LONGEST_WORDS: usize = 2000;

/// Why an input is not a report that can be read.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ReportError {
    /// It is something else.
    #[error("not a report: no JSON object with \"schema\": \"{SCHEMA}\"")]
    NotAReport,
    /// Another version of lastref wrote it.
    #[error("a report of the schema {found:?}; this version reads {SCHEMA:?}")]
    Version {
        /// What it says.
        found: String,
    },
    /// It ends too early.
    #[error("the report is cut: it ends at line {line}, column {column}")]
    Truncated {
        /// Counted from 1.
        line: usize,
        /// Counted from 1.
        column: usize,
    },
    /// It is not JSON, or a key is missing or of the wrong type.
    #[error("malformed report: {0}")]
    Malformed(#[source] serde_json::Error),
    /// It is larger than any report.
    #[error("the report is larger than {MOST_BYTES} bytes, and no report is")]
    TooLarge,
    /// The input failed.
    #[error("reading failed: {0}")]
    Read(#[source] io::Error),
}

/// A report of one process.
///
/// ```
/// use lastref_snapshot::report::{Report, ReportError};
///
/// let error = Report::read(&br#"{"schema": "lastref.report/2"}"#[..]);
/// assert!(matches!(error, Err(ReportError::Version { .. })));
/// ```
#[derive(Debug, Deserialize)]
pub struct Report {
    time: Option<f64>,
    host: Option<Text>,
    rank: Option<u64>,
    number: Option<u64>,
    out_of_memory: Option<OutOfMemory>,
    devices: Vec<Device>,
    storages: Vec<Storage>,
}

#[derive(Debug, Deserialize)]
struct Schema {
    schema: Option<Text>,
}

#[derive(Debug, Deserialize)]
struct OutOfMemory {
    device: Option<u32>,
    requested: u64,
}

#[derive(Debug, Deserialize)]
struct Device {
    index: u32,
    total: u64,
    free: u64,
    live: u64,
    cached: u64,
    pending: u64,
    fragmented: u64,
    largest_hole: u64,
}

#[derive(Debug, Deserialize)]
struct Storage {
    bytes: u64,
    device: Text,
    paths: Vec<Path>,
    cycle: Option<Cycle>,
    cure: Text,
}

#[derive(Debug, Deserialize)]
struct Cycle {
    words: Text,
}

#[derive(Debug, Deserialize)]
struct Path {
    words: Text,
    kind: Text,
    cure: Text,
    steps: FirstStep,
}

/// Whether a way begins in a frame of an installed package.
#[derive(Debug)]
struct FirstStep {
    is_installed: bool,
}

#[derive(Debug, Deserialize)]
struct Step {
    file: Option<Text>,
}

/// Text that need not be Unicode: JSON may have half of a surrogate pair, where Python had a byte.
#[derive(Debug)]
struct Text(String);

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Bytes;
        impl Visitor<'_> for Bytes {
            type Value = Text;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a string")
            }

            fn visit_str<E>(self, text: &str) -> Result<Text, E> {
                Ok(Text(text.to_owned()))
            }

            fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Text, E> {
                Ok(Text(String::from_utf8_lossy(bytes).into_owned()))
            }
        }
        deserializer.deserialize_bytes(Bytes)
    }
}

impl<'de> Deserialize<'de> for FirstStep {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct First;
        impl<'de> Visitor<'de> for First {
            type Value = FirstStep;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a list of steps")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<FirstStep, A::Error> {
                let first: Option<Step> = access.next_element()?;
                while access.next_element::<IgnoredAny>()?.is_some() {}
                let file = first.and_then(|step| step.file);
                Ok(FirstStep {
                    is_installed: file.is_some_and(|file| {
                        file.0.contains("site-packages") || file.0.contains("dist-packages")
                    }),
                })
            }
        }
        deserializer.deserialize_seq(First)
    }
}

impl Report {
    /// Reads a report, plain or compressed with gzip.
    ///
    /// # Errors
    ///
    /// [`ReportError`] where the input is something else, of another version, cut, malformed or too
    /// large, or cannot be read.
    pub fn read(mut input: impl Read) -> Result<Self, ReportError> {
        let mut start = Vec::new();
        let mut read = |start: &mut Vec<u8>| (&mut input).take(2).read_to_end(start);
        read(&mut start).map_err(ReportError::Read)?;
        let is_compressed = start == [0x1f, 0x8b];
        let input = io::Cursor::new(start).chain(input);
        if is_compressed {
            Self::read_plain(flate2::read::MultiGzDecoder::new(input))
        } else {
            Self::read_plain(input)
        }
    }

    fn read_plain(mut input: impl Read) -> Result<Self, ReportError> {
        // Most files in which there is no report are recognised, and left, here.
        let mut bytes = Vec::new();
        let head = (&mut input).take(4096).read_to_end(&mut bytes);
        let begins = bytes.iter().find(|byte| !byte.is_ascii_whitespace());
        if begins.is_some_and(|byte| *byte != b'{') {
            return Err(ReportError::NotAReport);
        }
        let says_so = says_so(&bytes);
        let read = head.and_then(|_| input.take(MOST_BYTES).read_to_end(&mut bytes));
        match read {
            Ok(_) => {}
            // What comes before it is still something.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {}
            Err(error) => return Err(ReportError::Read(error)),
        }
        let not = |error| {
            if says_so {
                error
            } else {
                ReportError::NotAReport
            }
        };
        if bytes.len() as u64 > MOST_BYTES {
            return Err(not(ReportError::TooLarge));
        }
        // The version first: another one may have other keys.
        let refused = |error: serde_json::Error| {
            let (line, column) = (error.line(), error.column());
            not(match error.is_eof() {
                true => ReportError::Truncated { line, column },
                false => ReportError::Malformed(error),
            })
        };
        let schema: Schema = serde_json::from_slice(&bytes).map_err(refused)?;
        match schema.schema {
            Some(Text(found)) if found == SCHEMA => {}
            Some(Text(mut found)) if found.starts_with("lastref.report/") => {
                cut(&mut found, 100);
                return Err(ReportError::Version { found });
            }
            _ => return Err(ReportError::NotAReport),
        }
        serde_json::from_slice(&bytes).map_err(|error| {
            debug_assert!(!error.is_eof(), "the whole has been read once");
            ReportError::Malformed(error)
        })
    }

    /// When it was made, in seconds since 1970, by the clock of its host.
    #[must_use]
    pub const fn time(&self) -> Option<f64> {
        self.time
    }

    /// The name of the host.
    #[must_use]
    pub fn host(&self) -> Option<&str> {
        self.host.as_ref().map(|host| &*host.0)
    }

    /// The rank in the job.
    #[must_use]
    pub const fn rank(&self) -> Option<u64> {
        self.rank
    }

    /// Each device of the process in the form of a snapshot's [`explain`](crate::explain::explain): the
    /// holders are the ways through the program to storages, with what is to be done about them.
    ///
    /// A storage that is held in several ways counts for each, so that the holder that comes first is
    /// the one through which most is held. Where there are others, ways do not count that begin in installed
    /// packages, which are passed what they hold; nor do those through the autograd graph, which saves what
    /// is held anyway, such as parameters.
    #[must_use]
    pub fn explain(&self) -> Vec<Explanation> {
        let holders = self.holders();
        // Where the failure does not say its device, it is taken to be the one with most in use.
        let most = self.devices.iter().max_by_key(|device| device.live);
        let most = most.map_or(0, |device| device.index);
        let failed = self.out_of_memory.as_ref();
        let failed = failed.map(|failed| (failed.device.unwrap_or(most), failed.requested));
        // One that fails at its first allocation may not be in the report.
        let unlisted = failed
            .filter(|(index, _)| self.devices.iter().all(|device| device.index != *index))
            .map(|(index, _)| Device::unknown(index));
        let explained = self.devices.iter().chain(&unlisted).map(|device| {
            let memory = device.memory();
            let failed = failed.filter(|(index, _)| *index == device.index);
            let name = format!("cuda:{}", device.index);
            let held = holders.get(&*name);
            let mut held: Vec<Holder> = held.map_or_else(Vec::new, |held| {
                held.values().map(|holder| (*holder).clone()).collect()
            });
            held.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.place.cmp(&b.place)));
            held.truncate(LISTED);
            Explanation {
                device: device.index,
                moment: match failed {
                    Some(_) => Moment::OutOfMemory,
                    None => Moment::Snapshot,
                },
                entry: None,
                failure: failed.map(|(_, requested)| Failure {
                    requested_bytes: requested,
                    device_free_bytes: device.free,
                    place: Vec::new(),
                    failures: self.number.unwrap_or(1),
                    verdict: verdict(requested, &memory),
                }),
                memory,
                at_end: memory,
                holders: held,
                categories: Vec::new(),
                pins: Vec::new(),
                contradictions: 0,
            }
        });
        explained.collect()
    }

    /// By device and way.
    fn holders(&self) -> HashMap<&str, HashMap<String, Holder>> {
        let mut holders: HashMap<&str, HashMap<String, Holder>> = HashMap::new();
        for storage in &self.storages {
            let rank = |path: &Path| (path.steps.is_installed, path.kind.0 == "autograd");
            let least = storage.paths.iter().map(rank).min();
            let paths = storage.paths.iter();
            let paths = paths.filter(|path| Some(rank(path)) == least);
            let ways = paths.map(|path| (&*path.words.0, &*path.kind.0, &*path.cure.0));
            let cycle = storage.cycle.iter();
            let ways = ways.chain(cycle.map(|cycle| (&*cycle.words.0, "cycle", &*storage.cure.0)));
            let of = holders.entry(&storage.device.0).or_default();
            let mut seen = Vec::new();
            for (words, kind, cure) in ways.take(MOST_WAYS) {
                let mut words = general(words);
                cut(&mut words, LONGEST_WORDS);
                if seen.contains(&words) || (of.len() >= MOST_HOLDERS && !of.contains_key(&words)) {
                    continue;
                }
                let holder = of.entry(words.clone()).or_insert_with(|| Holder {
                    bytes: 0,
                    blocks: 0,
                    place: vec![words.clone()],
                    kind: Some(kind.to_owned()),
                    cure: Some(cure.to_owned()),
                });
                holder.bytes = holder.bytes.saturating_add(storage.bytes);
                holder.blocks += 1;
                seen.push(words);
            }
        }
        holders
    }
}

impl Device {
    const fn unknown(index: u32) -> Self {
        Self {
            index,
            total: 0,
            free: 0,
            live: 0,
            cached: 0,
            pending: 0,
            fragmented: 0,
            largest_hole: 0,
        }
    }

    fn memory(&self) -> Memory {
        let parts = [self.live, self.pending, self.cached, self.fragmented];
        let reserved = parts.into_iter().fold(0, u64::saturating_add);
        let outside = self.total.saturating_sub(self.free);
        Memory {
            reserved_bytes: reserved,
            live_bytes: self.live,
            pending_bytes: self.pending,
            cached_bytes: self.cached,
            fragmented_bytes: self.fragmented,
            largest_hole_bytes: self.largest_hole,
            device_free_bytes: Some(self.free),
            outside_bytes: Some(outside.saturating_sub(reserved)),
        }
    }
}

/// As [of a snapshot](crate::explain), with what a report has: it does not tell pools and streams apart.
fn verdict(requested: u64, memory: &Memory) -> Verdict {
    let device_free = memory.device_free_bytes.unwrap_or(0);
    if device_free >= crate::explain::segment_bytes(requested, false) {
        return Verdict::MemoryLimit;
    }
    let most_bytes = device_free.saturating_add(memory.reserved_bytes);
    if requested > most_bytes {
        return Verdict::TooLarge { most_bytes };
    }
    let free = memory.reserved_bytes - memory.live_bytes;
    if free > 0 && free.saturating_add(device_free) >= requested {
        return Verdict::Fragmentation {
            free_bytes: free,
            largest_hole_bytes: memory.largest_hole_bytes,
        };
    }
    Verdict::LiveMemory
}

fn says_so(bytes: &[u8]) -> bool {
    let name = b"\"lastref.report/";
    bytes.windows(name.len()).any(|window| window == name)
}

/// Without what differs between items of a list, nodes of a graph and parameters: the words that a
/// report for people has too.
fn general(words: &str) -> String {
    let mut general = String::with_capacity(words.len());
    let mut rest = words;
    while let Some(at) = rest.find(['[', 's', 'o']) {
        let (before, found) = rest.split_at(at);
        general.push_str(before);
        let begins_word = !before.ends_with(|last: char| last.is_alphanumeric() || last == '_');
        let (known, after) = if let Some(after) = number(found, "[").filter(|a| a.starts_with(']'))
        {
            ("[…", after)
        } else if let Some(after) = found.strip_prefix("saved by ").filter(|_| begins_word) {
            let is_word = |letter: char| letter.is_alphanumeric() || letter == '_';
            let rest = after.trim_start_matches(is_word);
            if rest.len() < after.len() {
                ("saved by its nodes", rest)
            } else {
                ("saved by ", after)
            }
        } else if let Some(after) = number(found, "of parameter ").filter(|a| a.starts_with(" of"))
        {
            ("of a parameter", after)
        } else {
            let length = found.chars().next().map_or(0, char::len_utf8);
            let (letter, after) = found.split_at(length);
            general.push_str(letter);
            ("", after)
        };
        general.push_str(known);
        rest = after;
    }
    general.push_str(rest);
    general
}

/// What comes after `prefix` and digits, if `text` begins with them.
fn number<'a>(text: &'a str, prefix: &str) -> Option<&'a str> {
    let digits = text.strip_prefix(prefix)?;
    let after = digits.trim_start_matches(|digit: char| digit.is_ascii_digit());
    (after.len() < digits.len()).then_some(after)
}

/// Cuts a text to `most` bytes, or some less.
fn cut(text: &mut String, most: usize) {
    if text.len() > most {
        let end = (0..=most).rev().find(|end| text.is_char_boundary(*end));
        text.truncate(end.unwrap_or(0));
        text.push('…');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_between_items_is_left_out() {
        for (words, wanted) in [
            (
                "variable `x[12][0]` in `f` (a.py:7)",
                "variable `x[…][…]` in `f` (a.py:7)",
            ),
            (
                "the graph (18 nodes), saved by PowBackward0",
                "the graph (18 nodes), saved by its nodes",
            ),
            (
                "state of parameter 3 of Adam",
                "state of a parameter of Adam",
            ),
            (
                "global `soso['a']`, [x] and saved by ",
                "global `soso['a']`, [x] and saved by ",
            ),
            ("of parameter x", "of parameter x"),
            ("", ""),
        ] {
            assert_eq!(general(words), wanted);
        }
    }

    #[test]
    fn a_cut_text_ends_at_a_character() {
        let mut text = "ää".to_owned();
        cut(&mut text, 3);
        assert_eq!(text, "ä…");
    }
}
