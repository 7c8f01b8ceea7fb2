//! Programs from the histories of real snapshots, and from histories made by hand.
#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot read its file has failed"
)]

use std::fs::{self, File};
use std::path::Path;

use lastref_snapshot::Dump;
use lastref_snapshot::program::{Gaps, Program};
use lastref_snapshot::stats::Stats;
use lastref_snapshot::trace::OperationKind;

/// The histories of real programs: live bytes at the peak, and those before the first entry, are what
/// the figures of the snapshot are.
#[test]
fn programs_have_the_level_of_their_snapshots() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata");
    let mut compared = 0;
    for file in fs::read_dir(folder).unwrap() {
        let path = file.unwrap().path();
        if !path.to_string_lossy().ends_with(".pickle.gz") {
            continue;
        }
        let dump = Dump::read(File::open(&path).unwrap()).unwrap();
        let history = Stats::of(&dump).history;
        for program in Program::of(&dump).unwrap() {
            let figures = history.iter().find(|one| one.device == program.device);
            let figures = figures.unwrap();
            let (trace, gaps) = (&program.trace, program.gaps);
            let place = path.display();
            assert_eq!(
                trace.peak_live_bytes(),
                figures.peak_active_bytes,
                "{place}"
            );
            assert_eq!(gaps.bytes_before, figures.active_at_start_bytes, "{place}");
            assert_eq!(gaps.missing_frees, 0, "{place}");
            let mut live = 0;
            for operation in trace.operations() {
                match operation.kind {
                    OperationKind::Alloc => live += operation.bytes,
                    OperationKind::Free => live -= operation.bytes,
                }
            }
            assert_eq!(live, figures.active_at_end_bytes, "{place}");
            compared += 1;
        }
    }
    assert!(compared >= 4, "{compared}");
}

fn program(entries: &[(&str, u64, u64)], segments: &str) -> Program {
    let entries: Vec<String> = entries
        .iter()
        .map(|(action, address, bytes)| {
            format!(r#"{{"action":"{action}","addr":{address},"size":{bytes},"stream":3}}"#)
        })
        .collect();
    let json = format!(
        r#"{{"segments":[{segments}],"device_traces":[[{}]]}}"#,
        entries.join(",")
    );
    let mut programs = Program::of(&Dump::read(json.as_bytes()).unwrap()).unwrap();
    assert_eq!(programs.len(), 1);
    programs.remove(0)
}

fn operations(program: &Program) -> Vec<(OperationKind, u64, u64)> {
    let operations = program.trace.operations().iter();
    operations
        .map(|operation| (operation.kind, operation.bytes, operation.stream))
        .collect()
}

use OperationKind::{Alloc, Free};

#[test]
fn a_block_is_free_when_its_stream_is_done() {
    let program = program(
        &[
            ("alloc", 512, 100),
            ("free_requested", 512, 100),
            ("alloc", 1024, 200),
            ("free_completed", 512, 100),
            ("oom", 77, 1 << 40),
        ],
        "",
    );
    assert_eq!(
        operations(&program),
        [(Alloc, 100, 3), (Alloc, 200, 3), (Free, 100, 3)]
    );
    let mut gaps = Gaps::default();
    gaps.out_of_memory = 1;
    assert_eq!(program.gaps, gaps);
}

#[test]
fn blocks_from_before_come_first_in_the_order_of_their_addresses() {
    let segment = r#"{"address":0,"total_size":8192,"stream":9,"blocks":[
        {"address":4096,"size":512,"requested_size":30,"state":"active_allocated"},
        {"address":4608,"size":512,"requested_size":40,"state":"inactive"},
        {"address":5120,"size":3072,"requested_size":50,"state":"active_pending_free"}]}"#;
    let program = program(
        &[
            ("alloc", 512, 1),
            ("free_completed", 9216, 20),
            ("free_completed", 2048, 10),
        ],
        segment,
    );
    assert_eq!(
        operations(&program),
        [
            (Alloc, 10, 3),
            (Alloc, 30, 9),
            (Alloc, 50, 9),
            (Alloc, 20, 3),
            (Alloc, 1, 3),
            (Free, 20, 3),
            (Free, 10, 3),
        ]
    );
    assert_eq!(
        (program.gaps.blocks_before, program.gaps.bytes_before),
        (4, 110)
    );
    let first = &program.trace.operations()[0];
    assert_eq!(program.trace.phase(first), "before the history");
}

#[test]
fn a_free_that_is_missing_is_put_before_the_next_block_there() {
    let program = program(&[("alloc", 512, 100), ("alloc", 512, 50)], "");
    assert_eq!(
        operations(&program),
        [(Alloc, 100, 3), (Free, 100, 3), (Alloc, 50, 3)]
    );
    assert_eq!(program.gaps.missing_frees, 1);
}
