//! `lastref devices`: what is there.

use std::io::{self, Write};

use anstyle::Style;
use clap::Args;
use lastref::alloc::Bytes;
use lastref::cuda;
use serde::Serialize;

use crate::Failure;

#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Print one line of JSON
    #[arg(long)]
    json: bool,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Json {
    devices: Vec<Entry>,
}

#[derive(Serialize)]
struct Entry {
    device: String,
    name: String,
    simulated: bool,
    total_bytes: u64,
    free_bytes: u64,
    /// The size of a page of virtual memory; null without virtual memory.
    page_bytes: Option<u64>,
}

pub(crate) fn run(arguments: &Arguments, out: &mut impl Write) -> Result<(), Failure> {
    let devices = entries()?;
    if arguments.json {
        serde_json::to_writer(&mut *out, &Json { devices }).map_err(io::Error::from)?;
        writeln!(out)?;
        return Ok(());
    }
    let bold = Style::new().bold();
    for Entry {
        device,
        name,
        simulated,
        total_bytes,
        free_bytes,
        page_bytes,
    } in &devices
    {
        writeln!(
            out,
            "{device}  {bold}{name}{bold:#}{}",
            if *simulated { "  simulated" } else { "" }
        )?;
        let (free, total) = (Bytes(*free_bytes), Bytes(*total_bytes));
        let virtual_memory = page_bytes.map_or_else(
            || "no virtual memory".to_owned(),
            |bytes| format!("virtual memory in pages of {}", Bytes(bytes)),
        );
        writeln!(out, "        {free} free of {total}, {virtual_memory}")?;
    }
    if devices.is_empty() {
        writeln!(out, "no device")?;
        let hint = "hint: LASTREF_SIM=8GiB puts a simulated GPU in place of one";
        writeln!(anstream::stderr(), "{hint}")?;
    }
    Ok(())
}

fn entries() -> Result<Vec<Entry>, Failure> {
    // A setting that cannot be read must not pass for "no device".
    cuda::memory_stats(None)?;
    (0..cuda::device_count())
        .map(|index| {
            let properties = cuda::get_device_properties(index)?;
            let info = cuda::mem_get_info(index)?;
            Ok(Entry {
                device: lastref::Device::Cuda(index).to_string(),
                name: properties.name,
                simulated: properties.simulated,
                total_bytes: info.total_bytes,
                free_bytes: info.free_bytes,
                page_bytes: properties.page_bytes,
            })
        })
        .collect()
}
