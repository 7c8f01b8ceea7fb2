//! `lastref diff`: what grew from one snapshot to another.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use lastref::alloc::Bytes;
use lastref_snapshot::diff::{Change, diff};
use serde::Serialize;

use super::explain::place;
use super::{read, write_json};
use crate::Failure;
use crate::escape::escaped;
use crate::numbers::grouped;

#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// The earlier snapshot
    before: PathBuf,

    /// The later one
    after: PathBuf,

    /// How many places to list
    #[arg(long, value_name = "N", default_value_t = 20)]
    top: usize,

    /// Print one line of JSON
    #[arg(long)]
    json: bool,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Json<'a> {
    growth_bytes: i64,
    changes: &'a [Change],
}

pub(crate) fn run(arguments: &Arguments, out: &mut impl Write) -> Result<(), Failure> {
    let before = read(&arguments.before)?;
    let after = read(&arguments.after)?;
    let changes = diff(&before, &after);
    let growth: i128 = changes.iter().map(Change::growth).sum();
    if arguments.json {
        let growth_bytes = i64::try_from(growth).unwrap_or(i64::MAX);
        return write_json(
            out,
            &Json {
                growth_bytes,
                changes: &changes,
            },
        );
    }
    if changes.is_empty() {
        writeln!(
            out,
            "nothing changed: the same bytes are held at the same places"
        )?;
        return Ok(());
    }
    writeln!(
        out,
        "{} in all, at {} places",
        signed(growth),
        grouped(changes.len() as u64)
    )?;
    for change in changes.iter().take(arguments.top) {
        let blocks = i128::from(change.blocks_after) - i128::from(change.blocks_before);
        writeln!(
            out,
            "  {:>12}  {blocks:>+7} blocks  device {}  {}",
            signed(change.growth()),
            change.device,
            escaped(&place(&change.place))
        )?;
    }
    if changes.len() > arguments.top {
        let rest = changes.len() - arguments.top;
        writeln!(out, "  and {} more; --top lists them", grouped(rest as u64))?;
    }
    Ok(())
}

/// Bytes with a sign.
fn signed(bytes: i128) -> String {
    let size = Bytes(u64::try_from(bytes.unsigned_abs()).unwrap_or(u64::MAX));
    if bytes < 0 {
        format!("-{size}")
    } else {
        format!("+{size}")
    }
}
