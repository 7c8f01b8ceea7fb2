//! Every form a snapshot can have says the same, and what is written reads back.
#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot read its data has failed"
)]

use std::fmt::Write as _;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use lastref_snapshot::dump::{Action, StackId};
use lastref_snapshot::stats::Stats;
use lastref_snapshot::{BlockState, Dump, SegmentKind};

fn testdata(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("testdata")
        .join(name)
}

fn read(name: &str) -> Dump {
    let file = File::open(testdata(name)).unwrap();
    Dump::read(file).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Everything a dump says, without the numbers of its tables.
fn said(dump: &Dump) -> String {
    let mut said = String::new();
    let stack = |id: StackId| {
        let frames = dump.stack(id).iter();
        frames
            .map(|frame| dump.frame_text(*frame).to_string())
            .collect::<Vec<_>>()
    };
    for segment in dump.segments() {
        let lastref_snapshot::dump::Segment {
            device,
            address,
            total_bytes,
            stream,
            kind,
            is_expandable,
            ..
        } = segment;
        let pool = dump.pool(segment.pool).unwrap_or((0, 0));
        writeln!(
            said,
            "{device} {address} {total_bytes} {stream} {kind:?} {is_expandable} {pool:?} {:?}",
            stack(segment.stack)
        )
        .unwrap();
        for block in dump.blocks_of(segment) {
            writeln!(
                said,
                "  {} {} {} {:?} {:?}",
                block.address,
                block.bytes,
                block.requested_bytes,
                block.state,
                stack(block.stack)
            )
            .unwrap();
        }
    }
    for history in dump.histories() {
        writeln!(said, "history of {}", history.device).unwrap();
        for entry in dump.entries_of(history) {
            let notes = dump.notes(entry.notes);
            writeln!(
                said,
                "  {:?} {} {} {} {} {:?} {:?} {:?} {:?} {:?}",
                entry.action,
                entry.address,
                entry.bytes,
                entry.time_us,
                entry.stream,
                dump.pool(entry.pool),
                stack(entry.stack),
                stack(notes.forward_stack),
                dump.text(notes.category),
                dump.text(notes.user_metadata),
            )
            .unwrap();
        }
    }
    for annotation in dump.annotations() {
        let (name, stage) = (dump.text(annotation.name), dump.text(annotation.stage));
        writeln!(
            said,
            "{name} {stage} {} {}",
            annotation.device, annotation.time_us
        )
        .unwrap();
    }
    writeln!(said, "{:?}", dump.settings()).unwrap();
    said
}

#[test]
fn every_protocol_says_the_same() {
    let first = said(&read("forms/protocol-4.pickle"));
    for name in [
        "protocol-0",
        "protocol-1",
        "protocol-2",
        "protocol-3",
        "protocol-5",
        "optimized",
        "python-pickler",
    ] {
        assert_eq!(
            said(&read(&format!("forms/{name}.pickle"))),
            first,
            "{name}"
        );
    }
}

#[test]
fn nothing_of_a_rich_snapshot_is_lost() {
    let dump = read("forms/protocol-4.pickle");
    assert_eq!(dump.devices(), [0, 1]);
    let [first, second] = dump.segments() else {
        panic!()
    };
    assert_eq!((first.device, second.device), (0, 1), "sorted by device");
    assert_eq!(dump.pool(first.pool), Some((0, 7)));
    assert!(first.is_expandable && !second.is_expandable);
    assert_eq!(first.kind, Some(SegmentKind::Large));
    assert_eq!(second.stream, 140_000_000_000_001);
    let states: Vec<_> = dump
        .blocks_of(first)
        .iter()
        .map(|block| block.state)
        .collect();
    use BlockState::{ActiveAllocated, ActivePendingFree, Inactive};
    assert_eq!(states, [ActiveAllocated, Inactive, ActivePendingFree]);
    let stack = dump.stack(dump.blocks_of(first)[0].stack);
    assert_eq!(
        dump.frame_text(stack[0]).to_string(),
        "linear (train.py:10)"
    );
    assert_eq!(stack.len(), 3);

    let [history] = dump.histories() else {
        panic!()
    };
    let entries = dump.entries_of(history);
    let backward = dump.notes(entries[2].notes);
    assert_eq!(dump.stack(backward.forward_stack).len(), 3);
    assert_eq!(
        dump.text(dump.notes(entries[5].notes).category),
        "ACTIVATION"
    );
    let oom = entries[7];
    assert_eq!(
        (oom.action, oom.address, oom.bytes),
        (Action::Oom, 3 << 20, 64 << 20)
    );
    assert_eq!(
        dump.text(dump.notes(entries[8].notes).user_metadata),
        "after the failure"
    );
    assert_eq!(dump.annotations().len(), 2);
    assert_eq!(dump.host_bytes(), 4096);

    let settings = dump.settings();
    assert_eq!(
        settings.text("PYTORCH_CUDA_ALLOC_CONF"),
        Some("expandable_segments:True")
    );
    assert_eq!(settings.bool("expandable_segments"), Some(true));
    assert_eq!(settings.int("max_split_size"), Some(-1));
    assert_eq!(dump.problems(), [""; 0]);
}

#[test]
fn a_bare_list_is_the_segments_alone() {
    let dump = read("forms/bare-list.pickle");
    assert_eq!((dump.segments().len(), dump.histories().len()), (2, 0));
    let whole = read("forms/protocol-4.pickle");
    assert_eq!(Stats::of(&dump).devices, Stats::of(&whole).devices);
}

#[test]
fn missing_fields_are_made_up_for() {
    let dump = read("forms/minimal.pickle");
    let [segment] = dump.segments() else { panic!() };
    let addresses: Vec<_> = dump
        .blocks_of(segment)
        .iter()
        .map(|block| block.address)
        .collect();
    assert_eq!(addresses, [4096, 5120]);
    let history = &Stats::of(&dump).history[0];
    assert_eq!(
        (history.active_at_start_bytes, history.active_at_end_bytes),
        (0, 1000)
    );
    assert_eq!(dump.problems(), [""; 0]);
}

#[test]
fn what_is_written_reads_back() {
    for name in [
        "forms/protocol-4.pickle",
        "forms/minimal.pickle",
        "three-pools.pickle.gz",
        "no-frames.pickle.gz",
    ] {
        let dump = read(name);
        let mut bytes = Vec::new();
        dump.write(&mut bytes).unwrap();
        let again = Dump::read(bytes.as_slice()).unwrap();
        // A segment's kind is written even where it was not known.
        let strip = |dump: &Dump| said(dump).replace(" None ", " Some(Large) ");
        assert_eq!(strip(&again), strip(&dump), "{name}");
        assert_eq!(again.problems(), dump.problems(), "{name}");
    }
}

#[test]
fn a_snapshot_compressed_or_as_json_says_the_same() {
    let plain = fs::read(testdata("forms/protocol-4.pickle")).unwrap();
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    std::io::Write::write_all(&mut encoder, &plain).unwrap();
    let compressed = encoder.finish().unwrap();
    let dump = Dump::read(plain.as_slice()).unwrap();
    assert_eq!(
        said(&Dump::read(compressed.as_slice()).unwrap()),
        said(&dump)
    );

    let json = r#"{"segments": [{"device": 0, "address": 4096, "total_size": 3072, "stream": 0, "blocks": [
        {"size": 1024, "requested_size": 1000, "state": "active_allocated", "frames": []},
        {"size": 2048, "requested_size": 0, "state": "inactive", "frames": []}]}],
        "device_traces": [[{"action": "alloc", "addr": 4096, "size": 1000, "stream": 0, "frames": []}]]}"#;
    let dump = Dump::read(json.as_bytes()).unwrap();
    assert_eq!(said(&dump), said(&read("forms/minimal.pickle")));
}

#[test]
fn progress_counts_every_byte() {
    let plain = fs::read(testdata("forms/protocol-4.pickle")).unwrap();
    let mut last = 0;
    Dump::read_with_progress(plain.as_slice(), |bytes| last = bytes).unwrap();
    assert_eq!(last, plain.len() as u64);
}
