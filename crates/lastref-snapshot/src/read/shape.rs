//! Plain values become rows: what a dict or a list of a snapshot is, told by its keys.
//!
//! Both readers (pickle, JSON) hand containers over as they end, innermost first, so that the
//! values inside one are never containers still to be looked at. There is no recursion here.

use std::fmt::Write as _;

use super::Cause;
use crate::dump::{
    Action, Block, Entry, Frame, FrameId, Notes, NotesId, PoolId, StackId, Tables, TextId,
};
use crate::snapshot::{BlockState, SegmentKind};

/// A value, in 16 bytes. Containers are numbers of rows.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Value {
    /// Nothing, not even `None`: a place of the memo that is not set.
    Hole,
    None,
    Bool(bool),
    Int(i64),
    /// A whole number beyond `i64::MAX`.
    UInt(u64),
    /// A whole number that does not fit in 64 bits.
    Huge,
    Float(f64),
    Text(TextId),
    /// Bytes, which are not kept.
    Bytes,
    /// A container of the pickle reader that is not finished.
    Open(u32),
    Frame(FrameId),
    Stack(StackId),
    /// A pair of whole numbers.
    Pool(PoolId),
    /// What a block of an old snapshot was used for.
    Past(u32),
    Entry(u32),
    Block(u32),
    Segment(u32),
    /// A list of entries, blocks or segments.
    Rows(u32),
    EmptyList,
    /// Any other list or tuple.
    List(u32),
    /// Any other dict.
    Dict(u32),
}

macro_rules! known_texts {
    ($($name:ident = $text:literal,)*) => {
        /// Texts that have fixed ids, from 1.
        const KNOWN: &[&str] = &[$($text),*];
        /// The ids of [`KNOWN`], in its order.
        pub(super) mod known {
            use crate::dump::TextId;
            known_texts!(@each 1u32; $($name,)*);
        }
    };
    (@each $id:expr; $name:ident, $($rest:ident,)*) => {
        pub(in crate::read) const $name: TextId = TextId($id);
        known_texts!(@each $id + 1; $($rest,)*);
    };
    (@each $id:expr;) => {};
}

known_texts! {
    ACTION = "action",
    ADDR = "addr",
    SIZE = "size",
    STREAM = "stream",
    TIME_US = "time_us",
    FRAMES = "frames",
    COMPILE_CONTEXT = "compile_context",
    USER_METADATA = "user_metadata",
    POOL_ID = "pool_id",
    DEVICE_FREE = "device_free",
    FORWARD_FRAMES = "forward_frames",
    CATEGORY = "category",
    ADDRESS = "address",
    REQUESTED_SIZE = "requested_size",
    STATE = "state",
    HISTORY = "history",
    REAL_SIZE = "real_size",
    DEVICE = "device",
    TOTAL_SIZE = "total_size",
    ALLOCATED_SIZE = "allocated_size",
    ACTIVE_SIZE = "active_size",
    SEGMENT_TYPE = "segment_type",
    SEGMENT_POOL_ID = "segment_pool_id",
    IS_EXPANDABLE = "is_expandable",
    BLOCKS = "blocks",
    FILENAME = "filename",
    NAME = "name",
    LINE = "line",
    // Above, those that tell what a dict is: their ids are less than 64.
    ALLOC = "alloc",
    FREE_REQUESTED = "free_requested",
    FREE_COMPLETED = "free_completed",
    FREE = "free",
    SEGMENT_ALLOC = "segment_alloc",
    SEGMENT_FREE = "segment_free",
    SEGMENT_MAP = "segment_map",
    SEGMENT_UNMAP = "segment_unmap",
    SNAPSHOT = "snapshot",
    OOM = "oom",
    ANNOTATE = "annotate",
    ACTIVE_ALLOCATED = "active_allocated",
    ACTIVE_PENDING_FREE = "active_pending_free",
    ACTIVE_AWAITING_FREE = "active_awaiting_free",
    INACTIVE = "inactive",
    SMALL = "small",
    LARGE = "large",
    SEGMENTS = "segments",
    DEVICE_TRACES = "device_traces",
    ALLOCATOR_SETTINGS = "allocator_settings",
    EXTERNAL_ANNOTATIONS = "external_annotations",
    HOST_SEGMENTS = "host_segments",
    STAGE = "stage",
}

/// A segment whose blocks are still a list.
#[derive(Clone, Copy, Debug)]
pub(super) struct RawSegment {
    pub(super) device: u32,
    pub(super) address: Option<u64>,
    pub(super) total_bytes: Option<u64>,
    pub(super) allocated_bytes: Option<u64>,
    pub(super) active_bytes: Option<u64>,
    pub(super) stream: u64,
    pub(super) kind: Option<SegmentKind>,
    pub(super) pool: PoolId,
    pub(super) is_expandable: bool,
    pub(super) stack: StackId,
    pub(super) blocks: Value,
}

/// The address of a block that the file gives none for.
pub(super) const NO_ADDRESS: u64 = u64::MAX;

/// Which rows a list has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RowKind {
    Entry,
    Block,
    Segment,
}

/// A list of rows, each named once.
#[derive(Debug)]
pub(super) struct RowList {
    pub(super) kind: RowKind,
    pub(super) start: u32,
    pub(super) len: u32,
    /// The rows, if they do not follow each other from `start`.
    pub(super) scattered: Option<Box<[u32]>>,
}

/// Everything read so far.
#[derive(Debug)]
pub(super) struct Shaper {
    pub(super) tables: Tables,
    pub(super) entries: Vec<Entry>,
    pub(super) blocks: Vec<Block>,
    pub(super) segments: Vec<RawSegment>,
    pasts: Vec<(u64, StackId)>,
    pub(super) rows: Vec<RowList>,
    lists: Vec<Box<[Value]>>,
    dicts: Vec<Box<[(Value, Value)]>>,
    frames: Vec<FrameId>,
}

impl Default for Shaper {
    fn default() -> Self {
        let mut tables = Tables::default();
        for (id, text) in (1..).zip(KNOWN) {
            let found = tables.text(text);
            debug_assert_eq!(found, Some(TextId(id)), "{text}");
        }
        Self {
            tables,
            entries: Vec::new(),
            blocks: Vec::new(),
            segments: Vec::new(),
            pasts: Vec::new(),
            rows: Vec::new(),
            lists: Vec::new(),
            dicts: Vec::new(),
            frames: Vec::new(),
        }
    }
}

fn too_large(what: &'static str) -> Cause {
    Cause::TooLarge {
        what,
        limit: u64::from(u32::MAX),
    }
}

/// The number of the next row of `rows`.
fn next<T>(rows: &[T], what: &'static str) -> Result<u32, Cause> {
    u32::try_from(rows.len()).map_err(|_| too_large(what))
}

impl Shaper {
    pub(super) fn text(&mut self, text: &str) -> Result<Value, Cause> {
        let id = self.tables.text(text);
        id.map(Value::Text)
            .ok_or_else(|| too_large("the number of texts"))
    }

    pub(super) fn dict_items(&self, dict: u32) -> &[(Value, Value)] {
        &self.dicts[dict as usize]
    }

    pub(super) fn list_items(&self, list: u32) -> &[Value] {
        &self.lists[list as usize]
    }

    /// What a dict is.
    pub(super) fn dict(&mut self, pairs: &[(Value, Value)]) -> Result<Value, Cause> {
        let mut seen = 0u64;
        for (key, _) in pairs {
            if let Value::Text(TextId(id @ 1..64)) = key {
                seen |= 1 << id;
            }
        }
        let has = |key: TextId| seen & (1 << key.0) != 0;
        if has(known::ACTION) {
            self.entry(pairs)
        } else if has(known::FILENAME) && (has(known::NAME) || has(known::LINE)) {
            self.frame(pairs)
        } else if has(known::BLOCKS) && (has(known::TOTAL_SIZE) || has(known::ADDRESS)) {
            self.segment(pairs)
        } else if has(known::STATE) && has(known::SIZE) {
            self.block(pairs)
        } else if has(known::REAL_SIZE) {
            self.past(pairs)
        } else {
            let index = next(&self.dicts, "the number of dicts")?;
            self.dicts.push(pairs.into());
            Ok(Value::Dict(index))
        }
    }

    /// What a list or tuple is.
    pub(super) fn list(&mut self, items: &[Value]) -> Result<Value, Cause> {
        match items {
            [] => return Ok(Value::EmptyList),
            [Value::Frame(_), ..] => {
                self.frames.clear();
                self.frames
                    .extend(items.iter().map_while(|item| match item {
                        Value::Frame(frame) => Some(*frame),
                        _ => None,
                    }));
                if self.frames.len() == items.len() {
                    let stack = self.tables.stack(&self.frames);
                    let stack = stack.ok_or_else(|| too_large("the number of stacks"))?;
                    return Ok(Value::Stack(stack));
                }
            }
            [Value::Past(first), ..] => {
                let stack = self.pasts[*first as usize].1;
                let mut bytes = Some(0u64);
                for item in items {
                    bytes = match item {
                        Value::Past(past) => {
                            bytes.and_then(|sum| sum.checked_add(self.pasts[*past as usize].0))
                        }
                        _ => None,
                    };
                }
                if let Some(bytes) = bytes {
                    let index = next(&self.pasts, "the number of blocks")?;
                    self.pasts.push((bytes, stack));
                    return Ok(Value::Past(index));
                }
            }
            [Value::Entry(_) | Value::Block(_) | Value::Segment(_), ..] => {
                if let Some(rows) = row_list(items) {
                    let index = next(&self.rows, "the number of lists")?;
                    self.rows.push(rows);
                    return Ok(Value::Rows(index));
                }
            }
            [first, second] => {
                if let (Some(first), Some(second)) = (unsigned(*first), unsigned(*second)) {
                    let pool = self.tables.pool((first, second));
                    let pool = pool.ok_or_else(|| too_large("the number of pools"))?;
                    return Ok(Value::Pool(pool));
                }
            }
            _ => {}
        }
        let index = next(&self.lists, "the number of lists")?;
        self.lists.push(items.into());
        Ok(Value::List(index))
    }

    fn entry(&mut self, pairs: &[(Value, Value)]) -> Result<Value, Cause> {
        let of = |key| Field {
            of: "a trace entry",
            key,
        };
        let mut entry = Entry {
            address: 0,
            bytes: 0,
            time_us: 0,
            stream: 0,
            stack: StackId(0),
            pool: PoolId(0),
            notes: NotesId(0),
            action: Action::Other,
        };
        let mut notes = Notes::default();
        for (key, value) in pairs {
            let Value::Text(key) = *key else { continue };
            let value = *value;
            match key {
                known::ACTION => {
                    let word = self.words(of("action"), value)?;
                    entry.action = match word {
                        known::ALLOC => Action::Alloc,
                        known::FREE_REQUESTED => Action::FreeRequested,
                        known::FREE_COMPLETED | known::FREE => Action::FreeCompleted,
                        known::SEGMENT_ALLOC => Action::SegmentAlloc,
                        known::SEGMENT_FREE => Action::SegmentFree,
                        known::SEGMENT_MAP => Action::SegmentMap,
                        known::SEGMENT_UNMAP => Action::SegmentUnmap,
                        known::SNAPSHOT => Action::Snapshot,
                        known::OOM => Action::Oom,
                        known::ANNOTATE => Action::Annotate,
                        other => {
                            notes.unknown_action = other;
                            Action::Other
                        }
                    };
                }
                known::ADDR => entry.address = self.size(of("addr"), value)?,
                known::DEVICE_FREE => entry.address = self.size(of("device_free"), value)?,
                known::SIZE => entry.bytes = self.size(of("size"), value)?,
                known::STREAM => entry.stream = self.stream(of("stream"), value)?,
                known::TIME_US => entry.time_us = self.optional(of("time_us"), value)?.unwrap_or(0),
                known::FRAMES => entry.stack = self.stack(of("frames"), value)?,
                known::POOL_ID | known::SEGMENT_POOL_ID => {
                    entry.pool = self.pool(of("pool_id"), value)?;
                }
                known::COMPILE_CONTEXT => {
                    notes.compile_context = self.words(of("compile_context"), value)?;
                }
                known::USER_METADATA => {
                    notes.user_metadata = self.words(of("user_metadata"), value)?;
                }
                known::FORWARD_FRAMES => {
                    notes.forward_stack = self.stack(of("forward_frames"), value)?;
                }
                known::CATEGORY => notes.category = self.words(of("category"), value)?,
                _ => {}
            }
        }
        let notes = self.tables.notes(notes);
        entry.notes = notes.ok_or_else(|| too_large("the number of distinct notes"))?;
        let index = next(&self.entries, "the number of trace entries")?;
        self.entries.push(entry);
        Ok(Value::Entry(index))
    }

    fn block(&mut self, pairs: &[(Value, Value)]) -> Result<Value, Cause> {
        let of = |key| Field { of: "a block", key };
        let mut block = Block {
            address: NO_ADDRESS,
            bytes: 0,
            requested_bytes: 0,
            stack: StackId(0),
            state: BlockState::Inactive,
        };
        let (mut requested, mut past) = (None, None);
        for (key, value) in pairs {
            let Value::Text(key) = *key else { continue };
            let value = *value;
            match key {
                known::ADDRESS => block.address = self.size(of("address"), value)?,
                known::SIZE => block.bytes = self.size(of("size"), value)?,
                known::REQUESTED_SIZE => {
                    requested = self.optional(of("requested_size"), value)?;
                }
                known::FRAMES => block.stack = self.stack(of("frames"), value)?,
                known::HISTORY => match value {
                    Value::Past(index) => past = Some(self.pasts[index as usize]),
                    Value::EmptyList | Value::None => {}
                    other => return Err(self.wrong(of("history"), other, "a list")),
                },
                known::STATE => {
                    let word = self.words(of("state"), value)?;
                    block.state = match word {
                        known::ACTIVE_ALLOCATED => BlockState::ActiveAllocated,
                        known::ACTIVE_PENDING_FREE | known::ACTIVE_AWAITING_FREE => {
                            BlockState::ActivePendingFree
                        }
                        known::INACTIVE => BlockState::Inactive,
                        _ => {
                            let wanted = "active_allocated, active_pending_free or inactive";
                            return Err(self.wrong(of("state"), value, wanted));
                        }
                    };
                }
                _ => {}
            }
        }
        if let Some((_, stack)) = past
            && !block.stack.is_some()
        {
            block.stack = stack;
        }
        block.requested_bytes = requested
            .or_else(|| past.map(|(bytes, _)| bytes))
            .unwrap_or(block.bytes);
        let index = next(&self.blocks, "the number of blocks")?;
        self.blocks.push(block);
        Ok(Value::Block(index))
    }

    fn segment(&mut self, pairs: &[(Value, Value)]) -> Result<Value, Cause> {
        let of = |key| Field {
            of: "a segment",
            key,
        };
        let mut segment = RawSegment {
            device: 0,
            address: None,
            total_bytes: None,
            allocated_bytes: None,
            active_bytes: None,
            stream: 0,
            kind: None,
            pool: PoolId(0),
            is_expandable: false,
            stack: StackId(0),
            blocks: Value::EmptyList,
        };
        for (key, value) in pairs {
            let Value::Text(key) = *key else { continue };
            let value = *value;
            match key {
                known::DEVICE => segment.device = self.device(of("device"), value)?,
                known::ADDRESS => segment.address = Some(self.size(of("address"), value)?),
                known::TOTAL_SIZE => {
                    segment.total_bytes = Some(self.size(of("total_size"), value)?);
                }
                known::ALLOCATED_SIZE => {
                    segment.allocated_bytes = self.optional(of("allocated_size"), value)?;
                }
                known::ACTIVE_SIZE => {
                    segment.active_bytes = self.optional(of("active_size"), value)?;
                }
                known::STREAM => segment.stream = self.stream(of("stream"), value)?,
                known::SEGMENT_TYPE => {
                    segment.kind = match value {
                        Value::Text(known::SMALL) => Some(SegmentKind::Small),
                        Value::Text(known::LARGE) => Some(SegmentKind::Large),
                        Value::Text(_) | Value::None => None,
                        other => return Err(self.wrong(of("segment_type"), other, "a text")),
                    };
                }
                known::SEGMENT_POOL_ID | known::POOL_ID => {
                    segment.pool = self.pool(of("segment_pool_id"), value)?;
                }
                known::IS_EXPANDABLE => {
                    segment.is_expandable = match value {
                        Value::Bool(value) => value,
                        Value::None => false,
                        other => {
                            return Err(self.wrong(of("is_expandable"), other, "True or False"));
                        }
                    };
                }
                known::FRAMES => segment.stack = self.stack(of("frames"), value)?,
                known::BLOCKS => {
                    segment.blocks = match value {
                        Value::EmptyList => value,
                        Value::Rows(list) if self.rows[list as usize].kind == RowKind::Block => {
                            value
                        }
                        other => return Err(self.wrong(of("blocks"), other, "a list of blocks")),
                    };
                }
                _ => {}
            }
        }
        if segment.address.is_none() && segment.total_bytes.is_none() {
            return Err(Cause::Value(
                "a segment has no address and no size".to_owned(),
            ));
        }
        let index = next(&self.segments, "the number of segments")?;
        self.segments.push(segment);
        Ok(Value::Segment(index))
    }

    fn frame(&mut self, pairs: &[(Value, Value)]) -> Result<Value, Cause> {
        let of = |key| Field { of: "a frame", key };
        let mut frame = Frame {
            name: TextId(0),
            file: TextId(0),
            line: 0,
        };
        for (key, value) in pairs {
            match (key, *value) {
                (Value::Text(known::NAME), value) => frame.name = self.words(of("name"), value)?,
                (Value::Text(known::FILENAME), value) => {
                    frame.file = self.words(of("filename"), value)?;
                }
                // A line that is not known may be None or negative.
                (Value::Text(known::LINE), Value::Int(line)) => {
                    frame.line = u32::try_from(line).unwrap_or(0);
                }
                (Value::Text(known::LINE), Value::None) => {}
                (Value::Text(known::LINE), other) => {
                    return Err(self.wrong(of("line"), other, "a whole number"));
                }
                _ => {}
            }
        }
        let frame = self.tables.frame(frame);
        let frame = frame.ok_or_else(|| too_large("the number of frames"))?;
        Ok(Value::Frame(frame))
    }

    fn past(&mut self, pairs: &[(Value, Value)]) -> Result<Value, Cause> {
        let of = |key| Field {
            of: "a block's history",
            key,
        };
        let (mut bytes, mut stack) = (0, StackId(0));
        for (key, value) in pairs {
            match key {
                Value::Text(known::REAL_SIZE) => bytes = self.size(of("real_size"), *value)?,
                Value::Text(known::FRAMES) => stack = self.stack(of("frames"), *value)?,
                _ => {}
            }
        }
        let index = next(&self.pasts, "the number of blocks")?;
        self.pasts.push((bytes, stack));
        Ok(Value::Past(index))
    }

    /// A number of bytes, or an address.
    pub(super) fn size(&self, field: Field, value: Value) -> Result<u64, Cause> {
        unsigned(value).ok_or_else(|| self.wrong(field, value, "a whole number"))
    }

    fn optional(&self, field: Field, value: Value) -> Result<Option<u64>, Cause> {
        match value {
            Value::None => Ok(None),
            value => self.size(field, value).map(Some),
        }
    }

    pub(super) fn device(&self, field: Field, value: Value) -> Result<u32, Cause> {
        let device = unsigned(value).and_then(|device| u32::try_from(device).ok());
        device.ok_or_else(|| self.wrong(field, value, "the index of a device"))
    }

    /// A stream's handle: a pointer, which some write as a signed number.
    fn stream(&self, field: Field, value: Value) -> Result<u64, Cause> {
        match value {
            Value::Int(handle) => Ok(handle.cast_unsigned()),
            Value::None => Ok(0),
            value => self.size(field, value),
        }
    }

    fn stack(&self, field: Field, value: Value) -> Result<StackId, Cause> {
        match value {
            Value::Stack(stack) => Ok(stack),
            Value::EmptyList | Value::None => Ok(StackId(0)),
            other => Err(self.wrong(field, other, "a list of frames")),
        }
    }

    fn pool(&self, field: Field, value: Value) -> Result<PoolId, Cause> {
        match value {
            Value::Pool(pool) => Ok(pool),
            Value::None | Value::EmptyList => Ok(PoolId(0)),
            other => Err(self.wrong(field, other, "a pair of whole numbers")),
        }
    }

    fn words(&self, field: Field, value: Value) -> Result<TextId, Cause> {
        match value {
            Value::Text(text) => Ok(text),
            Value::None => Ok(TextId(0)),
            other => Err(self.wrong(field, other, "a text")),
        }
    }

    fn wrong(&self, field: Field, value: Value, wanted: &str) -> Cause {
        let Field { of, key } = field;
        let found = self.describe(value);
        Cause::Value(format!("{key:?} of {of} is {found}, expected {wanted}"))
    }

    /// A value, for an error message.
    pub(super) fn describe(&self, value: Value) -> String {
        match value {
            Value::Hole => "nothing".to_owned(),
            Value::None => "None".to_owned(),
            Value::Bool(true) => "True".to_owned(),
            Value::Bool(false) => "False".to_owned(),
            Value::Int(number) => number.to_string(),
            Value::UInt(number) => number.to_string(),
            Value::Huge => "a number of more than 64 bits".to_owned(),
            Value::Float(number) => format!("{number:?}"),
            Value::Text(text) => {
                let text = self.tables.texts.get(text.0);
                let mut shown = String::new();
                // Writing to a string does not fail.
                let _ = write!(shown, "{:?}", text.chars().take(60).collect::<String>());
                shown
            }
            Value::Bytes => "bytes".to_owned(),
            Value::Open(_) => "an unfinished container".to_owned(),
            Value::Frame(_) => "a frame".to_owned(),
            Value::Stack(_) => "a list of frames".to_owned(),
            Value::Pool(_) => "a pair of numbers".to_owned(),
            Value::Past(_) => "the history of a block".to_owned(),
            Value::Entry(_) => "a trace entry".to_owned(),
            Value::Block(_) => "a block".to_owned(),
            Value::Segment(_) => "a segment".to_owned(),
            Value::Rows(rows) => match self.rows[rows as usize].kind {
                RowKind::Entry => "a list of trace entries".to_owned(),
                RowKind::Block => "a list of blocks".to_owned(),
                RowKind::Segment => "a list of segments".to_owned(),
            },
            Value::EmptyList => "an empty list".to_owned(),
            Value::List(_) => "a list".to_owned(),
            Value::Dict(_) => "a dict".to_owned(),
        }
    }
}

/// Which value of which dict, for error messages.
#[derive(Clone, Copy)]
pub(super) struct Field {
    pub(super) of: &'static str,
    pub(super) key: &'static str,
}

fn unsigned(value: Value) -> Option<u64> {
    match value {
        Value::Int(number) => u64::try_from(number).ok(),
        Value::UInt(number) => Some(number),
        _ => None,
    }
}

/// The rows that `items` are, if they are all of one kind.
fn row_list(items: &[Value]) -> Option<RowList> {
    let row = |item: &Value| match *item {
        Value::Entry(row) => Some((RowKind::Entry, row)),
        Value::Block(row) => Some((RowKind::Block, row)),
        Value::Segment(row) => Some((RowKind::Segment, row)),
        _ => None,
    };
    let (kind, start) = row(items.first()?)?;
    let len = u32::try_from(items.len()).ok()?;
    let mut follow = true;
    for (offset, item) in (0u64..).zip(items) {
        let (found, index) = row(item)?;
        if found != kind {
            return None;
        }
        follow &= u64::from(index) == u64::from(start) + offset;
    }
    let scattered = (!follow).then(|| {
        let rows = items.iter().filter_map(|item| Some(row(item)?.1));
        rows.collect()
    });
    Some(RowList {
        kind,
        start,
        len,
        scattered,
    })
}
