//! `lastref explain FOLDER`: the ranks of a job side by side, from their memory snapshots and the reports
//! that `lastref.torch` wrote, and which of them is odd.
//!
//! 1. Files are read in parallel, each is forgotten for its [`Rank`] and its holders' names before the next
//!    is read, and [large](LARGE_BYTES) ones are read one after the other: a thousand reports and a few huge
//!    snapshots take the memory of [`MOST_THREADS`] small ones or of one large one.
//! 2. A file that cannot be read is a row too, and loses no other.
//! 3. The order of the rows is that of ranks, then of the files' names, numbers in them counting as such.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;

use anstyle::Style;
use anyhow::{Context, anyhow, bail};
use lastref::alloc::Bytes;
use lastref_snapshot::Dump;
use lastref_snapshot::explain::{Explanation, Holder, Moment, explain};
use lastref_snapshot::report::{Report, ReportError};
use rayon::ThreadPoolBuilder;
use rayon::iter::{IntoParallelRefIterator as _, ParallelIterator as _};
use serde::Serialize;

use super::explain::{place, summary};
use super::write_json;
use crate::Failure;
use crate::escape::escaped;
use crate::progress::Progress;

/// How ranks are printed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Format {
    Text,
    Json,
    Csv,
}

/// A rank differs from the others if its live or reserved bytes are off their median by more.
const ODD: f64 = 0.1;
/// Larger files are read one after the other. One that is compressed counts for so many bytes more.
const LARGE_BYTES: u64 = 64 << 20;
const COMPRESSED: u64 = 16;
/// More than this do not read faster, and each takes memory.
const MOST_THREADS: usize = 8;
/// Ranks beyond are not looked for: the number is a mistake.
const MOST_RANKS: u64 = 1 << 20;
/// Ranks that are missing and have a row. If more are, the files are of something else.
const MOST_MISSING: usize = 100;

/// One line of the table, of JSON and of CSV. One flat record, as DuckDB and Ray read them, for every
/// kind of file; what a kind of file does not say is null.
#[derive(Clone, Debug, Default, Serialize)]
struct Rank {
    file: Option<String>,
    /// `report` or `snapshot`.
    kind: Option<&'static str>,
    host: Option<String>,
    rank: Option<u64>,
    device: Option<u32>,
    /// `out_of_memory`, `peak` or `snapshot`: of when the figures are. Else `missing` or `unreadable`.
    moment: &'static str,
    /// Seconds since 1970.
    time: Option<f64>,
    out_of_memory: Option<bool>,
    /// Why it ran out of memory: in a word, as `explain --json` has it, and in words.
    verdict: Option<String>,
    cause: Option<String>,
    requested_bytes: Option<u64>,
    live_bytes: Option<u64>,
    pending_bytes: Option<u64>,
    cached_bytes: Option<u64>,
    fragmented_bytes: Option<u64>,
    reserved_bytes: Option<u64>,
    /// The heaviest: a place in the program, or of a report the way from a variable.
    holder: Option<String>,
    holder_kind: Option<String>,
    holder_bytes: Option<u64>,
    holder_cure: Option<String>,
    /// How many more files there are of this rank, which say less, or are older.
    other_files: u64,
    odd: bool,
    /// In what, if it is.
    why: Option<String>,
}

/// What is kept of a file.
struct Found {
    rank: Rank,
    /// Words and bytes, by what makes holders of two ranks the same.
    holders: HashMap<String, (String, u64)>,
}

/// Whether two files tell of the same rank, and which tells more: the later of these.
fn tells(rank: &Rank) -> (bool, bool, f64) {
    let is_report = rank.kind == Some("report");
    (
        rank.out_of_memory == Some(true),
        is_report,
        rank.time.unwrap_or(0.0),
    )
}

/// The table of a folder.
pub(super) fn run(
    folder: &Path,
    capacity: Option<u64>,
    format: Format,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let files = files(folder).map_err(Failure::BadInput)?;
    let mut found = Vec::new();
    let mut unreadable = Vec::new();
    for (path, read) in read_all(&files, capacity).map_err(Failure::BadInput)? {
        match read {
            Ok(one) => found.push(one),
            Err(error) => unreadable.push((path, error)),
        }
    }
    let all = files.len();
    let bad = unreadable.len();
    for (path, error) in &unreadable {
        let text = format!("{}: {error:#}", path.display());
        // Nothing is left to be done if standard error is closed.
        let _ = writeln!(anstream::stderr(), "not read: {}", escaped(&text));
    }
    if found.is_empty() {
        let error = anyhow!(
            "none of the {all} files in {} can be read",
            folder.display()
        );
        return Err(Failure::BadInput(error));
    }
    let mut found = one_each(found);
    judge(&mut found);
    let mut ranks: Vec<Rank> = found.into_iter().map(|found| found.rank).collect();
    ranks.extend(unreadable.iter().map(|(path, error)| {
        let (host, rank) = named(&name(path));
        Rank {
            file: Some(name(path)),
            host,
            rank,
            moment: "unreadable",
            odd: true,
            why: Some(format!("cannot be read: {error:#}")),
            ..Rank::default()
        }
    }));
    ranks.extend(missing(&ranks));
    ranks.sort_by_cached_key(|rank| {
        let file = rank.file.as_deref().unwrap_or_default();
        (
            rank.rank.is_none(),
            rank.rank,
            rank.host.clone(),
            numbered(file),
        )
    });
    match format {
        Format::Json => {
            for rank in &ranks {
                write_json(out, rank)?;
            }
        }
        Format::Csv => write_csv(out, &ranks)?,
        Format::Text => write_text(out, &ranks)?,
    }
    if bad == 0 {
        return Ok(());
    }
    let error = anyhow!(
        "{bad} of the {all} files in {} cannot be read",
        folder.display()
    );
    Err(Failure::No(error))
}

pub(super) fn name(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

/// The snapshots and reports of a folder.
fn files(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let entries =
        fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    for entry in entries {
        let path = entry?.path();
        let name = name(&path);
        // A report that is being written has a name with a dot.
        let is_hidden = name.starts_with('.');
        let name = name.strip_suffix(".gz").unwrap_or(&name);
        let is_ours = [".pickle", ".pkl", ".json"]
            .iter()
            .any(|end| name.ends_with(end));
        if is_ours && !is_hidden {
            files.push(path);
        }
    }
    files.sort_by_cached_key(|path| numbered(&path.to_string_lossy()));
    if files.is_empty() {
        bail!("{} has no .pickle, .pkl or .json", folder.display());
    }
    Ok(files)
}

/// A name with its numbers padded, so that rank 10 comes after rank 9.
fn numbered(name: &str) -> String {
    let mut key = String::new();
    let mut digits = String::new();
    for character in name.chars().chain(['\0']) {
        if character.is_ascii_digit() {
            digits.push(character);
        } else {
            if !digits.is_empty() {
                key.push_str(&format!("{digits:0>20}"));
                digits.clear();
            }
            key.push(character);
        }
    }
    key
}

type Outcome<'a> = (&'a PathBuf, anyhow::Result<Found>);

/// Reads the files, in their order.
fn read_all(files: &[PathBuf], capacity: Option<u64>) -> anyhow::Result<Vec<Outcome<'_>>> {
    let (large, small): (Vec<_>, Vec<_>) = files.iter().partition(|path| is_large(path));
    let mut bar = Progress::files("reading", files.len() as u64);
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let pool = ThreadPoolBuilder::new()
        .num_threads(processors.min(MOST_THREADS))
        .build()
        .context("cannot start threads")?;
    let (sender, receiver) = mpsc::channel();
    let mut outcomes: Vec<Outcome<'_>> = thread::scope(|scope| {
        let work = scope.spawn(|| {
            pool.install(|| {
                small
                    .par_iter()
                    .map_with(sender, |sender, path| {
                        let outcome = read_one(path, capacity);
                        // Nobody listens if the bar is gone, and nothing is lost.
                        let _ = sender.send(());
                        (*path, outcome)
                    })
                    .collect()
            })
        });
        for done in 1.. {
            if receiver.recv().is_err() {
                break;
            }
            bar.set(done);
        }
        work.join().expect("reading a file does not panic")
    });
    for path in large {
        outcomes.push((path, read_one(path, capacity)));
        bar.set(outcomes.len() as u64);
    }
    Ok(outcomes)
}

fn is_large(path: &Path) -> bool {
    let length = fs::metadata(path).map_or(0, |metadata| metadata.len());
    let compressed = path.extension().is_some_and(|end| end == "gz");
    length.saturating_mul(if compressed { COMPRESSED } else { 1 }) > LARGE_BYTES
}

fn read_one(path: &Path, capacity: Option<u64>) -> anyhow::Result<Found> {
    // A pipe would be waited for.
    if !fs::metadata(path)?.is_file() {
        bail!("it is no file");
    }
    let name = name(path);
    let (host, rank) = named(&name);
    let mut found = match report(path, &name)? {
        Some(report) => {
            let mut found = Found::new("report", report.explain());
            found.rank.time = report.time();
            found.rank.host = report.host().map(str::to_owned);
            found.rank.rank = report.rank();
            found
        }
        None => {
            let dump = Dump::read(File::open(path)?)?;
            Found::new("snapshot", explain(&dump, capacity))
        }
    };
    found.rank.host = found.rank.host.or(host);
    found.rank.rank = found.rank.rank.or(rank);
    found.rank.file = Some(name);
    Ok(found)
}

/// The report in the file, if there is one.
pub(super) fn report(path: &Path, name: &str) -> anyhow::Result<Option<Report>> {
    if !name.strip_suffix(".gz").unwrap_or(name).ends_with(".json") {
        return Ok(None);
    }
    match Report::read(File::open(path)?) {
        Ok(report) => Ok(Some(report)),
        Err(ReportError::NotAReport) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// What a file's name says of host and rank: `oom-HOST-RANK-PID.json`, as `lastref.torch` names reports,
/// else a number after the word rank.
fn named(name: &str) -> (Option<String>, Option<u64>) {
    let stem = name.split_once(".json").map_or(name, |(stem, _)| stem);
    let parts: Vec<&str> = stem.split('-').collect();
    if let ["oom" | "report", host, rank, _pid, ..] = parts[..]
        && let Ok(rank) = rank.parse()
    {
        return (Some(host.to_owned()), Some(rank));
    }
    let lower = name.to_ascii_lowercase();
    let after = lower.match_indices("rank").map(|(at, word)| {
        let rest = lower[at + word.len()..].trim_start_matches(['_', '-', '=', '.']);
        let digits = rest.split(|other: char| !other.is_ascii_digit()).next();
        digits.and_then(|digits| digits.parse().ok())
    });
    (None, after.flatten().next())
}

impl Found {
    fn new(kind: &'static str, devices: Vec<Explanation>) -> Self {
        // A rank uses one device; the others of its machine have nothing of it.
        let device = devices.into_iter().max_by_key(|one| {
            (
                one.failure.is_some(),
                one.memory.reserved_bytes,
                one.memory.live_bytes,
            )
        });
        let Some(device) = device else {
            let rank = Rank {
                kind: Some(kind),
                moment: "snapshot",
                out_of_memory: Some(false),
                live_bytes: Some(0),
                reserved_bytes: Some(0),
                ..Rank::default()
            };
            return Self {
                rank,
                holders: HashMap::new(),
            };
        };
        let memory = &device.memory;
        let failure = device.failure.as_ref();
        let verdict = failure.and_then(|failure| serde_json::to_value(&failure.verdict).ok());
        let verdict = verdict.and_then(|verdict| Some(verdict.get("cause")?.as_str()?.to_owned()));
        let holder = device.holders.first();
        let rank = Rank {
            kind: Some(kind),
            device: Some(device.device),
            moment: match device.moment {
                Moment::OutOfMemory => "out_of_memory",
                Moment::Peak => "peak",
                Moment::Snapshot => "snapshot",
            },
            out_of_memory: Some(failure.is_some()),
            verdict,
            cause: failure.map(|_| {
                let [_, cause, _] = summary(&device);
                cause.trim_start_matches("cause: ").to_owned()
            }),
            requested_bytes: failure.map(|failure| failure.requested_bytes),
            live_bytes: Some(memory.live_bytes),
            pending_bytes: Some(memory.pending_bytes),
            cached_bytes: Some(memory.cached_bytes),
            fragmented_bytes: Some(memory.fragmented_bytes),
            reserved_bytes: Some(memory.reserved_bytes),
            holder: holder.map(|holder| place(&holder.place)),
            holder_kind: holder.and_then(|holder| holder.kind.clone()),
            holder_bytes: holder.map(|holder| holder.bytes),
            holder_cure: holder.and_then(|holder| holder.cure.clone()),
            ..Rank::default()
        };
        let of = |holder: &Holder| {
            let words = place(&holder.place);
            // A running function goes from line to line, and a graph grows.
            let key = match kind {
                "report" => without_numbers(&words),
                _ => words.clone(),
            };
            (key, (words, holder.bytes))
        };
        Self {
            rank,
            holders: device.holders.iter().map(of).collect(),
        }
    }
}

fn without_numbers(words: &str) -> String {
    words
        .chars()
        .filter(|letter| !letter.is_ascii_digit())
        .collect()
}

/// One file for each rank: the one that tells most.
fn one_each(found: Vec<Found>) -> Vec<Found> {
    // A snapshot does not say its host: it is that of the one report of the rank, if there is one.
    let mut hosts: HashMap<u64, BTreeSet<String>> = HashMap::new();
    for Found { rank, .. } in &found {
        if let (Some(number), Some(host)) = (rank.rank, &rank.host) {
            hosts.entry(number).or_default().insert(host.clone());
        }
    }
    let mut kept: Vec<Found> = Vec::new();
    let mut by: HashMap<(Option<String>, u64), usize> = HashMap::new();
    for mut one in found {
        let Some(number) = one.rank.rank else {
            kept.push(one);
            continue;
        };
        if one.rank.host.is_none()
            && let Some(hosts) = hosts.get(&number)
            && hosts.len() == 1
        {
            one.rank.host = hosts.first().cloned();
        }
        let index = *by
            .entry((one.rank.host.clone(), number))
            .or_insert(kept.len());
        match kept.get_mut(index) {
            None => kept.push(one),
            Some(other) => {
                let files = other.rank.other_files + 1;
                if tells(&one.rank) >= tells(&other.rank) {
                    *other = one;
                }
                other.rank.other_files = files;
            }
        }
    }
    kept
}

/// Rows for the numbers that are not there, below the largest that is.
fn missing(ranks: &[Rank]) -> Vec<Rank> {
    let read = ranks.iter().filter(|rank| rank.kind.is_some());
    let numbers: Vec<u64> = read.filter_map(|rank| rank.rank).collect();
    let distinct: BTreeSet<u64> = numbers.iter().copied().collect();
    let there: BTreeSet<u64> = ranks.iter().filter_map(|rank| rank.rank).collect();
    // Without a launcher that says more, a number counts on its host alone; then they come again.
    let Some(most) = there
        .last()
        .filter(|most| **most < MOST_RANKS && distinct.len() == numbers.len())
    else {
        return Vec::new();
    };
    let missing: Vec<u64> = (0..*most)
        .filter(|number| !there.contains(number))
        .collect();
    if missing.len() > MOST_MISSING {
        return Vec::new();
    }
    let row = |number| Rank {
        rank: Some(number),
        moment: "missing",
        odd: true,
        why: Some("no file tells of it".to_owned()),
        ..Rank::default()
    };
    missing.into_iter().map(row).collect()
}

/// Marks the ranks that differ, and says in what.
fn judge(found: &mut [Found]) {
    let median = |of: fn(&Rank) -> Option<u64>| {
        let mut values: Vec<u64> = found.iter().filter_map(|found| of(&found.rank)).collect();
        values.sort_unstable();
        // Of two in the middle the smaller: more memory is what is looked for.
        values[(values.len() - 1) / 2]
    };
    let live = median(|rank| rank.live_bytes);
    let reserved = median(|rank| rank.reserved_bytes);
    let failed: Vec<usize> = (0..found.len())
        .filter(|index| found[*index].rank.out_of_memory == Some(true))
        .collect();
    let first = first_to_fail(found, &failed);
    let usual = usual_verdict(found, &failed);
    let only = only_here(found, live);
    // Holders are compared with those of the rank in the middle that tells them in the same words.
    let typical: HashMap<&str, HashMap<String, (String, u64)>> = ["report", "snapshot"]
        .into_iter()
        .filter_map(|kind| {
            let of = found.iter().filter(|found| found.rank.kind == Some(kind));
            let typical =
                of.min_by_key(|found| found.rank.live_bytes.unwrap_or(0).abs_diff(live))?;
            Some((kind, typical.holders.clone()))
        })
        .collect();
    for index in 0..found.len() {
        let rank = &found[index].rank;
        let mut why = Vec::new();
        if failed.len() < found.len() && rank.out_of_memory == Some(true) {
            why.push("out of memory".to_owned());
        }
        if let Some((at, seconds)) = first
            && at == index
        {
            why.push(format!("the first to run out of memory, by {seconds:.1} s"));
        }
        if let (Some(usual), Some(verdict)) = (&usual, &rank.verdict)
            && usual != verdict
        {
            let words = |verdict: &str| verdict.replace('_', " ");
            why.push(format!(
                "cause {} where most have {}",
                words(verdict),
                words(usual)
            ));
        }
        for (what, bytes, median) in [
            ("live", rank.live_bytes, live),
            ("reserved", rank.reserved_bytes, reserved),
        ] {
            let bytes = bytes.unwrap_or(0);
            if off(bytes, median) > ODD {
                why.push(format!(
                    "{what} {} where the median is {}",
                    Bytes(bytes),
                    Bytes(median)
                ));
            }
        }
        let more = typical.get(rank.kind.unwrap_or_default());
        let more = more.filter(|_| !why.is_empty());
        let more = more.and_then(|typical| difference(&found[index], typical, live));
        match (more, &only[index]) {
            (Some(more), _) => why.push(more),
            (None, Some((words, bytes))) => {
                why.push(format!("the only one with {} at {words}", Bytes(*bytes)));
            }
            (None, None) => {}
        }
        let rank = &mut found[index].rank;
        rank.odd = !why.is_empty();
        rank.why = rank.odd.then(|| why.join("; "));
    }
}

/// The rank that failed before all others, and by how many seconds.
fn first_to_fail(found: &[Found], failed: &[usize]) -> Option<(usize, f64)> {
    let times = failed
        .iter()
        .map(|index| Some((found[*index].rank.time?, *index)));
    // If one does not say when, it may have been that.
    let mut times = times.collect::<Option<Vec<_>>>()?;
    times.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    let [(first, index), (second, _), ..] = times[..] else {
        return None;
    };
    (second > first).then_some((index, second - first))
}

/// The verdict that more than half of those that failed have.
fn usual_verdict(found: &[Found], failed: &[usize]) -> Option<String> {
    let mut counts: HashMap<&str, usize> = HashMap::new();
    for index in failed {
        if let Some(verdict) = &found[*index].rank.verdict {
            *counts.entry(verdict).or_default() += 1;
        }
    }
    let most = counts.into_iter().max_by_key(|(_, count)| *count);
    let (verdict, _) = most.filter(|(_, count)| count * 2 > failed.len())?;
    Some(verdict.to_owned())
}

/// For each rank the heaviest holder that no other has, of a tenth of the median or more. Nobody has one where
/// most have one: then they are named differently everywhere.
fn only_here(found: &[Found], live: u64) -> Vec<Option<(String, u64)>> {
    let mut counts: HashMap<(Option<&str>, &str), usize> = HashMap::new();
    let mut ranks: HashMap<Option<&str>, usize> = HashMap::new();
    for one in found {
        *ranks.entry(one.rank.kind).or_default() += 1;
        for key in one.holders.keys() {
            *counts.entry((one.rank.kind, key)).or_default() += 1;
        }
    }
    let only: Vec<Option<(String, u64)>> = found
        .iter()
        .map(|one| {
            let alone = one.holders.iter().filter(|(key, (_, bytes))| {
                counts[&(one.rank.kind, key.as_str())] == 1
                    && ranks[&one.rank.kind] > 2
                    && *bytes > 0
                    && *bytes as f64 >= live as f64 * ODD
            });
            let most = alone.max_by_key(|(key, (_, bytes))| (*bytes, *key));
            most.map(|(_, holder)| holder.clone())
        })
        .collect();
    if only.iter().flatten().count() * 2 > found.len() {
        return vec![None; found.len()];
    }
    only
}

/// At which holder a rank has more, or if it has less at which less, than the typical one.
fn difference(
    found: &Found,
    typical: &HashMap<String, (String, u64)>,
    live: u64,
) -> Option<String> {
    let bytes =
        |of: &HashMap<String, (String, u64)>, key: &str| of.get(key).map_or(0, |(_, bytes)| *bytes);
    // What a rank has more of explains that it has more, and the other way round.
    let sign = if found.rank.live_bytes.unwrap_or(0) >= live {
        1
    } else {
        -1
    };
    let more = |key: &str| {
        (i128::from(bytes(&found.holders, key)) - i128::from(bytes(typical, key))) * sign
    };
    let keys: BTreeMap<&String, &(String, u64)> = typical.iter().chain(&found.holders).collect();
    let (most, (words, _)) = keys.into_iter().max_by_key(|(key, _)| more(key))?;
    (more(most) > 0).then(|| {
        format!(
            "{} at {words} where the median rank has {}",
            Bytes(bytes(&found.holders, most)),
            Bytes(bytes(typical, most))
        )
    })
}

#[expect(
    clippy::cast_precision_loss,
    reason = "a ratio, compared with a rough bound"
)]
fn off(bytes: u64, median: u64) -> f64 {
    bytes.abs_diff(median) as f64 / median.max(1) as f64
}

/// What people call a rank.
fn label(rank: &Rank) -> String {
    let label = match (rank.rank, &rank.host, &rank.file) {
        (Some(number), Some(host), _) => format!("rank {number} on {host}"),
        (Some(number), None, _) => format!("rank {number}"),
        (None, _, Some(file)) => file.clone(),
        (None, _, None) => "a rank".to_owned(),
    };
    escaped(&label).into_owned()
}

fn write_text(out: &mut impl Write, ranks: &[Rank]) -> io::Result<()> {
    let told = ranks.iter().filter(|rank| rank.kind.is_some()).count();
    let odd: Vec<&Rank> = ranks
        .iter()
        .filter(|rank| rank.odd && rank.kind.is_some())
        .collect();
    match &odd[..] {
        [] => writeln!(out, "{told} ranks, all alike")?,
        [one] => {
            let why = escaped(one.why.as_deref().unwrap_or_default());
            writeln!(out, "1 of {told} ranks differs: {} ({why})", label(one))?;
        }
        _ => {
            writeln!(out, "{} of {told} ranks differ:", odd.len())?;
            for rank in odd {
                writeln!(
                    out,
                    "  {} ({})",
                    label(rank),
                    escaped(rank.why.as_deref().unwrap_or_default())
                )?;
            }
        }
    }
    for rank in ranks.iter().filter(|rank| rank.kind.is_none()) {
        writeln!(
            out,
            "{}: {}",
            label(rank),
            escaped(rank.why.as_deref().unwrap_or_default())
        )?;
    }
    let rows: Vec<[String; 10]> = ranks
        .iter()
        .filter(|rank| rank.kind.is_some())
        .map(row)
        .collect();
    let heads = [
        "rank",
        "host",
        "device",
        "live",
        "cached",
        "fragmented",
        "reserved",
        "out of memory",
        "holder",
        "",
    ]
    .map(str::to_owned);
    let mut widths = [0; 10];
    for row in rows.iter().chain([&heads]) {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    let dim = Style::new().dimmed();
    writeln!(out)?;
    let lines = [(&heads, false)].into_iter();
    let odd = ranks
        .iter()
        .filter(|rank| rank.kind.is_some())
        .map(|rank| rank.odd);
    for (row, is_odd) in lines.chain(rows.iter().zip(odd)) {
        let mut line = String::from(if is_odd { "!" } else { " " });
        for (index, (cell, width)) in row.iter().zip(widths).enumerate() {
            let pad = " ".repeat(width - cell.chars().count());
            // Numbers to the right.
            let is_number = matches!(index, 2..=6 | 8);
            let (before, after) = if is_number { (&*pad, "") } else { ("", &*pad) };
            line.push_str(&format!(" {before}{cell}{after} "));
        }
        writeln!(out, "{}", line.trim_end())?;
    }
    let mut causes: BTreeMap<&str, Vec<&Rank>> = BTreeMap::new();
    for rank in ranks {
        if let Some(verdict) = &rank.verdict {
            causes.entry(verdict).or_default().push(rank);
        }
    }
    for (verdict, ranks) in causes {
        let cause = ranks[0].cause.as_deref().unwrap_or_default();
        let verdict = verdict.replace('_', " ");
        let (count, word) = (ranks.len(), if ranks.len() == 1 { "rank" } else { "ranks" });
        let (first, cause) = (label(ranks[0]), escaped(cause));
        writeln!(out, "\n{verdict}, {count} {word}; {first}: {cause}")?;
        if let Some(cure) = &ranks[0].holder_cure {
            writeln!(out, "  helps: {}", escaped(cure))?;
        }
    }
    let others: u64 = ranks.iter().map(|rank| rank.other_files).sum();
    if others > 0 {
        writeln!(
            out,
            "\n{dim}{others} more files tell of these ranks, and are older or say less{dim:#}"
        )?;
    }
    Ok(())
}

/// The table's cells.
fn row(rank: &Rank) -> [String; 10] {
    let bytes =
        |bytes: Option<u64>| bytes.map_or_else(|| "-".to_owned(), |bytes| Bytes(bytes).to_string());
    let text = |text: &Option<String>| text.as_deref().map(|text| escaped(text).into_owned());
    let name = match rank.rank {
        Some(number) => number.to_string(),
        None => text(&rank.file).unwrap_or_default(),
    };
    [
        name,
        text(&rank.host).unwrap_or_else(|| "-".to_owned()),
        rank.device
            .map_or_else(|| "-".to_owned(), |device| device.to_string()),
        bytes(rank.live_bytes),
        bytes(rank.cached_bytes),
        bytes(rank.fragmented_bytes),
        bytes(rank.reserved_bytes),
        if rank.out_of_memory == Some(true) {
            "yes"
        } else {
            "no"
        }
        .to_owned(),
        bytes(rank.holder_bytes),
        text(&rank.holder).unwrap_or_default(),
    ]
}

fn write_csv(out: &mut impl Write, ranks: &[Rank]) -> Result<(), Failure> {
    let mut writer = csv::Writer::from_writer(out);
    for rank in ranks {
        writer.serialize(rank).map_err(super::not_csv)?;
    }
    Ok(writer.flush()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_files_name_says_host_and_rank() {
        for (name, host, rank) in [
            ("oom-node_a-12-4711.json", Some("node_a"), Some(12)),
            ("report-node.b-3-4711-2.json.gz", Some("node.b"), Some(3)),
            ("oom-node.json", None, None),
            ("rank7_memory_snapshot.pickle", None, Some(7)),
            ("job_RANK-03.pickle.gz", None, Some(3)),
            ("rank_of_rank=9.pkl", None, Some(9)),
            ("franklin.pickle", None, None),
            ("rank99999999999999999999.pickle", None, None),
            ("rank.pickle", None, None),
        ] {
            assert_eq!(named(name), (host.map(str::to_owned), rank), "{name}");
        }
    }

    fn found(rank: u64, live: u64, time: Option<f64>, verdict: Option<&str>) -> Found {
        Found {
            rank: Rank {
                kind: Some("report"),
                rank: Some(rank),
                time,
                out_of_memory: Some(verdict.is_some()),
                verdict: verdict.map(str::to_owned),
                live_bytes: Some(live),
                reserved_bytes: Some(live),
                ..Rank::default()
            },
            holders: HashMap::from([("model".to_owned(), ("model".to_owned(), live))]),
        }
    }

    fn whys(mut all: Vec<Found>) -> Vec<String> {
        judge(&mut all);
        all.into_iter()
            .map(|found| found.rank.why.unwrap_or_default())
            .collect()
    }

    #[test]
    fn ranks_that_are_alike_are_not_odd() {
        let all = (0..3).map(|rank| found(rank, 100 + rank, None, None));
        assert_eq!(whys(all.collect()), ["", "", ""]);
    }

    #[test]
    fn the_first_to_fail_is_named() {
        let fails = |rank, time| found(rank, 100, time, Some("live_memory"));
        let all = vec![
            fails(0, Some(30.0)),
            fails(1, Some(20.5)),
            fails(2, Some(22.0)),
        ];
        assert_eq!(
            whys(all),
            ["", "the first to run out of memory, by 1.5 s", ""]
        );
        let all = vec![fails(0, Some(20.0)), fails(1, Some(20.0))];
        assert_eq!(whys(all), ["", ""], "together");
        let all = vec![fails(0, Some(20.0)), fails(1, None), fails(2, Some(21.0))];
        assert_eq!(whys(all), ["", "", ""], "one does not say when");
    }

    #[test]
    fn another_cause_is_named() {
        let fails = |rank, verdict| found(rank, 100, None, Some(verdict));
        let all = vec![
            fails(0, "live_memory"),
            fails(1, "too_large"),
            fails(2, "live_memory"),
        ];
        assert_eq!(
            whys(all),
            ["", "cause too large where most have live memory", ""]
        );
        let all = vec![fails(0, "live_memory"), fails(1, "too_large")];
        assert_eq!(whys(all), ["", ""], "no cause is the usual one");
    }

    #[test]
    fn a_holder_that_the_others_do_not_have_is_named() {
        let mut all: Vec<_> = (0..4).map(|rank| found(rank, 1000, None, None)).collect();
        let holder = ("`cache` (a.py:7)".to_owned(), 100);
        all[2].holders.insert("cache".to_owned(), holder);
        let small = ("small".to_owned(), 99);
        all[1].holders.insert("small".to_owned(), small);
        assert_eq!(
            whys(all),
            ["", "", "the only one with 100 B at `cache` (a.py:7)", ""]
        );
        // Names that differ everywhere say nothing.
        let mut all: Vec<_> = (0..4).map(|rank| found(rank, 1000, None, None)).collect();
        for (index, one) in all.iter_mut().enumerate() {
            let key = format!("shard {index}");
            one.holders.insert(key.clone(), (key, 500));
        }
        assert_eq!(whys(all), ["", "", "", ""]);
    }

    #[test]
    fn holders_are_compared_with_those_of_the_median() {
        let lives = [10, 1000, 1000, 3000];
        let all = (0..)
            .zip(lives)
            .map(|(rank, live)| found(rank, live, None, None));
        let whys = whys(all.collect());
        assert!(
            whys[3].ends_with("2.93 KiB at model where the median rank has 1000 B"),
            "{whys:?}"
        );
        assert!(
            whys[0].ends_with("10 B at model where the median rank has 1000 B"),
            "{whys:?}"
        );
    }

    #[test]
    fn holders_are_compared_with_those_of_files_of_the_same_kind() {
        let mut all: Vec<_> = (0..4).map(|rank| found(rank, 1000, None, None)).collect();
        all.push(found(4, 5000, None, None));
        all[4].rank.kind = Some("snapshot");
        let why = &whys(all)[4];
        assert!(
            why.starts_with("live 4.88 KiB where the median is 1000 B"),
            "{why}"
        );
        assert!(!why.contains("model"), "{why}");
    }

    #[test]
    fn the_file_that_tells_most_is_the_one_for_a_rank() {
        let with = |kind: &'static str, host: Option<&str>, time, verdict| {
            let mut one = found(3, 100, time, verdict);
            one.rank.kind = Some(kind);
            one.rank.host = host.map(str::to_owned);
            one
        };
        let kept = one_each(vec![
            with("snapshot", None, None, None),
            with("report", Some("a"), Some(2.0), Some("live_memory")),
            with("report", Some("a"), Some(3.0), None),
        ]);
        assert_eq!(kept.len(), 1);
        let rank = &kept[0].rank;
        assert_eq!(
            (rank.kind, rank.out_of_memory, rank.other_files),
            (Some("report"), Some(true), 2)
        );
        let failed = with("snapshot", Some("a"), None, Some("live_memory"));
        let kept = one_each(vec![failed, with("report", Some("a"), Some(2.0), None)]);
        assert_eq!(kept[0].rank.kind, Some("snapshot"), "what it died of");
        // Ranks that count on their own host, and a snapshot of which it is not known whose.
        let kept = one_each(vec![
            with("snapshot", None, None, None),
            with("report", Some("a"), Some(2.0), None),
            with("report", Some("b"), Some(2.0), None),
        ]);
        assert_eq!(kept.len(), 3);
    }

    #[test]
    fn missing_ranks_are_those_below_the_largest() {
        let of = |numbers: &[u64]| {
            let ranks: Vec<_> = numbers
                .iter()
                .map(|number| found(*number, 1, None, None).rank)
                .collect();
            let missing = missing(&ranks);
            missing
                .iter()
                .filter_map(|rank| rank.rank)
                .collect::<Vec<_>>()
        };
        assert_eq!(of(&[0, 1, 2]), [0u64; 0]);
        assert_eq!(of(&[4, 1]), [0, 2, 3]);
        assert_eq!(of(&[0, 0, 2]), [0u64; 0], "they count on their hosts");
        assert_eq!(of(&[u64::MAX, 0]), [0u64; 0]);
        assert_eq!(of(&[1000]), [0u64; 0]);
        assert_eq!(of(&[]), [0u64; 0]);
    }
}
