//! `lastref view`: the memory of a snapshot, to look at: in the browser, in one file that needs no
//! network, or in the terminal.
//!
//! The page is built from `web/` into `viewer/index.html` of this crate. [`answers`] makes what it
//! asks for, [`serve`] sends that over loopback, [`page`] writes it into the page, [`terminal`]
//! draws without one.

mod answers;
mod page;
mod serve;
mod terminal;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use lastref_snapshot::timeline::Timeline;

use crate::escape::escaped;
use crate::progress::Progress;
use crate::{Failure, snapshot};

use self::answers::File;

/// As `lastref view` is called.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// PyTorch memory snapshots, or allocation traces, - for standard input; two are shown side by side
    #[arg(required = true, num_args = 1..=2, value_name = "FILE")]
    files: Vec<PathBuf>,

    /// Write one page that holds its data and needs no network, instead of serving it
    #[arg(long, value_name = "OUT", conflicts_with_all = ["tty", "port", "open"])]
    html: Option<PathBuf>,

    /// Draw the timeline in the terminal
    #[arg(long, conflicts_with_all = ["port", "open"])]
    tty: bool,

    /// The port on 127.0.0.1 [default: any that is free]
    #[arg(long)]
    port: Option<u16>,

    /// Open the page in the browser
    #[arg(long)]
    open: bool,
}

pub(crate) fn run(arguments: &Arguments, out: &mut impl Write) -> Result<(), Failure> {
    let mut files = Vec::new();
    for path in &arguments.files {
        let dump = snapshot::read(path)?;
        let mut progress = Progress::spinner("laying out");
        progress.say(format!("laying out {}", escaped(&snapshot::name_of(path))));
        let timelines = Timeline::all(&dump);
        let name = match path.file_name() {
            Some(name) if path != Path::new("-") => name.to_string_lossy().into_owned(),
            _ => snapshot::name_of(path),
        };
        files.push(File::new(name, dump, timelines));
    }
    if let Some(to) = &arguments.html {
        let page = page::with_data(&files).map_err(Failure::BadInput)?;
        fs::write(to, &page)
            .with_context(|| format!("cannot write {}", to.display()))
            .map_err(Failure::BadInput)?;
        writeln!(out, "{} ({} bytes)", to.display(), page.len())?;
        return Ok(());
    }
    if arguments.tty {
        return terminal::draw(&files, out);
    }
    serve::serve(files, arguments.port.unwrap_or(0), arguments.open, out)
}
