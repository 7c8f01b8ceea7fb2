//! Where each handle on a storage was made; behind the feature `holders`.
//!
//! Every handle has a number, under which the storage keeps the place in the source where the
//! handle was made, from then until its drop. Places travel by `#[track_caller]`, which the
//! functions that make handles carry if the feature is on.

use std::collections::BTreeMap;
use std::panic::Location;

use crate::sync::{Mutex, lock};

/// A place in a source file.
pub(crate) type Place = &'static Location<'static>;

/// The handles on one storage.
#[derive(Default)]
pub(crate) struct Holders(Mutex<Places>);

#[derive(Default)]
struct Places {
    next: u64,
    by_handle: BTreeMap<u64, Place>,
}

impl Holders {
    /// Remembers the caller's place; returns the handle's number.
    #[track_caller]
    pub(crate) fn add(&self) -> u64 {
        let mut places = lock(&self.0);
        let handle = places.next;
        places.next += 1;
        places.by_handle.insert(handle, Location::caller());
        handle
    }

    pub(crate) fn remove(&self, handle: u64) {
        lock(&self.0).by_handle.remove(&handle);
    }

    /// The places of the handles there are now, the oldest handle first.
    pub(crate) fn places(&self) -> Vec<Place> {
        lock(&self.0).by_handle.values().copied().collect()
    }
}
