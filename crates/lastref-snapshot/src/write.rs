//! Writing a snapshot as PyTorch does: a pickle that `torch.cuda._memory_viz` and the page made of it
//! open.
//!
//! That page reads few opcodes, so few are written: protocol 4 without frames, nothing longer than
//! four bytes of length, lists and dicts in batches of at most 1000. Texts, frames and stacks are
//! written once and referred to afterwards.

use std::io::{self, Write};

use crate::dump::{
    Action, Annotation, Block, Dump, Entry, FrameId, PoolId, Segment, Setting, Settings, StackId,
    TextId,
};
use crate::snapshot::SegmentKind;
use crate::stats::state_word;

/// How many items CPython puts into a list at once. The page's reader takes not many more.
const BATCH: usize = 1000;

impl Dump {
    /// Writes the snapshot as a pickle in PyTorch's form.
    ///
    /// # Errors
    ///
    /// What `out` fails with.
    pub fn write(&self, out: impl Write) -> io::Result<()> {
        let mut pickler = Pickler {
            dump: self,
            out: io::BufWriter::with_capacity(256 << 10, out),
            memo: 0,
            words: Vec::new(),
            texts: vec![None; self.tables.texts.len()],
            frames: vec![None; self.tables.frames.len()],
            stacks: vec![None; self.tables.stacks.len()],
        };
        pickler.raw(&[0x80, 4])?;
        pickler.snapshot()?;
        pickler.raw(b".")?;
        pickler.out.flush()
    }
}

struct Pickler<'a, W: Write> {
    dump: &'a Dump,
    out: io::BufWriter<W>,
    /// How many places of the memo are taken.
    memo: u32,
    /// The places of the words of the format.
    words: Vec<(&'static str, u32)>,
    texts: Vec<Option<u32>>,
    frames: Vec<Option<u32>>,
    stacks: Vec<Option<u32>>,
}

impl<W: Write> Pickler<'_, W> {
    fn raw(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.out.write_all(bytes)
    }

    /// Puts the top of the stack into the memo.
    fn memoize(&mut self) -> io::Result<u32> {
        self.raw(&[0x94])?;
        self.memo += 1;
        Ok(self.memo - 1)
    }

    fn get(&mut self, place: u32) -> io::Result<()> {
        match u8::try_from(place) {
            Ok(place) => self.raw(&[b'h', place]),
            Err(_) => {
                self.raw(b"j")?;
                self.raw(&place.to_le_bytes())
            }
        }
    }

    fn string(&mut self, text: &str) -> io::Result<()> {
        let length = text.len();
        if let Ok(length) = u8::try_from(length) {
            self.raw(&[0x8c, length])?;
        } else {
            let length = u32::try_from(length).map_err(|_| {
                let what = "a text of more than 4 GiB does not fit in PyTorch's form";
                io::Error::new(io::ErrorKind::InvalidInput, what)
            })?;
            self.raw(b"X")?;
            self.raw(&length.to_le_bytes())?;
        }
        self.raw(text.as_bytes())
    }

    /// A word of the format.
    fn word(&mut self, word: &'static str) -> io::Result<()> {
        let found = self.words.iter().find(|(other, _)| *other == word);
        if let Some((_, place)) = found {
            let place = *place;
            return self.get(place);
        }
        self.string(word)?;
        let place = self.memoize()?;
        self.words.push((word, place));
        Ok(())
    }

    fn text(&mut self, id: TextId) -> io::Result<()> {
        if let Some(place) = self.texts[id.0 as usize] {
            return self.get(place);
        }
        self.string(self.dump.text(id))?;
        self.texts[id.0 as usize] = Some(self.memoize()?);
        Ok(())
    }

    fn number(&mut self, number: u64) -> io::Result<()> {
        if let Ok(number) = u8::try_from(number) {
            self.raw(&[b'K', number])
        } else if let Ok(number) = u16::try_from(number) {
            self.raw(b"M")?;
            self.raw(&number.to_le_bytes())
        } else if let Ok(number) = i32::try_from(number) {
            self.raw(b"J")?;
            self.raw(&number.to_le_bytes())
        } else {
            self.long(i128::from(number))
        }
    }

    fn signed(&mut self, number: i64) -> io::Result<()> {
        match (u64::try_from(number), i32::try_from(number)) {
            (Ok(number), _) => self.number(number),
            (_, Ok(number)) => {
                self.raw(b"J")?;
                self.raw(&number.to_le_bytes())
            }
            _ => self.long(i128::from(number)),
        }
    }

    /// The fewest bytes that keep the sign.
    fn long(&mut self, number: i128) -> io::Result<()> {
        let bytes = number.to_le_bytes();
        let sign = if number < 0 { 0xff } else { 0 };
        let mut length = bytes.len();
        while length > 1 && bytes[length - 1] == sign && (bytes[length - 2] ^ sign) & 0x80 == 0 {
            length -= 1;
        }
        self.raw(&[0x8a, u8::try_from(length).expect("at most 16")])?;
        self.raw(&bytes[..length])
    }

    fn bool(&mut self, value: bool) -> io::Result<()> {
        self.raw(&[if value { 0x88 } else { 0x89 }])
    }

    fn list<T>(
        &mut self,
        items: impl IntoIterator<Item = T>,
        mut each: impl FnMut(&mut Self, T) -> io::Result<()>,
    ) -> io::Result<()> {
        self.raw(b"]")?;
        let mut items = items.into_iter().peekable();
        while items.peek().is_some() {
            self.raw(b"(")?;
            for item in items.by_ref().take(BATCH) {
                each(self, item)?;
            }
            self.raw(b"e")?;
        }
        Ok(())
    }

    /// A dict; `pairs` writes keys and values.
    fn dict(&mut self, pairs: impl FnOnce(&mut Self) -> io::Result<()>) -> io::Result<()> {
        self.raw(b"}(")?;
        pairs(self)?;
        self.raw(b"u")
    }

    fn frame(&mut self, id: FrameId) -> io::Result<()> {
        if let Some(place) = self.frames[id.0 as usize] {
            return self.get(place);
        }
        let frame = self.dump.frame(id);
        self.dict(|this| {
            this.word("name")?;
            this.text(frame.name)?;
            this.word("filename")?;
            this.text(frame.file)?;
            this.word("line")?;
            this.number(u64::from(frame.line))
        })?;
        self.frames[id.0 as usize] = Some(self.memoize()?);
        Ok(())
    }

    fn stack(&mut self, id: StackId) -> io::Result<()> {
        if let Some(place) = self.stacks[id.index()] {
            return self.get(place);
        }
        let dump = self.dump;
        self.list(dump.stack(id), |this, frame| this.frame(*frame))?;
        self.stacks[id.index()] = Some(self.memoize()?);
        Ok(())
    }

    fn pool(&mut self, id: PoolId) -> io::Result<()> {
        let (first, second) = self.dump.pool(id).unwrap_or((0, 0));
        self.number(first)?;
        self.number(second)?;
        self.raw(&[0x86])
    }

    fn snapshot(&mut self) -> io::Result<()> {
        let dump = self.dump;
        self.dict(|this| {
            this.word("segments")?;
            this.list(dump.segments(), Self::segment)?;
            this.word("device_traces")?;
            let last = dump.devices().last().map_or(0, |device| device + 1);
            this.list(0..last, |this, device| {
                let mut histories = dump.histories().iter();
                let history = histories.find(|history| history.device == device);
                let entries = history.map_or(&[][..], |history| dump.entries_of(history));
                this.list(entries, Self::entry)
            })?;
            this.word("allocator_settings")?;
            this.settings(dump.settings())?;
            this.word("external_annotations")?;
            this.list(dump.annotations(), Self::annotation)
        })
    }

    fn segment(&mut self, segment: &Segment) -> io::Result<()> {
        let dump = self.dump;
        let blocks = dump.blocks_of(segment);
        let active = blocks.iter().filter(|block| block.is_active());
        let allocated = active
            .clone()
            .filter(|block| block.state == crate::BlockState::ActiveAllocated)
            .map(|block| block.bytes)
            .sum();
        let requested = active.clone().map(|block| block.requested_bytes).sum();
        let active = active.map(|block| block.bytes).sum();
        self.dict(|this| {
            this.word("device")?;
            this.number(u64::from(segment.device))?;
            this.word("address")?;
            this.number(segment.address)?;
            this.word("total_size")?;
            this.number(segment.total_bytes)?;
            this.word("allocated_size")?;
            this.number(segment.allocated_bytes.unwrap_or(allocated))?;
            this.word("active_size")?;
            this.number(segment.active_bytes.unwrap_or(active))?;
            this.word("requested_size")?;
            this.number(requested)?;
            this.word("stream")?;
            this.number(segment.stream)?;
            this.word("segment_type")?;
            this.word(match segment.kind {
                Some(SegmentKind::Small) => "small",
                Some(SegmentKind::Large) | None => "large",
            })?;
            this.word("segment_pool_id")?;
            this.pool(segment.pool)?;
            this.word("is_expandable")?;
            this.bool(segment.is_expandable)?;
            this.word("frames")?;
            this.stack(segment.stack)?;
            this.word("blocks")?;
            this.list(blocks, Self::block)
        })
    }

    fn block(&mut self, block: &Block) -> io::Result<()> {
        self.dict(|this| {
            this.word("address")?;
            this.number(block.address)?;
            this.word("size")?;
            this.number(block.bytes)?;
            this.word("requested_size")?;
            this.number(block.requested_bytes)?;
            this.word("state")?;
            this.word(state_word(block.state))?;
            this.word("frames")?;
            this.stack(block.stack)
        })
    }

    fn entry(&mut self, entry: &Entry) -> io::Result<()> {
        let notes = self.dump.notes(entry.notes);
        self.dict(|this| {
            this.word("action")?;
            if entry.action == Action::Other {
                this.text(notes.unknown_action)?;
            } else {
                this.word(entry.action.as_str())?;
            }
            this.word(if entry.action == Action::Oom {
                "device_free"
            } else {
                "addr"
            })?;
            this.number(entry.address)?;
            this.word("size")?;
            this.number(entry.bytes)?;
            this.word("stream")?;
            this.number(entry.stream)?;
            if entry.time_us != 0 {
                this.word("time_us")?;
                this.number(entry.time_us)?;
            }
            for (word, text) in [
                ("compile_context", notes.compile_context),
                ("user_metadata", notes.user_metadata),
                ("category", notes.category),
            ] {
                if text != TextId(0) {
                    this.word(word)?;
                    this.text(text)?;
                }
            }
            if entry.pool.is_some() {
                this.word("pool_id")?;
                this.pool(entry.pool)?;
            }
            if notes.forward_stack.is_some() {
                this.word("forward_frames")?;
                this.stack(notes.forward_stack)?;
            }
            // The page wants the list, be it empty.
            this.word("frames")?;
            this.stack(entry.stack)
        })
    }

    fn settings(&mut self, settings: &Settings) -> io::Result<()> {
        // Nesting ends at the second level: no setting has a third.
        self.dict(|this| {
            for (name, value) in settings.iter() {
                this.string(name)?;
                if let Setting::Map(inner) = value {
                    this.dict(|this| {
                        for (name, value) in inner.iter() {
                            this.string(name)?;
                            this.setting(value)?;
                        }
                        Ok(())
                    })?;
                } else {
                    this.setting(value)?;
                }
            }
            Ok(())
        })
    }

    fn setting(&mut self, value: &Setting) -> io::Result<()> {
        match value {
            Setting::None | Setting::Map(_) => self.raw(b"N"),
            Setting::Bool(value) => self.bool(*value),
            Setting::Int(value) => self.signed(*value),
            Setting::Float(value) => {
                self.raw(b"G")?;
                self.raw(&value.to_be_bytes())
            }
            Setting::Text(text) => self.string(text),
        }
    }

    fn annotation(&mut self, annotation: &Annotation) -> io::Result<()> {
        self.dict(|this| {
            this.word("name")?;
            this.text(annotation.name)?;
            if annotation.stage != TextId(0) {
                this.word("stage")?;
                this.text(annotation.stage)?;
            }
            this.word("device")?;
            this.number(u64::from(annotation.device))?;
            this.word("time_us")?;
            this.number(annotation.time_us)
        })
    }
}
