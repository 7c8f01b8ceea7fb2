//! Walking two layouts at once, in as few and as long runs as they allow.

use smallvec::SmallVec;

use crate::shape::{index, unsigned};

/// One dimension of a walk: how many steps, and how far each goes in either layout, in elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Step {
    pub(crate) size: i64,
    pub(crate) to: i64,
    pub(crate) from: i64,
}

/// Dimensions of a walk, outermost first.
pub(crate) type Walk = SmallVec<[Step; 5]>;

/// The walk over all indices of `shape` with the fewest dimensions: the largest destination stride
/// outermost, dimensions merged where both layouts allow. The order of elements is not kept.
pub(crate) fn walk(shape: &[i64], to: &[i64], from: &[i64]) -> Walk {
    let mut steps: Walk = shape
        .iter()
        .zip(to)
        .zip(from)
        .filter(|((size, _), _)| **size != 1)
        .map(|((&size, &to), &from)| Step { size, to, from })
        .collect();
    // Stable, so that equal strides keep the order of the dimensions.
    steps.sort_by_key(|step| std::cmp::Reverse((step.to, step.from)));
    let mut merged = Walk::new();
    for step in steps {
        match merged.last_mut() {
            Some(outer)
                if outer.to == step.to * step.size && outer.from == step.from * step.size =>
            {
                *outer = Step {
                    size: outer.size * step.size,
                    ..step
                };
            }
            _ => merged.push(step),
        }
    }
    merged
}

/// Calls `f` with both positions for every index of `walk`.
pub(crate) fn for_each<E>(
    walk: &[Step],
    to: i64,
    from: i64,
    f: &mut impl FnMut(i64, i64) -> Result<(), E>,
) -> Result<(), E> {
    let Some((step, inner)) = walk.split_first() else {
        return f(to, from);
    };
    (0..step.size).try_for_each(|i| for_each(inner, to + i * step.to, from + i * step.from, f))
}

/// Copies elements of `SIZE` bytes from one layout to the other.
fn copy_sized<const SIZE: usize>(to: &mut [u8], from: &[u8], walk: &[Step]) {
    let (outer, run) = split_run(walk);
    let Ok(()) = for_each::<std::convert::Infallible>(outer, 0, 0, &mut |to_at, from_at| {
        let (mut to_at, mut from_at) = (index(to_at) * SIZE, index(from_at) * SIZE);
        if run.to == 1 && run.from == 1 {
            let bytes = index(run.size) * SIZE;
            to[to_at..to_at + bytes].copy_from_slice(&from[from_at..from_at + bytes]);
            return Ok(());
        }
        for _ in 0..run.size {
            to[to_at..to_at + SIZE].copy_from_slice(&from[from_at..from_at + SIZE]);
            to_at += index(run.to) * SIZE;
            from_at += index(run.from) * SIZE;
        }
        Ok(())
    });
}

/// The innermost dimension apart from the others; a single step if there is none.
pub(crate) fn split_run(walk: &[Step]) -> (&[Step], Step) {
    match walk.split_last() {
        Some((run, outer)) => (outer, *run),
        None => (
            &[],
            Step {
                size: 1,
                to: 1,
                from: 1,
            },
        ),
    }
}

/// Copies elements of `size` bytes (1, 2, 4 or 8) from one layout to the other, each beginning with
/// its bytes.
pub(crate) fn copy(size: u64, to: &mut [u8], from: &[u8], walk: &[Step]) {
    match size {
        1 => copy_sized::<1>(to, from, walk),
        2 => copy_sized::<2>(to, from, walk),
        4 => copy_sized::<4>(to, from, walk),
        _ => copy_sized::<8>(to, from, walk),
    }
}

/// How a walk is done by calls that move rows: `rest` says how many calls and where.
#[derive(Debug)]
pub(crate) struct Rows {
    /// Bytes in a row that lie together on both sides.
    pub(crate) width_bytes: u64,
    /// The dimension whose steps are the rows of one call.
    pub(crate) row: Option<Step>,
    /// One call for each index of these.
    pub(crate) rest: Walk,
}

impl Rows {
    /// Splits a walk over elements of `size` bytes. With `unit_bytes` below `size`, rows are that
    /// wide and hold a part of one element each.
    pub(crate) fn new(walk: &[Step], size: u64, unit_bytes: Option<u64>) -> Self {
        let (outer, run) = split_run(walk);
        let together = unit_bytes.is_none() && run.to == 1 && run.from == 1;
        let (width_bytes, mut rest) = if together {
            (unsigned(run.size) * size, Walk::from_slice(outer))
        } else {
            (unit_bytes.unwrap_or(size), Walk::from_slice(walk))
        };
        // The longest dimension that may be rows: they must not overlap on either side.
        let row = rest
            .iter()
            .enumerate()
            .filter(|(_, step)| {
                unsigned(step.to) * size >= width_bytes && unsigned(step.from) * size >= width_bytes
            })
            .max_by_key(|(_, step)| step.size)
            .map(|(at, _)| at);
        let row = row.map(|at| rest.remove(at));
        Self {
            width_bytes,
            row,
            rest,
        }
    }

    /// The walk as one piece a call, without rows.
    pub(crate) fn pieces(walk: &[Step], size: u64) -> Self {
        let (outer, run) = split_run(walk);
        let (width_bytes, rest) = if run.to == 1 && run.from == 1 {
            (unsigned(run.size) * size, outer)
        } else {
            (size, walk)
        };
        Self {
            width_bytes,
            row: None,
            rest: Walk::from_slice(rest),
        }
    }

    /// How many calls it takes.
    pub(crate) fn calls(&self) -> u64 {
        self.rest.iter().fold(1, |calls: u64, step| {
            calls.saturating_mul(unsigned(step.size))
        })
    }
}
