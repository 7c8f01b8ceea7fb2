//! The commands that read memory snapshots: what they have in common.

pub(crate) mod diff;
pub(crate) mod explain;
pub(crate) mod export;
mod flame;
mod ranks;
pub(crate) mod stats;
mod svg;
mod timeline;

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;

use anstyle::Style;
use anyhow::Context;
use lastref_snapshot::Dump;
use serde::Serialize;

use crate::Failure;
use crate::progress::Progress;

/// What people call a file.
pub(crate) fn name_of(path: &Path) -> String {
    if path == Path::new("-") {
        "standard input".to_owned()
    } else {
        path.display().to_string()
    }
}

/// Reads a snapshot or a trace, from standard input for `-`.
pub(crate) fn read(path: &Path) -> Result<Dump, Failure> {
    let read = || -> anyhow::Result<Dump> {
        let (input, total): (Box<dyn Read>, _) = if path == Path::new("-") {
            (Box::new(io::stdin().lock()), None)
        } else {
            let file = File::open(path)?;
            let metadata = file.metadata()?;
            (Box::new(file), metadata.is_file().then_some(metadata.len()))
        };
        let mut progress = Progress::bytes("reading", total);
        Ok(Dump::read_with_progress(input, |bytes| {
            progress.set(bytes);
        })?)
    };
    read()
        .with_context(|| format!("cannot read a memory snapshot from {}", name_of(path)))
        .map_err(Failure::BadInput)
}

/// Why CSV could not be written, of the kind that it is: a reader that has gone is no failure.
pub(crate) fn not_csv(error: csv::Error) -> io::Error {
    match error.into_kind() {
        csv::ErrorKind::Io(error) => error,
        other => io::Error::other(format!("{other:?}")),
    }
}

/// Writes one line of JSON.
pub(crate) fn write_json(out: &mut impl Write, value: &impl Serialize) -> Result<(), Failure> {
    serde_json::to_writer(&mut *out, value).map_err(io::Error::from)?;
    Ok(writeln!(out)?)
}

/// Writes a name, a value and what the value means.
pub(crate) fn write_line(
    out: &mut impl Write,
    name: &str,
    value: &str,
    meaning: &str,
) -> io::Result<()> {
    let dim = Style::new().dimmed();
    writeln!(out, "  {name:<20} {value:>11}  {dim}{meaning}{dim:#}")
}
