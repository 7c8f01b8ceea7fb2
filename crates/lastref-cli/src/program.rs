//! Reading what programs allocated, from traces and from snapshots.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use anyhow::Context as _;
use lastref_snapshot::Dump;
use lastref_snapshot::program::{Gaps, Program};
use lastref_snapshot::trace::{Trace, TraceError};

use crate::progress::{Audience, Progress};

/// A program's allocations, and where they are from.
#[derive(Debug)]
pub(crate) struct Named {
    /// The file, with the device if it has more than one.
    pub(crate) name: String,
    pub(crate) trace: Trace,
    pub(crate) from: From,
}

/// What kind of file it was.
#[derive(Debug)]
pub(crate) enum From {
    Trace,
    /// A snapshot's history: what it leaves open, and the settings it was recorded under, as far as
    /// the file says.
    Snapshot {
        gaps: Gaps,
        settings: Option<String>,
    },
}

impl Named {
    /// The text of the settings it was recorded under, if the file says.
    pub(crate) fn settings(&self) -> Option<&str> {
        match &self.from {
            From::Trace => None,
            From::Snapshot { settings, .. } => settings.as_deref(),
        }
    }
}

fn is_standard_input(path: &Path) -> bool {
    path == Path::new("-")
}

pub(crate) fn name(path: &Path) -> String {
    if is_standard_input(path) {
        "standard input".to_owned()
    } else {
        path.display().to_string()
    }
}

/// Reads a trace.
fn trace(path: &Path, audience: Audience) -> anyhow::Result<Trace> {
    let (input, total): (Box<dyn Read>, _) = if is_standard_input(path) {
        (Box::new(io::stdin().lock()), None)
    } else {
        let (file, total) = open(path)?;
        (Box::new(file), total)
    };
    let mut progress = Progress::bytes("reading", total).shown_to(audience);
    Ok(Trace::read_with_progress(input, |bytes| {
        progress.set(bytes);
    })?)
}

/// Reads a trace, or a snapshot that has a history: a program for each device. Standard input is read
/// as a trace.
pub(crate) fn programs(path: &Path, audience: Audience) -> anyhow::Result<Vec<Named>> {
    let not_a_trace = match trace(path, audience) {
        Ok(trace) => {
            return Ok(vec![Named {
                name: name(path),
                trace,
                from: From::Trace,
            }]);
        }
        Err(error) => error,
    };
    // Only the header tells. A trace that breaks off later is a trace.
    let header = matches!(not_a_trace.downcast_ref(), Some(TraceError::Header { .. }));
    if !header || is_standard_input(path) {
        return Err(not_a_trace);
    }
    let (file, total) = open(path)?;
    let mut progress = Progress::bytes("reading", total).shown_to(audience);
    let dump = Dump::read_with_progress(file, |bytes| progress.set(bytes))
        .context("neither an allocation trace nor a memory snapshot")?;
    let programs = Program::of(&dump)?;
    anyhow::ensure!(
        !programs.is_empty(),
        "the snapshot has no history: call torch.cuda.memory._record_memory_history() before what \
         is to be looked at"
    );
    let one = programs.len() == 1;
    let settings = dump.settings().text("PYTORCH_CUDA_ALLOC_CONF");
    let named = programs.into_iter().map(|program| Named {
        name: if one {
            name(path)
        } else {
            format!("{}, device {}", name(path), program.device)
        },
        trace: program.trace,
        from: From::Snapshot {
            gaps: program.gaps,
            settings: settings.map(str::to_owned),
        },
    });
    Ok(named.collect())
}

/// Reads the one program of a trace or a snapshot.
pub(crate) fn one(path: &Path) -> anyhow::Result<Trace> {
    let mut programs = programs(path, Audience::Person)?;
    anyhow::ensure!(
        programs.len() == 1,
        "{} devices have a history, and a replay has one; `lastref advise` tries each",
        programs.len()
    );
    Ok(programs.remove(0).trace)
}

fn open(path: &Path) -> io::Result<(File, Option<u64>)> {
    let file = File::open(path)?;
    let metadata = file.metadata()?;
    let total = metadata.is_file().then_some(metadata.len());
    Ok((file, total))
}
