//! The rows of a file, in the order and under the invariants of a [`Dump`].

use super::shape::{Field, NO_ADDRESS, RawSegment, RowKind, Shaper, Value, known};
use super::{Cause, ReadError};
use crate::dump::{
    Action, Annotation, Block, Dump, Entry, History, Segment, Setting, Settings, TextId,
};

/// Settings are shown, not worked with: what is nested deeper or longer is not a setting.
const MAX_SETTINGS: usize = 4096;
/// A machine has fewer devices.
const MAX_DEVICES: usize = 4096;
/// Problems of one kind are listed up to here.
const MAX_PROBLEMS: usize = 20;

fn not_a_snapshot(what: impl Into<String>) -> ReadError {
    Cause::NotASnapshot(what.into()).at(0)
}

/// Makes a dump of what a file holds: `top` is the outermost value.
pub(super) fn assemble(mut shaper: Shaper, top: Value) -> Result<Dump, ReadError> {
    let mut parts = Parts {
        segments: top,
        traces: Value::None,
        settings: Value::None,
        annotations: Value::None,
        host_segments: Value::None,
    };
    match top {
        Value::Rows(_) | Value::EmptyList => {}
        Value::Dict(dict) => {
            parts.segments = Value::Hole;
            for (key, value) in shaper.dict_items(dict) {
                match key {
                    Value::Text(known::SEGMENTS) => parts.segments = *value,
                    Value::Text(known::DEVICE_TRACES) => parts.traces = *value,
                    Value::Text(known::ALLOCATOR_SETTINGS) => parts.settings = *value,
                    Value::Text(known::EXTERNAL_ANNOTATIONS) => parts.annotations = *value,
                    Value::Text(known::HOST_SEGMENTS) => parts.host_segments = *value,
                    _ => {}
                }
            }
            if parts.segments == Value::Hole {
                return Err(not_a_snapshot("it is a dict without \"segments\""));
            }
        }
        other => {
            let what = format!("it holds {}", shaper.describe(other));
            return Err(not_a_snapshot(what));
        }
    }
    let mut dump = Dump::default();
    segments(&mut shaper, parts.segments, &mut dump)?;
    histories(&mut shaper, parts.traces, &mut dump)?;
    dump.settings = settings(&shaper, parts.settings)?;
    dump.annotations = annotations(&shaper, parts.annotations)?;
    dump.host_bytes = host_bytes(&shaper, parts.host_segments)?;
    dump.tables = shaper.tables;
    check(&mut dump);
    Ok(dump)
}

/// The values under the known keys.
struct Parts {
    segments: Value,
    traces: Value,
    settings: Value,
    annotations: Value,
    host_segments: Value,
}

/// The rows of a list, or why it is not one.
fn rows(shaper: &Shaper, value: Value, kind: RowKind, what: &str) -> Result<Vec<u32>, ReadError> {
    match value {
        Value::EmptyList | Value::None => Ok(Vec::new()),
        Value::Rows(list) if shaper.rows[list as usize].kind == kind => {
            let list = &shaper.rows[list as usize];
            Ok(match &list.scattered {
                Some(rows) => rows.to_vec(),
                None => (list.start..list.start + list.len).collect(),
            })
        }
        other => {
            let found = shaper.describe(other);
            Err(not_a_snapshot(format!("{what} is {found}")))
        }
    }
}

fn segments(shaper: &mut Shaper, value: Value, dump: &mut Dump) -> Result<(), ReadError> {
    let rows_of_segments = rows(shaper, value, RowKind::Segment, "\"segments\"")?;
    let mut order: Vec<(RawSegment, u64)> = Vec::with_capacity(rows_of_segments.len());
    let mut taken = vec![false; shaper.rows.len()];
    let mut total = 0u64;
    for row in rows_of_segments {
        let raw = shaper.segments[row as usize];
        if let Value::Rows(list) = raw.blocks
            && std::mem::replace(&mut taken[list as usize], true)
        {
            let what = "two segments have the same list of blocks".to_owned();
            return Err(Cause::Value(what).at(0));
        }
        let sums = match raw.blocks {
            Value::Rows(list) => sums_of_blocks(shaper, list),
            _ => Some((0, 0)),
        };
        let bytes = sums.and_then(|(sum, most)| {
            let bytes = raw.total_bytes.unwrap_or(sum);
            total = total.checked_add(bytes.max(most))?;
            raw.address.unwrap_or(0).checked_add(bytes.max(sum))?;
            Some(bytes)
        });
        let bytes = bytes
            .ok_or_else(|| Cause::Value("the sizes of the segments pass 2^64".to_owned()).at(0))?;
        order.push((raw, bytes));
    }
    order.sort_by_key(|(raw, _)| (raw.device, raw.address));
    dump.blocks.reserve(shaper.blocks.len());
    for (raw, total_bytes) in order {
        let start = dump.blocks.len();
        let address = match (raw.address, raw.blocks) {
            (Some(address), _) => address,
            (None, Value::Rows(list)) => {
                let first = shaper.blocks[first_row(shaper, list) as usize].address;
                if first == NO_ADDRESS { 0 } else { first }
            }
            _ => 0,
        };
        if let Value::Rows(list) = raw.blocks {
            let list = &shaper.rows[list as usize];
            match &list.scattered {
                None => {
                    let rows = list.start as usize..(list.start + list.len) as usize;
                    dump.blocks.extend_from_slice(&shaper.blocks[rows]);
                }
                Some(rows) => {
                    let rows = rows.iter().map(|row| shaper.blocks[*row as usize]);
                    dump.blocks.extend(rows);
                }
            }
        }
        let mut next = address;
        for block in &mut dump.blocks[start..] {
            if block.address == NO_ADDRESS {
                block.address = next;
            }
            next = block.address.saturating_add(block.bytes);
        }
        dump.segments.push(Segment {
            device: raw.device,
            address,
            total_bytes,
            allocated_bytes: raw.allocated_bytes,
            active_bytes: raw.active_bytes,
            stream: raw.stream,
            kind: raw.kind,
            pool: raw.pool,
            is_expandable: raw.is_expandable,
            stack: raw.stack,
            blocks: start..dump.blocks.len(),
        });
    }
    shaper.blocks = Vec::new();
    Ok(())
}

fn first_row(shaper: &Shaper, list: u32) -> u32 {
    shaper.rows[list as usize].start
}

/// The sums of the sizes, and of the larger of size and requested size, of some blocks.
fn sums_of_blocks(shaper: &Shaper, list: u32) -> Option<(u64, u64)> {
    let list = &shaper.rows[list as usize];
    let add = |(sum, most): (u64, u64), block: &Block| {
        let sum = sum.checked_add(block.bytes)?;
        Some((
            sum,
            most.checked_add(block.bytes.max(block.requested_bytes))?,
        ))
    };
    match &list.scattered {
        None => shaper.blocks[list.start as usize..(list.start + list.len) as usize]
            .iter()
            .try_fold((0, 0), add),
        Some(rows) => rows
            .iter()
            .map(|row| &shaper.blocks[*row as usize])
            .try_fold((0, 0), add),
    }
}

fn histories(shaper: &mut Shaper, value: Value, dump: &mut Dump) -> Result<(), ReadError> {
    let lists: &[Value] = match value {
        Value::None | Value::EmptyList => &[],
        Value::List(list) => shaper.list_items(list),
        // One flat history, as some write it.
        Value::Rows(_) => std::slice::from_ref(&value),
        other => {
            let what = format!("\"device_traces\" is {}", shaper.describe(other));
            return Err(not_a_snapshot(what));
        }
    };
    if lists.len() > MAX_DEVICES {
        let (what, limit) = ("the number of devices", MAX_DEVICES as u64);
        return Err(Cause::TooLarge { what, limit }.at(0));
    }
    let mut taken = vec![false; shaper.rows.len()];
    let mut scattered: Vec<Entry> = Vec::new();
    let mut later: Vec<usize> = Vec::new();
    let mut found: Vec<History> = Vec::new();
    for (device, list) in (0..).zip(lists) {
        let rows = match list {
            Value::EmptyList | Value::None => continue,
            Value::Rows(list) if shaper.rows[*list as usize].kind == RowKind::Entry => {
                if std::mem::replace(&mut taken[*list as usize], true) {
                    let what = "two devices have the same list of trace entries".to_owned();
                    return Err(Cause::Value(what).at(0));
                }
                &shaper.rows[*list as usize]
            }
            other => {
                let found = shaper.describe(*other);
                let what = format!("the history of device {device} is {found}");
                return Err(not_a_snapshot(what));
            }
        };
        let entries = match &rows.scattered {
            None => rows.start as usize..(rows.start + rows.len) as usize,
            Some(rows) => {
                let start = scattered.len();
                let entries = rows.iter().map(|row| shaper.entries[*row as usize]);
                scattered.extend(entries);
                later.push(found.len());
                start..scattered.len()
            }
        };
        found.push(History { device, entries });
    }
    dump.entries = std::mem::take(&mut shaper.entries);
    // Histories whose entries were not in one piece follow those that were.
    let base = dump.entries.len();
    for index in later {
        let entries = &mut found[index].entries;
        *entries = entries.start + base..entries.end + base;
    }
    dump.entries.append(&mut scattered);
    dump.histories = found;
    Ok(())
}

fn settings(shaper: &Shaper, value: Value) -> Result<Settings, ReadError> {
    let pairs = match value {
        Value::None | Value::EmptyList => &[][..],
        Value::Dict(dict) => shaper.dict_items(dict),
        other => {
            let what = format!("\"allocator_settings\" is {}", shaper.describe(other));
            return Err(not_a_snapshot(what));
        }
    };
    let mut left = MAX_SETTINGS;
    let mut found = Vec::new();
    for (key, value) in pairs {
        let value = match value {
            Value::Dict(dict) => {
                let inner = shaper.dict_items(*dict);
                left = left.checked_sub(inner.len()).ok_or_else(too_many)?;
                let inner = inner
                    .iter()
                    .map(|(key, value)| (name(shaper, *key), setting(shaper, *value)));
                Setting::Map(Settings(inner.collect()))
            }
            value => setting(shaper, *value),
        };
        left = left.checked_sub(1).ok_or_else(too_many)?;
        found.push((name(shaper, *key), value));
    }
    Ok(Settings(found))
}

fn too_many() -> ReadError {
    let (what, limit) = ("the number of settings", MAX_SETTINGS as u64);
    Cause::TooLarge { what, limit }.at(0)
}

fn name(shaper: &Shaper, key: Value) -> String {
    match key {
        Value::Text(text) => shaper.tables.texts.get(text.0).to_owned(),
        other => shaper.describe(other),
    }
}

fn setting(shaper: &Shaper, value: Value) -> Setting {
    match value {
        Value::None => Setting::None,
        Value::Bool(value) => Setting::Bool(value),
        Value::Int(value) => Setting::Int(value),
        Value::Float(value) => Setting::Float(value),
        Value::Text(text) => Setting::Text(shaper.tables.texts.get(text.0).to_owned()),
        other => Setting::Text(shaper.describe(other)),
    }
}

fn annotations(shaper: &Shaper, value: Value) -> Result<Vec<Annotation>, ReadError> {
    let items = match value {
        Value::None | Value::EmptyList => return Ok(Vec::new()),
        Value::List(list) => shaper.list_items(list),
        other => {
            let what = format!("\"external_annotations\" is {}", shaper.describe(other));
            return Err(not_a_snapshot(what));
        }
    };
    let mut annotations = Vec::with_capacity(items.len());
    for item in items {
        let Value::Dict(dict) = item else {
            let what = format!("an annotation is {}", shaper.describe(*item));
            return Err(not_a_snapshot(what));
        };
        let of = |key| Field {
            of: "an annotation",
            key,
        };
        let at_top = |cause: Cause| cause.at(0);
        let mut annotation = Annotation {
            device: 0,
            time_us: 0,
            name: TextId(0),
            stage: TextId(0),
        };
        let mut other = TextId(0);
        // Only the first keys of each are looked at: a dict may be shared by all.
        for (key, value) in shaper.dict_items(*dict).iter().take(64) {
            match (key, value) {
                (Value::Text(known::DEVICE), value) => {
                    annotation.device = shaper.device(of("device"), *value).map_err(at_top)?;
                }
                (Value::Text(known::TIME_US), value) => {
                    annotation.time_us = shaper.size(of("time_us"), *value).map_err(at_top)?;
                }
                (Value::Text(known::NAME), Value::Text(text)) => annotation.name = *text,
                (Value::Text(known::STAGE), Value::Text(text)) => annotation.stage = *text,
                (_, Value::Text(text)) => other = *text,
                _ => {}
            }
        }
        if annotation.name == TextId(0) {
            annotation.name = other;
        }
        annotations.push(annotation);
    }
    Ok(annotations)
}

fn host_bytes(shaper: &Shaper, value: Value) -> Result<u64, ReadError> {
    let items = match value {
        Value::List(list) => shaper.list_items(list),
        _ => return Ok(0),
    };
    let mut total = 0u64;
    for item in items {
        let Value::Dict(dict) = item else { continue };
        for (key, value) in shaper.dict_items(*dict).iter().take(64) {
            if matches!(key, Value::Text(known::SIZE | known::TOTAL_SIZE)) {
                let field = Field {
                    of: "a host segment",
                    key: "size",
                };
                let bytes = shaper.size(field, *value).map_err(|cause| cause.at(0))?;
                total = total.checked_add(bytes).ok_or_else(|| {
                    Cause::Value("the sizes of the host segments pass 2^64".to_owned()).at(0)
                })?;
            }
        }
    }
    Ok(total)
}

/// Notes what the file says that cannot be true.
fn check(dump: &mut Dump) {
    let mut problems = Problems::default();
    let mut previous: Option<&Segment> = None;
    for segment in &dump.segments {
        let blocks = &dump.blocks[segment.blocks.clone()];
        let place = format!("device {}, segment 0x{:x}", segment.device, segment.address);
        let mut next = segment.address;
        let (mut allocated, mut active) = (0, 0);
        let mut gap = false;
        for block in blocks {
            gap |= block.address != next;
            next = block.address.saturating_add(block.bytes);
            match block.state {
                crate::BlockState::ActiveAllocated => {
                    allocated += block.bytes;
                    active += block.bytes;
                }
                crate::BlockState::ActivePendingFree => active += block.bytes,
                crate::BlockState::Inactive => {}
            }
        }
        if gap || next != segment.address.saturating_add(segment.total_bytes) {
            problems.add(0, || {
                format!(
                    "{place}: its blocks do not tile its {} bytes",
                    segment.total_bytes
                )
            });
        }
        for (word, said, sum) in [
            ("allocated", segment.allocated_bytes, allocated),
            ("active", segment.active_bytes, active),
        ] {
            if let Some(said) = said.filter(|said| *said != sum) {
                problems.add(1, || {
                    format!("{place}: says {said} bytes {word}, its blocks have {sum}")
                });
            }
        }
        if let Some(previous) = previous
            && previous.device == segment.device
            && previous.address.saturating_add(previous.total_bytes) > segment.address
        {
            problems.add(2, || format!("{place}: overlaps the segment before it"));
        }
        previous = Some(segment);
    }
    for history in &dump.histories {
        let entries = &dump.entries[history.entries.clone()];
        let device = history.device;
        let mut last = 0;
        let mut sum = Some(0u64);
        let mut unknown = 0u64;
        let mut late = 0u64;
        for entry in entries {
            sum = sum.and_then(|sum| sum.checked_add(entry.bytes));
            unknown += u64::from(entry.action == Action::Other);
            if entry.time_us != 0 {
                late += u64::from(entry.time_us < last);
                last = entry.time_us;
            }
        }
        if unknown > 0 {
            let word = entries.iter().find(|entry| entry.action == Action::Other);
            let word = word.map_or("", |entry| {
                dump.text(dump.notes(entry.notes).unknown_action)
            });
            let word: String = word.chars().take(40).collect();
            problems.add(3, || {
                format!("device {device}: {unknown} entries are of an unknown action, as {word:?}")
            });
        }
        if late > 0 {
            problems.add(4, || {
                format!("device {device}: {late} entries are earlier than the one before them")
            });
        }
        if sum.is_none() {
            problems.add(5, || {
                format!("device {device}: the sizes in its history pass 2^64")
            });
        }
    }
    dump.problems = problems.into_texts();
}

/// Problems, of each kind only so many.
#[derive(Default)]
struct Problems {
    texts: Vec<String>,
    counts: [usize; 6],
}

impl Problems {
    fn add(&mut self, kind: usize, text: impl FnOnce() -> String) {
        self.counts[kind] += 1;
        if self.counts[kind] <= MAX_PROBLEMS {
            self.texts.push(text());
        }
    }

    fn into_texts(mut self) -> Vec<String> {
        let more: usize = self
            .counts
            .iter()
            .map(|n| n.saturating_sub(MAX_PROBLEMS))
            .sum();
        if more > 0 {
            self.texts.push(format!("and {more} more of these kinds"));
        }
        self.texts
    }
}
