//! What is measured: the same work for every implementation.

use std::hint::{black_box, spin_loop};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::heaps::Heap;

/// Operations in one measurement of handles.
const OPERATIONS: u32 = 2_000_000;
/// Nodes in one measurement of collections.
pub(crate) const NODES: u64 = 1_000_000;
/// Dead pairs beside live nodes.
const FEW_PAIRS: u64 = 1000;

/// Nanoseconds of one of [`OPERATIONS`].
fn each(mut operation: impl FnMut(u64)) -> f64 {
    let started = Instant::now();
    for number in 0..u64::from(OPERATIONS) {
        operation(number);
    }
    started.elapsed().as_secs_f64() * 1e9 / f64::from(OPERATIONS)
}

fn milliseconds(work: impl FnOnce()) -> f64 {
    let started = Instant::now();
    work();
    started.elapsed().as_secs_f64() * 1e3
}

/// One node, one more handle and back.
pub(crate) fn clone_drop<H: Heap>() -> f64 {
    let node = H::node(7);
    let time = each(|_| {
        black_box(black_box(&node).clone());
    });
    drop(node);
    H::collect();
    time
}

/// A node that is in no cycle, made and dropped.
pub(crate) fn alloc_drop<H: Heap>() -> f64 {
    each(|number| {
        black_box(&H::node(number));
    })
}

/// A node's number read through a handle.
pub(crate) fn read<H: Heap>() -> f64 {
    let node = H::node(7);
    let mut sum = 0_u64;
    let time = each(|_| sum = sum.wrapping_add(H::number(black_box(&node))));
    black_box(sum);
    time
}

/// Two nodes that refer to each other.
fn pair<H: Heap>() -> H::Handle {
    let (first, second) = (H::node(1), H::node(2));
    H::link(&first, second.clone());
    H::link(&second, first.clone());
    first
}

fn dead_pairs<H: Heap>(pairs: u64) {
    for _ in 0..pairs {
        drop(pair::<H>());
    }
}

/// A collection of [`NODES`] dead nodes in pairs.
pub(crate) fn pairs<H: Heap>() -> f64 {
    dead_pairs::<H>(NODES / 2);
    milliseconds(H::collect)
}

/// A collection of one dead ring of [`NODES`] nodes.
pub(crate) fn ring<H: Heap>() -> f64 {
    let first = H::node(0);
    let mut last = first.clone();
    for number in 1..NODES {
        let node = H::node(number);
        H::link(&node, last);
        last = node;
    }
    H::link(&first, last);
    drop(first);
    milliseconds(H::collect)
}

/// A collection of a few dead pairs beside [`NODES`] live nodes that nobody touched since the last.
pub(crate) fn beside_live<H: Heap>() -> f64 {
    let live: Vec<H::Handle> = (0..NODES / 2).map(|_| pair::<H>()).collect();
    H::collect();
    dead_pairs::<H>(FEW_PAIRS);
    let time = milliseconds(H::collect);
    drop(live);
    H::collect();
    time
}

/// The longest operation of a thread, in milliseconds, while another does what is given; and how
/// long that took. An operation makes a node, clones it, reads it, and drops it.
fn longest_while<H: Heap>(prepare: impl FnOnce() + Send, busy: impl FnOnce() + Send) -> (f64, f64) {
    let started = Barrier::new(2);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            prepare();
            started.wait();
            let time = milliseconds(busy);
            done.store(true, Ordering::Relaxed);
            time
        });
        started.wait();
        let mut longest = 0_f64;
        while !done.load(Ordering::Relaxed) {
            longest = longest.max(milliseconds(|| {
                let node = H::node(3);
                black_box(H::number(&black_box(node.clone())));
            }));
        }
        (longest, other.join().expect("nothing in it panics"))
    })
}

/// The longest operation of a thread while another collects [`NODES`] dead nodes.
pub(crate) fn longest_while_collecting<H: Heap>() -> (f64, f64) {
    longest_while::<H>(|| dead_pairs::<H>(NODES / 2), H::collect)
}

/// The same while another is just as busy for as long, and nobody collects.
pub(crate) fn longest_while_spinning<H: Heap>(time: Duration) -> f64 {
    let spin = move || {
        let until = Instant::now() + time;
        while Instant::now() < until {
            spin_loop();
        }
    };
    longest_while::<H>(|| (), spin).0
}
