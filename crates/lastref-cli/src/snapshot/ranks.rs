//! `lastref explain FOLDER`: the snapshots of many ranks side by side, and which one is odd.

use std::collections::HashMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use lastref::alloc::Bytes;
use lastref_snapshot::explain::{Explanation, Holder, explain};
use serde::Serialize;

use super::explain::{place, summary};
use super::{read, write_json};
use crate::Failure;

/// How ranks are printed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Format {
    Text,
    Json,
    Csv,
}

/// A rank differs from the others if its live or reserved bytes are off their median by more.
const ODD: f64 = 0.1;

/// One line of the table, of JSON and of CSV. One flat record, as DuckDB and Ray read them.
#[derive(Clone, Debug, Serialize)]
struct Rank {
    file: String,
    device: u32,
    moment: &'static str,
    cause: Option<String>,
    requested_bytes: Option<u64>,
    live_bytes: u64,
    cached_bytes: u64,
    fragmented_bytes: u64,
    reserved_bytes: u64,
    odd: bool,
    why: String,
}

pub(super) fn run(
    folder: &Path,
    capacity: Option<u64>,
    format: Format,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let files = files(folder).map_err(Failure::BadInput)?;
    let mut ranks = Vec::new();
    let mut explanations = Vec::new();
    for file in &files {
        let dump = read(file)?;
        // A rank uses one device; the others of its machine have no segments in its snapshot.
        let found = explain(&dump, capacity).into_iter();
        let found = found.max_by_key(|explanation| explanation.memory.reserved_bytes);
        let Some(explanation) = found else {
            continue;
        };
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        ranks.push(rank(&name, &explanation));
        explanations.push(explanation);
    }
    if ranks.is_empty() {
        let error = anyhow!("no snapshot in {} has a device", folder.display());
        return Err(Failure::BadInput(error));
    }
    judge(&mut ranks, &explanations);
    match format {
        Format::Json => {
            for rank in &ranks {
                write_json(out, rank)?;
            }
        }
        Format::Csv => write_csv(out, &ranks)?,
        Format::Text => write_text(out, &ranks)?,
    }
    Ok(())
}

/// The snapshots of a folder, in the order of their names, numbers in them counting as such.
fn files(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let entries =
        fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    for entry in entries {
        let path = entry?.path();
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let name = name.strip_suffix(".gz").unwrap_or(&name);
        if [".pickle", ".pkl", ".json"]
            .iter()
            .any(|end| name.ends_with(end))
        {
            files.push(path);
        }
    }
    files.sort_by_key(|path| numbered(&path.to_string_lossy()));
    if files.is_empty() {
        anyhow::bail!("{} has no .pickle, .pkl or .json", folder.display());
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

fn rank(file: &str, explanation: &Explanation) -> Rank {
    let memory = &explanation.memory;
    let failure = explanation.failure.as_ref();
    Rank {
        file: file.to_owned(),
        device: explanation.device,
        moment: match explanation.moment {
            lastref_snapshot::explain::Moment::OutOfMemory => "out_of_memory",
            lastref_snapshot::explain::Moment::Peak => "peak",
            lastref_snapshot::explain::Moment::Snapshot => "snapshot",
        },
        cause: failure.map(|_| {
            let [_, cause, _] = summary(explanation);
            cause.trim_start_matches("cause: ").to_owned()
        }),
        requested_bytes: failure.map(|failure| failure.requested_bytes),
        live_bytes: memory.live_bytes,
        cached_bytes: memory.cached_bytes,
        fragmented_bytes: memory.fragmented_bytes,
        reserved_bytes: memory.reserved_bytes,
        odd: false,
        why: String::new(),
    }
}

/// Marks the ranks that differ, and says at which place they hold more or less than the median rank.
fn judge(ranks: &mut [Rank], explanations: &[Explanation]) {
    let median = |of: fn(&Rank) -> u64| {
        let mut values: Vec<u64> = ranks.iter().map(of).collect();
        values.sort_unstable();
        values[values.len() / 2]
    };
    let (live, reserved) = (
        median(|rank| rank.live_bytes),
        median(|rank| rank.reserved_bytes),
    );
    let typical = ranks
        .iter()
        .position(|rank| rank.live_bytes == live)
        .unwrap_or(0);
    let some_did_not_fail = ranks.iter().any(|rank| rank.cause.is_none());
    let typical_holders = by_place(&explanations[typical].holders);
    for (rank, explanation) in ranks.iter_mut().zip(explanations) {
        let mut why = Vec::new();
        for (what, bytes, median) in [
            ("live", rank.live_bytes, live),
            ("reserved", rank.reserved_bytes, reserved),
        ] {
            if off(bytes, median) > ODD {
                why.push(format!(
                    "{what} {} where the median is {}",
                    Bytes(bytes),
                    Bytes(median)
                ));
            }
        }
        if some_did_not_fail && rank.cause.is_some() {
            why.push("out of memory".to_owned());
        }
        if !why.is_empty() {
            let holders = by_place(&explanation.holders);
            let mut places: Vec<_> = holders.keys().chain(typical_holders.keys()).collect();
            places.sort_unstable();
            let bytes =
                |of: &HashMap<String, u64>, place: &str| of.get(place).copied().unwrap_or(0);
            // What a rank has more of explains that it has more, and the other way round.
            let sign = if rank.live_bytes >= live { 1 } else { -1 };
            let more = |place: &str| {
                let typical = bytes(&typical_holders, place);
                (i128::from(bytes(&holders, place)) - i128::from(typical)) * sign
            };
            let most = places.into_iter().max_by_key(|place| more(place));
            if let Some(most) = most
                && bytes(&holders, most) != bytes(&typical_holders, most)
            {
                why.push(format!(
                    "{} at {most} where the median rank has {}",
                    Bytes(bytes(&holders, most)),
                    Bytes(bytes(&typical_holders, most))
                ));
            }
        }
        rank.odd = !why.is_empty();
        rank.why = why.join("; ");
    }
}

fn by_place(holders: &[Holder]) -> HashMap<String, u64> {
    let holders = holders.iter();
    holders
        .map(|holder| (place(&holder.place), holder.bytes))
        .collect()
}

#[expect(
    clippy::cast_precision_loss,
    reason = "a ratio, compared with a rough bound"
)]
fn off(bytes: u64, median: u64) -> f64 {
    bytes.abs_diff(median) as f64 / median.max(1) as f64
}

fn write_text(out: &mut impl Write, ranks: &[Rank]) -> Result<(), Failure> {
    let odd = ranks.iter().filter(|rank| rank.odd);
    let odd: Vec<_> = odd
        .map(|rank| format!("{} ({})", rank.file, rank.why))
        .collect();
    if odd.is_empty() {
        writeln!(out, "{} ranks, all alike", ranks.len())?;
    } else {
        writeln!(
            out,
            "{} of {} ranks differ: {}",
            odd.len(),
            ranks.len(),
            odd.join(", ")
        )?;
    }
    let width = ranks.iter().map(|rank| rank.file.len()).max().unwrap_or(0);
    writeln!(
        out,
        "\n  {:<width$}  device        live      cached  fragmented    reserved",
        "rank"
    )?;
    for rank in ranks {
        writeln!(
            out,
            "{} {:<width$}  {:>6}  {:>10}  {:>10}  {:>10}  {:>10}  {}",
            if rank.odd { '!' } else { ' ' },
            rank.file,
            rank.device,
            Bytes(rank.live_bytes).to_string(),
            Bytes(rank.cached_bytes).to_string(),
            Bytes(rank.fragmented_bytes).to_string(),
            Bytes(rank.reserved_bytes).to_string(),
            rank.cause.as_deref().unwrap_or("")
        )?;
    }
    Ok(())
}

fn write_csv(out: &mut impl Write, ranks: &[Rank]) -> Result<(), Failure> {
    let mut writer = csv::Writer::from_writer(out);
    for rank in ranks {
        writer.serialize(rank).map_err(super::not_csv)?;
    }
    Ok(writer.flush()?)
}
