//! The stack machine of Python's pickles, protocols 0 to 5, for plain data.
//!
//! A container is *open* while the file may still put things into it, and *frozen* (made into rows,
//! see [`shape`](super::shape)) when it is put into another one. The memo and the stack refer to an
//! open container by its slot. When it is frozen, its place in the memo is changed to what it has
//! become and the slot is used again; only if something else referred to it meanwhile is the slot
//! kept, to say what it has become.

use std::io::Read;

use super::shape::{Shaper, Value};
use super::source::Source;
use super::{Cause, ReadError};

/// The most containers that are open at once: how deep a file may be nested.
const MAX_OPEN: usize = 1 << 20;
/// The most values on the stack.
const MAX_STACK: usize = 1 << 22;
/// A place in the memo that stands for none.
const NOWHERE: u32 = u32::MAX;
/// Digits of a number written in decimal. 2^64 has 20.
const MAX_DIGITS: usize = 4096;

enum Body {
    Dict(Vec<(Value, Value)>),
    List(Vec<Value>),
    /// What it has become.
    Frozen(Value),
}

struct Open {
    /// Where in the file it began.
    start: u64,
    /// Its place in the memo.
    memo: u32,
    /// Whether more than its place in the memo and one place on the stack refer to it.
    shared: bool,
    body: Body,
}

struct Machine<'a> {
    shaper: &'a mut Shaper,
    stack: Vec<Value>,
    marks: Vec<usize>,
    memo: Vec<Value>,
    open: Vec<Open>,
    /// Slots of `open` that nothing refers to.
    unused: Vec<u32>,
    /// Buffers of frozen containers, to be used again.
    dict_buffers: Vec<Vec<(Value, Value)>>,
    list_buffers: Vec<Vec<Value>>,
    text: Vec<u8>,
    /// Where the current opcode is.
    at: u64,
}

/// Reads one pickle and gives what it holds, frozen.
pub(super) fn read<R: Read, P: FnMut(u64)>(
    source: &mut Source<R, P>,
    shaper: &mut Shaper,
) -> Result<Value, ReadError> {
    let mut machine = Machine {
        shaper,
        stack: Vec::new(),
        marks: Vec::new(),
        memo: Vec::new(),
        open: Vec::new(),
        unused: Vec::new(),
        dict_buffers: Vec::new(),
        list_buffers: Vec::new(),
        text: Vec::new(),
        at: 0,
    };
    machine.run(source)
}

impl Machine<'_> {
    fn run<R: Read, P: FnMut(u64)>(
        &mut self,
        source: &mut Source<R, P>,
    ) -> Result<Value, ReadError> {
        const OPCODE: &str = "the pickle, before its end";
        const ARGUMENT: &str = "an argument";
        const NUMBER: &str = "a number";
        const TEXT: &str = "a text";
        loop {
            self.at = source.offset();
            let opcode = source.byte(OPCODE)?;
            match opcode {
                // Most frequent first: references to what was read before.
                b'h' => {
                    let index = source.byte(ARGUMENT)?;
                    self.get(u64::from(index))?;
                }
                b'j' => {
                    let index = u32::from_le_bytes(source.array(ARGUMENT)?);
                    self.get(u64::from(index))?;
                }
                0x94 => {
                    let index = self.memo.len() as u64;
                    self.put(index)?;
                }
                b'q' => {
                    let index = source.byte(ARGUMENT)?;
                    self.put(u64::from(index))?;
                }
                b'r' => {
                    let index = u32::from_le_bytes(source.array(ARGUMENT)?);
                    self.put(u64::from(index))?;
                }
                b'(' => self.marks.push(self.stack.len()),
                b'K' => {
                    let number = source.byte(NUMBER)?;
                    self.push(Value::Int(i64::from(number)))?;
                }
                b'M' => {
                    let number = u16::from_le_bytes(source.array(NUMBER)?);
                    self.push(Value::Int(i64::from(number)))?;
                }
                b'J' => {
                    let number = i32::from_le_bytes(source.array(NUMBER)?);
                    self.push(Value::Int(i64::from(number)))?;
                }
                0x8a => {
                    let length = source.byte(NUMBER)?;
                    self.long(source, u64::from(length))?;
                }
                0x8b => {
                    let length = i32::from_le_bytes(source.array(NUMBER)?);
                    let length = u64::try_from(length)
                        .map_err(|_| self.malformed(format!("a number of {length} bytes")))?;
                    self.long(source, length)?;
                }
                b'}' => {
                    let body = Body::Dict(self.dict_buffers.pop().unwrap_or_default());
                    self.open(body)?;
                }
                b']' => {
                    let body = Body::List(self.list_buffers.pop().unwrap_or_default());
                    self.open(body)?;
                }
                b'u' => self.set_items()?,
                b'e' => self.append_items()?,
                b'a' => {
                    let item = self.pop()?;
                    let item = self.freeze(item)?;
                    self.list()?.push(item);
                }
                b's' => {
                    let value = self.pop()?;
                    let value = self.freeze(value)?;
                    let key = self.pop()?;
                    let key = self.freeze(key)?;
                    self.dict()?.push((key, value));
                }
                0x8c => {
                    let length = source.byte(TEXT)?;
                    self.text(source, u64::from(length))?;
                }
                b'X' => {
                    let length = u32::from_le_bytes(source.array(TEXT)?);
                    self.text(source, u64::from(length))?;
                }
                0x8d => {
                    let length = u64::from_le_bytes(source.array(TEXT)?);
                    self.text(source, length)?;
                }
                b'N' => self.push(Value::None)?,
                0x88 => self.push(Value::Bool(true))?,
                0x89 => self.push(Value::Bool(false))?,
                b'G' => {
                    let number = f64::from_be_bytes(source.array(NUMBER)?);
                    self.push(Value::Float(number))?;
                }
                b')' => self.push(Value::EmptyList)?,
                0x85 => self.tuple(1)?,
                0x86 => self.tuple(2)?,
                0x87 => self.tuple(3)?,
                b't' => {
                    let mark = self.mark()?;
                    self.tuple(self.stack.len() - mark)?;
                }
                b'l' => {
                    let items = self.items()?;
                    self.open(Body::List(items))?;
                }
                b'd' => {
                    let pairs = self.pairs()?;
                    self.open(Body::Dict(pairs))?;
                }
                0x80 => {
                    let protocol = source.byte(ARGUMENT)?;
                    if protocol > 5 {
                        return Err(self.malformed(format!("protocol {protocol}, 5 is the last")));
                    }
                }
                0x95 => {
                    let _length: [u8; 8] = source.array(ARGUMENT)?;
                }
                b'.' => {
                    let value = self.pop()?;
                    return self.freeze(value);
                }
                b'0' => {
                    // As Python has it: a mark is taken if it is on the top.
                    if self.marks.last() == Some(&self.stack.len()) {
                        self.marks.pop();
                    } else {
                        self.pop()?;
                    }
                }
                b'1' => {
                    let mark = self.mark()?;
                    self.stack.truncate(mark);
                }
                b'2' => {
                    let top = self.top()?;
                    self.share(top);
                    self.push(top)?;
                }
                // Numbers and texts as protocol 0 writes them, each on a line.
                b'I' | b'L' => {
                    self.line(source, NUMBER)?;
                    let value = self.decimal(opcode)?;
                    self.push(value)?;
                }
                b'F' => {
                    self.line(source, NUMBER)?;
                    let text = self.text_so_far()?;
                    let number: f64 = text
                        .parse()
                        .map_err(|_| self.malformed(format!("{} is no number", shown(text))))?;
                    self.push(Value::Float(number))?;
                }
                b'V' => {
                    source.line(&mut self.text, TEXT)?;
                    self.unescape_unicode()?;
                    self.push_text()?;
                }
                b'S' => {
                    source.line(&mut self.text, TEXT)?;
                    self.unquote()?;
                    self.push_text()?;
                }
                b'g' => {
                    self.line(source, ARGUMENT)?;
                    let index = self.index()?;
                    self.get(index)?;
                }
                b'p' => {
                    self.line(source, ARGUMENT)?;
                    let index = self.index()?;
                    self.put(index)?;
                }
                // Bytes: nothing in a snapshot is, so what they are does not matter.
                b'U' => {
                    let length = source.byte(TEXT)?;
                    self.text(source, u64::from(length))?;
                }
                b'T' => {
                    let length = i32::from_le_bytes(source.array(TEXT)?);
                    let length = u64::try_from(length)
                        .map_err(|_| self.malformed(format!("a text of {length} bytes")))?;
                    self.text(source, length)?;
                }
                b'C' => {
                    let length = source.byte("bytes")?;
                    self.bytes(source, u64::from(length))?;
                }
                b'B' => {
                    let length = u32::from_le_bytes(source.array("bytes")?);
                    self.bytes(source, u64::from(length))?;
                }
                0x8e | 0x96 => {
                    let length = u64::from_le_bytes(source.array("bytes")?);
                    self.bytes(source, length)?;
                }
                b'c' | b'i' => {
                    self.line(source, "the name of a module")?;
                    let module = shown(self.text_so_far()?);
                    self.line(source, "a name")?;
                    let name = shown(self.text_so_far()?);
                    return Err(self.not_plain(format!("names {module}.{name}")));
                }
                0x93 => {
                    let [module, name] = [1, 0].map(|depth| {
                        let index = self.stack.len().checked_sub(depth + 1);
                        let value = index.and_then(|index| self.stack.get(index));
                        value.map_or_else(String::new, |value| self.shaper.describe(*value))
                    });
                    return Err(self.not_plain(format!("names {module}.{name}")));
                }
                b'R' | b'o' | 0x81 | 0x92 => {
                    return Err(self.not_plain("calls something".to_owned()));
                }
                b'b' => return Err(self.not_plain("sets the state of an object".to_owned())),
                b'P' | b'Q' => {
                    return Err(self.not_plain("refers to an object outside itself".to_owned()));
                }
                0x82..=0x84 => {
                    return Err(self.not_plain("names something by an extension code".to_owned()));
                }
                0x8f..=0x91 => return Err(self.not_plain("has a set".to_owned())),
                0x97 | 0x98 => {
                    return Err(self.not_plain("refers to a buffer outside itself".to_owned()));
                }
                _ if self.at == 0 => {
                    let what = format!("its first byte, 0x{opcode:02x}, begins no pickle");
                    return Err(Cause::NotASnapshot(what).at(0));
                }
                _ => return Err(self.malformed(format!("0x{opcode:02x} is no opcode"))),
            }
        }
    }

    fn malformed(&self, what: String) -> ReadError {
        Cause::Malformed(what).at(self.at)
    }

    fn not_plain(&self, what: String) -> ReadError {
        Cause::NotPlainData(what).at(self.at)
    }

    fn push(&mut self, value: Value) -> Result<(), ReadError> {
        if self.stack.len() == MAX_STACK {
            let (what, limit) = ("the number of values on the stack", MAX_STACK as u64);
            return Err(Cause::TooLarge { what, limit }.at(self.at));
        }
        self.stack.push(value);
        Ok(())
    }

    fn top(&self) -> Result<Value, ReadError> {
        let bottom = self.marks.last().copied().unwrap_or(0);
        match self.stack.last() {
            Some(top) if self.stack.len() > bottom => Ok(*top),
            _ => Err(self.malformed("the stack is empty".to_owned())),
        }
    }

    fn pop(&mut self) -> Result<Value, ReadError> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    fn mark(&mut self) -> Result<usize, ReadError> {
        let mark = self.marks.pop();
        mark.ok_or_else(|| self.malformed("there is no mark".to_owned()))
    }

    /// Puts a new container on the stack.
    fn open(&mut self, body: Body) -> Result<(), ReadError> {
        let open = Open {
            start: self.at,
            memo: NOWHERE,
            shared: false,
            body,
        };
        let index = if let Some(index) = self.unused.pop() {
            self.open[index as usize] = open;
            index
        } else if self.open.len() < MAX_OPEN {
            self.open.push(open);
            u32::try_from(self.open.len() - 1).expect("MAX_OPEN fits in 32 bits")
        } else {
            let (what, limit) = (
                "the number of containers that are open at once (how deep the file is nested)",
                MAX_OPEN as u64,
            );
            return Err(Cause::TooLarge { what, limit }.at(self.at));
        };
        self.push(Value::Open(index))
    }

    /// Notes that one more place refers to `value`.
    fn share(&mut self, value: Value) {
        if let Value::Open(index) = value {
            self.open[index as usize].shared = true;
        }
    }

    fn get(&mut self, index: u64) -> Result<(), ReadError> {
        let value = usize::try_from(index).ok().and_then(|i| self.memo.get(i));
        match value {
            None | Some(Value::Hole) => {
                Err(self.malformed(format!("place {index} of the memo is not set")))
            }
            Some(value) => {
                let value = *value;
                self.share(value);
                self.push(value)
            }
        }
    }

    fn put(&mut self, index: u64) -> Result<(), ReadError> {
        let value = self.top()?;
        // Who counts up, as all do, never passes the number of bytes; a gap would take memory.
        if index > self.at.max(255) || index >= u64::from(NOWHERE) {
            let place = format!("place {index} of the memo is out of order");
            return Err(self.malformed(place));
        }
        if let Value::Open(slot) = value {
            let open = &mut self.open[slot as usize];
            if open.memo == NOWHERE {
                open.memo = u32::try_from(index).expect("less than NOWHERE");
            } else {
                open.shared = true;
            }
        }
        let index = usize::try_from(index).expect("at most 2^32");
        if index >= self.memo.len() {
            self.memo.resize(index + 1, Value::Hole);
        }
        self.memo[index] = value;
        Ok(())
    }

    /// What a container has become; what is none stays what it is.
    fn freeze(&mut self, value: Value) -> Result<Value, ReadError> {
        let Value::Open(index) = value else {
            return Ok(value);
        };
        let open = &mut self.open[index as usize];
        let (start, memo, shared) = (open.start, open.memo, open.shared);
        let frozen = match std::mem::replace(&mut open.body, Body::Frozen(Value::None)) {
            Body::Frozen(value) => {
                open.body = Body::Frozen(value);
                return Ok(value);
            }
            Body::Dict(mut pairs) => {
                let frozen = self.shaper.dict(&pairs).map_err(|cause| cause.at(start))?;
                pairs.clear();
                // Large buffers are not kept for small containers.
                if pairs.capacity() <= 64 && self.dict_buffers.len() < 4096 {
                    self.dict_buffers.push(pairs);
                }
                frozen
            }
            Body::List(mut items) => {
                let frozen = self.shaper.list(&items).map_err(|cause| cause.at(start))?;
                items.clear();
                if items.capacity() <= 256 && self.list_buffers.len() < 4096 {
                    self.list_buffers.push(items);
                }
                frozen
            }
        };
        if let Some(place) = self.memo.get_mut(memo as usize)
            && matches!(*place, Value::Open(slot) if slot == index)
        {
            *place = frozen;
        }
        if shared {
            self.open[index as usize].body = Body::Frozen(frozen);
        } else {
            self.unused.push(index);
        }
        Ok(frozen)
    }

    /// The container on the top of the stack, which must be open.
    fn container(&mut self, wanted: &str) -> Result<&mut Body, ReadError> {
        let top = self.top()?;
        if let Value::Open(index) = top {
            let body = &self.open[index as usize].body;
            if matches!(body, Body::Frozen(_)) {
                let what = "a container is changed after it was put into another one".to_owned();
                return Err(self.malformed(what));
            }
            return Ok(&mut self.open[index as usize].body);
        }
        let what = match top {
            Value::Stack(_) | Value::EmptyList | Value::List(_) | Value::Rows(_) => {
                "a container is changed after it was put into another one".to_owned()
            }
            _ => format!(
                "a {wanted} is expected on the stack, {} is there",
                self.shaper.describe(top)
            ),
        };
        Err(self.malformed(what))
    }

    fn dict(&mut self) -> Result<&mut Vec<(Value, Value)>, ReadError> {
        let at = self.at;
        match self.container("dict")? {
            Body::Dict(pairs) => Ok(pairs),
            _ => Err(Cause::Malformed("a pair is put into a list".to_owned()).at(at)),
        }
    }

    fn list(&mut self) -> Result<&mut Vec<Value>, ReadError> {
        let at = self.at;
        match self.container("list")? {
            Body::List(items) => Ok(items),
            _ => Err(Cause::Malformed("an item is put into a dict".to_owned()).at(at)),
        }
    }

    /// Freezes what lies on the stack above the last mark; takes the mark, and says where it was.
    fn freeze_above_mark(&mut self) -> Result<usize, ReadError> {
        let mark = self.mark()?;
        for index in mark..self.stack.len() {
            if let value @ Value::Open(_) = self.stack[index] {
                self.stack[index] = self.freeze(value)?;
            }
        }
        Ok(mark)
    }

    /// Takes what lies on the stack above the last mark.
    fn items(&mut self) -> Result<Vec<Value>, ReadError> {
        let mark = self.freeze_above_mark()?;
        Ok(self.stack.split_off(mark))
    }

    fn pairs(&mut self) -> Result<Vec<(Value, Value)>, ReadError> {
        let items = self.items()?;
        let (pairs, rest) = items.as_chunks::<2>();
        if !rest.is_empty() {
            return Err(self.malformed("a key without a value".to_owned()));
        }
        Ok(pairs.iter().map(|[key, value]| (*key, *value)).collect())
    }

    fn set_items(&mut self) -> Result<(), ReadError> {
        let mark = self.freeze_above_mark()?;
        let (below, items) = self.stack.split_at(mark);
        let (pairs, rest) = items.as_chunks::<2>();
        if !rest.is_empty() {
            return Err(self.malformed("a key without a value".to_owned()));
        }
        if let Some(Value::Open(index)) = below.last()
            && let Body::Dict(dict) = &mut self.open[*index as usize].body
        {
            dict.extend(pairs.iter().map(|[key, value]| (*key, *value)));
            self.stack.truncate(mark);
            return Ok(());
        }
        self.stack.truncate(mark);
        self.dict().map(drop)
    }

    fn append_items(&mut self) -> Result<(), ReadError> {
        let mark = self.freeze_above_mark()?;
        let (below, items) = self.stack.split_at(mark);
        if let Some(Value::Open(index)) = below.last()
            && let Body::List(list) = &mut self.open[*index as usize].body
        {
            list.extend_from_slice(items);
            self.stack.truncate(mark);
            return Ok(());
        }
        self.stack.truncate(mark);
        self.list().map(drop)
    }

    fn tuple(&mut self, count: usize) -> Result<(), ReadError> {
        let bottom = self.marks.last().copied().unwrap_or(0);
        let start = self.stack.len().checked_sub(count);
        let start = start
            .filter(|start| *start >= bottom)
            .ok_or_else(|| self.malformed("the stack is empty".to_owned()))?;
        for index in start..self.stack.len() {
            let value = self.stack[index];
            self.stack[index] = self.freeze(value)?;
        }
        let tuple = self.shaper.list(&self.stack[start..]);
        let tuple = tuple.map_err(|cause| cause.at(self.at))?;
        self.stack.truncate(start);
        self.push(tuple)
    }

    /// A whole number in little-endian two's complement.
    fn long<R: Read, P: FnMut(u64)>(
        &mut self,
        source: &mut Source<R, P>,
        length: u64,
    ) -> Result<(), ReadError> {
        if length > MAX_DIGITS as u64 {
            source.skip(length, "a number")?;
            return self.push(Value::Huge);
        }
        source.take(length, &mut self.text, "a number")?;
        let negative = self.text.last().is_some_and(|byte| *byte >= 0x80);
        let filler = if negative { 0xff } else { 0 };
        let mut bytes = [filler; 16];
        for (index, byte) in self.text.iter().enumerate() {
            match bytes.get_mut(index) {
                Some(place) => *place = *byte,
                None if *byte == filler => {}
                None => return self.push(Value::Huge),
            }
        }
        self.push(whole(i128::from_le_bytes(bytes)))
    }

    fn decimal(&mut self, opcode: u8) -> Result<Value, ReadError> {
        let text = self.text_so_far()?;
        match (opcode, text) {
            (b'I', "00") => return Ok(Value::Bool(false)),
            (b'I', "01") => return Ok(Value::Bool(true)),
            _ => {}
        }
        let digits = text.strip_suffix('L').unwrap_or(text);
        let unsigned = digits.strip_prefix('-').unwrap_or(digits);
        if unsigned.is_empty() || !unsigned.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(self.malformed(format!("{} is no number", shown(text))));
        }
        Ok(digits.parse().map_or(Value::Huge, whole))
    }

    fn index(&self) -> Result<u64, ReadError> {
        let text = self.text_so_far()?;
        let digits = text.bytes().all(|byte| byte.is_ascii_digit());
        let index = text.parse().ok().filter(|_| digits);
        index.ok_or_else(|| self.malformed(format!("{} is no place in the memo", shown(text))))
    }

    /// A short line of protocol 0.
    fn line<R: Read, P: FnMut(u64)>(
        &mut self,
        source: &mut Source<R, P>,
        inside: &'static str,
    ) -> Result<(), ReadError> {
        source.line(&mut self.text, inside)
    }

    fn text_so_far(&self) -> Result<&str, ReadError> {
        let text = std::str::from_utf8(&self.text);
        text.map_err(|_| self.malformed("a text is not UTF-8".to_owned()))
    }

    fn text<R: Read, P: FnMut(u64)>(
        &mut self,
        source: &mut Source<R, P>,
        length: u64,
    ) -> Result<(), ReadError> {
        source.take(length, &mut self.text, "a text")?;
        self.push_text()
    }

    fn push_text(&mut self) -> Result<(), ReadError> {
        // Python writes surrogates as they are; in the name of a file they are possible.
        let text = String::from_utf8_lossy(&self.text);
        let value = self.shaper.text(&text).map_err(|cause| cause.at(self.at))?;
        self.push(value)
    }

    fn bytes<R: Read, P: FnMut(u64)>(
        &mut self,
        source: &mut Source<R, P>,
        length: u64,
    ) -> Result<(), ReadError> {
        source.skip(length, "bytes")?;
        self.push(Value::Bytes)
    }

    /// Replaces what Python's raw-unicode-escape writes for what does not fit on a line.
    fn unescape_unicode(&mut self) -> Result<(), ReadError> {
        let mut text = String::with_capacity(self.text.len());
        let mut rest = self.text.as_slice();
        while let Some((first, after)) = rest.split_first() {
            rest = after;
            let digits = match (first, after.first()) {
                (b'\\', Some(b'u')) => 4,
                (b'\\', Some(b'U')) => 8,
                // Other bytes are Latin-1.
                _ => {
                    text.push(char::from(*first));
                    continue;
                }
            };
            let code = after.get(1..=digits).and_then(|hex| {
                let hex = std::str::from_utf8(hex).ok()?;
                u32::from_str_radix(hex, 16).ok()
            });
            let code =
                code.ok_or_else(|| self.malformed("a text has half an escape".to_owned()))?;
            text.push(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER));
            rest = &after[digits + 1..];
        }
        self.text = text.into_bytes();
        Ok(())
    }

    /// Takes the quotes off a text as Python 2 wrote it.
    fn unquote(&mut self) -> Result<(), ReadError> {
        let inside = match self.text.as_slice() {
            [b'\'', inside @ .., b'\''] | [b'"', inside @ .., b'"'] => inside,
            _ => return Err(self.malformed("a text has no quotes around it".to_owned())),
        };
        let mut text = Vec::with_capacity(inside.len());
        let mut bytes = inside.iter();
        while let Some(byte) = bytes.next() {
            if *byte != b'\\' {
                text.push(*byte);
                continue;
            }
            match bytes.next() {
                Some(b'n') => text.push(b'\n'),
                Some(b't') => text.push(b'\t'),
                Some(b'r') => text.push(b'\r'),
                Some(b'x') => {
                    let hex = [bytes.next(), bytes.next()];
                    let hex = hex.map(|digit| digit.and_then(|d| char::from(*d).to_digit(16)));
                    let [Some(high), Some(low)] = hex else {
                        return Err(self.malformed("a text has half an escape".to_owned()));
                    };
                    text.push(u8::try_from(high * 16 + low).expect("two hexadecimal digits"));
                }
                Some(other) => text.push(*other),
                None => return Err(self.malformed("a text has half an escape".to_owned())),
            }
        }
        self.text = text;
        Ok(())
    }
}

/// A whole number as a value.
fn whole(number: i128) -> Value {
    if let Ok(number) = i64::try_from(number) {
        Value::Int(number)
    } else if let Ok(number) = u64::try_from(number) {
        Value::UInt(number)
    } else {
        Value::Huge
    }
}

/// The start of a text from a file, fit for an error message.
fn shown(text: &str) -> String {
    let mut shown: String = text.chars().take(60).flat_map(char::escape_debug).collect();
    if text.chars().nth(60).is_some() {
        shown.push('…');
    }
    shown
}
