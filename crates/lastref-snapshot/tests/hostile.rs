//! Files that are cut, wrong or made to harm: an error with the offset and the cause, in little time
//! and memory.
#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot read its data has failed"
)]

use std::fs;
use std::io::Read as _;
use std::path::Path;

use lastref_snapshot::Dump;
use lastref_snapshot::read::{Cause, ReadError};

fn refused(bytes: &[u8]) -> ReadError {
    match Dump::read(bytes) {
        Ok(_) => panic!("it must be refused"),
        Err(error) => {
            assert!(error.offset <= bytes.len() as u64, "{error}");
            error
        }
    }
}

#[track_caller]
fn refused_at(bytes: &[u8], offset: u64, message: &str) {
    let error = refused(bytes);
    assert_eq!(error.offset, offset, "{error}");
    assert!(error.to_string().contains(message), "{error}");
}

fn testdata(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("testdata")
        .join(name);
    let mut bytes = fs::read(path).unwrap();
    if name.ends_with(".gz") {
        let mut plain = Vec::new();
        let mut decoder = flate2::read::GzDecoder::new(bytes.as_slice());
        decoder.read_to_end(&mut plain).unwrap();
        bytes = plain;
    }
    bytes
}

/// A pickle, piece by piece.
#[derive(Default)]
struct Pickle(Vec<u8>);

impl Pickle {
    fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    fn text(self, text: &str) -> Self {
        self.raw(&[0x8c, u8::try_from(text.len()).unwrap()])
            .raw(text.as_bytes())
    }

    fn int(self, number: i32) -> Self {
        self.raw(b"J").raw(&number.to_le_bytes())
    }

    /// A block, or something like one.
    fn block(self, size: impl FnOnce(Self) -> Self) -> Self {
        let this = self.raw(b"}(").text("size");
        size(this).text("state").text("inactive").raw(b"u")
    }

    fn segment(self, blocks: impl FnOnce(Self) -> Self) -> Self {
        let this = self
            .raw(b"}(")
            .text("device")
            .int(0)
            .text("address")
            .int(4096);
        blocks(this.text("blocks")).raw(b"u")
    }

    fn end(self) -> Vec<u8> {
        self.raw(b".").0
    }
}

#[test]
fn an_empty_file_is_said_to_be_empty() {
    assert!(matches!(refused(b"").cause, Cause::Empty));
}

#[test]
fn a_file_cut_at_any_offset_is_refused_where_it_ends() {
    let names = [
        "small-inference.pickle.gz",
        "forms/protocol-0.pickle",
        "forms/protocol-1.pickle",
        "forms/protocol-2.pickle",
        "forms/protocol-4.pickle",
    ];
    for name in names {
        let whole = testdata(name);
        Dump::read(whole.as_slice()).unwrap();
        for end in 1..whole.len() {
            let error = refused(&whole[..end]);
            assert!(
                matches!(error.cause, Cause::Truncated { .. }),
                "{name} {end}: {error}"
            );
            assert_eq!(error.offset, end as u64, "{name}: {error}");
        }
    }
}

#[test]
fn compressed_data_that_is_cut_is_refused() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/kv-cache.pickle.gz");
    let whole = fs::read(path).unwrap();
    for end in [3, 20, whole.len() / 2, whole.len() - 9] {
        let error = match Dump::read(&whole[..end]) {
            Ok(_) => panic!("{end}"),
            Err(error) => error,
        };
        assert!(
            matches!(error.cause, Cause::Truncated { .. }),
            "{end}: {error}"
        );
    }
}

#[test]
fn other_kinds_of_files_are_named() {
    for (bytes, kind) in [
        (&b"PK\x03\x04rest"[..], "zip archive"),
        (
            b"op,id,bytes,stream,phase,label\nalloc,1",
            "the trace is cut",
        ),
        (b"<html>", "HTML"),
        (b"\xff\xff", "0xff, begins no pickle"),
        (b"N.", "it holds None"),
        (b"}.", "without \"segments\""),
        (b"}(X\x01\x00\x00\x00aNu.", "without \"segments\""),
        (b"{\"a\": 1}", "without \"segments\""),
        (b"[1, 2", "the JSON"),
        (b"[1, }", "malformed JSON"),
    ] {
        let error = refused(bytes).to_string();
        assert!(error.contains(kind), "{error}");
    }
}

#[test]
fn nothing_is_looked_up_or_called() {
    for (bytes, offset, message) in [
        (&b"cos\nsystem\n(Vecho hi\ntR."[..], 0, "names os.system"),
        (
            b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
            14,
            "names \"os\".\"system\"",
        ),
        (b"\x80\x02NNR.", 4, "calls something"),
        (b"\x80\x02(ios\nsystem\n.", 3, "names os.system"),
        (b"\x80\x02NNb.", 4, "sets the state"),
        (b"P1\n.", 0, "outside itself"),
        (b"\x80\x05\x97.", 2, "a buffer outside itself"),
        (b"\x80\x02\x82\x01.", 2, "extension code"),
        (b"\x80\x04\x8f.", 2, "has a set"),
    ] {
        refused_at(bytes, offset, message);
    }
}

#[test]
fn shared_lists_are_not_expanded() {
    // Ten references to a list of ten references to a list ... a hundred times: 10^100 items.
    let mut pickle = Pickle::default()
        .raw(b"\x80\x04")
        .raw(b"](K\x01K\x02K\x03e\x94");
    for level in 0..100u8 {
        pickle = pickle.raw(b"](");
        for _ in 0..10 {
            pickle = pickle.raw(&[b'h', level]);
        }
        pickle = pickle.raw(b"e\x94");
    }
    let laughs = pickle.0;
    refused_at(&[&laughs[..], b"."].concat(), 0, "it holds a list");

    // The same as a setting, an annotation, blocks, frames, and as what has no meaning.
    for key in [
        "allocator_settings",
        "external_annotations",
        "device_traces",
        "else",
    ] {
        let bytes = [&laughs[..], b"0}("].concat();
        let pickle = Pickle(bytes)
            .text("segments")
            .raw(b"]")
            .text(key)
            .raw(b"h\x64u");
        let result = Dump::read(pickle.end().as_slice());
        assert_eq!(result.is_ok(), key == "else", "{key}");
    }
    for key in ["blocks", "frames"] {
        let bytes = [&laughs[..], b"0](}("].concat();
        let pickle = Pickle(bytes)
            .text("address")
            .int(1)
            .text("blocks")
            .raw(b"]");
        let bytes = pickle.text(key).raw(b"h\x64ue").end();
        let error = refused(&bytes).to_string();
        assert!(
            error.contains(&format!("{key:?} of a segment is a list")),
            "{error}"
        );
    }
    // In the settings a dict is followed once, not further.
    let mut pickle = Pickle::default().raw(b"\x80\x04").raw(b"}\x94");
    for level in 0..100u8 {
        pickle = pickle.raw(b"}(");
        for name in ["a", "b", "c", "d"] {
            pickle = pickle.text(name).raw(&[b'h', level]);
        }
        pickle = pickle.raw(b"u\x94");
    }
    let pickle = pickle
        .raw(b"0}(")
        .text("segments")
        .raw(b"]")
        .text("allocator_settings");
    let dump = Dump::read(pickle.raw(b"h\x64u").end().as_slice()).unwrap();
    assert!(format!("{:?}", dump.settings()).len() < 1000);
}

#[test]
fn the_same_rows_are_not_counted_twice() {
    let one = |this: Pickle| this.raw(b"](").block(|this| this.int(512)).raw(b"e\x94");
    let same = |this: Pickle| this.raw(b"h\x00");
    let bytes = Pickle::default()
        .raw(b"](")
        .segment(one)
        .segment(same)
        .raw(b"e")
        .end();
    refused_at(&bytes, 0, "the same list of blocks");

    let entry = |this: Pickle| this.raw(b"}(").text("action").text("alloc").raw(b"u");
    let pickle = Pickle::default()
        .raw(b"}(")
        .text("segments")
        .raw(b"]")
        .text("device_traces");
    let bytes = entry(pickle.raw(b"](](")).raw(b"e\x94h\x00eu").end();
    refused_at(&bytes, 0, "the same list of trace entries");
}

#[test]
fn deep_nesting_is_limited_and_takes_no_stack() {
    let bytes = vec![b']'; 3 << 20];
    let error = refused(&bytes);
    assert!(matches!(error.cause, Cause::TooLarge { .. }), "{error}");
    assert!(
        error.to_string().contains("how deep the file is nested"),
        "{error}"
    );

    let deep = 1 << 20;
    let bytes = [vec![b']'; deep], vec![b'a'; deep - 1], vec![b'.']].concat();
    refused_at(&bytes, 0, "it holds a list");

    let bytes = [vec![b'['; 200_000], vec![b']'; 200_000]].concat();
    let error = refused(&bytes).to_string();
    assert!(error.contains("recursion limit"), "{error}");
}

#[test]
fn huge_lengths_reserve_nothing() {
    let huge = u64::MAX.to_le_bytes();
    for opcode in [0x8d, 0x8e, 0x96] {
        let bytes = [&[0x80, 4, opcode], &huge[..], b"abc"].concat();
        let error = refused(&bytes);
        assert!(matches!(error.cause, Cause::Truncated { .. }), "{error}");
    }
    let bytes = [&[0x80, 4, 0x95], &huge[..], b"N."].concat();
    refused_at(&bytes, 0, "it holds None");
    for (bytes, message) in [
        (
            &b"\x80\x02\x8b\xff\xff\xff\xff."[..],
            "a number of -1 bytes",
        ),
        (b"T\xff\xff\xff\xff.", "a text of -1 bytes"),
        (
            b"Nr\xff\xff\xff\x7f.",
            "place 2147483647 of the memo is out of order",
        ),
        (
            b"Np99999999999\n.",
            "place 99999999999 of the memo is out of order",
        ),
        (
            b"j\xff\xff\xff\xff.",
            "place 4294967295 of the memo is not set",
        ),
        (b"g-1\n.", "-1 is no place in the memo"),
    ] {
        let error = refused(bytes).to_string();
        assert!(error.contains(message), "{error}");
    }
    // A number of a million bytes.
    let mut bytes = b"\x80\x02](}(\x8c\x06device\x8b\x40\x42\x0f\x00".to_vec();
    bytes.extend(vec![0x11; 1_000_000]);
    bytes.extend(b"\x8c\x07address\x8b\x40\x42\x0f\x00");
    bytes.extend(vec![0x11; 1_000_000]);
    bytes.extend(b"\x8c\x06blocks]ue.");
    let error = refused(&bytes).to_string();
    assert!(error.contains("more than 64 bits"), "{error}");
}

#[test]
fn wrong_values_name_their_dict() {
    let with = |size: &dyn Fn(Pickle) -> Pickle| {
        let blocks = |this: Pickle| this.raw(b"](").block(size).raw(b"e");
        Pickle::default().raw(b"](").segment(blocks).raw(b"e").end()
    };
    Dump::read(with(&|this| this.int(512)).as_slice()).unwrap();
    let at = with(&|this| this.int(512))
        .windows(8)
        .position(|w| &w[..2] == b"}(" && &w[4..] == b"size")
        .unwrap() as u64;
    refused_at(
        &with(&|this| this.int(-5)),
        at,
        "\"size\" of a block is -5, expected a whole number",
    );
    refused_at(
        &with(&|this| this.text("12")),
        at,
        "\"size\" of a block is \"12\"",
    );
    refused_at(
        &with(&|this| this.raw(b"]")),
        at,
        "\"size\" of a block is an empty list",
    );
    refused_at(
        &with(&|this| this.raw(b"G\x3f\xf0\0\0\0\0\0\0")),
        at,
        "\"size\" of a block is 1.0",
    );
    let most = |this: Pickle| this.raw(b"\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\x00");
    refused_at(&with(&most), 0, "pass 2^64");
    let state = b"](}(\x8c\x07address\x4b\x01\x8c\x06blocks](}(\x8c\x04sizeK\x01\x8c\x05state\x8c\x04goneueue.";
    refused_at(
        state,
        25,
        "\"state\" of a block is \"gone\", expected active_allocated",
    );
}

#[test]
fn broken_stacks_are_refused() {
    for (bytes, message) in [
        (&b"."[..], "the stack is empty"),
        (b"(.", "the stack is empty"),
        (b"a.", "the stack is empty"),
        (b"Na.", "the stack is empty"),
        (b"e.", "there is no mark"),
        (b"u.", "there is no mark"),
        (b"}(Nu.", "a key without a value"),
        (b"](NNu.", "a pair is put into a list"),
        (b"}Na.", "an item is put into a dict"),
        (b"N(Ne.", "a list is expected on the stack, None is there"),
        (b"N\x86.", "the stack is empty"),
        (b"\x80\x09.", "protocol 9"),
        (b"]q\x00h\x00aN.", "after it was put into another"),
        (b"](h\x00e.", "place 0 of the memo is not set"),
        (b"I12a\n.", "is no number"),
        (b"Fx\n.", "is no number"),
        (b"Sx\n.", "no quotes"),
        (b"Va\\u12\n.", "half an escape"),
        (b"N\x01.", "0x01 is no opcode"),
    ] {
        let error = refused(bytes).to_string();
        assert!(error.contains(message), "{message}: {error}");
    }
}

#[test]
fn a_container_that_is_changed_after_its_use_is_refused() {
    // A list that holds itself.
    refused_at(
        b"](]q\x00(h\x00h\x00ee.",
        10,
        "after it was put into another",
    );
    // One that is used, then changed through the memo.
    let bytes = b"](]q\x00eh\x00Na.";
    let error = refused(bytes).to_string();
    assert!(error.contains("after it was put into another"), "{error}");
}
