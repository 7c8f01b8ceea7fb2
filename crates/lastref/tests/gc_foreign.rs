//! Another language's collector, run by this one: what it may wait for, and what is reported.
//!
//! Its interpreter lock is played by a lock of the test's.
#![expect(clippy::unwrap_used, reason = "an error here is a failed test")]

mod common;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use common::{GIB, MIB, allocated, bytes_on_gpu, turn};
use lastref::Tensor;
use lastref::gc::{self, ForeignCollector, Phase, Reason};

/// Tensors that only this collector can free, and the lock that it needs.
#[derive(Default)]
struct Interpreter {
    lock: Mutex<()>,
    garbage: Mutex<Vec<Tensor>>,
    runs: Mutex<Vec<(u32, Reason)>>,
}

impl ForeignCollector for Interpreter {
    fn collect(&self, generation: u32, reason: Reason) -> u64 {
        let _attached = self.lock.lock().unwrap();
        self.runs.lock().unwrap().push((generation, reason));
        if reason == Reason::Count || reason == Reason::Time {
            return 0;
        }
        // Each generation finds half.
        let mut garbage = self.garbage.lock().unwrap();
        let left = garbage.len() / 2;
        let found = garbage.split_off(left);
        drop(garbage);
        found.len() as u64
    }
}

impl Interpreter {
    fn new() -> Arc<Self> {
        gc::disable();
        let interpreter = Arc::new(Self::default());
        gc::set_foreign_collector(Some(interpreter.clone()));
        interpreter
    }

    /// Fills the 8 GiB of the device with garbage.
    fn fill(&self) {
        let mut garbage = self.garbage.lock().unwrap();
        garbage.extend((0..8).map(|_| bytes_on_gpu(GIB).unwrap()));
    }

    fn end(&self) {
        gc::set_foreign_collector(None);
        gc::set_wait_bound(Duration::from_secs(30));
        gc::enable();
        self.garbage.lock().unwrap().clear();
    }
}

#[test]
fn runs_with_rising_generations_until_enough_is_free() {
    let _turn = turn("8GiB");
    let interpreter = Interpreter::new();
    let sum = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
    let sums = sum.clone();
    let id = gc::add_callback(move |phase, report| {
        if phase == Phase::Stop {
            sums[0].fetch_add(report.device_bytes_freed, Ordering::SeqCst);
            sums[1].fetch_add(report.objects, Ordering::SeqCst);
        }
    });
    for (gib, generations) in [(4, 1), (6, 2), (7, 3)] {
        interpreter.fill();
        let tensor = bytes_on_gpu(gib * GIB).unwrap();
        drop(tensor);
        let runs = std::mem::take(&mut *interpreter.runs.lock().unwrap());
        let expected: Vec<_> = (0..generations)
            .map(|generation| (generation, Reason::OutOfMemory))
            .collect();
        assert_eq!(runs, expected);
        interpreter.garbage.lock().unwrap().clear();
    }
    assert!(gc::remove_callback(id));
    let [bytes, objects] = &*sum;
    assert_eq!(bytes.load(Ordering::SeqCst), (4 + 6 + 7) << 30);
    assert_eq!(objects.load(Ordering::SeqCst), 4 + 6 + 7);
    interpreter.end();
}

#[test]
fn collecting_by_hand_runs_it_only_where_asked_for() {
    let _turn = turn("8GiB");
    let interpreter = Interpreter::new();
    interpreter.fill();
    assert_eq!(gc::collect(2).unwrap().objects, 0);
    assert_eq!(allocated(), 8 << 30);
    let report = gc::collect_with_foreign(1).unwrap();
    assert_eq!(report.reason, Reason::Manual);
    assert_eq!((report.objects, report.device_bytes_freed), (4, 4 << 30));
    assert!(gc::collect_with_foreign(3).is_err());
    interpreter.end();
}

/// The allocating thread holds a lock, which another thread wants that holds the interpreter's.
#[test]
fn a_cycle_of_locks_ends_at_the_bound() {
    let _turn = turn("8GiB");
    let interpreter = Interpreter::new();
    interpreter.fill();
    gc::set_wait_bound(Duration::from_millis(200));
    let native = Mutex::new(());
    let (attached, is_attached) = mpsc::channel();
    std::thread::scope(|scope| {
        let held = native.lock().unwrap();
        scope.spawn(|| {
            let _attached = interpreter.lock.lock().unwrap();
            attached.send(()).unwrap();
            drop(native.lock().unwrap());
        });
        is_attached.recv().unwrap();
        let started = Instant::now();
        let error = bytes_on_gpu(GIB).unwrap_err();
        assert!(error.is_out_of_memory(), "{error}");
        assert!(started.elapsed() >= Duration::from_millis(200));
        assert!(started.elapsed() < Duration::from_secs(20));
        drop(held);
    });
    gc::set_wait_bound(Duration::from_secs(30));
    bytes_on_gpu(GIB).unwrap();
    interpreter.end();
}

/// It is busy for a time that is shorter than the bound.
#[test]
fn an_allocation_waits_for_a_lock_that_is_held_for_long() {
    let _turn = turn("8GiB");
    let interpreter = Interpreter::new();
    interpreter.fill();
    let (attached, is_attached) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _attached = interpreter.lock.lock().unwrap();
            attached.send(()).unwrap();
            std::thread::sleep(Duration::from_millis(300));
        });
        is_attached.recv().unwrap();
        let started = Instant::now();
        bytes_on_gpu(GIB).unwrap();
        assert!(started.elapsed() >= Duration::from_millis(200));
    });
    interpreter.end();
}

#[test]
fn a_thread_that_may_not_wait_fails_at_once() {
    let _turn = turn("8GiB");
    let interpreter = Interpreter::new();
    interpreter.fill();
    let attached = interpreter.lock.lock().unwrap();
    let started = Instant::now();
    let failed = gc::without_waiting(|| bytes_on_gpu(MIB)).unwrap_err();
    assert!(failed.is_out_of_memory(), "{failed}");
    assert!(started.elapsed() < Duration::from_secs(10));
    drop(attached);
    bytes_on_gpu(MIB).unwrap();
    interpreter.end();
}
