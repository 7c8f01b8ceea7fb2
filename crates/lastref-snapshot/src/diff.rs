//! What grew between two snapshots, by place in the program.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::dump::Dump;
use crate::explain::holders_of;
use crate::rebuild::State;

/// What changed at one place.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Change {
    /// The index of the device.
    pub device: u32,
    /// Bytes in blocks from there, before.
    pub bytes_before: u64,
    /// And after.
    pub bytes_after: u64,
    /// How many blocks, before.
    pub blocks_before: u64,
    /// And after.
    pub blocks_after: u64,
    /// The frames of the program, innermost first; none if no stack was recorded.
    pub place: Vec<String>,
}

impl Change {
    /// By how many bytes it grew; negative if it shrank.
    #[must_use]
    pub fn growth(&self) -> i128 {
        i128::from(self.bytes_after) - i128::from(self.bytes_before)
    }
}

/// What changed from `before` to `after`, what grew most first. Places are told apart by their texts,
/// so the snapshots may be of different processes.
#[must_use]
pub fn diff(before: &Dump, after: &Dump) -> Vec<Change> {
    type Sizes = (u64, u64);
    let mut found: BTreeMap<(u32, Vec<String>), (Sizes, Sizes)> = BTreeMap::new();
    for (dump, is_after) in [(before, false), (after, true)] {
        for device in dump.devices() {
            for holder in holders_of(dump, &State::at_end(dump, device)) {
                let sizes = found.entry((device, holder.place)).or_default();
                let sizes = if is_after { &mut sizes.1 } else { &mut sizes.0 };
                sizes.0 = sizes.0.saturating_add(holder.bytes);
                sizes.1 += holder.blocks;
            }
        }
    }
    let changed = found
        .into_iter()
        .filter(|(_, (before, after))| before != after);
    let mut changes: Vec<_> = changed
        .map(|((device, place), (before, after))| Change {
            device,
            bytes_before: before.0,
            bytes_after: after.0,
            blocks_before: before.1,
            blocks_after: after.1,
            place,
        })
        .collect();
    changes.sort_by_key(|change| std::cmp::Reverse(change.growth()));
    changes
}
