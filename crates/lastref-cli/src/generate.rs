//! `lastref generate`: made-up traces, for `lastref replay` and for other allocators.

use std::io::Write;

use anyhow::anyhow;
use clap::Args;
use lastref_snapshot::generate::Kind;

use crate::Failure;

#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// The kind of trace [default: list them]
    kind: Option<String>,

    /// The seed: another one makes another trace of the kind
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
}

pub(crate) fn run(arguments: &Arguments, out: &mut impl Write) -> Result<(), Failure> {
    let Some(name) = &arguments.kind else {
        for kind in Kind::ALL {
            writeln!(out, "{:<12} {}", kind.name, kind.about)?;
        }
        return Ok(());
    };
    let kind = Kind::ALL.iter().find(|kind| kind.name == name);
    let kind = kind.ok_or_else(|| {
        let names: Vec<_> = Kind::ALL.iter().map(|kind| kind.name).collect();
        Failure::BadInput(anyhow!(
            "there is no kind of trace {name:?}, there are {}",
            names.join(", ")
        ))
    })?;
    out.write_all(kind.csv(arguments.seed).as_bytes())?;
    Ok(())
}
