//! Printing, in the form torch gives.
//!
//! A tensor of more than [`THRESHOLD`] elements is shown by its first and last [`EDGE`] positions
//! of each dimension, and only those are read. So printing copies at most [`MOST_SHOWN`] elements,
//! however large the tensor, and takes no device memory for them unless they lie far apart. A
//! tensor with so many dimensions that even its edges are more is shown by its shape.

use std::fmt;

use crate::tensor::Tensor;
use crate::{DType, Result, Scalar};

/// Elements that are shown without leaving any out.
const THRESHOLD: u64 = 1000;
/// Positions shown at either end of a long dimension.
const EDGE: i64 = 3;
/// Elements that are shown at most.
const MOST_SHOWN: i64 = 10_000;
/// Columns of a line.
const LINE_WIDTH: usize = 80;
/// Digits after the point.
const PRECISION: usize = 4;

const PREFIX: &str = "tensor(";

impl fmt::Display for Tensor {
    /// As torch prints it. Waits for the current stream. If the elements cannot be read, the text
    /// says why.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = String::from(PREFIX);
        let mut suffixes = Vec::new();
        if self.is_cuda() {
            suffixes.push(format!("device='{}'", self.device()));
        }
        let size = || {
            let sizes: Vec<String> = self.shape().iter().map(i64::to_string).collect();
            let comma = if sizes.len() == 1 { "," } else { "" };
            format!("size=({}{comma})", sizes.join(", "))
        };
        let mut show_dtype = !matches!(self.dtype(), DType::F32 | DType::I64 | DType::Bool);
        if self.numel() == 0 {
            text.push_str("[]");
            if self.dim() != 1 {
                suffixes.push(size());
            }
            show_dtype = self.dtype() != DType::F32;
        } else {
            match Shown::read(self) {
                Ok(Some(shown)) => text.push_str(&shown.body(PREFIX.len())),
                Ok(None) => {
                    text.push_str("...");
                    suffixes.push(size());
                }
                Err(error) => {
                    text.push_str(&format!("<not readable: {error}>"));
                    suffixes.push(size());
                }
            }
        }
        if show_dtype {
            suffixes.push(format!("dtype=lastref.{}", self.dtype()));
        }
        // torch counts two more than there are on the line that the elements end on.
        let mut column = text.len() - text.rfind('\n').map_or(0, |at| at + 1) + 2;
        for suffix in suffixes {
            if column + suffix.len() + 2 > LINE_WIDTH {
                text.push_str(",\n");
                text.push_str(&" ".repeat(PREFIX.len()));
                column = PREFIX.len() + suffix.len();
            } else {
                text.push_str(", ");
                column += suffix.len() + 2;
            }
            text.push_str(&suffix);
        }
        text.push(')');
        f.write_str(&text)
    }
}

impl fmt::Debug for Tensor {
    /// The same as for `Display`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// One dimension as shown: `size` positions, with a gap after the first `EDGE` or not.
#[derive(Clone, Copy)]
struct ShownDim {
    size: usize,
    gap: bool,
}

/// The elements that are shown.
struct Shown {
    dims: Vec<ShownDim>,
    values: Vec<Scalar>,
    style: Style,
}

impl Shown {
    /// Reads what is shown of a tensor with elements; `None` if that would be too much.
    fn read(tensor: &Tensor) -> Result<Option<Self>> {
        let summarise = tensor.numel() > THRESHOLD;
        let cut = |size: i64| summarise && size > 2 * EDGE;
        // For each dimension, the stretches that are read: (first shown, first read, how many).
        let stretches: Vec<Vec<(i64, i64, i64)>> = tensor
            .shape()
            .iter()
            .map(|&size| match cut(size) {
                true => vec![(0, 0, EDGE), (EDGE, size - EDGE, EDGE)],
                false => vec![(0, 0, size)],
            })
            .collect();
        let sizes: Vec<i64> = stretches
            .iter()
            .map(|stretches| stretches.iter().map(|(_, _, len)| len).sum())
            .collect();
        let total = sizes
            .iter()
            .try_fold(1_i64, |total, size| total.checked_mul(*size));
        let Some(total) = total.filter(|total| *total <= MOST_SHOWN) else {
            return Ok(None);
        };
        let shown = Tensor::zeros_with(&sizes, tensor.dtype())?;
        read_blocks(&shown, tensor, &stretches, 0)?;
        let values = shown.to_scalars()?;
        debug_assert_eq!(i64::try_from(values.len()), Ok(total));
        let dims = tensor
            .shape()
            .iter()
            .zip(&sizes)
            .map(|(&whole, &size)| ShownDim {
                size: crate::shape::index(size),
                gap: cut(whole),
            })
            .collect();
        Ok(Some(Self {
            dims,
            style: Style::of(&values),
            values,
        }))
    }

    fn body(&self, indent: usize) -> String {
        let mut out = String::new();
        self.write(&mut out, 0, &self.values, indent);
        out
    }

    /// Writes the dimensions from `dim` on; `values` are theirs.
    fn write(&self, out: &mut String, dim: usize, values: &[Scalar], indent: usize) {
        let Some(shown) = self.dims.get(dim) else {
            out.push_str(self.style.show(values[0]).trim_start());
            return;
        };
        out.push('[');
        if dim + 1 == self.dims.len() {
            self.write_line(out, *shown, values, indent);
        } else {
            let inner = self.dims.len() - dim - 1;
            let separator = format!(",{}{}", "\n".repeat(inner), " ".repeat(indent + 1));
            let step = values.len() / shown.size;
            for (at, part) in values.chunks_exact(step).enumerate() {
                if at > 0 {
                    out.push_str(&separator);
                }
                if shown.gap && at == crate::shape::index(EDGE) {
                    out.push_str("...");
                    out.push_str(&separator);
                }
                self.write(out, dim + 1, part, indent + 1);
            }
        }
        out.push(']');
    }

    /// Writes the innermost dimension, in as many lines as it takes.
    fn write_line(&self, out: &mut String, shown: ShownDim, values: &[Scalar], indent: usize) {
        let mut cells: Vec<String> = values.iter().map(|value| self.style.show(*value)).collect();
        if shown.gap {
            cells.insert(crate::shape::index(EDGE), " ...".to_owned());
        }
        let per_line = (LINE_WIDTH.saturating_sub(indent) / (self.style.width + 2)).max(1);
        let lines: Vec<String> = cells
            .chunks(per_line)
            .map(|cells| cells.join(", "))
            .collect();
        out.push_str(&lines.join(&format!(",\n{}", " ".repeat(indent + 1))));
    }
}

/// Copies the stretches of all dimensions from `dim` on into their places.
fn read_blocks(
    to: &Tensor,
    from: &Tensor,
    stretches: &[Vec<(i64, i64, i64)>],
    dim: usize,
) -> Result<()> {
    let Some(own) = stretches.get(dim) else {
        return to.copy_(from);
    };
    let axis = crate::shape::count(dim);
    for &(place, first, len) in own {
        let to = to.narrow(axis, place, len)?;
        let from = from.narrow(axis, first, len)?;
        read_blocks(&to, &from, stretches, dim + 1)?;
    }
    Ok(())
}

/// How all numbers of one tensor are written, so that they line up.
struct Style {
    form: Form,
    width: usize,
}

#[derive(Clone, Copy)]
enum Form {
    /// Integers and truth values.
    Plain,
    /// Floats that are all whole: `2.`
    Whole,
    /// Floats with digits: `2.5000`
    Fixed,
    /// Floats of very different size: `2.5000e+00`
    Exponent,
}

impl Style {
    fn of(values: &[Scalar]) -> Self {
        let floats: Vec<f64> = values
            .iter()
            .filter_map(|value| match value {
                Scalar::Float(value) => Some(*value),
                _ => None,
            })
            .collect();
        if floats.is_empty() {
            let form = Form::Plain;
            return Self {
                form,
                width: widest(form, values.iter().copied()),
            };
        }
        let finite = || {
            floats
                .iter()
                .copied()
                .filter(|value| value.is_finite() && *value != 0.0)
        };
        let most = finite().map(f64::abs).fold(0.0, f64::max);
        let least = finite().map(f64::abs).fold(f64::INFINITY, f64::min);
        let whole = finite().all(|value| value == value.ceil());
        // torch's limits: where more than three digits would be lost or many zeros written.
        let far = most / least > 1000.0 || most > 1e8 || (!whole && least < 1e-4);
        let form = match (far, whole) {
            (true, _) => Form::Exponent,
            (false, true) => Form::Whole,
            (false, false) => Form::Fixed,
        };
        Self {
            form,
            width: widest(form, finite().map(Scalar::Float)),
        }
    }

    fn show(&self, value: Scalar) -> String {
        format!("{:>1$}", self.form.show(value), self.width)
    }
}

fn widest(form: Form, values: impl Iterator<Item = Scalar>) -> usize {
    values
        .map(|value| form.show(value).len())
        .max()
        .unwrap_or(0)
        .max(1)
}

impl Form {
    fn show(self, value: Scalar) -> String {
        let value = match value {
            Scalar::Bool(true) => return "True".to_owned(),
            Scalar::Bool(false) => return "False".to_owned(),
            Scalar::Int(value) => return value.to_string(),
            Scalar::Float(value) => value,
        };
        if value.is_nan() {
            return "nan".to_owned();
        }
        if value.is_infinite() {
            return if value > 0.0 { "inf" } else { "-inf" }.to_owned();
        }
        match self {
            Self::Plain | Self::Fixed => format!("{value:.PRECISION$}"),
            Self::Whole => format!("{value:.0}."),
            Self::Exponent => {
                let text = format!("{value:.PRECISION$e}");
                let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
                let (sign, exponent) = match exponent.strip_prefix('-') {
                    Some(exponent) => ('-', exponent),
                    None => ('+', exponent),
                };
                format!("{digits}e{sign}{exponent:0>2}")
            }
        }
    }
}
