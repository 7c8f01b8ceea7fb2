//! How tensors print. The expected texts are torch's, with `lastref.` for `torch.`.
#![expect(clippy::unwrap_used, reason = "an error here is a failed test")]

mod common;

use common::{allocated, calls, turn};
use lastref::alloc::sim::Call;
use lastref::{DType, Device, Tensor, cuda};

const GPU: Device = Device::Cuda(0);

common::also_on_a_driver!("8GiB");

fn floats(values: &[f32], shape: &[i64]) -> Tensor {
    Tensor::from_slice(values, shape).unwrap()
}

#[test]
fn floats_line_up() {
    assert_eq!(
        floats(&[1.0, 2.0, 3.0, 4.0], &[2, 2]).to_string(),
        "tensor([[1., 2.],\n        [3., 4.]])"
    );
    assert_eq!(
        floats(&[1.5, -20.25, 0.0], &[3]).to_string(),
        "tensor([  1.5000, -20.2500,   0.0000])"
    );
    assert_eq!(
        floats(&[1.0, 10_000.0], &[2]).to_string(),
        "tensor([1.0000e+00, 1.0000e+04])"
    );
    assert_eq!(
        floats(&[1e-5, 0.5], &[2]).to_string(),
        "tensor([1.0000e-05, 5.0000e-01])"
    );
    assert_eq!(
        floats(&[f32::NAN, f32::INFINITY, -f32::INFINITY, 1.0], &[4]).to_string(),
        "tensor([nan, inf, -inf, 1.])"
    );
    assert_eq!(floats(&[0.0, 0.0], &[2]).to_string(), "tensor([0., 0.])");
    assert_eq!(floats(&[3.25], &[]).to_string(), "tensor(3.2500)");
    assert_eq!(floats(&[-2.0], &[1, 1]).to_string(), "tensor([[-2.]])");
}

#[test]
fn other_dtypes_say_what_they_are() {
    assert_eq!(
        Tensor::from_slice(&[1_i64, -20, 3], [3])
            .unwrap()
            .to_string(),
        "tensor([  1, -20,   3])"
    );
    assert_eq!(
        Tensor::from_slice(&[true, false], [2]).unwrap().to_string(),
        "tensor([ True, False])"
    );
    assert_eq!(
        Tensor::from_slice(&[1_u8, 2], [2]).unwrap().to_string(),
        "tensor([1, 2], dtype=lastref.uint8)"
    );
    assert_eq!(
        Tensor::ones_with([2], DType::BF16).unwrap().to_string(),
        "tensor([1., 1.], dtype=lastref.bfloat16)"
    );
    assert_eq!(
        format!("{:?}", Tensor::ones_with([1], DType::F64).unwrap()),
        "tensor([1.], dtype=lastref.float64)"
    );
}

#[test]
fn empty_tensors_say_their_shape() {
    assert_eq!(Tensor::empty([0]).unwrap().to_string(), "tensor([])");
    assert_eq!(
        Tensor::empty([0, 3]).unwrap().to_string(),
        "tensor([], size=(0, 3))"
    );
    assert_eq!(
        Tensor::empty_with([2, 0], DType::I64).unwrap().to_string(),
        "tensor([], size=(2, 0), dtype=lastref.int64)"
    );
}

#[test]
fn three_dimensions_are_set_apart() {
    let t = Tensor::arange(0, 8, 1).unwrap().view([2, 2, 2]).unwrap();
    assert_eq!(
        t.to_string(),
        "tensor([[[0, 1],\n         [2, 3]],\n\n        [[4, 5],\n         [6, 7]]])"
    );
}

#[test]
fn long_lines_are_broken() {
    let t = Tensor::arange(0, 30, 1).unwrap();
    assert_eq!(
        t.to_string(),
        "tensor([ 0,  1,  2,  3,  4,  5,  6,  7,  8,  9, 10, 11, 12, 13, 14, 15, 16, 17,\n        \
         18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29])"
    );
}

#[test]
fn the_device_is_named() {
    let _turn = turn("8GiB");
    assert_eq!(
        Tensor::ones_with([2], GPU).unwrap().to_string(),
        "tensor([1., 1.], device='cuda:0')"
    );
    assert_eq!(
        Tensor::ones_with([0, 2], (DType::F16, GPU))
            .unwrap()
            .to_string(),
        "tensor([], device='cuda:0', size=(0, 2), dtype=lastref.float16)"
    );
}

#[test]
fn large_tensors_show_their_edges_and_read_no_more() {
    let _turn = turn("8GiB");
    let t = Tensor::arange(0, 1001, 1).unwrap();
    assert_eq!(
        t.to_string(),
        "tensor([   0,    1,    2,  ...,  998,  999, 1000])"
    );

    // 64 MiB on a full device: printing needs neither all of it nor more memory.
    let t = Tensor::zeros_with([1 << 12, 1 << 12], GPU).unwrap();
    t.select(0, -1).unwrap().fill_(2.5).unwrap();
    let full = cuda::mem_get_info(0).unwrap().free_bytes;
    let rest = common::bytes_on_gpu(i64::try_from(full).unwrap()).unwrap();
    let before = (allocated(), calls(0, Call::CopyToHost));
    assert_eq!(
        t.to_string(),
        "tensor([[0.0000, 0.0000, 0.0000,  ..., 0.0000, 0.0000, 0.0000],\n        \
         [0.0000, 0.0000, 0.0000,  ..., 0.0000, 0.0000, 0.0000],\n        \
         [0.0000, 0.0000, 0.0000,  ..., 0.0000, 0.0000, 0.0000],\n        \
         ...,\n        \
         [0.0000, 0.0000, 0.0000,  ..., 0.0000, 0.0000, 0.0000],\n        \
         [0.0000, 0.0000, 0.0000,  ..., 0.0000, 0.0000, 0.0000],\n        \
         [2.5000, 2.5000, 2.5000,  ..., 2.5000, 2.5000, 2.5000]],\n       device='cuda:0')"
    );
    assert_eq!(allocated(), before.0);
    let reads = calls(0, Call::CopyToHost) - before.1;
    assert!(reads <= 12, "one read for each piece of a row, not {reads}");
    drop(rest);

    // Endless, and of more dimensions than can be shown.
    let one = Tensor::ones([1]).unwrap();
    let wide = one.expand([1 << 40]).unwrap();
    assert_eq!(wide.to_string(), "tensor([1., 1., 1.,  ..., 1., 1., 1.])");
    let deep = one.expand([2; 40]).unwrap().to_string();
    assert!(
        deep.starts_with("tensor(...,\n       size=(2, 2, "),
        "{deep}"
    );
}
