//! The state rebuilt for any moment of a real history adds up to the levels that its entries say.
#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot read its data has failed"
)]

use std::fs::File;
use std::path::Path;

use lastref_snapshot::Dump;
use lastref_snapshot::dump::Action;
use lastref_snapshot::rebuild::State;
use lastref_snapshot::stats::{active_at_start, active_change};

fn read(name: &str) -> Dump {
    let testdata = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata");
    Dump::read(File::open(testdata.join(name)).unwrap()).unwrap()
}

#[test]
fn rebuilt_states_have_the_bytes_that_the_history_says() {
    for name in [
        "federated.pickle.gz",
        "mixed-precision-forward.pickle.gz",
        "no-frames.pickle.gz",
        "transformer-training.pickle.gz",
        "oom/fragmentation.pickle.gz",
        "oom/other-stream.pickle.gz",
    ] {
        let dump = read(name);
        let history = &dump.histories()[0];
        let entries = dump.entries_of(history);
        let segments: i128 = dump
            .segments()
            .iter()
            .map(|segment| i128::from(segment.total_bytes))
            .sum();
        let reserved_change = |entry: &lastref_snapshot::dump::Entry| match entry.action {
            Action::SegmentAlloc => i128::from(entry.bytes),
            Action::SegmentFree => -i128::from(entry.bytes),
            _ => 0,
        };
        let mut reserved = segments - entries.iter().map(reserved_change).sum::<i128>();
        let mut active = active_at_start(&dump, history);
        for count in 0..=entries.len() {
            if count > 0 {
                active += active_change(&entries[count - 1]);
                reserved += reserved_change(&entries[count - 1]);
            }
            // Each state takes a pass over the whole history.
            if count % (entries.len() / 20 + 1) != 0 && count != entries.len() {
                continue;
            }
            let state = State::at(&dump, history, count);
            let requested = state
                .blocks
                .iter()
                .map(|block| i128::from(block.requested_bytes));
            assert_eq!(requested.sum::<i128>(), active, "{name} after {count}");
            assert_eq!(
                i128::from(state.reserved_bytes()),
                reserved,
                "{name} after {count}"
            );
            assert_eq!(state.contradictions, 0, "{name} after {count}");
            let parts = state.occupancy();
            let used: u64 = parts.iter().map(|part| part.used_bytes).sum();
            let blocks: u64 = state.blocks.iter().map(|block| block.bytes).sum();
            assert_eq!(
                used, blocks,
                "every block is in a segment: {name} after {count}"
            );
        }
    }
}
