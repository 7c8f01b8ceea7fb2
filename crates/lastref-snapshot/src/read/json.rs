//! The same shape as JSON: what `serde_json` reads, handed to the [`Shaper`] as containers end.
//!
//! `serde_json` itself limits how deep a file may be nested, to 128.

use std::cell::RefCell;
use std::fmt;
use std::io::{BufReader, Read};
use std::rc::Rc;

use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};

use super::shape::{Shaper, Value};
use super::source::Source;
use super::{Cause, ReadError};

pub(super) fn read<R: Read, P: FnMut(u64)>(
    source: &mut Source<R, P>,
    shaper: &mut Shaper,
) -> Result<Value, ReadError> {
    let offset = Rc::new(RefCell::new(0));
    let input = Counted {
        inner: source,
        offset: Rc::clone(&offset),
    };
    let mut deserializer =
        serde_json::Deserializer::from_reader(BufReader::with_capacity(64, input));
    let mut seed = Seed {
        shaper,
        cause: None,
    };
    let result = (&mut seed).deserialize(&mut deserializer);
    let value = match result {
        Ok(value) => value,
        Err(error) => {
            let offset = *offset.borrow();
            let cause = match seed.cause.take() {
                Some(cause) => cause,
                None if error.is_eof() => Cause::Truncated { inside: "the JSON" },
                None if error.is_io() => Cause::Read(error.into()),
                None => Cause::NotASnapshot(format!("malformed JSON: {error}")),
            };
            return Err(cause.at(offset));
        }
    };
    Ok(value)
}

/// Counts what is read through it.
struct Counted<'a, R> {
    inner: &'a mut R,
    offset: Rc<RefCell<u64>>,
}

impl<R: Read> Read for Counted<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let count = self.inner.read(into)?;
        *self.offset.borrow_mut() += count as u64;
        Ok(count)
    }
}

struct Seed<'a> {
    shaper: &'a mut Shaper,
    /// Why the shaper refused something.
    cause: Option<Cause>,
}

impl Seed<'_> {
    fn done<E: serde::de::Error>(&mut self, result: Result<Value, Cause>) -> Result<Value, E> {
        result.map_err(|cause| {
            let error = E::custom(&cause);
            self.cause = Some(cause);
            error
        })
    }
}

impl<'de> DeserializeSeed<'de> for &mut Seed<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for &mut Seed<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a memory snapshot")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::None)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Int(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(i64::try_from(value).map_or(Value::UInt(value), Value::Int))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Value::Float(value))
    }

    fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<Value, E> {
        let value = self.shaper.text(value);
        self.done(value)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = access.next_element_seed(&mut *self)? {
            items.push(item);
        }
        let value = self.shaper.list(&items);
        self.done(value)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut pairs = Vec::new();
        while let Some(key) = access.next_key_seed(&mut *self)? {
            let value = access.next_value_seed(&mut *self)?;
            pairs.push((key, value));
        }
        let value = self.shaper.dict(&pairs);
        self.done(value)
    }
}
