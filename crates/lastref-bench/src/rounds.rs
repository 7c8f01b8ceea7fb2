//! Medians of interleaved rounds.
//!
//! In each round everything is measured once, in turn, so that whatever else the machine does meets all of
//! it; every other round goes backwards, so that nobody always comes after the same one.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How long to measure.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The most rounds.
    pub rounds: usize,
    /// No measurement begins after this, but those of the first round.
    pub time: Duration,
}

/// What is to be measured, each under a key.
pub struct Measures<'a, K, E> {
    takes: Vec<(K, Take<'a, E>)>,
}

type Take<'a, E> = Box<dyn FnMut() -> Result<f64, E> + 'a>;

/// The medians.
#[derive(Clone, Debug)]
pub struct Measured<K> {
    /// By key.
    pub medians: BTreeMap<K, f64>,
    /// How many samples each is the median of, at least.
    pub rounds: usize,
    /// How long it took.
    pub time: Duration,
}

impl<'a, K: Ord + Clone, E> Measures<'a, K, E> {
    /// Nothing yet.
    #[must_use]
    pub const fn new() -> Self {
        Self { takes: Vec::new() }
    }

    /// Adds what `take` measures.
    pub fn add(&mut self, key: K, take: impl FnMut() -> Result<f64, E> + 'a) {
        self.takes.push((key, Box::new(take)));
    }

    /// How many measurements there are in all rounds.
    #[must_use]
    pub fn count(&self, limits: Limits) -> usize {
        self.takes.len() * limits.rounds
    }

    /// Measures. `progress` is told how many measurements are done.
    ///
    /// # Errors
    ///
    /// The first that a measurement answers.
    pub fn run(
        mut self,
        limits: Limits,
        mut progress: impl FnMut(usize),
    ) -> Result<Measured<K>, E> {
        let start = Instant::now();
        let mut samples: BTreeMap<K, Vec<f64>> = BTreeMap::new();
        let mut done = 0;
        'rounds: for round in 0..limits.rounds.max(1) {
            for turn in 0..self.takes.len() {
                if round > 0 && start.elapsed() > limits.time {
                    break 'rounds;
                }
                let at = if round % 2 == 0 {
                    turn
                } else {
                    self.takes.len() - 1 - turn
                };
                let (key, take) = &mut self.takes[at];
                samples.entry(key.clone()).or_default().push(take()?);
                done += 1;
                progress(done);
            }
        }
        let rounds = samples.values().map(Vec::len).min().unwrap_or(0);
        let medians = samples
            .into_iter()
            .map(|(key, samples)| (key, median(samples)));
        Ok(Measured {
            medians: medians.collect(),
            rounds,
            time: start.elapsed(),
        })
    }
}

impl<K: Ord + Clone, E> Default for Measures<'_, K, E> {
    fn default() -> Self {
        Self::new()
    }
}

impl<K, E> std::fmt::Debug for Measures<'_, K, E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Measures")
            .field("len", &self.takes.len())
            .finish_non_exhaustive()
    }
}

/// Of an even number, the mean of the two in the middle.
fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    let middle = samples.len() / 2;
    if samples.len() % 2 == 1 {
        samples[middle]
    } else {
        f64::midpoint(samples[middle - 1], samples[middle])
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::convert::Infallible;

    use super::*;

    const AMPLE: Duration = Duration::from_secs(60);

    #[test]
    fn medians_are_of_all_rounds_and_every_other_goes_backwards() {
        let order = RefCell::new(String::new());
        let mut measures = Measures::new();
        for name in ["a", "b", "c"] {
            let order = &order;
            let mut calls = 0.0;
            measures.add(name, move || {
                order.borrow_mut().push_str(name);
                calls += 1.0;
                Ok::<_, Infallible>(calls * calls)
            });
        }
        let limits = Limits {
            rounds: 3,
            time: AMPLE,
        };
        assert_eq!(measures.count(limits), 9);
        let mut told = Vec::new();
        let Ok(measured) = measures.run(limits, |done| told.push(done));
        assert_eq!(*order.borrow(), "abccbaabc");
        assert_eq!(told, (1..=9).collect::<Vec<_>>());
        assert_eq!(measured.rounds, 3);
        assert!(
            measured.medians.values().all(|median| *median == 4.0),
            "of 1, 4 and 9"
        );
    }

    #[test]
    fn the_first_round_ends_whatever_the_limit_says() {
        let mut measures = Measures::new();
        measures.add(1, || Ok::<_, Infallible>(2.0));
        measures.add(2, || {
            std::thread::sleep(Duration::from_millis(2));
            Ok(3.0)
        });
        let limits = Limits {
            rounds: 100,
            time: Duration::ZERO,
        };
        let Ok(measured) = measures.run(limits, |_| {});
        assert_eq!(measured.rounds, 1);
        assert_eq!(measured.medians, BTreeMap::from([(1, 2.0), (2, 3.0)]));
    }

    #[test]
    fn an_even_number_of_samples_has_its_median_between_two() {
        assert_eq!(median(vec![9.0, 1.0, 2.0, 4.0]), 3.0);
    }

    #[test]
    fn a_failure_ends_it() {
        let mut measures = Measures::new();
        measures.add(1, || Err::<f64, _>("no device"));
        let limits = Limits {
            rounds: 1,
            time: AMPLE,
        };
        assert_eq!(measures.run(limits, |_| {}).unwrap_err(), "no device");
    }
}
