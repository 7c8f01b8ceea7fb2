//! Bytes from a reader, counted: every opcode and argument comes through here.

use std::io::{self, Read};

use super::{Cause, ReadError};

/// How much is read at a time.
const CHUNK: usize = 256 << 10;

/// A buffered reader that knows its offset.
pub(super) struct Source<R, P> {
    inner: R,
    progress: P,
    buffer: Vec<u8>,
    /// The next byte to give out, in `buffer`.
    position: usize,
    /// The bytes of `buffer` that are filled.
    filled: usize,
    /// The offset of `buffer`'s first byte.
    base: u64,
}

impl<R: Read, P: FnMut(u64)> Source<R, P> {
    pub(super) fn new(inner: R, progress: P) -> Self {
        Self {
            inner,
            progress,
            buffer: vec![0; CHUNK],
            position: 0,
            filled: 0,
            base: 0,
        }
    }

    /// The offset of the next byte.
    pub(super) const fn offset(&self) -> u64 {
        self.base + self.position as u64
    }

    /// What is left, as a reader of its own, and the callback.
    pub(super) fn into_parts(self) -> (impl Read, P) {
        let Self {
            inner,
            progress,
            mut buffer,
            position,
            filled,
            ..
        } = self;
        buffer.truncate(filled);
        buffer.drain(..position);
        (io::Cursor::new(buffer).chain(inner), progress)
    }

    /// Has at least `wanted` bytes in the buffer, or all there are.
    fn fill(&mut self, wanted: usize) -> Result<(), ReadError> {
        if self.filled - self.position >= wanted {
            return Ok(());
        }
        self.buffer.copy_within(self.position..self.filled, 0);
        self.base += self.position as u64;
        self.filled -= self.position;
        self.position = 0;
        while self.filled < wanted {
            match self.inner.read(&mut self.buffer[self.filled..]) {
                Ok(0) => break,
                Ok(read) => self.filled += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    let inside = "its compressed data";
                    return Err(Cause::Truncated { inside }.at(self.base + self.filled as u64));
                }
                Err(error) => return Err(Cause::Read(error).at(self.base + self.filled as u64)),
            }
        }
        (self.progress)(self.base + self.filled as u64);
        Ok(())
    }

    /// The next bytes, `count` or as many as there are, without taking them.
    pub(super) fn peek(&mut self, count: usize) -> Result<&[u8], ReadError> {
        self.fill(count)?;
        let end = self.filled.min(self.position + count);
        Ok(&self.buffer[self.position..end])
    }

    fn truncated(&self, inside: &'static str) -> ReadError {
        Cause::Truncated { inside }.at(self.base + self.filled as u64)
    }

    pub(super) fn byte(&mut self, inside: &'static str) -> Result<u8, ReadError> {
        if self.position == self.filled {
            self.fill(1)?;
            if self.position == self.filled {
                return Err(self.truncated(inside));
            }
        }
        let byte = self.buffer[self.position];
        self.position += 1;
        Ok(byte)
    }

    pub(super) fn array<const N: usize>(
        &mut self,
        inside: &'static str,
    ) -> Result<[u8; N], ReadError> {
        self.fill(N)?;
        let bytes = self.buffer[self.position..self.filled].first_chunk::<N>();
        let bytes = *bytes.ok_or_else(|| self.truncated(inside))?;
        self.position += N;
        Ok(bytes)
    }

    /// Puts the next `length` bytes into `into`, which grows as they come.
    pub(super) fn take(
        &mut self,
        length: u64,
        into: &mut Vec<u8>,
        inside: &'static str,
    ) -> Result<(), ReadError> {
        into.clear();
        self.each(length, inside, |chunk| into.extend_from_slice(chunk))
    }

    /// Skips the next `length` bytes.
    pub(super) fn skip(&mut self, length: u64, inside: &'static str) -> Result<(), ReadError> {
        self.each(length, inside, |_| {})
    }

    fn each(
        &mut self,
        length: u64,
        inside: &'static str,
        mut chunk: impl FnMut(&[u8]),
    ) -> Result<(), ReadError> {
        let mut left = length;
        while left > 0 {
            self.fill(1)?;
            let there = self.filled - self.position;
            if there == 0 {
                return Err(self.truncated(inside));
            }
            let count = usize::try_from(left).map_or(there, |left| left.min(there));
            chunk(&self.buffer[self.position..self.position + count]);
            self.position += count;
            left -= count as u64;
        }
        Ok(())
    }

    /// Puts the bytes up to the next line feed into `into`, without it.
    pub(super) fn line(
        &mut self,
        into: &mut Vec<u8>,
        inside: &'static str,
    ) -> Result<(), ReadError> {
        into.clear();
        loop {
            self.fill(1)?;
            let there = &self.buffer[self.position..self.filled];
            if there.is_empty() {
                return Err(self.truncated(inside));
            }
            if let Some(end) = there.iter().position(|byte| *byte == b'\n') {
                into.extend_from_slice(&there[..end]);
                self.position += end + 1;
                return Ok(());
            }
            into.extend_from_slice(there);
            self.position = self.filled;
        }
    }
}

impl<R: Read, P: FnMut(u64)> Read for Source<R, P> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let there = self
            .peek(into.len().min(CHUNK))
            .map_err(|error| match error.cause {
                Cause::Read(error) => error,
                _ => io::ErrorKind::UnexpectedEof.into(),
            })?;
        let count = there.len();
        into[..count].copy_from_slice(there);
        self.position += count;
        Ok(count)
    }
}
