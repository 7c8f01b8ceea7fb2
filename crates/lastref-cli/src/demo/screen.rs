//! What the demo shows: source, variables with their references, and the device's memory.
//!
//! Nothing here is wider than 80 columns, and nothing depends on colour to be understood.

use std::fmt::Display;
use std::io::{self, Write};

use anstyle::{AnsiColor, Color, Style};
use lastref::alloc::{Bytes, MemoryStats};
use lastref::{Tensor, WeakTensor, cuda};
use lastref_snapshot::trace::{OperationKind, Trace};

use crate::Failure;
use crate::numbers::grouped;

const WIDTH: usize = 80;
const INDENT: &str = "    ";
const BAR: usize = WIDTH - INDENT.len();

const fn colour(colour: AnsiColor) -> Style {
    Style::new().fg_color(Some(Color::Ansi(colour)))
}

const PLAIN: Style = Style::new();
const DIM: Style = Style::new().dimmed();
const TITLE: Style = Style::new().bold();
const SOURCE: Style = colour(AnsiColor::Cyan).bold();
const ALLOCATED: Style = colour(AnsiColor::Green);
const CACHED: Style = colour(AnsiColor::Yellow);
const FREED: Style = colour(AnsiColor::Magenta);
const ERROR: Style = colour(AnsiColor::Red);

/// The parts of a device's memory. They add up to all of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Memory {
    allocated: u64,
    cached: u64,
    /// Held by nobody known: other processes, the driver itself.
    other: u64,
    free: u64,
}

impl Memory {
    fn read() -> Result<Self, Failure> {
        let stats = cuda::memory_stats(None)?;
        let info = cuda::mem_get_info(None)?;
        let reserved = stats.reserved_bytes.all.current;
        let allocated = stats.allocated_bytes.all.current;
        Ok(Self {
            allocated,
            cached: reserved - allocated,
            other: info.total_bytes.saturating_sub(info.free_bytes + reserved),
            free: info.free_bytes,
        })
    }

    fn parts(self) -> [(&'static str, u64, &'static str, Style); 4] {
        [
            ("allocated", self.allocated, "█", ALLOCATED),
            ("cached", self.cached, "▒", CACHED),
            ("other", self.other, "×", PLAIN),
            ("free", self.free, "·", DIM),
        ]
    }
}

/// Cells for parts of a bar of `cells`, in proportion, but at least one for what is not nothing.
fn cells<const N: usize>(parts: [u64; N], cells: usize) -> [usize; N] {
    let total: u128 = parts.iter().map(|part| u128::from(*part)).sum();
    let mut result = parts.map(|part| {
        let exact = (u128::from(part) * cells as u128)
            .checked_div(total)
            .unwrap_or(0);
        usize::try_from(exact)
            .unwrap_or(cells)
            .max(usize::from(part > 0))
    });
    // Rounding down leaves some cells, lifting to one takes some: the largest part settles it.
    let sum: usize = result.iter().sum();
    if let Some(largest) = result.iter_mut().max() {
        *largest = (*largest + cells).saturating_sub(sum);
    }
    result
}

/// The screen, and what was on it: tensors that were seen, to say when they are gone.
#[derive(Debug)]
pub(crate) struct Screen<'a, W> {
    out: &'a mut W,
    seen: Vec<Seen>,
    driver_calls: u64,
}

#[derive(Debug)]
struct Seen {
    weak: WeakTensor,
    address: u64,
    what: String,
}

impl<'a, W: Write> Screen<'a, W> {
    pub(crate) const fn new(out: &'a mut W) -> Self {
        Self {
            out,
            seen: Vec::new(),
            driver_calls: 0,
        }
    }

    pub(crate) const fn out(&mut self) -> &mut W {
        self.out
    }

    pub(crate) fn title(&mut self, text: &str) -> Result<(), Failure> {
        writeln!(self.out, "{TITLE}{text}{TITLE:#}")?;
        Ok(())
    }

    /// Says which device it is, and how its memory will be drawn.
    pub(crate) fn device(&mut self, name: &str, what: &str) -> Result<(), Failure> {
        writeln!(self.out, "\nDevice: {TITLE}{name}{TITLE:#}")?;
        wrapped(self.out, "", PLAIN, what)?;
        write!(self.out, "\nIts memory:")?;
        for (name, bytes, mark, style) in Memory::read()?.parts() {
            if name != "other" || bytes > 0 {
                write!(self.out, "  {style}{mark}{mark} {name}{style:#}")?;
            }
        }
        writeln!(self.out, "  (at least one cell each)")?;
        self.driver_calls = driver_calls()?;
        Ok(())
    }

    pub(crate) fn section(&mut self, text: &str) -> Result<(), Failure> {
        // What the section before left behind is not this one's story.
        self.seen.clear();
        let rule = "─".repeat(WIDTH.saturating_sub(text.chars().count() + 4));
        writeln!(
            self.out,
            "\n{DIM}──{DIM:#} {TITLE}{text}{TITLE:#} {DIM}{rule}{DIM:#}"
        )?;
        Ok(())
    }

    pub(crate) fn note(&mut self, text: &str) -> Result<(), Failure> {
        writeln!(self.out)?;
        Ok(wrapped(self.out, "", PLAIN, text)?)
    }

    /// Shows lines of source that are about to run.
    pub(crate) fn source(&mut self, lines: &[&str]) -> Result<(), Failure> {
        writeln!(self.out)?;
        for line in lines {
            writeln!(self.out, "{DIM}>{DIM:#} {SOURCE}{line}{SOURCE:#}")?;
        }
        Ok(())
    }

    /// Shows what the program printed.
    pub(crate) fn prints(&mut self, text: &str) -> Result<(), Failure> {
        writeln!(self.out, "{INDENT}{TITLE}{text}{TITLE:#}")?;
        Ok(())
    }

    /// Shows an error, as the program would have got it.
    pub(crate) fn error(&mut self, error: &dyn Display) -> Result<(), Failure> {
        for line in error.to_string().lines() {
            let depth = line.len() - line.trim_start().len();
            if INDENT.len() + line.len() <= WIDTH {
                writeln!(self.out, "{INDENT}{ERROR}{line}{ERROR:#}")?;
            } else {
                wrapped(self.out, &" ".repeat(INDENT.len() + depth), ERROR, line)?;
            }
        }
        writeln!(self.out)?;
        Ok(())
    }

    /// Shows what the source did: in words, to the variables, and to the device's memory. A step
    /// without words only printed something.
    pub(crate) fn after(
        &mut self,
        text: &str,
        variables: &[(&str, &Tensor)],
    ) -> Result<(), Failure> {
        if text.is_empty() {
            return Ok(self.out.flush()?);
        }
        wrapped(self.out, INDENT, PLAIN, text)?;
        for (name, tensor) in variables {
            let what = format!(
                "{} on {}",
                Bytes(tensor.storage().nbytes()),
                tensor.device()
            );
            let count = match tensor.ref_count() {
                1 => "1 reference".to_owned(),
                count => format!("{count} references"),
            };
            let place = tensor.storage().data_ptr();
            writeln!(
                self.out,
                "{INDENT}{name} → {what} at {place:#x}, {TITLE}{count}{TITLE:#}"
            )?;
            let address = tensor.storage().data_ptr();
            if !self
                .seen
                .iter()
                .any(|seen| seen.address == address && seen.weak.ref_count() > 0)
            {
                self.seen.push(Seen {
                    weak: tensor.downgrade(),
                    address,
                    what,
                });
            }
        }
        let (seen, gone) = std::mem::take(&mut self.seen)
            .into_iter()
            .partition(|seen| seen.weak.ref_count() > 0);
        self.seen = seen;
        for Seen { address, what, .. } in gone {
            writeln!(
                self.out,
                "{INDENT}{FREED}freed{FREED:#}: {what} at {address:#x}"
            )?;
        }
        self.memory()?;
        Ok(self.out.flush()?)
    }

    fn memory(&mut self) -> Result<(), Failure> {
        let parts = Memory::read()?.parts();
        write!(self.out, "{INDENT}")?;
        for ((_, _, mark, style), cells) in parts.into_iter().zip(cells(parts.map(|p| p.1), BAR)) {
            write!(self.out, "{style}{}{style:#}", mark.repeat(cells))?;
        }
        write!(self.out, "\n{INDENT}")?;
        for (name, bytes, _, style) in parts {
            if name != "other" || bytes > 0 {
                write!(self.out, "{style}{name} {}{style:#}  ", Bytes(bytes))?;
            }
        }
        let calls = driver_calls()?;
        let since = calls - std::mem::replace(&mut self.driver_calls, calls);
        writeln!(self.out, "{DIM}driver calls {}{DIM:#}", grouped(since))?;
        Ok(())
    }

    /// Shows what the rungs of the out-of-memory ladder did between two moments.
    pub(crate) fn rungs(
        &mut self,
        before: &MemoryStats,
        after: &MemoryStats,
    ) -> Result<(), Failure> {
        for (rung, totals) in &after.rungs {
            let earlier = before.rungs.get(rung).copied().unwrap_or_default();
            let tried = totals.num_tried - earlier.num_tried;
            if tried > 0 {
                let bytes = Bytes(totals.bytes_freed - earlier.bytes_freed);
                writeln!(
                    self.out,
                    "{INDENT}{TITLE}ladder{TITLE:#}: {rung}, {}, {bytes}",
                    times(tried)
                )?;
            }
        }
        Ok(())
    }

    /// Draws the live bytes of a trace over its operations.
    pub(crate) fn chart(&mut self, trace: &Trace) -> Result<(), Failure> {
        const ROWS: usize = 6;
        let columns = live_by_column(trace, BAR);
        let peak = trace.peak_live_bytes().max(1);
        writeln!(
            self.out,
            "\n{INDENT}{DIM}bytes live, at most {}{DIM:#}",
            Bytes(peak)
        )?;
        for row in (0..ROWS).rev() {
            let line: String = columns
                .iter()
                .map(|bytes| block(*bytes, peak, row, ROWS))
                .collect();
            writeln!(
                self.out,
                "{INDENT}{ALLOCATED}{}{ALLOCATED:#}",
                line.trim_end()
            )?;
        }
        let operations = grouped(trace.operations().len() as u64);
        writeln!(
            self.out,
            "{INDENT}{DIM}over {operations} allocations and frees →{DIM:#}"
        )?;
        Ok(())
    }

    /// Two columns.
    pub(crate) fn table(&mut self, rows: &[(&str, &str)]) -> Result<(), Failure> {
        writeln!(self.out)?;
        for (left, right) in rows {
            writeln!(
                self.out,
                "{INDENT}{SOURCE}{left}{SOURCE:#}\n{INDENT}{INDENT}{right}"
            )?;
        }
        Ok(())
    }
}

fn driver_calls() -> Result<u64, Failure> {
    let stats = cuda::memory_stats(None)?;
    Ok(stats.num_device_alloc + stats.num_device_free)
}

fn times(count: u64) -> String {
    match count {
        1 => "once".to_owned(),
        count => format!("{} times", grouped(count)),
    }
}

/// Writes `text` in lines of at most [`WIDTH`] columns.
fn wrapped(out: &mut impl Write, indent: &str, style: Style, text: &str) -> io::Result<()> {
    let mut line = String::new();
    for word in text.split_whitespace() {
        if !line.is_empty() && indent.len() + line.len() + 1 + word.len() > WIDTH {
            writeln!(out, "{indent}{style}{line}{style:#}")?;
            line.clear();
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    writeln!(out, "{indent}{style}{line}{style:#}")
}

/// The most live bytes in each of `columns` equal stretches of a trace.
fn live_by_column(trace: &Trace, columns: usize) -> Vec<u64> {
    let mut peaks = vec![0; columns];
    let mut live = 0;
    let operations = trace.operations();
    for (index, operation) in operations.iter().enumerate() {
        match operation.kind {
            OperationKind::Alloc => live += operation.bytes,
            OperationKind::Free => live -= operation.bytes,
        }
        let peak = &mut peaks[index * columns / operations.len()];
        *peak = live.max(*peak);
    }
    peaks
}

/// The piece of a column of `value` (of `peak`) that is in `row` of `rows`, counted from below.
fn block(value: u64, peak: u64, row: usize, rows: usize) -> char {
    const EIGHTHS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let height = (u128::from(value) * (rows * 8) as u128).div_ceil(u128::from(peak));
    let height = usize::try_from(height).unwrap_or(rows * 8);
    EIGHTHS[height.saturating_sub(row * 8).min(8)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_full_and_show_whatever_is_there() {
        for parts in [
            [0, 0, 0, 8 << 30],
            [512, (2 << 20) - 512, 0, 8 << 30],
            [1, 1, 1, u64::MAX],
            [1 << 30, 1 << 30, 1 << 30, 5 << 30],
            [7 << 30, 0, 0, 1 << 30],
            [0, 0, 0, 0],
        ] {
            let cells = cells(parts, 76);
            let sum: usize = cells.iter().sum();
            assert_eq!(sum, 76, "{parts:?}");
            if parts.iter().any(|part| *part > 0) {
                for (part, cells) in parts.iter().zip(cells) {
                    assert_eq!(*part > 0, cells > 0, "{parts:?}");
                }
            }
        }
        assert_eq!(cells([1, 0, 0, 3], 76), [19, 0, 0, 57]);
    }

    #[test]
    fn charts_reach_the_top_at_the_peak_and_nothing_is_blank() {
        let csv = "op,id,bytes,stream,phase,label\n\
                   alloc,1,10,0,a,b\nalloc,2,70,0,a,b\nfree,2,0,0,a,\nfree,1,0,0,a,\n";
        let trace = Trace::read(csv.as_bytes()).unwrap();
        assert_eq!(live_by_column(&trace, 2), [80, 10]);
        assert_eq!(live_by_column(&trace, 4), [10, 80, 10, 0]);
        assert_eq!(block(80, 80, 5, 6), '█');
        assert_eq!(block(79, 80, 5, 6), '█');
        assert_eq!(block(1, 80, 0, 6), '▁');
        assert_eq!(block(0, 80, 0, 6), ' ');
        assert_eq!(block(40, 80, 2, 6), '█');
        assert_eq!(block(40, 80, 3, 6), ' ');
    }

    #[test]
    fn text_is_wrapped_at_the_width() {
        let mut out = Vec::new();
        wrapped(&mut out, INDENT, PLAIN, &"word ".repeat(40)).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert_eq!(text.lines().count(), 3);
        assert!(
            text.lines()
                .all(|line| line.len() <= WIDTH && line.starts_with(INDENT))
        );
        assert_eq!(text.split_whitespace().count(), 40);
    }
}
