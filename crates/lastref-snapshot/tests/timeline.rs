//! Timelines and their tiles, against what counting everything gives.
#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot read its data has failed"
)]

use std::fs::{self, File};
use std::path::Path;

use lastref_snapshot::explain;
use lastref_snapshot::stats::Stats;
use lastref_snapshot::timeline::{COLUMNS_PER_TILE, MarkKind, Timeline};
use lastref_snapshot::{
    BlockRecord, BlockState, Dump, Segment, SegmentKind, Snapshot, TraceAction, TraceEntry,
};
use proptest::prelude::*;

const KIB: u64 = 1 << 10;

fn real() -> Vec<(String, Dump)> {
    let testdata = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata");
    let mut found: Vec<_> = fs::read_dir(testdata)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.to_string_lossy().ends_with(".pickle.gz"))
        .map(|path| {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            (name, Dump::read(File::open(path).unwrap()).unwrap())
        })
        .collect();
    found.sort_by(|(a, _), (b, _)| a.cmp(b));
    assert!(found.len() > 5, "the real snapshots are not there");
    found
}

#[test]
fn real_histories_have_the_peak_that_counting_gives() {
    for (name, dump) in real() {
        let stats = Stats::of(&dump);
        for history in &stats.history {
            let timeline = Timeline::new(&dump, history.device);
            let peak = timeline.peak();
            assert_eq!(
                timeline.live_bytes(peak),
                history.peak_active_bytes,
                "{name}"
            );
            assert_eq!(i64::from(peak) - 1, history.peak_entry, "{name}");
            assert_eq!(
                timeline.live_bytes(0),
                history.active_at_start_bytes,
                "{name}"
            );
            let end = timeline.entries();
            assert_eq!(
                timeline.live_bytes(end),
                history.active_at_end_bytes,
                "{name}"
            );
            let failures = timeline.marks().iter();
            let failures = failures.filter(|mark| mark.kind == MarkKind::OutOfMemory);
            assert_eq!(failures.count(), history.out_of_memory.len(), "{name}");
        }
    }
}

#[test]
fn real_segments_are_reserved_at_the_end_as_the_file_says() {
    for (name, dump) in real() {
        for timeline in Timeline::all(&dump) {
            let segments = dump.segments_of(timeline.device());
            let reserved: u64 = segments.iter().map(|segment| segment.total_bytes).sum();
            let end = timeline.entries();
            assert_eq!(timeline.reserved_bytes(end), reserved, "{name}");
            let rows = timeline.reserved_at(end);
            assert_eq!(
                rows.iter().map(|row| row.bytes).sum::<u64>(),
                reserved,
                "{name}"
            );
            assert_eq!(rows.len(), segments.len(), "{name}");
        }
    }
}

#[test]
fn every_tile_of_real_histories_is_right() {
    for (_, dump) in real() {
        for timeline in Timeline::all(&dump) {
            check_tiles(&timeline);
        }
    }
}

/// Every column of every tile against the allocations themselves.
fn check_tiles(timeline: &Timeline) {
    let (entries, levels) = (timeline.entries(), timeline.levels());
    assert_eq!(timeline.tiles(levels - 1), 1);
    assert_eq!(timeline.tile(levels, 0), None);
    for level in 0..levels {
        let mut moments = 0;
        for index in 0..timeline.tiles(level) {
            let tile = timeline.tile(level, index).unwrap();
            let columns = tile.live.len();
            assert_eq!(
                tile.first_entry,
                ((index * COLUMNS_PER_TILE) as u64) << level
            );
            for column in 0..columns {
                let within = u32::try_from(column).unwrap() << level;
                let first = u32::try_from(tile.first_entry).unwrap() + within;
                let last = (first + (1 << level) - 1).min(entries);
                moments += last - first + 1;
                let most = (first..=last)
                    .map(|m| timeline.live_bytes(m))
                    .max()
                    .unwrap();
                assert_eq!(tile.live[column], most);
                assert!((first..=last).contains(&tile.moment[column]));
                assert_eq!(timeline.live_bytes(tile.moment[column]), most);
                let reserved = (first..=last).map(|m| timeline.reserved_bytes(m));
                assert_eq!(tile.reserved[column], reserved.max().unwrap());
            }
            let mut drawn = tile.small.clone();
            for span in &tile.spans {
                let allocation = timeline.allocations()[span.id as usize];
                assert!(allocation.bytes >= tile.small_below);
                for (column, sum) in (0_u16..).zip(&mut drawn) {
                    let there = (span.start_column..span.end_column).contains(&column);
                    let moment = tile.moment[usize::from(column)];
                    assert_eq!(there, allocation.is_there(moment));
                    *sum += if there { allocation.bytes } else { 0 };
                }
            }
            assert_eq!(drawn, tile.live);
            assert!(tile.spans.windows(2).all(|pair| pair[0].id < pair[1].id));
            // What is in the band is there, and small.
            for column in [0, columns / 2, columns - 1] {
                let small = timeline
                    .alive(tile.moment[column])
                    .map(|id| timeline.allocations()[id as usize].bytes);
                let small: u64 = small.filter(|bytes| *bytes < tile.small_below).sum();
                assert_eq!(tile.small[column], small);
            }
        }
        assert_eq!(
            moments,
            entries + 1,
            "the tiles of a level cover the history"
        );
    }
}

/// A snapshot; by moment, what is there (address, bytes) and what is reserved.
type Example = (Snapshot, Vec<Vec<(u64, u64)>>, Vec<u64>);

/// A program over eight places of 64 KiB in one range, with its segments and its end.
fn program(steps: &[(u8, u64, bool)]) -> Example {
    const BASE: u64 = 1 << 40;
    const PLACE: u64 = 64 * KIB;
    let mut held = [0_u64; 8];
    let mut reserved = [false; 8];
    let mut trace = Vec::new();
    let mut alive = vec![Vec::new()];
    let mut levels = vec![0];
    for (place, bytes, segment) in steps {
        let at = usize::from(*place % 8);
        let address = BASE + at as u64 * PLACE;
        let action = if *segment {
            if held[at] > 0 {
                continue;
            }
            reserved[at] = !reserved[at];
            if reserved[at] {
                TraceAction::SegmentMap
            } else {
                TraceAction::SegmentUnmap
            }
        } else if held[at] > 0 {
            TraceAction::FreeCompleted
        } else {
            TraceAction::Alloc
        };
        let bytes = match action {
            TraceAction::Alloc => {
                held[at] = *bytes;
                *bytes
            }
            TraceAction::FreeCompleted => std::mem::take(&mut held[at]),
            _ => PLACE,
        };
        trace.push(TraceEntry {
            action,
            address,
            bytes,
            stream: 0,
            sequence: trace.len() as u64,
            time_us: None,
        });
        let places = held.iter().enumerate().filter(|(_, bytes)| **bytes > 0);
        let there = places.map(|(at, bytes)| (BASE + at as u64 * PLACE, *bytes));
        alive.push(there.collect());
        levels.push(reserved.iter().filter(|there| **there).count() as u64 * PLACE);
    }
    let blocks = held.iter().enumerate().filter(|(_, bytes)| **bytes > 0);
    let segments = blocks.map(|(at, bytes)| Segment {
        device: 0,
        address: BASE + at as u64 * PLACE,
        // Only what the history reserves is a segment in this program: see the test.
        total_bytes: 0,
        allocated_bytes: *bytes,
        active_bytes: *bytes,
        requested_bytes: *bytes,
        stream: 0,
        kind: SegmentKind::Large,
        is_expandable: true,
        blocks: vec![BlockRecord {
            address: BASE + at as u64 * PLACE,
            bytes: *bytes,
            requested_bytes: *bytes,
            state: BlockState::ActiveAllocated,
        }],
    });
    let snapshot = Snapshot {
        segments: segments.collect(),
        device_traces: vec![trace],
        ..Snapshot::default()
    };
    (snapshot, alive, levels)
}

fn entry(action: TraceAction, address: u64, bytes: u64) -> TraceEntry {
    TraceEntry {
        action,
        address,
        bytes,
        stream: 0,
        sequence: 0,
        time_us: None,
    }
}

/// Everything that the viewer asks of a timeline.
fn ask_everything(timeline: &Timeline) {
    check_tiles_are_there(timeline);
    for moment in 0..=timeline.entries() {
        let _ = timeline.reserved_at(moment);
        let _ = timeline.stacks_at(moment);
    }
    let _ = (timeline.peak(), timeline.peak_reserved_bytes());
}

fn check_tiles_are_there(timeline: &Timeline) {
    for level in 0..timeline.levels() {
        for index in 0..timeline.tiles(level) {
            let bytes = timeline.tile(level, index).unwrap().to_bytes(timeline);
            assert_eq!(&bytes[..4], b"LRT1");
        }
    }
}

fn of_entries(trace: Vec<TraceEntry>) -> Dump {
    Dump::from(&Snapshot {
        device_traces: vec![trace],
        ..Snapshot::default()
    })
}

#[test]
fn a_segment_ends_at_the_last_address() {
    let start = u64::MAX - 512;
    let dump = of_entries(vec![
        entry(TraceAction::SegmentMap, start, 1 << 20),
        entry(TraceAction::SegmentUnmap, start + 100, 1 << 20),
    ]);
    let timeline = Timeline::new(&dump, 0);
    assert_eq!(timeline.reserved_bytes(1), 512);
    assert_eq!(timeline.reserved_bytes(2), 100);
    ask_everything(&timeline);
}

#[test]
fn sums_that_pass_the_largest_number_are_the_largest() {
    let dump = of_entries(vec![
        entry(TraceAction::Alloc, 0, u64::MAX),
        entry(TraceAction::Alloc, 512, u64::MAX),
        entry(TraceAction::FreeCompleted, 0, u64::MAX),
    ]);
    let timeline = Timeline::new(&dump, 0);
    let live: Vec<u64> = (0..4).map(|moment| timeline.live_bytes(moment)).collect();
    assert_eq!(live, [0, u64::MAX, u64::MAX, u64::MAX]);
    assert_eq!(timeline.stacks_at(2)[0].1, u64::MAX);
    ask_everything(&timeline);
}

const EDGES: [u64; 10] = [
    0,
    1,
    512,
    64 * KIB,
    1 << 40,
    (1 << 40) + 512,
    i64::MAX as u64,
    1 << 63,
    u64::MAX - 512,
    u64::MAX,
];

const ACTIONS: [TraceAction; 7] = [
    TraceAction::Alloc,
    TraceAction::FreeRequested,
    TraceAction::FreeCompleted,
    TraceAction::SegmentAlloc,
    TraceAction::SegmentFree,
    TraceAction::SegmentMap,
    TraceAction::SegmentUnmap,
];

proptest! {
    /// The reader lets histories through that contradict themselves.
    #[test]
    fn no_history_is_too_strange(
        steps in prop::collection::vec((0..7_usize, 0..10_usize, 0..10_usize), 0..200),
    ) {
        let step = |(action, address, bytes)| {
            let (action, address, bytes): (usize, usize, usize) = (action, address, bytes);
            entry(ACTIONS[action], EDGES[address], EDGES[bytes])
        };
        let dump = of_entries(steps.into_iter().map(step).collect());
        for timeline in Timeline::all(&dump) {
            ask_everything(&timeline);
        }
        let _ = explain::explain(&dump, None);
        let _ = Stats::of(&dump);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Cutting off the beginning of a history changes nothing of what is known after it.
    #[test]
    fn states_are_those_of_the_program(
        steps in prop::collection::vec((any::<u8>(), 1..64 * KIB, prop::bool::weighted(0.2)), 1..3000),
        cut in 0.0_f64..1.0,
    ) {
        let (mut snapshot, alive, levels) = program(&steps);
        let trace = &mut snapshot.device_traces[0];
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "a share of it")]
        let cut = (trace.len() as f64 * cut) as usize;
        trace.drain(..cut);
        let unmapped_later = levels[cut];
        let timeline = Timeline::new(&Dump::from(&snapshot), 0);
        for (moment, wanted) in (0..).zip(&alive[cut..]) {
            let spans = timeline.alive(moment).map(|id| timeline.allocations()[id as usize]);
            let mut found: Vec<_> = spans.map(|span| (span.address, span.bytes)).collect();
            found.sort_unstable();
            prop_assert_eq!(&found, wanted);
            let live: u64 = wanted.iter().map(|(_, bytes)| bytes).sum();
            prop_assert_eq!(timeline.live_bytes(moment), live);
            let by_stack = timeline.stacks_at(moment);
            prop_assert_eq!(by_stack.iter().map(|(_, bytes, _)| bytes).sum::<u64>(), live);
            // What was reserved before the cut, and is at the end, no entry and no segment tells.
            if cut == 0 {
                prop_assert_eq!(timeline.reserved_bytes(moment), levels[moment as usize]);
            } else {
                prop_assert!(timeline.reserved_bytes(moment) <= levels[cut + moment as usize].max(unmapped_later));
            }
        }
        check_tiles(&timeline);
    }
}
