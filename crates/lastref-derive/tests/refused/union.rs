//! Which field is alive is not known.

#[derive(lastref::gc::Trace)]
union Either {
    number: u64,
    text: [u8; 8],
}

fn main() {}
