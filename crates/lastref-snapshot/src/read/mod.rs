//! Reading a memory snapshot from a file: PyTorch's pickles, and the same shape as JSON.
//!
//! ```text
//! bytes ─▶ source ─▶ pickle: a stack machine ─┐
//!                                             ├─▶ shape: containers become rows ─▶ assemble ─▶ Dump
//! bytes ─▶ serde_json ────────────────────────┘
//! bytes ─▶ trace (CSV) ─▶ Dump
//! ```
//!
//! The pickle reader is our own, because general ones build what a file asks them to build:
//!
//! 1. Nothing in the file is executed or looked up: an opcode that names a Python object by its
//!    module, or calls one, is an error.
//! 2. An object that is shared is kept once and referred to by its number. Nothing ever walks
//!    references recursively, so sharing costs no time and nesting no stack.
//! 3. A dict of a known shape (a trace entry, a block, a segment, a frame) becomes a row of a table
//!    as soon as it is put into its list. What the file says twice is kept once.
//! 4. Memory is at most [`BYTES_PER_BYTE`] times the bytes read, and some [`BYTES_AT_LEAST`] bytes
//!    more: lengths in the file reserve nothing, and containers that are not finished are limited.
//! 5. Every error names the offset it was found at, and of a wrong value the offset of its dict.

mod assemble;
mod json;
mod pickle;
mod shape;
mod source;

use std::io::{self, Read};

use thiserror::Error;

use crate::dump::Dump;
use crate::trace::{Trace, TraceError};
use shape::{Shaper, Value};
use source::Source;

/// At most so many bytes of memory are taken for each byte of a hostile file. Real ones take less
/// than one.
pub const BYTES_PER_BYTE: u64 = 48;
/// At most so many bytes of memory are taken besides.
pub const BYTES_AT_LEAST: u64 = 512 << 20;

/// Why an input is not a memory snapshot.
#[derive(Debug, Error)]
#[error("byte {offset}: {cause}")]
pub struct ReadError {
    /// Where in the input (uncompressed, if it was compressed).
    pub offset: u64,
    /// What is wrong there.
    pub cause: Cause,
}

/// What is wrong with an input.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Cause {
    /// Nothing to read.
    #[error("the file is empty")]
    Empty,
    /// The input ends too early.
    #[error("the file is cut: it ends inside {inside}")]
    Truncated {
        /// What was being read.
        inside: &'static str,
    },
    /// The input is a file of another kind.
    #[error("not a memory snapshot: {0}")]
    NotASnapshot(String),
    /// The pickle does something that no plain data needs.
    #[error("the pickle {0}; a memory snapshot is plain data, and nothing else is read")]
    NotPlainData(String),
    /// The pickle breaks the rules of its format.
    #[error("malformed pickle: {0}")]
    Malformed(String),
    /// A value is of the wrong type, negative or too large.
    #[error("{0}")]
    Value(String),
    /// One of the limits on memory is passed.
    #[error("{what} passes the limit of {limit}")]
    TooLarge {
        /// What is too large.
        what: &'static str,
        /// The limit.
        limit: u64,
    },
    /// The input is an allocation trace, and not in order.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The input failed.
    #[error("reading failed: {0}")]
    Read(#[source] io::Error),
}

impl Cause {
    pub(crate) const fn at(self, offset: u64) -> ReadError {
        ReadError {
            offset,
            cause: self,
        }
    }
}

impl Dump {
    /// Reads a memory snapshot: a pickle as `torch.cuda.memory._dump_snapshot` writes it, of any
    /// protocol, or its JSON, or an allocation [`trace`](crate::trace); plain or compressed with gzip.
    ///
    /// # Errors
    ///
    /// [`ReadError`] where the input is something else, cut, hostile, or cannot be read.
    pub fn read(input: impl Read) -> Result<Self, ReadError> {
        Self::read_with_progress(input, |_| {})
    }

    /// As [`read`](Self::read), calling `progress` now and then with the number of bytes read so
    /// far (uncompressed ones, if the input is compressed).
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    pub fn read_with_progress(
        input: impl Read,
        progress: impl FnMut(u64),
    ) -> Result<Self, ReadError> {
        let mut source = Source::new(input, progress);
        let start = source.peek(4)?;
        if start.starts_with(&[0x1f, 0x8b]) {
            let (inner, mut progress) = source.into_parts();
            let decoder = flate2::read::MultiGzDecoder::new(inner);
            let mut source = Source::new(decoder, &mut progress);
            return read_plain(&mut source);
        }
        read_plain(&mut source)
    }
}

/// Whether a text begins with a line of names with commas between them: no pickle does.
fn is_table(start: &[u8]) -> bool {
    let line = start.split(|byte| *byte == b'\n').next().unwrap_or(start);
    let is_name = |byte: &u8| byte.is_ascii_alphanumeric() || b"_ ,\r".contains(byte);
    line.contains(&b',') && line.iter().all(is_name)
}

fn read_plain<R: Read, P: FnMut(u64)>(source: &mut Source<R, P>) -> Result<Dump, ReadError> {
    let start = source.peek(200)?;
    let other = match start {
        [] => return Err(Cause::Empty.at(0)),
        [b'P', b'K', 3 | 5, ..] => Some("it is a zip archive, as torch.save writes"),
        [b'o', b'p', b',', ..] => {
            let trace = Trace::read(source).map_err(|error| Cause::from(error).at(0))?;
            return Ok(Dump::from(&trace));
        }
        [0x1f, 0x8b, ..] => Some("it is compressed twice"),
        [b'<', ..] => Some("it looks like HTML or XML"),
        [b'a'..=b'z' | b'A'..=b'Z', ..] if is_table(start) => {
            Some("it is a table, but not with the header op,id,bytes,stream,phase,label of a trace")
        }
        _ => None,
    };
    if let Some(kind) = other {
        return Err(Cause::NotASnapshot(kind.to_owned()).at(0));
    }
    let mut shaper = Shaper::default();
    let is_json = matches!(start, [b'{' | b'[' | b' ' | b'\n', ..]);
    let value: Value = if is_json {
        json::read(source, &mut shaper)?
    } else {
        pickle::read(source, &mut shaper)?
    };
    assemble::assemble(shaper, value)
}
