//! What is compared: one node type for each implementation, a number and one edge that can change.

use std::cell::RefCell;
use std::sync::{Arc, Mutex};

/// An implementation of counted handles.
pub(crate) trait Heap {
    /// Its name in the table.
    const NAME: &'static str;
    /// A handle on a node.
    type Handle: Clone + 'static;

    /// A node without an edge.
    fn node(number: u64) -> Self::Handle;
    /// Sets a node's edge.
    fn link(from: &Self::Handle, to: Self::Handle);
    /// Reads a node's number.
    fn number(handle: &Self::Handle) -> u64;
    /// Frees all dead cycles; nothing where there is no collector.
    fn collect();
    /// Turns automatic collections off, where there are any.
    fn no_automatic_collections() {}
}

/// `std::sync::Arc`: no collector, and what pointers are compared with.
pub(crate) struct Std;

pub(crate) struct StdNode {
    edge: Mutex<Option<Arc<StdNode>>>,
    number: u64,
}

impl Heap for Std {
    const NAME: &'static str = "Arc";
    type Handle = Arc<StdNode>;

    fn node(number: u64) -> Self::Handle {
        let edge = Mutex::new(None);
        Arc::new(StdNode { edge, number })
    }

    fn link(from: &Self::Handle, to: Self::Handle) {
        *from.edge.lock().expect("no holder panics") = Some(to);
    }

    fn number(handle: &Self::Handle) -> u64 {
        handle.number
    }

    fn collect() {}
}

/// Ours.
pub(crate) struct Lastref;

#[derive(lastref::gc::Trace)]
pub(crate) struct LastrefNode {
    edge: lastref::gc::Slot<Option<lastref::gc::Gc<LastrefNode>>>,
    number: u64,
}

impl Heap for Lastref {
    const NAME: &'static str = "lastref";
    type Handle = lastref::gc::Gc<LastrefNode>;

    fn node(number: u64) -> Self::Handle {
        let edge = lastref::gc::Slot::new(None);
        lastref::gc::Gc::new(LastrefNode { edge, number })
    }

    fn link(from: &Self::Handle, to: Self::Handle) {
        from.edge.set(Some(to));
    }

    fn number(handle: &Self::Handle) -> u64 {
        handle.number
    }

    fn collect() {
        lastref::gc::collect(2).expect("there is a generation 2");
    }

    fn no_automatic_collections() {
        lastref::gc::disable();
        lastref::gc::set_threshold(0, 10, 10);
    }
}

/// rust-cc: single-threaded.
pub(crate) struct RustCc;

#[derive(rust_cc::Trace, rust_cc::Finalize)]
pub(crate) struct RustCcNode {
    edge: RefCell<Option<rust_cc::Cc<RustCcNode>>>,
    number: u64,
}

impl Heap for RustCc {
    const NAME: &'static str = "rust-cc";
    type Handle = rust_cc::Cc<RustCcNode>;

    fn node(number: u64) -> Self::Handle {
        let edge = RefCell::new(None);
        rust_cc::Cc::new(RustCcNode { edge, number })
    }

    fn link(from: &Self::Handle, to: Self::Handle) {
        *from.edge.borrow_mut() = Some(to);
    }

    fn number(handle: &Self::Handle) -> u64 {
        handle.number
    }

    fn collect() {
        rust_cc::collect_cycles();
    }

    fn no_automatic_collections() {
        rust_cc::config::config(|config| config.set_auto_collect(false))
            .expect("this thread is not collecting");
    }
}

/// dumpster, the single-threaded half.
pub(crate) struct DumpsterUnsync;

#[derive(dumpster::Trace)]
pub(crate) struct DumpsterUnsyncNode {
    edge: RefCell<Option<dumpster::unsync::Gc<DumpsterUnsyncNode>>>,
    number: u64,
}

impl Heap for DumpsterUnsync {
    const NAME: &'static str = "dumpster";
    type Handle = dumpster::unsync::Gc<DumpsterUnsyncNode>;

    fn node(number: u64) -> Self::Handle {
        let edge = RefCell::new(None);
        dumpster::unsync::Gc::new(DumpsterUnsyncNode { edge, number })
    }

    fn link(from: &Self::Handle, to: Self::Handle) {
        *from.edge.borrow_mut() = Some(to);
    }

    fn number(handle: &Self::Handle) -> u64 {
        handle.number
    }

    fn collect() {
        dumpster::unsync::collect();
    }

    fn no_automatic_collections() {
        dumpster::unsync::set_collect_condition(|_| false);
    }
}

/// dumpster, the half for threads.
pub(crate) struct DumpsterSync;

#[derive(dumpster::Trace)]
pub(crate) struct DumpsterSyncNode {
    edge: Mutex<Option<dumpster::sync::Gc<DumpsterSyncNode>>>,
    number: u64,
}

impl Heap for DumpsterSync {
    const NAME: &'static str = "dumpster sync";
    type Handle = dumpster::sync::Gc<DumpsterSyncNode>;

    fn node(number: u64) -> Self::Handle {
        let edge = Mutex::new(None);
        dumpster::sync::Gc::new(DumpsterSyncNode { edge, number })
    }

    fn link(from: &Self::Handle, to: Self::Handle) {
        *from.edge.lock().expect("no holder panics") = Some(to);
    }

    fn number(handle: &Self::Handle) -> u64 {
        handle.number
    }

    fn collect() {
        dumpster::sync::collect();
    }

    fn no_automatic_collections() {
        dumpster::sync::set_collect_condition(|_| false);
    }
}

/// bacon_rajan_cc: single-threaded.
pub(crate) struct BaconRajan;

pub(crate) struct BaconRajanNode {
    edge: RefCell<Option<bacon_rajan_cc::Cc<BaconRajanNode>>>,
    number: u64,
}

impl bacon_rajan_cc::Trace for BaconRajanNode {
    fn trace(&self, tracer: &mut bacon_rajan_cc::Tracer) {
        self.edge.trace(tracer);
    }
}

impl Heap for BaconRajan {
    const NAME: &'static str = "bacon_rajan";
    type Handle = bacon_rajan_cc::Cc<BaconRajanNode>;

    fn node(number: u64) -> Self::Handle {
        let edge = RefCell::new(None);
        bacon_rajan_cc::Cc::new(BaconRajanNode { edge, number })
    }

    fn link(from: &Self::Handle, to: Self::Handle) {
        *from.edge.borrow_mut() = Some(to);
    }

    fn number(handle: &Self::Handle) -> u64 {
        handle.number
    }

    fn collect() {
        bacon_rajan_cc::collect_cycles();
    }
}
