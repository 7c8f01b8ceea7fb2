//! What the page asks for, as values that are sent as JSON. `web/src/source.ts` reads them; the
//! names are its own.

use lastref_snapshot::dump::{Dump, FrameId, StackId};
use lastref_snapshot::timeline::{COLUMNS_PER_TILE, Mark, NEVER, Timeline};
use serde::Serialize;

/// Rows of the table of stacks that are sent.
const MOST_STACKS: usize = 2000;

/// A file that is shown.
#[derive(Debug)]
pub(super) struct File {
    pub(super) name: String,
    pub(super) dump: Dump,
    pub(super) timelines: Vec<Timeline>,
}

#[derive(Serialize, Debug)]
#[serde(rename_all = "camelCase")]
pub(super) struct About {
    version: &'static str,
    columns_per_tile: usize,
    files: Vec<FileAbout>,
}

#[derive(Serialize, Debug)]
struct FileAbout {
    name: String,
    stacks: usize,
    devices: Vec<DeviceAbout>,
}

#[derive(Serialize, Debug)]
#[serde(rename_all = "camelCase")]
struct DeviceAbout {
    device: u32,
    entries: u32,
    allocations: usize,
    peak_bytes: u64,
    peak_entry: u32,
    peak_reserved_bytes: u64,
    levels: u32,
    finest: u32,
    marks: Vec<Mark>,
    notes: Vec<String>,
}

#[derive(Serialize, Debug)]
pub(super) struct Stack {
    title: String,
    frames: Vec<String>,
}

#[derive(Serialize, Debug)]
pub(super) struct Allocation {
    id: u32,
    bytes: u64,
    address: u64,
    stack: usize,
    start: Option<u32>,
    end: Option<u32>,
}

#[derive(Serialize, Debug)]
#[serde(rename_all = "camelCase")]
pub(super) struct State {
    entry: u32,
    live_bytes: u64,
    reserved_bytes: u64,
    segments: Vec<Segment>,
}

#[derive(Serialize, Debug)]
struct Segment {
    address: u64,
    bytes: u64,
    blocks: Vec<Block>,
}

#[derive(Serialize, Debug)]
struct Block {
    address: u64,
    bytes: u64,
    stack: usize,
    state: &'static str,
}

#[derive(Serialize, Debug)]
pub(super) struct StackRow {
    stack: usize,
    title: String,
    bytes: u64,
    count: u64,
}

/// What a page says of its files. `finest` is the finest level that it can get of a device, by the
/// positions of the file and of the device in it.
pub(super) fn about(files: &[File], finest: impl Fn(usize, usize) -> u32) -> About {
    let device = |file, (at, timeline): (usize, &Timeline)| DeviceAbout {
        device: timeline.device(),
        entries: timeline.entries(),
        allocations: timeline.allocations().len(),
        peak_bytes: timeline.live_bytes(timeline.peak()),
        peak_entry: timeline.peak(),
        peak_reserved_bytes: timeline.peak_reserved_bytes(),
        levels: timeline.levels(),
        finest: finest(file, at),
        marks: timeline.marks().to_vec(),
        notes: timeline.notes().to_vec(),
    };
    About {
        version: env!("CARGO_PKG_VERSION"),
        columns_per_tile: COLUMNS_PER_TILE,
        files: (0..)
            .zip(files)
            .map(|(at, file)| FileAbout {
                name: file.name.clone(),
                stacks: file.dump.num_stacks(),
                devices: (0..)
                    .zip(&file.timelines)
                    .map(|timeline| device(at, timeline))
                    .collect(),
            })
            .collect(),
    }
}

impl File {
    pub(super) const fn new(name: String, dump: Dump, timelines: Vec<Timeline>) -> Self {
        Self {
            name,
            dump,
            timelines,
        }
    }

    /// Every stack, by its number.
    pub(super) fn stacks(&self) -> impl Iterator<Item = StackId> {
        self.dump.stack_ids()
    }

    fn frames(&self, stack: StackId) -> impl Iterator<Item = String> {
        let frames: &[FrameId] = self.dump.stack(stack);
        frames
            .iter()
            .map(|frame| self.dump.frame_text(*frame).to_string())
    }

    fn title(&self, stack: StackId) -> String {
        self.dump.place(stack).to_string()
    }

    pub(super) fn stack(&self, stack: StackId) -> Stack {
        Stack {
            title: self.title(stack),
            frames: self.frames(stack).collect(),
        }
    }

    /// The stacks that have a text in one of their frames, in any case of its letters.
    pub(super) fn search(&self, text: &str) -> Vec<usize> {
        let wanted = text.to_lowercase();
        let has = |frame: String| frame.to_lowercase().contains(&wanted);
        self.stacks()
            .filter(|stack| has(self.title(*stack)) || self.frames(*stack).any(has))
            .map(StackId::index)
            .collect()
    }
}

/// One allocation; `None` where there is none of this number.
pub(super) fn allocation(timeline: &Timeline, id: u32) -> Option<Allocation> {
    let span = timeline.allocations().get(id as usize)?;
    Some(Allocation {
        id,
        bytes: span.bytes,
        address: span.address,
        stack: span.stack.index(),
        start: span.start.checked_sub(1),
        end: (span.end != NEVER).then(|| span.end - 1),
    })
}

/// What lies where at a moment.
pub(super) fn state(timeline: &Timeline, moment: u32) -> State {
    let moment = moment.min(timeline.entries());
    let mut segments: Vec<Segment> = timeline
        .reserved_at(moment)
        .into_iter()
        .map(|span| Segment {
            address: span.address,
            bytes: span.bytes,
            blocks: Vec::new(),
        })
        .collect();
    for id in timeline.alive(moment) {
        let span = &timeline.allocations()[id as usize];
        let after = segments.partition_point(|segment| segment.address <= span.address);
        if let Some(at) = after.checked_sub(1) {
            segments[at].blocks.push(Block {
                address: span.address,
                bytes: span.bytes,
                stack: span.stack.index(),
                state: if moment < span.given {
                    "active"
                } else {
                    "pending"
                },
            });
        }
    }
    for segment in &mut segments {
        segment.blocks.sort_unstable_by_key(|block| block.address);
    }
    State {
        entry: moment,
        live_bytes: timeline.live_bytes(moment),
        reserved_bytes: timeline.reserved_bytes(moment),
        segments,
    }
}

/// Who held how much at a moment, the heaviest first.
pub(super) fn stacks(file: &File, timeline: &Timeline, moment: u32) -> Vec<StackRow> {
    timeline
        .stacks_at(moment.min(timeline.entries()))
        .into_iter()
        .take(MOST_STACKS)
        .map(|(stack, bytes, count)| StackRow {
            stack: stack.index(),
            title: file.title(stack),
            bytes,
            count,
        })
        .collect()
}
