//! No out-of-memory error while dead cycles hold the memory: one thread, a GPU of 11,000 MiB.
#![expect(clippy::unwrap_used, reason = "an error here is a failed test")]

mod common;

use std::sync::Mutex;
use std::time::{Duration, Instant};

use lastref::gc::{self, Gc, Slot, Trace};
use lastref::{Tensor, cuda};

use common::{MIB, Turn, allocated, bytes_on_gpu, reserved};

common::also_on_a_driver!("11000MiB");

/// The device, and the collector as it is from the start.
struct Setting(#[expect(dead_code, reason = "held for its end")] Turn);

fn setting() -> Setting {
    let turn = common::turn("11000MiB");
    Setting(turn)
}

impl Drop for Setting {
    fn drop(&mut self) {
        gc::enable();
        gc::set_before_out_of_memory(true);
        gc::set_byte_threshold(0, None);
        gc::set_threshold(700, 10, 10);
        gc::set_wait_bound(Duration::from_secs(30));
        gc::collect(2).unwrap();
        cuda::allocator(0).unwrap().set_memory_limit(None);
        cuda::empty_cache().unwrap();
    }
}

#[derive(Trace)]
struct Model {
    weights: Tensor,
    itself: Slot<Option<Gc<Model>>>,
    more: Slot<Vec<Gc<Model>>>,
    fixed: Option<Gc<Model>>,
}

fn model(bytes: i64) -> lastref::Result<Gc<Model>> {
    Ok(Gc::new(Model {
        weights: bytes_on_gpu(bytes)?,
        itself: Slot::default(),
        more: Slot::default(),
        fixed: None,
    }))
}

/// One that holds so many bytes, is in a cycle with itself and is dead.
fn dead_cycle(bytes: i64) -> lastref::Result<()> {
    let made = model(bytes)?;
    assert!(made.weights.is_cuda());
    made.itself.set(Some(made.clone()));
    Ok(())
}

/// How many of 400 dead cycles of 400 MiB can be made.
fn dead_cycles() -> usize {
    let made = (0..400)
        .take_while(|_| dead_cycle(400 * MIB).is_ok())
        .count();
    // Nothing is left when they are collected and the cache is emptied.
    gc::collect(2).unwrap();
    cuda::empty_cache().unwrap();
    assert_eq!((allocated(), reserved()), (0, 0));
    made
}

#[test]
fn four_hundred_dead_cycles_fit() {
    let _setting = setting();
    assert_eq!(dead_cycles(), 400);
}

#[test]
fn they_fit_with_the_collector_disabled() {
    let _setting = setting();
    gc::disable();
    assert_eq!(dead_cycles(), 400);
    assert!(!gc::is_enabled());
}

#[test]
fn they_fit_under_a_memory_limit() {
    let _setting = setting();
    gc::disable();
    cuda::allocator(0)
        .unwrap()
        .set_memory_limit(Some(5000 << 20));
    assert_eq!(dead_cycles(), 400);
}

#[test]
fn they_fit_by_the_byte_trigger_alone() {
    let _setting = setting();
    gc::set_before_out_of_memory(false);
    gc::set_threshold(0, 10, 10);
    // It races with the collector's thread, so it goes at the pace of a program that works.
    for _ in 0..100 {
        dead_cycle(400 * MIB).unwrap();
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn without_rung_and_triggers_memory_is_full_at_the_28th() {
    let _setting = setting();
    gc::set_before_out_of_memory(false);
    gc::set_byte_threshold(0, Some(0));
    gc::set_threshold(0, 10, 10);
    assert_eq!(dead_cycles(), 27);
}

#[test]
fn cycles_of_every_shape_leave_nothing() {
    let _setting = setting();
    gc::disable();
    let one = || model(MIB).unwrap();
    let nothing_is_left = |shape: &str| {
        assert!(allocated() > 0, "{shape}: it was there");
        gc::collect(2).unwrap();
        cuda::empty_cache().unwrap();
        assert_eq!((allocated(), reserved()), (0, 0), "{shape}");
    };

    let a = one();
    a.itself.set(Some(a.clone()));
    drop(a);
    nothing_is_left("itself");

    let (a, b) = (one(), one());
    a.itself.set(Some(b.clone()));
    b.itself.set(Some(a.clone()));
    drop((a, b));
    nothing_is_left("a pair");

    let ring: Vec<_> = (0..20).map(|_| one()).collect();
    for (at, from) in ring.iter().enumerate() {
        from.itself.set(Some(ring[(at + 1) % 20].clone()));
    }
    drop(ring);
    nothing_is_left("a ring");

    let a = one();
    a.more.lock().extend([a.clone(), a.clone(), one()]);
    drop(a);
    nothing_is_left("through a container, twice, with something that hangs on it");

    let a = one();
    let b = Gc::new(Model {
        weights: bytes_on_gpu(MIB).unwrap(),
        itself: Slot::default(),
        more: Slot::default(),
        fixed: Some(a.clone()),
    });
    a.itself.set(Some(b.clone()));
    drop((a, b));
    nothing_is_left("through an edge that cannot change");

    let a = one();
    a.itself.set(Some(a.clone()));
    let weak = Gc::downgrade(&a);
    weak.on_death({
        let another = weak.clone();
        move || assert!(another.upgrade().is_none())
    });
    drop(a);
    nothing_is_left("with weak handles that stay");
    assert!(weak.upgrade().is_none());

    trait Layer: Trace + Send + Sync {
        fn next(&self) -> &Slot<Option<Gc<dyn Layer>>>;
    }
    #[derive(Trace)]
    struct Linear {
        weights: Tensor,
        next: Slot<Option<Gc<dyn Layer>>>,
    }
    impl Layer for Linear {
        fn next(&self) -> &Slot<Option<Gc<dyn Layer>>> {
            assert!(self.weights.is_cuda());
            &self.next
        }
    }
    let a = Gc::new(Linear {
        weights: bytes_on_gpu(MIB).unwrap(),
        next: Slot::new(None),
    });
    let a: Gc<dyn Layer> = lastref::gc_coerce!(a => dyn Layer);
    a.next().set(Some(a.clone()));
    drop(a);
    nothing_is_left("through a trait object");
}

#[test]
fn a_destructor_that_wants_a_lock_of_the_allocating_thread_makes_it_fail_in_time() {
    static LOCK: Mutex<()> = Mutex::new(());
    #[derive(Trace)]
    struct Wants {
        itself: Slot<Option<Gc<Wants>>>,
        weights: Tensor,
    }
    impl Drop for Wants {
        fn drop(&mut self) {
            drop(LOCK.lock());
        }
    }
    let _setting = setting();
    gc::disable();
    gc::set_wait_bound(Duration::from_millis(200));
    let wants = Gc::new(Wants {
        itself: Slot::default(),
        weights: bytes_on_gpu(10_000 * MIB).unwrap(),
    });
    wants.itself.set(Some(wants.clone()));
    drop(wants);
    let started = Instant::now();
    let guard = LOCK.lock();
    let error = bytes_on_gpu(10_000 * MIB).unwrap_err();
    drop(guard);
    assert!(error.to_string().contains("cycle collection"), "{error}");
    let took = started.elapsed();
    assert!(
        took >= Duration::from_millis(200) && took < Duration::from_secs(5),
        "{took:?}"
    );
    // The destructor goes on now, and the memory is there.
    gc::set_wait_bound(Duration::from_secs(30));
    drop(bytes_on_gpu(10_000 * MIB).unwrap());
}

#[test]
fn finalizers_that_allocate_find_memory_or_an_error() {
    #[derive(Trace)]
    #[trace(finalize)]
    struct Saves {
        itself: Slot<Option<Gc<Saves>>>,
        weights: Tensor,
    }
    impl gc::Finalize for Saves {
        fn finalize(&self) {
            // While this runs nothing has been freed: on a full device there is an error, at once.
            let copy = bytes_on_gpu(i64::try_from(self.weights.nbytes()).unwrap());
            SAVED.lock().unwrap().push(copy.is_ok());
        }
    }
    static SAVED: Mutex<Vec<bool>> = Mutex::new(Vec::new());
    let _setting = setting();
    gc::disable();
    for _ in 0..60 {
        let saves = Gc::new(Saves {
            itself: Slot::default(),
            weights: bytes_on_gpu(400 * MIB).unwrap(),
        });
        saves.itself.set(Some(saves.clone()));
    }
    gc::collect(2).unwrap();
    let saved = SAVED.lock().unwrap();
    assert_eq!(saved.len(), 60, "each once");
    assert!(saved.contains(&true) && saved.contains(&false));
}

#[test]
fn memory_that_is_ample_forces_no_collection() {
    let setting = setting();
    let live: Vec<_> = (0..200_000)
        .map(|_| {
            let node: Gc<Slot<Option<Gc<Model>>>> = Gc::new(Slot::new(None));
            node
        })
        .collect();
    gc::collect(2).unwrap();
    let spent = || -> (u64, u64) {
        let stats = gc::stats();
        (
            stats.iter().map(|sums| sums.collections).sum(),
            stats.iter().map(|sums| sums.microseconds).sum(),
        )
    };
    let before = spent();
    let started = Instant::now();
    let weights = bytes_on_gpu(1000 * MIB).unwrap();
    for step in 0..3000 {
        // Activations, a gradient and a temporary handle on an object, as a step of training has.
        let activations: Vec<_> = (0..20).map(|_| bytes_on_gpu(40 * MIB).unwrap()).collect();
        let gradient = bytes_on_gpu(1000 * MIB).unwrap();
        drop(live[step % live.len()].clone());
        // The work of the step itself, which is short for one of training.
        let work = Instant::now();
        while work.elapsed() < Duration::from_micros(200) {
            std::hint::spin_loop();
        }
        drop((activations, gradient));
    }
    let took = started.elapsed();
    let (runs, microseconds) = spent();
    let (runs, microseconds) = (runs - before.0, microseconds - before.1);
    let share = microseconds as f64 / took.as_micros() as f64;
    println!(
        "{runs} collections, {microseconds} us of {took:?}: {:.2} %",
        share * 100.0
    );
    let stats = cuda::allocator(0).unwrap().stats();
    assert_eq!(stats.num_ooms, 0);
    assert!(
        stats
            .rungs
            .keys()
            .all(|rung| rung.to_string() != "reclaimer \"cycle collection\""),
        "nothing forced: {:?}",
        stats.rungs
    );
    assert!(share < 0.01, "{share}");
    drop((weights, live, setting));
}
