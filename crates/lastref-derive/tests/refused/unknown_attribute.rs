//! A slip of the pen must not pass for a field that is traced, or skipped.

#[derive(lastref::gc::Trace)]
struct Node {
    #[trace(skipped)]
    number: u64,
}

#[derive(lastref::gc::Trace)]
#[trace(skip)]
struct Whole {
    number: u64,
}

fn main() {}
