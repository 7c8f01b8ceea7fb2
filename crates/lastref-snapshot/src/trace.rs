//! Allocation traces: what a program asked of a device's memory, in the order it asked.
//!
//! A trace is CSV, plain or compressed with gzip (told apart by the first two bytes), with one
//! operation a line:
//!
//! ```text
//! op,id,bytes,stream,phase,label
//! alloc,1,37632,0,init,empty|_ConvNd.__init__:170|Conv2d.__init__:531
//! free,1,0,0,optimizer,
//! ```
//!
//! `id` is unique per allocation. `bytes` is what was requested and `stream` the stream that was
//! current then; on a `free` both are ignored, as is the label: the allocation's are what counts.
//! `phase` and `label` are words for people.
//!
//! # What a [`Trace`] promises
//!
//! 1. Every free names an allocation before it, and no allocation is freed twice.
//! 2. An operation's [`slot`](Operation::slot) is held by no other live allocation, and is less
//!    than [`Trace::peak_live_blocks`].
//! 3. The live bytes never pass `u64::MAX`.
//! 4. Operation `n`, counted from 0, was on line `n + 2`: see [`Trace::line`]. Of a trace made from
//!    a snapshot ([`crate::program`]), that is the line it would have been on.
//!
//! A file that cannot promise this is refused with the line, the id and the label. Nothing a file
//! contains makes the reader take memory without bound: lines, operations and the text of labels
//! are limited ([`MAX_LINE_BYTES`], [`MAX_OPERATIONS`], [`MAX_TEXT_BYTES`]).

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::io::{self, BufRead, BufReader, Read};
use std::sync::Arc;

use csv_core::ReadRecordResult;
use flate2::bufread::MultiGzDecoder;
use thiserror::Error;

/// The longest line a trace may have, its end included.
pub const MAX_LINE_BYTES: u64 = 64 << 10;
/// The most operations a trace may have.
pub const MAX_OPERATIONS: usize = 1 << 24;
/// The most bytes that the distinct labels and phases of a trace may have together.
pub const MAX_TEXT_BYTES: usize = 64 << 20;

const HEADER: [&str; 6] = ["op", "id", "bytes", "stream", "phase", "label"];
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// A checked allocation trace. See the [module](self) for what it promises.
#[derive(Clone, Debug)]
pub struct Trace {
    operations: Vec<Operation>,
    texts: Vec<Arc<str>>,
    streams: Vec<u64>,
    peak_live_bytes: u64,
    peak_live_blocks: usize,
    live_blocks_at_end: usize,
}

/// One operation of a trace.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Operation {
    /// What is done.
    pub kind: OperationKind,
    /// The allocation's name in the file.
    pub id: u64,
    /// A small number that stands for the allocation while it lives, to index a table with.
    pub slot: u32,
    /// Bytes requested; for a free, those of its allocation.
    pub bytes: u64,
    /// The stream of the allocation.
    pub stream: u64,
    label: TextId,
    phase: TextId,
}

/// What an [`Operation`] does.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum OperationKind {
    /// Allocate.
    Alloc,
    /// Free.
    Free,
}

/// The position of a text in `Trace::texts`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct TextId(u32);

impl Trace {
    /// Reads and checks a whole trace.
    ///
    /// # Errors
    ///
    /// [`TraceError`] where the input is no trace, breaks its rules, is cut, or cannot be read.
    pub fn read(input: impl Read) -> Result<Self, TraceError> {
        Self::read_with_progress(input, |_| {})
    }

    /// As [`read`](Self::read), calling `progress` now and then with the number of bytes taken
    /// from `input` so far (compressed ones, if it is).
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    pub fn read_with_progress(
        input: impl Read,
        progress: impl FnMut(u64),
    ) -> Result<Self, TraceError> {
        let mut input = Counted {
            inner: input,
            bytes: 0,
            progress,
        };
        let at_start = |source| TraceError::from_io(1, source);
        let mut head = Vec::with_capacity(GZIP_MAGIC.len());
        input
            .by_ref()
            .take(GZIP_MAGIC.len() as u64)
            .read_to_end(&mut head)
            .map_err(at_start)?;
        let compressed = head == GZIP_MAGIC;
        let input = BufReader::with_capacity(64 << 10, io::Cursor::new(head).chain(input));
        if compressed {
            Builder::default().read(BufReader::new(MultiGzDecoder::new(input)))
        } else {
            Builder::default().read(input)
        }
    }

    /// The operations in program order.
    #[must_use]
    pub fn operations(&self) -> &[Operation] {
        &self.operations
    }

    /// The line of the file that operation `index` was on.
    #[must_use]
    pub const fn line(index: usize) -> u64 {
        index as u64 + 2
    }

    /// The label of the operation's allocation; often `op|autograd node or frame|frame`.
    #[must_use]
    pub fn label(&self, operation: &Operation) -> &str {
        &self.texts[operation.label.0 as usize]
    }

    /// The phase of the program that the operation was in.
    #[must_use]
    pub fn phase(&self, operation: &Operation) -> &str {
        &self.texts[operation.phase.0 as usize]
    }

    /// The streams that occur, in ascending order.
    #[must_use]
    pub fn streams(&self) -> &[u64] {
        &self.streams
    }

    /// The most bytes that were requested and not freed at one moment.
    #[must_use]
    pub const fn peak_live_bytes(&self) -> u64 {
        self.peak_live_bytes
    }

    /// The most allocations that were live at one moment.
    #[must_use]
    pub const fn peak_live_blocks(&self) -> usize {
        self.peak_live_blocks
    }

    /// How many allocations the trace never frees.
    #[must_use]
    pub const fn live_blocks_at_end(&self) -> usize {
        self.live_blocks_at_end
    }
}

/// Why an input is not a trace. Lines are counted from 1.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TraceError {
    /// Nothing to read.
    #[error("the trace is empty, not even a header")]
    Empty,
    /// The first line is not the header.
    #[error("line 1: expected the header \"op,id,bytes,stream,phase,label\", found {found:?}")]
    Header {
        /// The start of what was found.
        found: String,
    },
    /// The input ends inside a line, or inside compressed data.
    #[error("line {line}: the trace is cut in the middle, {reason}")]
    Truncated {
        /// The line that is not whole.
        line: u64,
        /// How one can tell.
        reason: String,
    },
    /// A line does not have six fields of text.
    #[error("line {line}: {reason}")]
    Malformed {
        /// The line.
        line: u64,
        /// What is wrong with it.
        reason: String,
    },
    /// An operation that is neither `alloc` nor `free`.
    #[error("line {line}: unknown op {op:?} for id {id:?}, expected \"alloc\" or \"free\"")]
    UnknownOp {
        /// The line.
        line: u64,
        /// The word found.
        op: String,
        /// The id field, as it stands.
        id: String,
    },
    /// A field that should be a number from 0 to 2^64 - 1, and is not.
    #[error(
        "line {line}: {field} {value:?} of id {id:?}, label {label:?}, is not a whole number from \
         0 to 18446744073709551615"
    )]
    Number {
        /// The line.
        line: u64,
        /// The name of the field.
        field: &'static str,
        /// Its value.
        value: String,
        /// The id field, as it stands.
        id: String,
        /// The label.
        label: String,
    },
    /// An allocation under an id that an earlier one has or had.
    #[error(
        "line {line}: id {id} (label {label:?}) is allocated again, it was allocated on line \
         {first_line}"
    )]
    IdUsedTwice {
        /// The line.
        line: u64,
        /// The id.
        id: u64,
        /// The label of the second allocation.
        label: String,
        /// The line of the first allocation.
        first_line: u64,
    },
    /// A second free of one allocation.
    #[error(
        "line {line}: id {id} (label {label:?}) is freed twice, it was freed on line {first_line}"
    )]
    FreedTwice {
        /// The line.
        line: u64,
        /// The id.
        id: u64,
        /// The label of the allocation.
        label: String,
        /// The line of the first free.
        first_line: u64,
    },
    /// A free without an allocation before it.
    #[error("line {line}: id {id} (label {label:?}) is freed but was never allocated")]
    NeverAllocated {
        /// The line.
        line: u64,
        /// The id.
        id: u64,
        /// The label on the line.
        label: String,
    },
    /// More live bytes than 64 bits count.
    #[error(
        "line {line}: with {bytes} bytes for id {id} (label {label:?}), the live bytes pass 2^64"
    )]
    LiveBytesOverflow {
        /// The line.
        line: u64,
        /// The id.
        id: u64,
        /// The label.
        label: String,
        /// The bytes asked for.
        bytes: u64,
    },
    /// One of the limits on what is kept in memory is passed.
    #[error("line {line}: {what} passes the limit of {limit}")]
    TooLarge {
        /// The line.
        line: u64,
        /// What is too large.
        what: &'static str,
        /// The limit.
        limit: u64,
    },
    /// The input failed.
    #[error("line {line}: reading failed")]
    Read {
        /// The line being read.
        line: u64,
        /// Why.
        source: io::Error,
    },
}

impl TraceError {
    fn from_io(line: u64, source: io::Error) -> Self {
        // What the decoder answers to an end inside the compressed data.
        if source.kind() == io::ErrorKind::UnexpectedEof {
            let reason = "the compressed data ends early".to_owned();
            return Self::Truncated { line, reason };
        }
        Self::Read { line, source }
    }
}

/// Counts what is read through it.
struct Counted<R, P> {
    inner: R,
    bytes: u64,
    progress: P,
}

impl<R: Read, P: FnMut(u64)> Read for Counted<R, P> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.bytes += read as u64;
        (self.progress)(self.bytes);
        Ok(read)
    }
}

/// What became of an id.
struct Allocation {
    /// The index of its alloc among the operations.
    alloc: u32,
    /// The index of its free.
    free: Option<u32>,
}

/// A trace being made.
#[derive(Default)]
pub(crate) struct Builder {
    operations: Vec<Operation>,
    texts: Vec<Arc<str>>,
    text_ids: HashMap<Arc<str>, TextId>,
    text_bytes: usize,
    streams: BTreeSet<u64>,
    allocations: HashMap<u64, Allocation>,
    /// Slots below `peak_live_blocks` that no live allocation has.
    free_slots: Vec<u32>,
    live_bytes: u64,
    peak_live_bytes: u64,
    peak_live_blocks: u32,
}

/// Words for people about an operation.
pub(crate) struct Named<'a> {
    pub(crate) phase: &'a str,
    pub(crate) label: &'a str,
}

/// The six fields of a line, as they stand.
struct Fields<'a> {
    op: &'a str,
    id: &'a str,
    bytes: &'a str,
    stream: &'a str,
    phase: &'a str,
    label: &'a str,
}

impl Builder {
    fn read(mut self, mut input: impl BufRead) -> Result<Trace, TraceError> {
        let mut parser = LineParser::default();
        let mut line = Vec::new();
        for number in 1.. {
            line.clear();
            let length = input
                .by_ref()
                .take(MAX_LINE_BYTES)
                .read_until(b'\n', &mut line)
                .map_err(|source| TraceError::from_io(number, source))?;
            if length == 0 {
                if number == 1 {
                    return Err(TraceError::Empty);
                }
                break;
            }
            // The header is judged first: of a file of another kind, "not a trace" is what helps.
            if number == 1 && !line.starts_with(HEADER[0].as_bytes()) {
                return Err(header_error(&line));
            }
            if line.last() != Some(&b'\n') {
                if length as u64 == MAX_LINE_BYTES {
                    let (what, limit) = ("the line's length in bytes", MAX_LINE_BYTES);
                    return Err(TraceError::TooLarge {
                        line: number,
                        what,
                        limit,
                    });
                }
                let reason = "its last line has no end".to_owned();
                return Err(TraceError::Truncated {
                    line: number,
                    reason,
                });
            }
            let fields = parser.parse(number, &line)?;
            if number == 1 {
                let found = [
                    fields.op,
                    fields.id,
                    fields.bytes,
                    fields.stream,
                    fields.phase,
                    fields.label,
                ];
                if found != HEADER {
                    return Err(header_error(&line));
                }
                continue;
            }
            self.add(number, &fields)?;
        }
        Ok(self.finish())
    }

    pub(crate) fn finish(self) -> Trace {
        Trace {
            operations: self.operations,
            texts: self.texts,
            streams: self.streams.into_iter().collect(),
            peak_live_bytes: self.peak_live_bytes,
            peak_live_blocks: self.peak_live_blocks as usize,
            live_blocks_at_end: self.peak_live_blocks as usize - self.free_slots.len(),
        }
    }

    fn add(&mut self, line: u64, fields: &Fields<'_>) -> Result<(), TraceError> {
        let number = |field, value: &str| {
            // `parse` would take a sign.
            let digits = value.bytes().all(|byte| byte.is_ascii_digit());
            value
                .parse()
                .ok()
                .filter(|_| digits)
                .ok_or_else(|| TraceError::Number {
                    line,
                    field,
                    value: value.to_owned(),
                    id: fields.id.to_owned(),
                    label: fields.label.to_owned(),
                })
        };
        let kind = match fields.op {
            "alloc" => OperationKind::Alloc,
            "free" => OperationKind::Free,
            other => {
                let (op, id) = (other.to_owned(), fields.id.to_owned());
                return Err(TraceError::UnknownOp { line, op, id });
            }
        };
        let id = number("id", fields.id)?;
        let bytes = number("bytes", fields.bytes)?;
        let stream = number("stream", fields.stream)?;
        match kind {
            OperationKind::Alloc => {
                let named = Named {
                    phase: fields.phase,
                    label: fields.label,
                };
                self.alloc(line, id, bytes, stream, &named)
            }
            OperationKind::Free => self.free(line, id, fields.phase, fields.label),
        }
    }

    /// Adds an allocation. `line` is for errors.
    pub(crate) fn alloc(
        &mut self,
        line: u64,
        id: u64,
        bytes: u64,
        stream: u64,
        named: &Named<'_>,
    ) -> Result<(), TraceError> {
        let index = self.next_index(line)?;
        let phase = self.intern(line, named.phase)?;
        let label_id = self.intern(line, named.label)?;
        match self.allocations.entry(id) {
            Entry::Occupied(first) => {
                let first_line = Trace::line(first.get().alloc as usize);
                let label = named.label.to_owned();
                return Err(TraceError::IdUsedTwice {
                    line,
                    id,
                    label,
                    first_line,
                });
            }
            Entry::Vacant(entry) => entry.insert(Allocation {
                alloc: index,
                free: None,
            }),
        };
        self.live_bytes =
            self.live_bytes
                .checked_add(bytes)
                .ok_or_else(|| TraceError::LiveBytesOverflow {
                    line,
                    id,
                    label: named.label.to_owned(),
                    bytes,
                })?;
        self.peak_live_bytes = self.peak_live_bytes.max(self.live_bytes);
        self.streams.insert(stream);
        let slot = self.free_slots.pop().unwrap_or_else(|| {
            self.peak_live_blocks += 1;
            self.peak_live_blocks - 1
        });
        self.operations.push(Operation {
            kind: OperationKind::Alloc,
            id,
            slot,
            bytes,
            stream,
            label: label_id,
            phase,
        });
        Ok(())
    }

    /// Adds a free. The label is for errors, as `line` is.
    pub(crate) fn free(
        &mut self,
        line: u64,
        id: u64,
        phase: &str,
        label: &str,
    ) -> Result<(), TraceError> {
        let index = self.next_index(line)?;
        let phase = self.intern(line, phase)?;
        let Some(allocation) = self.allocations.get_mut(&id) else {
            let label = label.to_owned();
            return Err(TraceError::NeverAllocated { line, id, label });
        };
        let alloc = self.operations[allocation.alloc as usize];
        if let Some(first) = allocation.free {
            let first_line = Trace::line(first as usize);
            let label = self.texts[alloc.label.0 as usize].to_string();
            return Err(TraceError::FreedTwice {
                line,
                id,
                label,
                first_line,
            });
        }
        allocation.free = Some(index);
        self.live_bytes -= alloc.bytes;
        self.free_slots.push(alloc.slot);
        self.operations.push(Operation {
            kind: OperationKind::Free,
            phase,
            ..alloc
        });
        Ok(())
    }

    /// The index of the operation that is added next.
    fn next_index(&self, line: u64) -> Result<u32, TraceError> {
        if self.operations.len() == MAX_OPERATIONS {
            let (what, limit) = ("the number of operations", MAX_OPERATIONS as u64);
            return Err(TraceError::TooLarge { line, what, limit });
        }
        Ok(u32::try_from(self.operations.len()).expect("MAX_OPERATIONS fits in 32 bits"))
    }

    fn intern(&mut self, line: u64, text: &str) -> Result<TextId, TraceError> {
        if let Some(id) = self.text_ids.get(text) {
            return Ok(*id);
        }
        self.text_bytes += text.len();
        if self.text_bytes > MAX_TEXT_BYTES {
            let (what, limit) = ("the text of all labels, in bytes,", MAX_TEXT_BYTES as u64);
            return Err(TraceError::TooLarge { line, what, limit });
        }
        let id = TextId(u32::try_from(self.texts.len()).expect("two texts at most an operation"));
        let text: Arc<str> = text.into();
        self.texts.push(Arc::clone(&text));
        self.text_ids.insert(text, id);
        Ok(id)
    }
}

fn header_error(line: &[u8]) -> TraceError {
    let start = String::from_utf8_lossy(&line[..line.len().min(80)]);
    TraceError::Header {
        found: start.trim_end().to_owned(),
    }
}

/// Takes lines apart, quotes included, into a buffer that is used again.
struct LineParser {
    parser: csv_core::Reader,
    text: Vec<u8>,
    /// Where each field ends in `text`. One more than a line may have, to see that it has.
    ends: [usize; HEADER.len() + 1],
}

impl Default for LineParser {
    fn default() -> Self {
        Self {
            parser: csv_core::Reader::new(),
            // Fields are never longer than the line they come from.
            text: vec![0; usize::try_from(MAX_LINE_BYTES).expect("fits")],
            ends: [0; HEADER.len() + 1],
        }
    }
}

impl LineParser {
    /// Takes apart `line`, whose last byte is the line's end.
    fn parse(&mut self, number: u64, line: &[u8]) -> Result<Fields<'_>, TraceError> {
        let malformed = |reason| TraceError::Malformed {
            line: number,
            reason,
        };
        self.parser.reset();
        let (result, _, _, count) = self
            .parser
            .read_record(line, &mut self.text, &mut self.ends);
        let wrong_count = |found| {
            malformed(format!(
                "{found} fields where 6 are expected: {}",
                HEADER.join(",")
            ))
        };
        match result {
            ReadRecordResult::Record if count == HEADER.len() => {}
            ReadRecordResult::Record => return Err(wrong_count(count.to_string())),
            ReadRecordResult::OutputEndsFull => return Err(wrong_count("7 or more".to_owned())),
            // An empty line is skipped by the parser; else only a quote makes it want another.
            _ if line.trim_ascii().is_empty() => return Err(wrong_count("no".to_owned())),
            _ => {
                return Err(malformed(
                    "a quoted field has no end on the line".to_owned(),
                ));
            }
        }
        let mut start = 0;
        let mut fields = [""; HEADER.len()];
        for ((field, end), name) in fields.iter_mut().zip(self.ends).zip(HEADER) {
            *field = std::str::from_utf8(&self.text[start..end])
                .map_err(|_| malformed(format!("{name} is not UTF-8")))?;
            start = end;
        }
        let [op, id, bytes, stream, phase, label] = fields;
        Ok(Fields {
            op,
            id,
            bytes,
            stream,
            phase,
            label,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    const SMALL: &str = "op,id,bytes,stream,phase,label\n\
        alloc,10,1000,0,init,weight\n\
        alloc,11,24,3,data,batch\n\
        free,10,0,0,step,\n\
        alloc,12,500,0,step,grad\n";

    fn read(text: &str) -> Result<Trace, TraceError> {
        Trace::read(text.as_bytes())
    }

    /// A trace with these lines after the header.
    fn lines(lines: &str) -> Result<Trace, TraceError> {
        read(&format!("op,id,bytes,stream,phase,label\n{lines}"))
    }

    fn message(result: Result<Trace, TraceError>) -> String {
        result.expect_err("the trace must be refused").to_string()
    }

    fn gzip(text: &str) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(text.as_bytes()).unwrap();
        encoder.finish().unwrap()
    }

    /// Gives one byte a call, as a slow pipe may.
    struct Drip<'a>(&'a [u8]);

    impl Read for Drip<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let length = buffer.len().min(1);
            self.0.read(&mut buffer[..length])
        }
    }

    #[test]
    fn operations_carry_what_their_allocation_asked_for() {
        let trace = read(SMALL).unwrap();
        let [first, other, free, last] = trace.operations() else {
            panic!("{trace:?}")
        };
        assert_eq!(
            (first.kind, first.id, first.bytes),
            (OperationKind::Alloc, 10, 1000)
        );
        assert_eq!(
            (free.kind, free.id, free.bytes),
            (OperationKind::Free, 10, 1000)
        );
        assert_eq!(trace.label(free), "weight");
        assert_eq!(trace.phase(free), "step");
        assert_eq!(
            (other.stream, trace.label(other), trace.phase(other)),
            (3, "batch", "data")
        );
        assert_eq!(first.slot, free.slot);
        assert_eq!(last.slot, first.slot, "a slot is used again");
        assert_ne!(other.slot, first.slot);
        assert_eq!(trace.streams(), [0, 3]);
        assert_eq!(trace.peak_live_bytes(), 1024);
        assert_eq!(trace.peak_live_blocks(), 2);
        assert_eq!(trace.live_blocks_at_end(), 2);
    }

    #[test]
    fn gzip_is_told_by_its_first_bytes_however_they_arrive() {
        let plain = read(SMALL).unwrap();
        let mut two_members = gzip(&SMALL[..50]);
        two_members.extend(gzip(&SMALL[50..]));
        for input in [gzip(SMALL), two_members, SMALL.as_bytes().to_vec()] {
            let trace = Trace::read(&*input).unwrap();
            assert_eq!(trace.operations(), plain.operations());
            let trace = Trace::read(Drip(&input)).unwrap();
            assert_eq!(trace.operations(), plain.operations());
        }
    }

    #[test]
    fn progress_counts_the_bytes_of_the_input() {
        let input = gzip(SMALL);
        let mut seen = Vec::new();
        Trace::read_with_progress(Drip(&input), |bytes| seen.push(bytes)).unwrap();
        assert!(seen.is_sorted());
        assert_eq!(seen.last(), Some(&(input.len() as u64)));
    }

    #[test]
    fn quoted_labels_and_windows_line_ends_are_read() {
        let trace = lines("alloc,1,8,0,init,\"a, \"\"b\"\"\"\r\nfree,1,0,0,x,\r\n").unwrap();
        assert_eq!(trace.label(&trace.operations()[0]), "a, \"b\"");
    }

    #[test]
    fn an_empty_input_is_refused() {
        assert!(matches!(read(""), Err(TraceError::Empty)));
        assert!(matches!(Trace::read(&*gzip("")), Err(TraceError::Empty)));
    }

    #[test]
    fn a_missing_or_other_header_is_refused() {
        for text in [
            "alloc,1,8,0,init,x\n",
            "op,id,size,stream,phase,label\n",
            "PK\u{3}\u{4}",
        ] {
            let message = message(read(text));
            assert!(message.contains("expected the header"), "{message}");
            assert!(
                message.contains(&format!("{:?}", text.trim_end())),
                "{message}"
            );
        }
        assert!(matches!(
            read("op,id\n"),
            Err(TraceError::Malformed { line: 1, .. })
        ));
    }

    #[test]
    fn a_header_alone_is_a_trace_without_operations() {
        let trace = lines("").unwrap();
        assert!(trace.operations().is_empty());
        assert_eq!((trace.peak_live_bytes(), trace.peak_live_blocks()), (0, 0));
    }

    #[test]
    fn every_cut_is_noticed_unless_it_falls_between_lines() {
        for cut in 1..SMALL.len() {
            let result = read(&SMALL[..cut]);
            let between = SMALL.as_bytes()[cut - 1] == b'\n';
            assert_eq!(result.is_ok(), between, "cut at {cut}: {result:?}");
            if cut > 30 && !between {
                assert!(
                    message(result).contains("the trace is cut in the middle"),
                    "{cut}"
                );
            }
        }
        let compressed = gzip(SMALL);
        for cut in 2..compressed.len() {
            let result = Trace::read(&compressed[..cut]);
            let text = message(result);
            assert!(
                text.contains("the compressed data ends early"),
                "cut at {cut}: {text}"
            );
        }
    }

    #[test]
    fn damaged_compressed_data_is_refused() {
        let mut compressed = gzip(SMALL);
        let crc = compressed.len() - 8;
        compressed[crc] ^= 1;
        assert!(matches!(
            Trace::read(&*compressed),
            Err(TraceError::Read { .. })
        ));
    }

    #[test]
    fn an_unknown_op_is_refused() {
        assert_eq!(
            message(lines("alloc,1,8,0,a,b\nrealloc,1,16,0,a,b\n")),
            "line 3: unknown op \"realloc\" for id \"1\", expected \"alloc\" or \"free\""
        );
    }

    #[test]
    fn numbers_must_be_whole_and_in_range() {
        for (line, field, value) in [
            ("alloc,1,-5,0,a,lbl", "bytes", "-5"),
            ("alloc,1,+5,0,a,lbl", "bytes", "+5"),
            (
                "alloc,1,18446744073709551616,0,a,lbl",
                "bytes",
                "18446744073709551616",
            ),
            ("alloc,1,,0,a,lbl", "bytes", ""),
            ("alloc,1,1e3,0,a,lbl", "bytes", "1e3"),
            ("alloc,x,8,0,a,lbl", "id", "x"),
            ("alloc,-1,8,0,a,lbl", "id", "-1"),
            ("alloc,1,8,-1,a,lbl", "stream", "-1"),
        ] {
            let text = message(lines(&format!("{line}\n")));
            let start = format!("line 2: {field} {value:?} of id ");
            assert!(
                text.starts_with(&start) && text.contains("\"lbl\""),
                "{line}: {text}"
            );
        }
        assert!(lines("alloc,1,18446744073709551615,0,a,b\n").is_ok());
    }

    #[test]
    fn live_bytes_that_overflow_are_refused() {
        let text = message(lines(
            "alloc,1,18446744073709551615,0,a,huge\nalloc,2,1,0,a,more\n",
        ));
        assert!(
            text.starts_with("line 3: with 1 bytes for id 2 (label \"more\")"),
            "{text}"
        );
    }

    #[test]
    fn an_id_allocated_again_is_refused_even_after_its_free() {
        assert_eq!(
            message(lines(
                "alloc,7,8,0,a,one\nfree,7,0,0,a,\nalloc,7,8,0,a,two\n"
            )),
            "line 4: id 7 (label \"two\") is allocated again, it was allocated on line 2"
        );
    }

    #[test]
    fn a_second_free_is_refused() {
        assert_eq!(
            message(lines("alloc,7,8,0,a,one\nfree,7,0,0,a,\nfree,7,0,0,a,\n")),
            "line 4: id 7 (label \"one\") is freed twice, it was freed on line 3"
        );
    }

    #[test]
    fn a_free_without_an_allocation_is_refused() {
        assert_eq!(
            message(lines("free,9,0,0,a,who\n")),
            "line 2: id 9 (label \"who\") is freed but was never allocated"
        );
    }

    #[test]
    fn lines_with_other_than_six_fields_are_refused() {
        for (line, found) in [
            ("alloc,1,8,0,a", "5"),
            ("", "no"),
            ("alloc,1,8,0,a,b,c", "7"),
        ] {
            let text = message(lines(&format!("{line}\n")));
            let start = format!("line 2: {found}");
            assert!(
                text.starts_with(&start) && text.contains("fields where 6"),
                "{text}"
            );
        }
        assert!(message(lines("alloc,1,8,0,a,b,c,d,e\n")).contains("fields where 6"));
        let text = message(lines("alloc,1,8,0,a,\"open\nfree,1,0,0,a,\"\n"));
        assert_eq!(text, "line 2: a quoted field has no end on the line");
        let invalid = b"op,id,bytes,stream,phase,label\nalloc,1,8,0,a,\xff\n";
        assert_eq!(
            message(Trace::read(&invalid[..])),
            "line 2: label is not UTF-8"
        );
    }

    #[test]
    fn endless_input_is_refused_and_not_kept() {
        let endless = HEADER.join(",") + "\nalloc,1,8,0,a,";
        let input = endless.as_bytes().chain(io::repeat(b'x'));
        let text = message(Trace::read(input));
        assert_eq!(
            text,
            "line 2: the line's length in bytes passes the limit of 65536"
        );
    }

    #[test]
    fn an_input_that_fails_says_so_and_why() {
        struct Broken;
        impl Read for Broken {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                Err(io::Error::other("the disk is gone"))
            }
        }
        let error = Trace::read(SMALL.as_bytes().chain(Broken)).unwrap_err();
        assert!(
            matches!(error, TraceError::Read { line: 6, .. }),
            "{error:?}"
        );
        let source = std::error::Error::source(&error).expect("the cause is kept");
        assert_eq!(source.to_string(), "the disk is gone");
    }
}
