//! Random programs of views, copies and fills against a model that knows nothing of strides: a
//! list of values, and for each tensor the list of places its elements have in it.
#![expect(clippy::unwrap_used, reason = "an error here is a failed test")]

mod common;

use common::turn;
use lastref::alloc::sim::Call;
use lastref::{DType, Device, Scalar, Tensor, cuda};
use proptest::prelude::*;

common::also_on_a_driver!("256MiB");

/// What a tensor is: a shape, and where each element is in the base, in row-major order.
#[derive(Clone, Debug)]
struct Model {
    shape: Vec<i64>,
    places: Vec<usize>,
}

/// Every index of `shape` in row-major order.
fn indices(shape: &[i64]) -> Vec<Vec<i64>> {
    shape.iter().fold(vec![vec![]], |all, &size| {
        all.iter()
            .flat_map(|index| (0..size).map(move |i| [&index[..], &[i]].concat()))
            .collect()
    })
}

impl Model {
    fn new(shape: &[i64]) -> Self {
        Self {
            shape: shape.to_vec(),
            places: (0..indices(shape).len()).collect(),
        }
    }

    fn place(&self, index: &[i64]) -> usize {
        let flat = index
            .iter()
            .zip(&self.shape)
            .fold(0, |flat, (i, size)| flat * size + i);
        self.places[usize::try_from(flat).unwrap()]
    }

    /// The model of another shape, whose element at an index is this one's at `from(index)`.
    fn view(&self, shape: Vec<i64>, from: impl Fn(&[i64]) -> Vec<i64>) -> Self {
        let places = indices(&shape)
            .iter()
            .map(|index| self.place(&from(index)))
            .collect();
        Self { shape, places }
    }

    fn has_repeats(&self) -> bool {
        let mut places = self.places.clone();
        places.sort_unstable();
        places.windows(2).any(|pair| pair[0] == pair[1])
    }
}

/// A view to take; the numbers choose among what the shape allows.
#[derive(Clone, Debug)]
enum Op {
    Transpose(usize, usize),
    Permute(usize),
    Narrow(usize, i64, i64),
    Select(usize, i64),
    Slice(usize, i64, i64, i64),
    Squeeze,
    SqueezeDim(usize),
    Unsqueeze(usize),
    Expand(i64),
    Merge(usize),
    Split(usize),
}

fn op() -> impl Strategy<Value = Op> {
    let n = 0_usize..8;
    let i = -9_i64..9;
    prop_oneof![
        (n.clone(), n.clone()).prop_map(|(a, b)| Op::Transpose(a, b)),
        n.clone().prop_map(Op::Permute),
        (n.clone(), 0_i64..4, 0_i64..5).prop_map(|(d, a, b)| Op::Narrow(d, a, b)),
        (n.clone(), i.clone()).prop_map(|(d, a)| Op::Select(d, a)),
        (n.clone(), i.clone(), i, 1_i64..4).prop_map(|(d, a, b, s)| Op::Slice(d, a, b, s)),
        Just(Op::Squeeze),
        n.clone().prop_map(Op::SqueezeDim),
        n.clone().prop_map(Op::Unsqueeze),
        (2_i64..4).prop_map(Op::Expand),
        n.clone().prop_map(Op::Merge),
        n.prop_map(Op::Split),
    ]
}

fn without(index: &[i64], at: usize, value: i64) -> Vec<i64> {
    [&index[..at], &[value], &index[at..]].concat()
}

fn signed(n: usize) -> i64 {
    i64::try_from(n).unwrap()
}

/// Takes the view on both sides; leaves them as they are where the shape does not allow it.
fn apply(op: &Op, tensor: &Tensor, model: &Model) -> (Tensor, Model) {
    let dims = model.shape.len();
    let same = || (tensor.clone(), model.clone());
    let dim = |n: usize| n % dims;
    match *op {
        Op::Transpose(..)
        | Op::Permute(_)
        | Op::Narrow(..)
        | Op::Select(..)
        | Op::Slice(..)
        | Op::SqueezeDim(_)
        | Op::Merge(_)
        | Op::Split(_)
            if dims == 0 =>
        {
            same()
        }
        Op::Transpose(a, b) => {
            let (a, b) = (dim(a), dim(b));
            let mut shape = model.shape.clone();
            shape.swap(a, b);
            let moved = model.view(shape, |index| {
                let mut index = index.to_vec();
                index.swap(a, b);
                index
            });
            // One of the two counted from the end.
            let back = signed(b) - signed(dims);
            (tensor.transpose(signed(a), back).unwrap(), moved)
        }
        Op::Permute(by) => {
            let order: Vec<usize> = (0..dims).map(|at| (at + by) % dims).rev().collect();
            let shape = order.iter().map(|&from| model.shape[from]).collect();
            let moved = model.view(shape, |index| {
                let mut from = vec![0; dims];
                for (at, &to) in order.iter().enumerate() {
                    from[to] = index[at];
                }
                from
            });
            let order: Vec<i64> = order.into_iter().map(signed).collect();
            (tensor.permute(order).unwrap(), moved)
        }
        Op::Narrow(d, start, len) => {
            let d = dim(d);
            let size = model.shape[d];
            let start = start.min(size);
            let len = len.min(size - start);
            let mut shape = model.shape.clone();
            shape[d] = len;
            let moved = model.view(shape, |index| {
                let mut index = index.to_vec();
                index[d] += start;
                index
            });
            (tensor.narrow(signed(d), start, len).unwrap(), moved)
        }
        Op::Select(d, at) => {
            let d = dim(d);
            let size = model.shape[d];
            if at < -size || at >= size {
                assert!(tensor.select(signed(d), at).is_err());
                return same();
            }
            let real = if at < 0 { at + size } else { at };
            let mut shape = model.shape.clone();
            shape.remove(d);
            let moved = model.view(shape, |index| without(index, d, real));
            (tensor.select(signed(d), at).unwrap(), moved)
        }
        Op::Slice(d, start, end, step) => {
            let d = dim(d);
            let size = model.shape[d];
            let real = |at: i64| (if at < 0 { at + size } else { at }).clamp(0, size);
            let taken: Vec<i64> = (real(start)..real(end))
                .step_by(usize::try_from(step).unwrap())
                .collect();
            let mut shape = model.shape.clone();
            shape[d] = signed(taken.len());
            let moved = model.view(shape, |index| {
                let mut index = index.to_vec();
                index[d] = taken[usize::try_from(index[d]).unwrap()];
                index
            });
            (tensor.slice(signed(d), start, end, step).unwrap(), moved)
        }
        Op::Squeeze => {
            let kept: Vec<i64> = model.shape.iter().copied().filter(|s| *s != 1).collect();
            let moved = Model {
                shape: kept,
                places: model.places.clone(),
            };
            (tensor.squeeze(None).unwrap(), moved)
        }
        Op::SqueezeDim(d) => {
            let d = dim(d);
            let mut moved = model.clone();
            if moved.shape[d] == 1 {
                moved.shape.remove(d);
            }
            (tensor.squeeze(signed(d)).unwrap(), moved)
        }
        Op::Unsqueeze(d) => {
            if dims >= 6 {
                return same();
            }
            let d = d % (dims + 1);
            let mut moved = model.clone();
            moved.shape.insert(d, 1);
            let back = signed(d) - signed(dims) - 1;
            (tensor.unsqueeze(back).unwrap(), moved)
        }
        Op::Expand(to) => {
            if model.places.len() > 200 || dims >= 6 {
                return same();
            }
            let shape: Vec<i64> = std::iter::once(to)
                .chain(model.shape.iter().map(|&s| if s == 1 { to } else { s }))
                .collect();
            let own = model.shape.clone();
            let moved = model.view(shape.clone(), |index| {
                let inner = index[1..].iter().zip(&own);
                inner.map(|(&i, &s)| if s == 1 { 0 } else { i }).collect()
            });
            (tensor.expand(shape).unwrap(), moved)
        }
        // Reshapes keep the row-major order, so the places stay.
        Op::Merge(d) => {
            let d = dim(d);
            if d + 1 == dims {
                return same();
            }
            let mut shape = model.shape.clone();
            let inner = shape.remove(d + 1);
            shape[d] *= inner;
            reshaped(tensor, model, shape)
        }
        Op::Split(d) => {
            let d = dim(d);
            if model.shape[d] % 2 != 0 || model.shape[d] == 0 || dims >= 6 {
                return same();
            }
            let mut shape = model.shape.clone();
            shape[d] = 2;
            shape.insert(d + 1, model.shape[d] / 2);
            reshaped(tensor, model, shape)
        }
    }
}

/// The view where there is one; `reshape` must have the right elements in any case.
fn reshaped(tensor: &Tensor, model: &Model, shape: Vec<i64>) -> (Tensor, Model) {
    let moved = Model {
        shape: shape.clone(),
        places: model.places.clone(),
    };
    let reshaped = tensor.reshape(&shape).unwrap();
    assert_eq!(reshaped.shape(), shape);
    assert_eq!(reshaped.to_bytes().unwrap(), tensor.to_bytes().unwrap());
    match tensor.view(&shape) {
        Ok(view) => {
            assert!(reshaped.same_storage(tensor), "copied without need");
            (view, moved)
        }
        Err(_) => {
            assert!(!reshaped.same_storage(tensor));
            assert!(!tensor.is_contiguous(), "{tensor:?} to {shape:?}");
            (tensor.clone(), model.clone())
        }
    }
}

fn read(model: &Model, base: &[i64]) -> Vec<i64> {
    model.places.iter().map(|&place| base[place]).collect()
}

fn integers(tensor: &Tensor) -> Vec<i64> {
    let scalars = tensor.to_scalars().unwrap();
    scalars.into_iter().map(Scalar::to_i64).collect()
}

fn check(shape: &[i64], dtype: DType, device: Device, programs: &[Vec<Op>], other: DType) {
    let _turn = turn("256MiB");
    // Values below 128, which every dtype but bool holds exactly.
    let mut base: Vec<i64> = (0..signed(Model::new(shape).places.len()))
        .map(|at| at % 120)
        .collect();
    let made = Tensor::from_slice_with(&base, [signed(base.len())], (dtype, device)).unwrap();
    let whole = made.view(shape).unwrap();
    let mut views = vec![];
    for program in programs {
        let mut pair = (whole.clone(), Model::new(shape));
        for op in program {
            pair = apply(op, &pair.0, &pair.1);
            assert_eq!(pair.0.shape(), pair.1.shape, "{op:?}");
            assert!(pair.0.same_storage(&made), "{op:?} copied");
            assert_eq!(integers(&pair.0), read(&pair.1, &base), "{op:?}");
        }
        views.push(pair);
    }
    let count = made.ref_count();

    for (at, (view, model)) in views.iter().enumerate() {
        // Copies of every kind hold the same values, and leave the source alone.
        let expected = read(model, &base);
        assert_eq!(integers(&view.copy().unwrap()), expected);
        assert_eq!(integers(&view.contiguous().unwrap()), expected);
        assert!(view.contiguous().unwrap().is_contiguous());
        assert_eq!(integers(&view.to_dtype(other).unwrap()), expected);
        let elsewhere = match device {
            Device::Cpu => view.cuda().unwrap(),
            _ => view.cpu().unwrap(),
        };
        assert_eq!(integers(&elsewhere), expected);
        let _ = view.to_string();

        // Fills and copies through the view change its places and no others.
        let value = 100 + signed(at);
        let filled = view.fill_(value);
        if model.has_repeats() {
            assert!(filled.is_err() || view.numel() == 0);
            continue;
        }
        filled.unwrap();
        for &place in &model.places {
            base[place] = value;
        }
        assert_eq!(integers(&made), base, "after a fill");

        // From another device, dtype and order of dimensions.
        let values: Vec<i64> = (0..signed(model.places.len())).map(|i| i % 90).collect();
        let source = Tensor::from_slice(&values, &model.shape).unwrap();
        let turned: Vec<i64> = (0..signed(model.shape.len())).rev().collect();
        let source = source.permute(&turned[..]).unwrap().copy().unwrap();
        let source = source.permute(&turned[..]).unwrap();
        let source = source.to(elsewhere.device(), other).unwrap();
        view.copy_(&source).unwrap();
        for (&place, value) in model.places.iter().zip(values) {
            base[place] = value;
        }
        assert_eq!(integers(&made), base, "after a copy");

        // From another view of the same memory, read before it is written.
        if let Some((from, from_model)) = views
            .iter()
            .rev()
            .find(|(from, _)| from.shape() == view.shape())
        {
            let values = read(from_model, &base);
            view.copy_(from).unwrap();
            for (&place, value) in model.places.iter().zip(values) {
                base[place] = value;
            }
            assert_eq!(integers(&made), base, "after a copy within");
        }
    }
    assert_eq!(made.ref_count(), count, "no handle was kept");
    drop((made, whole, views));
    cuda::synchronize(0).unwrap();
    assert_eq!(common::allocated(), 0);
}

const DTYPES: [DType; 9] = [
    DType::F64,
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::I64,
    DType::I32,
    DType::I16,
    DType::I8,
    DType::U8,
];

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn views_and_copies_agree_with_the_model(
        shape in prop::collection::vec(0_i64..6, 0..5),
        dtype in prop::sample::select(&DTYPES[..]),
        other in prop::sample::select(&DTYPES[..]),
        on_gpu in any::<bool>(),
        programs in prop::collection::vec(prop::collection::vec(op(), 0..6), 1..5),
    ) {
        let device = if on_gpu { Device::Cuda(0) } else { Device::Cpu };
        check(&shape, dtype, device, &programs, other);
    }
}

/// Views far larger than the limits under which a device tensor is read in one piece.
#[test]
fn large_strided_tensors_are_read_right() {
    let _turn = turn("256MiB");
    let (rows, columns) = (1000_i64, 300_i64);
    let values: Vec<i32> = (0..300_000).collect();
    let t = Tensor::from_slice_with(&values, [rows, columns], Device::Cuda(0)).unwrap();
    let at = |row: i64, column: i64| values[usize::try_from(row * columns + column).unwrap()];

    let column = t.select(1, 7).unwrap(); // 1000 pieces, one call of rows
    let expected: Vec<i32> = (0..rows).map(|row| at(row, 7)).collect();
    assert_eq!(column.to_vec::<i32>().unwrap(), expected);

    // Bringing it together takes memory; on a full device it is read piece by piece.
    cuda::empty_cache().unwrap();
    let free = cuda::mem_get_info(0).unwrap().free_bytes;
    let rest = common::bytes_on_gpu(i64::try_from(free).unwrap()).unwrap();
    let reads = || common::calls(0, Call::CopyToHost);
    let before = reads();
    assert_eq!(column.to_vec::<i32>().unwrap(), expected);
    assert_eq!(reads() - before, 1000, "and nothing between");
    drop(rest);

    let few = t
        .slice(0, None, None, 100)
        .unwrap()
        .narrow(1, 5, 3)
        .unwrap(); // 10 pieces
    let expected: Vec<i32> = (0..10)
        .flat_map(|row| (5..8).map(move |column| (row * 100, column)))
        .map(|(row, column)| at(row, column))
        .collect();
    assert_eq!(few.to_vec::<i32>().unwrap(), expected);

    // Sparse in two dimensions: too many calls of rows either way.
    let sparse = t.view([100, 10, 100, 3]).unwrap();
    let sparse = sparse
        .select(3, 1)
        .unwrap()
        .slice(1, None, None, 9)
        .unwrap();
    let expected: Vec<i32> = (0..100)
        .flat_map(|a| [0, 9].map(|b| (a, b)))
        .flat_map(|(a, b)| (0..100).map(move |c| at(a * 10 + b, c * 3 + 1)))
        .collect();
    assert_eq!(sparse.to_vec::<i32>().unwrap(), expected);
    assert_eq!(sparse.copy().unwrap().to_vec::<i32>().unwrap(), expected);
}

#[test]
fn conversion_follows_torch() {
    let floats = Tensor::from_slice(&[1.9_f32, -1.9, 0.0, 300.0], [4]).unwrap();
    let to = |dtype| floats.to_dtype(dtype).unwrap().to_scalars().unwrap();
    let ints = |values: [i64; 4]| values.map(Scalar::Int).to_vec();
    assert_eq!(to(DType::I32), ints([1, -1, 0, 300]));
    assert_eq!(to(DType::I8), ints([1, -1, 0, 44]));
    assert_eq!(
        to(DType::Bool),
        [true, true, false, true].map(Scalar::Bool).to_vec()
    );
    let nan = Tensor::full([1], f32::NAN).unwrap();
    assert!(nan.to_dtype(DType::Bool).unwrap().item::<bool>().unwrap());
    let large = Tensor::from_slice(&[i64::MAX, 16_777_217], [2]).unwrap();
    assert_eq!(
        large.to_dtype(DType::F32).unwrap().to_vec::<f32>().unwrap(),
        [9.223_372e18, 16_777_216.0]
    );
    assert_eq!(
        large.to_dtype(DType::I16).unwrap().to_vec::<i16>().unwrap(),
        [-1, 1]
    );
    assert_eq!(
        large.to_dtype(DType::I64).unwrap().to_vec::<i64>().unwrap(),
        [i64::MAX, 16_777_217]
    );
}

/// Memory that nobody has written, or that another library wrote, holds any byte.
#[test]
fn every_byte_but_zero_is_true() {
    let _turn = turn("256MiB");
    let bytes = [0, 1, 2, 255];
    let host = Tensor::from_bytes(&bytes, DType::Bool, [4]).unwrap();
    for tensor in [host.cuda().unwrap(), host] {
        assert_eq!(tensor.to_vec::<bool>().unwrap(), [false, true, true, true]);
        let numbers = tensor.to_dtype(DType::U8).unwrap();
        assert_eq!(numbers.to_vec::<u8>().unwrap(), [0, 1, 1, 1]);
    }
}

#[test]
fn nothing_is_copied_where_nothing_changes() {
    let _turn = turn("256MiB");
    let t = Tensor::zeros_with([3], Device::Cuda(0)).unwrap();
    for same in [
        t.cuda(),
        t.to_device(t.device()),
        t.to_dtype(t.dtype()),
        t.contiguous(),
        t.to(None, None),
    ] {
        assert!(same.unwrap().same_storage(&t));
    }
    assert!(!t.copy().unwrap().same_storage(&t));
    assert!(!t.cpu().unwrap().same_storage(&t));
}
