//! Giving back what was not used for long, and events of foreign streams: what is looked after when a
//! block is freed and when the free lists had nothing, if there is cause.
//!
//! Free memory is stamped with the number of its latest free, not with the time. A log of (time, number)
//! says which frees are older than the age that is set.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::State;
use crate::device::Device;

/// How often it is looked, and logged, within the age.
const STEPS: u32 = 8;

#[derive(Debug)]
pub(super) struct Trim {
    age: Duration,
    /// Times since this moment.
    start: Instant,
    /// For tests: what the time is.
    #[cfg(any(test, feature = "test-util"))]
    set_to: Option<Duration>,
    /// At this time, the frees up to this number had been made. In order, and one each step at most, so
    /// that what is older than the age is taken for younger by a step at most.
    log: VecDeque<(Duration, u64)>,
    /// By when the latest free was made, and its number.
    latest: (Duration, u64),
    next_look: Duration,
}

impl Trim {
    fn new(age: Duration, tick: u64) -> Self {
        Self {
            age,
            start: Instant::now(),
            #[cfg(any(test, feature = "test-util"))]
            set_to: None,
            log: VecDeque::from([(Duration::ZERO, tick)]),
            latest: (Duration::ZERO, tick),
            next_look: Duration::ZERO,
        }
    }

    fn now(&self) -> Duration {
        #[cfg(any(test, feature = "test-util"))]
        if let Some(now) = self.set_to {
            return now;
        }
        self.start.elapsed()
    }

    /// Notes that the latest free by now is `tick`.
    fn note(&mut self, now: Duration, tick: u64) {
        if tick == self.latest.1 {
            return;
        }
        let last = self.log.back().map_or(Duration::ZERO, |(time, _)| *time);
        if now.saturating_sub(last) >= self.age / STEPS {
            self.log.push_back(self.latest);
        }
        self.latest = (now, tick);
    }

    /// The latest free that was made at least the age ago.
    fn oldest(&mut self, now: Duration) -> Option<u64> {
        let limit = now.checked_sub(self.age)?;
        if self.latest.0 <= limit {
            return Some(self.latest.1);
        }
        while self.log.get(1).is_some_and(|(time, _)| *time <= limit) {
            self.log.pop_front();
        }
        let (time, tick) = *self.log.front()?;
        (time <= limit).then_some(tick)
    }
}

impl State {
    /// Gives back from now on what was not used for `age`; zero is never.
    pub(super) fn set_idle_trim(&mut self, age: Duration) {
        let tick = self.clocks.tick();
        self.trim = (!age.is_zero()).then(|| Box::new(Trim::new(age, tick)));
    }

    #[cfg(any(test, feature = "test-util"))]
    pub(crate) fn set_time(&mut self, now: Duration) {
        if let Some(trim) = &mut self.trim {
            trim.set_to = Some(now);
        }
    }

    /// Whether there is cause to [look after](Self::look_after) something.
    #[inline]
    pub(crate) const fn needs_care(&self) -> bool {
        self.clocks.is_event_due() | self.trim.is_some()
    }

    /// Records the events that are due on foreign streams, and gives back what was not used for long.
    #[inline(never)]
    pub(crate) fn look_after(&mut self, device: &impl Device) {
        if self.clocks.is_event_due() {
            self.stats.num_device_errors += self.clocks.record_due(device);
        }
        let tick = self.clocks.tick();
        let Some(trim) = &mut self.trim else { return };
        let now = trim.now();
        trim.note(now, tick);
        if now >= trim.next_look {
            trim.next_look = now + trim.age / STEPS;
            self.trim(device);
        }
    }

    /// Gives back what was not used for the age that is set, as far as all work on it is known to be
    /// done and more is cached than is to be kept. Returns how many bytes.
    pub(crate) fn trim(&mut self, device: &impl Device) -> u64 {
        let tick = self.clocks.tick();
        let Some(trim) = &mut self.trim else { return 0 };
        let now = trim.now();
        trim.note(now, tick);
        let Some(oldest) = trim.oldest(now) else {
            return 0;
        };
        let most = self.cached().saturating_sub(self.idle_keep);
        if most == 0 {
            return 0;
        }
        self.free_last();
        let released = self.release_older(device, most, oldest);
        if released > 0 {
            self.stats.num_trims += 1;
            self.stats.num_trimmed_bytes += released;
        }
        released
    }

    fn cached(&self) -> u64 {
        // A cache of a thread may have counted frees that the books do not know of.
        let active = u64::try_from(self.books.active_bytes().balance()).unwrap_or(0);
        self.reserved().saturating_sub(active)
    }
}
