//! Edges in a cell could move while a collection looks: they live in a `Slot`.

use std::cell::Cell;

use lastref::gc::Gc;

#[derive(lastref::gc::Trace)]
struct Node {
    next: Cell<Option<Gc<Node>>>,
}

fn main() {}
