//! Writes a snapshot of any size, for measurements: the history of a real one, over and over, in the
//! way that CPython writes it.
//!
//! ```text
//! cargo run --release --example grow -- testdata/transformer-training.pickle.gz big.pickle 1000000000
//! ```
//!
//! As in a real file, texts and frames are shared and everything else is not: each entry has a dict
//! and a list of frames of its own, and each of them a place in the memo.

use std::collections::HashMap;
use std::env;
use std::error::Error;
use std::fs::File;
use std::io::{self, BufWriter, Write};

use lastref_snapshot::Dump;
use lastref_snapshot::dump::{Action, Entry, FrameId};
use lastref_snapshot::stats::state_word;

/// How many items CPython puts into a list at once.
const BATCH: u64 = 1000;

struct Pickler<W> {
    out: W,
    bytes: u64,
    memo: u32,
    texts: HashMap<String, u32>,
    frames: HashMap<FrameId, u32>,
}

impl<W: Write> Pickler<W> {
    fn raw(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.bytes += bytes.len() as u64;
        self.out.write_all(bytes)
    }

    fn memoize(&mut self) -> io::Result<u32> {
        self.raw(&[0x94])?;
        self.memo += 1;
        Ok(self.memo - 1)
    }

    fn get(&mut self, place: u32) -> io::Result<()> {
        if let Ok(place) = u8::try_from(place) {
            return self.raw(&[b'h', place]);
        }
        self.raw(b"j")?;
        self.raw(&place.to_le_bytes())
    }

    fn text(&mut self, text: &str) -> io::Result<()> {
        if let Some(place) = self.texts.get(text) {
            return self.get(*place);
        }
        self.raw(b"X")?;
        self.raw(
            &u32::try_from(text.len())
                .map_err(io::Error::other)?
                .to_le_bytes(),
        )?;
        self.raw(text.as_bytes())?;
        let place = self.memoize()?;
        self.texts.insert(text.to_owned(), place);
        Ok(())
    }

    fn number(&mut self, number: u64) -> io::Result<()> {
        if let Ok(number) = u8::try_from(number) {
            self.raw(&[b'K', number])
        } else if let Ok(number) = i32::try_from(number) {
            self.raw(b"J")?;
            self.raw(&number.to_le_bytes())
        } else {
            self.raw(&[0x8a, 9])?;
            self.raw(&number.to_le_bytes())?;
            self.raw(&[0])
        }
    }

    fn open(&mut self, kind: u8) -> io::Result<()> {
        self.raw(&[kind])?;
        self.memoize().map(drop)
    }

    fn frames(&mut self, dump: &Dump, frames: &[FrameId]) -> io::Result<()> {
        self.open(b']')?;
        self.raw(b"(")?;
        for id in frames {
            if let Some(place) = self.frames.get(id) {
                self.get(*place)?;
                continue;
            }
            let frame = dump.frame(*id);
            self.raw(b"}")?;
            let place = self.memoize()?;
            self.frames.insert(*id, place);
            self.raw(b"(")?;
            self.text("name")?;
            self.text(dump.text(frame.name))?;
            self.text("filename")?;
            self.text(dump.text(frame.file))?;
            self.text("line")?;
            self.number(u64::from(frame.line))?;
            self.raw(b"u")?;
        }
        self.raw(b"e")
    }

    fn segments(&mut self, dump: &Dump) -> io::Result<()> {
        self.open(b']')?;
        for segment in dump.segments() {
            self.open(b'}')?;
            self.raw(b"(")?;
            for (key, number) in [
                ("device", u64::from(segment.device)),
                ("address", segment.address),
                ("total_size", segment.total_bytes),
                ("stream", segment.stream),
            ] {
                self.text(key)?;
                self.number(number)?;
            }
            self.text("blocks")?;
            self.open(b']')?;
            for block in dump.blocks_of(segment) {
                self.open(b'}')?;
                self.raw(b"(")?;
                for (key, number) in [
                    ("address", block.address),
                    ("size", block.bytes),
                    ("requested_size", block.requested_bytes),
                ] {
                    self.text(key)?;
                    self.number(number)?;
                }
                self.text("state")?;
                self.text(state_word(block.state))?;
                self.text("frames")?;
                self.frames(dump, dump.stack(block.stack))?;
                self.raw(b"ua")?;
            }
            self.raw(b"ua")?;
        }
        Ok(())
    }

    fn entry(&mut self, dump: &Dump, entry: &Entry, time_us: u64) -> io::Result<()> {
        self.open(b'}')?;
        self.raw(b"(")?;
        self.text("action")?;
        self.text(entry.action.as_str())?;
        self.text(if entry.action == Action::Oom {
            "device_free"
        } else {
            "addr"
        })?;
        self.number(entry.address)?;
        self.text("size")?;
        self.number(entry.bytes)?;
        self.text("stream")?;
        self.number(entry.stream)?;
        self.text("time_us")?;
        self.number(time_us)?;
        self.text("compile_context")?;
        self.text("N/A")?;
        self.text("user_metadata")?;
        self.raw(&[0x8c, 0])?;
        self.text("frames")?;
        self.frames(dump, dump.stack(entry.stack))?;
        self.raw(b"u")
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [input, output, bytes] = arguments.as_slice() else {
        return Err("usage: grow SNAPSHOT OUTPUT BYTES".into());
    };
    let bytes: u64 = bytes.parse()?;
    let dump = Dump::read(File::open(input)?)?;
    let history = dump
        .histories()
        .first()
        .ok_or("the snapshot has no history")?;
    let entries = dump.entries_of(history);
    let first = entries.first().map_or(0, |entry| entry.time_us);
    let span = entries.last().map_or(0, |entry| entry.time_us) - first + 1;

    let mut pickler = Pickler {
        out: BufWriter::with_capacity(1 << 20, File::create(output)?),
        bytes: 0,
        memo: 0,
        texts: HashMap::new(),
        frames: HashMap::new(),
    };
    pickler.raw(&[0x80, 4])?;
    pickler.open(b'}')?;
    pickler.raw(b"(")?;
    pickler.text("segments")?;
    pickler.segments(&dump)?;
    pickler.text("device_traces")?;
    pickler.open(b']')?;
    pickler.open(b']')?;
    let mut count = 0;
    'grown: for round in 0.. {
        for entry in entries {
            if count % BATCH == 0 {
                pickler.raw(b"(")?;
            }
            pickler.entry(&dump, entry, entry.time_us + round * span)?;
            count += 1;
            if count % BATCH == 0 {
                pickler.raw(b"e")?;
                if pickler.bytes >= bytes {
                    break 'grown;
                }
            }
        }
    }
    pickler.raw(b"au.")?;
    pickler.out.flush()?;
    Ok(())
}
