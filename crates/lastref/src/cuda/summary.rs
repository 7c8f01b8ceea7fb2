//! The table of `memory_summary`, laid out as torch's.

use std::fmt::Write as _;

use crate::alloc::{MemoryStats, Stat, StatByPool};

/// How a number is written.
type Show = fn(u64) -> String;

/// Inner width of the table.
const WIDTH: usize = 75;

pub(crate) fn table(stats: &MemoryStats, device: u32) -> String {
    let mut out = String::new();
    let double = "=".repeat(WIDTH);
    let single = "-".repeat(WIDTH);
    let title = format!("lastref CUDA memory summary, device ID {device}");
    let ooms = format!("CUDA OOMs: {}", stats.num_ooms);
    let retries = format!("allocations retried: {}", stats.num_alloc_retries);
    line(&mut out, &double);
    line(&mut out, &format!("{title:^WIDTH$}"));
    line(&mut out, &single);
    line(&mut out, &format!("{ooms:^37}|{retries:^37}"));
    line(&mut out, &double);
    line(
        &mut out,
        "        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  ",
    );
    let families: [(&str, &StatByPool, Show); 9] = [
        ("Allocated memory", &stats.allocated_bytes, bytes),
        ("Active memory", &stats.active_bytes, bytes),
        ("Requested memory", &stats.requested_bytes, bytes),
        ("GPU reserved memory", &stats.reserved_bytes, bytes),
        ("Non-releasable memory", &stats.inactive_split_bytes, bytes),
        ("Allocations", &stats.allocation, number),
        ("Active allocs", &stats.active, number),
        ("GPU reserved segments", &stats.segment, number),
        ("Non-releasable allocs", &stats.inactive_split, number),
    ];
    for (name, family, show) in families {
        line(&mut out, &single);
        row(&mut out, name, &family.all, show);
        row(&mut out, "      from large pool", &family.large_pool, show);
        row(&mut out, "      from small pool", &family.small_pool, show);
    }
    line(&mut out, &double);
    for advice in stats.advice() {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "advice: {advice}");
    }
    out
}

fn line(out: &mut String, text: &str) {
    // Writing to a string cannot fail.
    let _ = writeln!(out, "|{text}|");
}

fn row(out: &mut String, name: &str, stat: &Stat, show: Show) {
    let cells: String = [stat.current, stat.peak, stat.allocated, stat.freed]
        .map(|value| format!("|{:>11} ", show(value)))
        .concat();
    line(out, &format!(" {name:<22}{cells}"));
}

fn number(value: u64) -> String {
    value.to_string()
}

/// At most six digits and a unit, which grows where the number would reach 768 * 1024, as in torch.
fn bytes(value: u64) -> String {
    const LIMIT: u64 = 768 * 1024;
    let mut value = value;
    let mut units = ["B  ", "KiB", "MiB", "GiB", "TiB"].into_iter();
    let mut unit = units.next();
    while value >= LIMIT {
        let Some(larger) = units.next() else { break };
        unit = Some(larger);
        value /= 1024;
    }
    format!("{value} {}", unit.unwrap_or_default())
}
