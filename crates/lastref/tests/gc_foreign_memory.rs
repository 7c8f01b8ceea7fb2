//! Device memory that another allocator serves: it drives collections, waits for them, and has work done on the
//! collector's thread.
#![expect(clippy::unwrap_used, reason = "an error here is a failed test")]

mod common;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use common::turn;
use lastref::gc::{self, BeforeOutOfMemory, ForeignCollector, Reason};

/// A device that no other test uses, and this crate knows nothing of.
const DEVICE: u32 = 9;
const MIB: u64 = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(20);

/// Bytes in use, all of which are garbage; each run finds half.
struct Foreign {
    bytes: AtomicU64,
    lock: Mutex<()>,
    inside: Mutex<Vec<BeforeOutOfMemory>>,
    runs: Mutex<mpsc::Sender<(u32, Reason, u64)>>,
}

impl ForeignCollector for Foreign {
    fn collect(&self, generation: u32, reason: Reason) -> u64 {
        let _lock = self.lock.lock().unwrap();
        let freed = self.bytes.load(Ordering::SeqCst).div_ceil(2);
        self.bytes.fetch_sub(freed, Ordering::SeqCst);
        gc::foreign_bytes_freed(freed);
        // As a finalizer that allocates would.
        let inside = gc::collect_before_out_of_memory(1);
        self.inside.lock().unwrap().push(inside);
        assert_eq!(gc::on_collector_thread(PATIENCE, || 1), None);
        let _ = self.runs.lock().unwrap().send((generation, reason, freed));
        u64::from(freed > 0)
    }

    fn device_bytes(&self, device: u32) -> u64 {
        assert_eq!(
            device, DEVICE,
            "only devices that were spoken of are asked for"
        );
        self.bytes.load(Ordering::SeqCst)
    }
}

impl Foreign {
    fn new() -> (Arc<Self>, mpsc::Receiver<(u32, Reason, u64)>) {
        let (runs, seen) = mpsc::channel();
        let foreign = Arc::new(Self {
            bytes: AtomicU64::new(0),
            lock: Mutex::default(),
            inside: Mutex::default(),
            runs: Mutex::new(runs),
        });
        gc::set_foreign_collector(Some(foreign.clone()));
        (foreign, seen)
    }

    fn holds(&self, bytes: u64) -> u64 {
        self.bytes.store(bytes, Ordering::SeqCst);
        gc::foreign_bytes_in_use(DEVICE, bytes)
    }
}

fn end() {
    gc::set_foreign_collector(None);
    gc::foreign_bytes_in_use(DEVICE, 0);
    gc::set_byte_threshold(DEVICE, None);
    gc::set_wait_bound(Duration::from_secs(30));
    gc::set_before_out_of_memory(true);
    gc::enable();
}

#[test]
fn growing_bytes_wake_the_collector() {
    let _turn = turn("8GiB");
    let (foreign, runs) = Foreign::new();
    gc::set_foreign_capacity(DEVICE, 8 << 30);
    assert_eq!(
        gc::get_byte_threshold(DEVICE),
        1 << 30,
        "an eighth of the device"
    );
    gc::set_byte_threshold(DEVICE, Some(100 * MIB));
    assert_eq!(foreign.holds(0), 100 * MIB);
    assert_eq!(foreign.holds(60 * MIB), 40 * MIB);
    // Near the mark it need not be called at every byte.
    assert_eq!(foreign.holds(99 * MIB), 100 * MIB / 8);
    assert!(runs.try_recv().is_err(), "there was not enough growth");
    foreign.holds(120 * MIB);
    let run = runs.recv_timeout(PATIENCE).unwrap();
    assert_eq!(run, (1, Reason::Bytes, 60 * MIB));
    // From what is left then, another threshold: the mark is set when the run has ended.
    assert_eq!(gc::on_collector_thread(PATIENCE, || ()), Some(()));
    assert_eq!(foreign.holds(60 * MIB), 100 * MIB);
    foreign.holds(150 * MIB);
    assert!(runs.try_recv().is_err());
    gc::disable();
    foreign.holds(500 * MIB);
    assert_eq!(
        foreign.holds(550 * MIB),
        50 * MIB,
        "a mark is set all the same"
    );
    assert!(runs.try_recv().is_err());
    end();
}

#[test]
fn an_allocator_waits_for_a_collection_before_it_fails() {
    let _turn = turn("8GiB");
    let (foreign, runs) = Foreign::new();
    gc::disable();
    foreign.holds(800 * MIB);
    let freed = |bytes| BeforeOutOfMemory::Ran {
        device_bytes_freed: bytes,
    };
    assert_eq!(
        gc::collect_before_out_of_memory(300 * MIB),
        freed(400 * MIB)
    );
    assert_eq!(
        runs.try_iter().count(),
        1,
        "the young generation was enough"
    );
    assert_eq!(
        gc::collect_before_out_of_memory(300 * MIB),
        freed(300 * MIB)
    );
    assert_eq!(
        gc::collect_before_out_of_memory(300 * MIB),
        freed(100 * MIB - 100 * MIB / 8)
    );
    assert_eq!(
        *foreign.inside.lock().unwrap(),
        [BeforeOutOfMemory::Inside; 6],
        "nobody waits on the collector's own thread"
    );
    gc::set_before_out_of_memory(false);
    assert_eq!(
        gc::collect_before_out_of_memory(1),
        BeforeOutOfMemory::SwitchedOff
    );
    gc::set_before_out_of_memory(true);
    gc::set_wait_bound(Duration::from_millis(50));
    let held = foreign.lock.lock().unwrap();
    assert_eq!(
        gc::collect_before_out_of_memory(1),
        BeforeOutOfMemory::TimedOut
    );
    drop(held);
    end();
}

#[test]
fn work_is_done_on_the_collectors_thread_within_a_bound() {
    let _turn = turn("8GiB");
    let (foreign, _runs) = Foreign::new();
    let name = || std::thread::current().name().map(str::to_owned);
    let done = gc::on_collector_thread(PATIENCE, name);
    assert_eq!(done, Some(Some("lastref-collector".to_owned())));
    let panicked: Option<()> = gc::on_collector_thread(PATIENCE, || panic!("on purpose"));
    assert_eq!(panicked, None);

    // While the thread cannot get through, work waits no longer than its bound, and is then not begun.
    let held = foreign.lock.lock().unwrap();
    std::thread::scope(|scope| {
        gc::set_wait_bound(PATIENCE);
        let waits = scope.spawn(|| gc::collect_before_out_of_memory(1));
        while foreign.bytes.load(Ordering::SeqCst) != 0 {}
        // The thread is inside the run, or about to be.
        std::thread::sleep(Duration::from_millis(50));
        let begun = Arc::new(AtomicBool::new(false));
        let begin = begun.clone();
        let work = move || begin.store(true, Ordering::SeqCst);
        assert_eq!(
            gc::on_collector_thread(Duration::from_millis(50), work),
            None
        );
        drop(held);
        waits.join().unwrap();
        // After what was asked for before.
        assert_eq!(gc::on_collector_thread(PATIENCE, || ()), Some(()));
        assert!(!begun.load(Ordering::SeqCst));
    });
    end();
}
