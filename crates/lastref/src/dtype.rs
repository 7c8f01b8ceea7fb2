//! Element types: [`DType`], the Rust types behind them ([`Element`]), and single values
//! ([`Scalar`]).
//!
//! Conversion follows torch: to `bool`, everything but zero is true; from a float to an integer,
//! the fraction is cut off; an integer that does not fit wraps. What a float outside the range of
//! the integer type becomes is not specified. A [`Scalar`] holds every value of every dtype
//! exactly, so converting through it loses nothing that the target could have kept.
#![expect(
    clippy::cast_possible_truncation,
    reason = "narrowing numbers as torch does is what this module is for"
)]

use std::fmt;
use std::str::FromStr;

use half::{bf16, f16};

use crate::{Error, Result};

/// The type of a tensor's elements.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum DType {
    /// 64-bit float.
    F64,
    /// 32-bit float; what tensors hold unless told otherwise.
    #[default]
    F32,
    /// 16-bit IEEE float.
    F16,
    /// 16-bit float with the exponent range of `F32`.
    BF16,
    /// 64-bit signed integer.
    I64,
    /// 32-bit signed integer.
    I32,
    /// 16-bit signed integer.
    I16,
    /// 8-bit signed integer.
    I8,
    /// 8-bit unsigned integer.
    U8,
    /// One byte, zero or one.
    Bool,
}

impl DType {
    /// All of them.
    pub const ALL: [Self; 10] = [
        Self::F64,
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::I64,
        Self::I32,
        Self::I16,
        Self::I8,
        Self::U8,
        Self::Bool,
    ];

    /// Bytes of one element.
    #[must_use]
    pub const fn size(self) -> u64 {
        match self {
            Self::F64 | Self::I64 => 8,
            Self::F32 | Self::I32 => 4,
            Self::F16 | Self::BF16 | Self::I16 => 2,
            Self::I8 | Self::U8 | Self::Bool => 1,
        }
    }

    /// torch's name: `float32`, `int64`, `bool`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F64 => "float64",
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::BF16 => "bfloat16",
            Self::I64 => "int64",
            Self::I32 => "int32",
            Self::I16 => "int16",
            Self::I8 => "int8",
            Self::U8 => "uint8",
            Self::Bool => "bool",
        }
    }

    /// Whether it is one of the four float types.
    #[must_use]
    pub const fn is_floating_point(self) -> bool {
        matches!(self, Self::F64 | Self::F32 | Self::F16 | Self::BF16)
    }

    /// The bytes of `value` in this dtype, in the first [`size`](Self::size) places.
    pub(crate) fn encode(self, value: Scalar) -> [u8; 8] {
        let mut bytes = [0; 8];
        with_element!(self, T => T::from_scalar(value).store(&mut bytes));
        bytes
    }

    /// The value in the first [`size`](Self::size) bytes.
    pub(crate) fn decode(self, bytes: &[u8]) -> Scalar {
        with_element!(self, T => T::load(bytes).to_scalar())
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for DType {
    type Err = Error;

    /// Reads torch's names, with or without `torch.` or `lastref.`, and torch's short names
    /// (`float`, `double`, `half`, `long`, `int`, `short`).
    fn from_str(text: &str) -> Result<Self> {
        let name = text.rsplit('.').next().unwrap_or(text);
        Ok(match name {
            "float64" | "double" => Self::F64,
            "float32" | "float" => Self::F32,
            "float16" | "half" => Self::F16,
            "bfloat16" => Self::BF16,
            "int64" | "long" => Self::I64,
            "int32" | "int" => Self::I32,
            "int16" | "short" => Self::I16,
            "int8" => Self::I8,
            "uint8" => Self::U8,
            "bool" => Self::Bool,
            _ => {
                return Err(Error::argument(
                    "dtype",
                    format!("unknown name {text:?}, expected one such as float32, int64 or bool"),
                ));
            }
        })
    }
}

/// One value of any dtype, exactly.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Scalar {
    /// A truth value.
    Bool(bool),
    /// Any integer.
    Int(i64),
    /// Any float.
    Float(f64),
}

impl Scalar {
    /// The dtype torch gives a tensor made from it: `bool`, `int64` or `float32`.
    #[must_use]
    pub const fn default_dtype(self) -> DType {
        match self {
            Self::Bool(_) => DType::Bool,
            Self::Int(_) => DType::I64,
            Self::Float(_) => DType::F32,
        }
    }

    /// The value as a float; a large integer is rounded.
    #[must_use]
    pub fn to_f64(self) -> f64 {
        match self {
            Self::Bool(value) => f64::from(u8::from(value)),
            #[expect(clippy::cast_precision_loss, reason = "documented to round")]
            Self::Int(value) => value as f64,
            Self::Float(value) => value,
        }
    }

    /// The value as an integer; the fraction of a float is cut off.
    #[must_use]
    pub fn to_i64(self) -> i64 {
        match self {
            Self::Bool(value) => i64::from(value),
            Self::Int(value) => value,
            Self::Float(value) => value as i64,
        }
    }

    /// Whether the value is not zero.
    #[must_use]
    pub fn to_bool(self) -> bool {
        match self {
            Self::Bool(value) => value,
            Self::Int(value) => value != 0,
            Self::Float(value) => value != 0.0,
        }
    }

    /// As a 32-bit float, rounded once.
    fn to_f32(self) -> f32 {
        match self {
            Self::Bool(value) => f32::from(u8::from(value)),
            #[expect(clippy::cast_precision_loss, reason = "rounds to the nearest float")]
            Self::Int(value) => value as f32,
            Self::Float(value) => value as f32,
        }
    }
}

impl fmt::Display for Scalar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bool(value) => value.fmt(f),
            Self::Int(value) => value.fmt(f),
            Self::Float(value) => value.fmt(f),
        }
    }
}

mod sealed {
    pub trait Sealed {}
}

/// The Rust types that tensors hold, one for each [`DType`].
pub trait Element:
    sealed::Sealed + Copy + PartialEq + fmt::Debug + Send + Sync + Into<Scalar> + 'static
{
    /// The dtype of this type.
    const DTYPE: DType;

    /// This value as a [`Scalar`], exactly.
    fn to_scalar(self) -> Scalar {
        self.into()
    }

    /// The nearest value of this type; see the rules of [`Scalar`].
    fn from_scalar(value: Scalar) -> Self;

    /// Reads a value from its first bytes, in the host's order.
    #[doc(hidden)]
    fn load(bytes: &[u8]) -> Self;

    /// Writes the value to the first bytes, in the host's order.
    #[doc(hidden)]
    fn store(self, bytes: &mut [u8]);
}

macro_rules! element {
    ($ty:ty, $dtype:ident, $into:expr, $from:expr) => {
        impl sealed::Sealed for $ty {}
        impl From<$ty> for Scalar {
            fn from(value: $ty) -> Self {
                let into: fn($ty) -> Self = $into;
                into(value)
            }
        }
        impl Element for $ty {
            const DTYPE: DType = DType::$dtype;
            #[inline]
            fn from_scalar(value: Scalar) -> Self {
                let from: fn(Scalar) -> Self = $from;
                from(value)
            }
            #[inline]
            fn load(bytes: &[u8]) -> Self {
                let mut raw = [0; size_of::<Self>()];
                raw.copy_from_slice(&bytes[..size_of::<Self>()]);
                Self::from_ne_bytes(raw)
            }
            #[inline]
            fn store(self, bytes: &mut [u8]) {
                bytes[..size_of::<Self>()].copy_from_slice(&self.to_ne_bytes());
            }
        }
    };
}

element!(f64, F64, Scalar::Float, Scalar::to_f64);
element!(f32, F32, |v| Scalar::Float(v.into()), Scalar::to_f32);
element!(f16, F16, |v| Scalar::Float(v.to_f64()), |v| match v {
    Scalar::Float(value) => f16::from_f64(value),
    other => f16::from_f32(other.to_f32()),
});
element!(bf16, BF16, |v| Scalar::Float(v.to_f64()), |v| match v {
    Scalar::Float(value) => bf16::from_f64(value),
    other => bf16::from_f32(other.to_f32()),
});
element!(i64, I64, Scalar::Int, Scalar::to_i64);
element!(i32, I32, |v| Scalar::Int(v.into()), |v| v.to_i64() as i32);
element!(i16, I16, |v| Scalar::Int(v.into()), |v| v.to_i64() as i16);
element!(i8, I8, |v| Scalar::Int(v.into()), |v| v.to_i64() as i8);
element!(u8, U8, |v| Scalar::Int(v.into()), |v| v.to_i64() as u8);

impl sealed::Sealed for bool {}
impl From<bool> for Scalar {
    fn from(value: bool) -> Self {
        Self::Bool(value)
    }
}
impl Element for bool {
    const DTYPE: DType = DType::Bool;
    #[inline]
    fn from_scalar(value: Scalar) -> Self {
        value.to_bool()
    }
    #[inline]
    fn load(bytes: &[u8]) -> Self {
        // Memory that nobody has written holds any byte: only `== 0` is false.
        bytes[0] != 0
    }
    #[inline]
    fn store(self, bytes: &mut [u8]) {
        bytes[0] = self.into();
    }
}

/// Runs an expression with `$ty` standing for the Rust type of a dtype.
macro_rules! with_element {
    ($dtype:expr, $ty:ident => $body:expr) => {
        match $dtype {
            $crate::DType::F64 => {
                type $ty = f64;
                $body
            }
            $crate::DType::F32 => {
                type $ty = f32;
                $body
            }
            $crate::DType::F16 => {
                type $ty = ::half::f16;
                $body
            }
            $crate::DType::BF16 => {
                type $ty = ::half::bf16;
                $body
            }
            $crate::DType::I64 => {
                type $ty = i64;
                $body
            }
            $crate::DType::I32 => {
                type $ty = i32;
                $body
            }
            $crate::DType::I16 => {
                type $ty = i16;
                $body
            }
            $crate::DType::I8 => {
                type $ty = i8;
                $body
            }
            $crate::DType::U8 => {
                type $ty = u8;
                $body
            }
            $crate::DType::Bool => {
                type $ty = bool;
                $body
            }
        }
    };
}
pub(crate) use with_element;
