//! The pools: a heap and a list of pending blocks each, of which one is at work at a time.
//!
//! Everything else in the state speaks of `heap` and `pending`, and means those of the pool at work:
//! the default one, save inside [`State::on`]. What is summed over all pools goes through
//! [`State::pools`].
//!
//! # Invariants
//!
//! 1. `at_work` names the pool whose heap is in `State::heap`. If it is a private one, its slot holds
//!    the default pool's heap meanwhile.
//! 2. A closed pool leaves its slot as soon as nothing is mapped in it; a pool that is not closed
//!    never does.
//! 3. `num_closed` is the number of closed pools that are left.

use super::{POOLS, State};
use crate::device::{Device, DevicePtr};
use crate::heap::{Heap, NodeId, RegionKind, State as Node, Totals};
use crate::pool::PoolStats;
use crate::stats::PoolKind;

/// Names a pool of an allocator.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct PoolId(u32);

impl PoolId {
    /// The pool of all allocations that go to no other.
    pub(crate) const DEFAULT: Self = Self(0);

    /// Counted from 1; 0 is the default pool.
    pub(crate) const fn number(self) -> u32 {
        self.0
    }

    /// The pool of that [number](Self::number).
    pub(crate) const fn from_number(number: u32) -> Self {
        Self(number)
    }

    const fn slot(self) -> usize {
        self.0 as usize - 1
    }
}

/// A private pool.
#[derive(Debug)]
pub(super) struct Pool {
    /// While the pool is at work: the default pool's.
    heap: Heap,
    pending: Vec<NodeId>,
    stats: PoolStats,
    /// Its last handle is gone.
    is_closed: bool,
    /// Captured into a graph, which uses its memory as long as there is a handle.
    is_kept: bool,
}

fn mapped_bytes(heap: &Heap) -> u64 {
    let kinds = POOLS.iter();
    kinds.map(|kind| heap.totals(*kind).mapped_bytes).sum()
}

impl State {
    fn pool_mut(&mut self, pool: PoolId) -> &mut Pool {
        self.private_pools[pool.slot()]
            .as_mut()
            .expect("a pool is there as long as a handle or a block names it")
    }

    /// Makes a private pool.
    pub(crate) fn open_pool(&mut self) -> PoolId {
        let pool = Box::new(Pool {
            heap: Heap::new(self.page_bytes),
            pending: Vec::new(),
            stats: PoolStats::default(),
            is_closed: false,
            is_kept: false,
        });
        let slots = &mut self.private_pools;
        let slot = slots.iter().position(Option::is_none);
        let slot = slot.unwrap_or_else(|| {
            slots.push(None);
            slots.len() - 1
        });
        slots[slot] = Some(pool);
        PoolId(u32::try_from(slot + 1).expect("under 2^32 pools exist"))
    }

    /// Puts `pool` to work in the place of the one that is.
    fn put_to_work(&mut self, pool: PoolId) {
        for other in [self.at_work, pool] {
            if other != PoolId::DEFAULT {
                let slot = self.private_pools[other.slot()].as_mut();
                let slot = slot.expect("a pool is there as long as a handle or a block names it");
                std::mem::swap(&mut self.heap, &mut slot.heap);
                std::mem::swap(&mut self.pending, &mut slot.pending);
            }
        }
        self.at_work = pool;
    }

    /// Runs `f` with `pool` at work.
    #[inline]
    pub(crate) fn on<R>(&mut self, pool: PoolId, f: impl FnOnce(&mut Self) -> R) -> R {
        if pool == self.at_work {
            f(self)
        } else {
            self.on_another(pool, f)
        }
    }

    #[cold]
    fn on_another<R>(&mut self, pool: PoolId, f: impl FnOnce(&mut Self) -> R) -> R {
        let before = self.at_work;
        self.put_to_work(pool);
        let counted = |state: &Self| {
            let books = &state.books;
            [
                books.allocation.balance().cast_unsigned(),
                books.allocated_bytes.balance().cast_unsigned(),
                books.active_bytes().balance().cast_unsigned(),
            ]
        };
        let was = counted(self);
        let outer = std::mem::take(&mut self.counted_elsewhere);
        let result = f(self);
        let is = counted(self);
        // Numbers go up and down; what matters is that they add up.
        let change = |at: usize| is[at].wrapping_sub(was[at]);
        if pool != PoolId::DEFAULT {
            let own = |at: usize| change(at).wrapping_sub(self.counted_elsewhere[at]);
            let own = [own(0), own(1), own(2)];
            let reserved = mapped_bytes(&self.heap);
            let stats = &mut self.pool_mut(pool).stats;
            let families = [
                &mut stats.allocation,
                &mut stats.allocated_bytes,
                &mut stats.active_bytes,
            ];
            for (stat, own) in families.into_iter().zip(own) {
                stat.set(stat.current.wrapping_add(own));
            }
            stats.reserved_bytes.set(reserved);
        }
        self.counted_elsewhere = [0, 1, 2].map(|at| outer[at].wrapping_add(change(at)));
        self.put_to_work(before);
        result
    }

    /// Runs `f` with each pool at work in turn.
    pub(crate) fn on_each(&mut self, mut f: impl FnMut(&mut Self)) {
        self.on(PoolId::DEFAULT, &mut f);
        for slot in 0..self.private_pools.len() {
            if self.private_pools[slot].is_some() {
                self.on(PoolId(u32::try_from(slot + 1).unwrap_or(0)), &mut f);
            }
        }
    }

    pub(super) const fn at_work(&self) -> PoolId {
        self.at_work
    }

    /// The heap and the pending blocks of every pool, and whether its memory is kept for graphs.
    pub(super) fn pools(&self) -> impl Iterator<Item = (&Heap, &Vec<NodeId>, bool)> {
        let is_kept = |pool: PoolId| {
            let slot = pool.number().checked_sub(1);
            let slot = slot.and_then(|slot| self.private_pools[slot as usize].as_ref());
            slot.is_some_and(|pool| pool.is_kept)
        };
        let at_work = (&self.heap, &self.pending, is_kept(self.at_work));
        let slots = (1..).map(PoolId).zip(&self.private_pools);
        let others = slots.filter_map(move |(id, slot)| {
            let slot = slot.as_ref()?;
            // The default pool is never kept.
            let is_kept = slot.is_kept && id != self.at_work;
            Some((&slot.heap, &slot.pending, is_kept))
        });
        std::iter::once(at_work).chain(others)
    }

    /// Whether the memory of the pool at work is kept for graphs.
    pub(super) fn is_kept(&self) -> bool {
        self.pools().next().is_some_and(|(_, _, is_kept)| is_kept)
    }

    /// Sums over all pools.
    #[inline]
    pub(super) fn totals(&self, kind: PoolKind) -> Totals {
        let mut sum = self.heap.totals(kind);
        if self.private_pools.is_empty() {
            return sum;
        }
        for pool in self.private_pools.iter().flatten() {
            sum.add(&pool.heap.totals(kind));
        }
        sum
    }

    /// The split blocks of all pools, and their bytes that cannot go back to the device.
    #[inline]
    pub(super) fn splits(&self, kind: PoolKind) -> (u64, u64) {
        let (mut nodes, mut bytes) = self.heap.splits(kind);
        for pool in self.private_pools.iter().flatten() {
            let (more_nodes, more_bytes) = pool.heap.splits(kind);
            nodes += more_nodes;
            bytes += more_bytes;
        }
        (nodes, bytes)
    }

    pub(crate) fn pool_stats(&self, pool: PoolId) -> PoolStats {
        let slot = self.private_pools[pool.slot()].as_ref();
        slot.map(|pool| pool.stats).unwrap_or_default()
    }

    /// Keeps the memory of a private pool until it is closed: a graph uses it.
    pub(crate) fn keep(&mut self, pool: PoolId) {
        if pool != PoolId::DEFAULT {
            self.pool_mut(pool).is_kept = true;
        }
    }

    /// Gives what is free in a pool back to the device, as far as all work on it is known to be done.
    /// Returns how many bytes.
    pub(crate) fn empty_pool(&mut self, device: &impl Device, pool: PoolId) -> u64 {
        self.poll_streams(device);
        let before = self.reserved();
        self.on(pool, |state| {
            if !state.is_kept() {
                state.release_at_work(device, u64::MAX, None);
            }
        });
        self.destroy_spare_pages(device);
        self.book_totals();
        before - self.reserved()
    }

    /// Closes a pool: nothing is allocated from it any more. What is known to be done with goes back
    /// to the device now, the rest when it is.
    pub(crate) fn close_pool(&mut self, device: &impl Device, pool: PoolId) {
        let closed = self.pool_mut(pool);
        closed.is_closed = true;
        closed.is_kept = false;
        self.num_closed += 1;
        self.poll_streams(device);
        self.on(pool, |state| state.release_at_work(device, u64::MAX, None));
        self.destroy_spare_pages(device);
        self.remove_closed(device);
        self.book_totals();
    }

    /// Takes what closed pools have free for whoever needs memory now: pages become spare, segments
    /// go back to the device.
    pub(super) fn drain_closed(&mut self, device: &impl Device) {
        self.poll_streams(device);
        for slot in 0..self.private_pools.len() {
            let pool = self.private_pools[slot].as_ref();
            if pool.is_some_and(|pool| pool.is_closed) {
                let pool = PoolId(u32::try_from(slot + 1).unwrap_or(0));
                self.on(pool, |state| state.release_at_work(device, u64::MAX, None));
            }
        }
        self.remove_closed(device);
    }

    /// Forgets closed pools in which nothing is left.
    pub(super) fn remove_closed(&mut self, device: &impl Device) {
        for slot in &mut self.private_pools {
            let is_done = |pool: &mut Box<Pool>| pool.is_closed && mapped_bytes(&pool.heap) == 0;
            let Some(pool) = slot.take_if(is_done) else {
                continue;
            };
            self.num_closed -= 1;
            for (_, region) in pool.heap.regions() {
                if let RegionKind::Range(_) = region.kind {
                    // Addresses only. If they cannot be given back, nothing is lost but those.
                    let base = DevicePtr(region.base);
                    let released = device.release_range(base, region.bytes);
                    self.stats.num_device_errors += u64::from(released.is_err());
                }
            }
        }
    }

    /// Checks what is said of pools; returns what is wrong.
    pub(super) fn check_pools(&self) -> Result<(), String> {
        let closed = self
            .private_pools
            .iter()
            .flatten()
            .filter(|pool| pool.is_closed);
        if self.at_work != PoolId::DEFAULT || closed.count() != self.num_closed {
            return Err("the wrong pool is at work, or the closed ones are miscounted".into());
        }
        for (number, pool) in (1..).zip(&self.private_pools) {
            let Some(pool) = pool else { continue };
            let mapped = mapped_bytes(&pool.heap);
            if pool.stats.reserved_bytes.current != mapped {
                return Err(format!(
                    "pool {number}: statistics differ from its heap's totals"
                ));
            }
            if pool.is_closed && mapped == 0 {
                return Err(format!(
                    "pool {number} is closed and empty, and was not removed"
                ));
            }
            let nodes = pool
                .heap
                .regions()
                .flat_map(|(id, _)| pool.heap.nodes_of(id));
            let mut counted = [0; 3];
            for (_, node) in nodes {
                match node.state {
                    Node::Live => {
                        counted[0] += 1;
                        counted[1] += node.bytes;
                        counted[2] += node.bytes;
                    }
                    Node::Pending => counted[2] += node.bytes,
                    _ => {}
                }
            }
            let stats = &pool.stats;
            let said = [
                stats.allocation.current,
                stats.allocated_bytes.current,
                stats.active_bytes.current,
            ];
            if counted != said {
                return Err(format!(
                    "pool {number} counts {said:?}, its nodes say {counted:?}"
                ));
            }
        }
        Ok(())
    }
}
