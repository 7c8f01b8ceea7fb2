//! The heap: which addresses are live, free or unmapped. Policy on numbers only, no device calls.
//!
//! ```text
//!  region (an address range)      one node a stretch, in address order, linked both ways
//!  ┌───────┬────────┬──────┬────────────┬─────────────────────────────────────┬──────┬──────┐
//!  │ live  │ free   │ live │ free       │ unmapped: a gap                     │ free │ live │
//!  └───────┴────────┴──────┴────────────┴─────────────────────────────────────┴──────┴──────┘
//!   large blocks, from the low end on                   small blocks, from the high end down
//!
//!  free nodes are in the bin of their size, of their pool ── [.][x][.][.][x][.]
//! ```
//!
//! A **region** is one contiguous address range: a segment, fully backed, or a reserved range of
//! virtual memory in which pages are mapped as needed. A **pool** is that of the small or that of
//! the large blocks. They share no page and no segment, so that small blocks do not pin pages that
//! large ones need; in a range they grow from opposite ends. Nodes live outside the memory they
//! describe (it is on a device) in one slab, and a block is named by its node's index. Splitting and
//! merging touch neighbours only; nothing but the check walks all nodes.
//!
//! # Invariants
//!
//! 1. The nodes of a region tile it: each starts where the one before ends; none is empty; sizes
//!    are multiples of [`MIN_BLOCK_BYTES`].
//! 2. No two neighbours of one pool are both free, and no two are both unmapped: merging is
//!    immediate. (While a growth is under way, what it has claimed is not merged.)
//! 3. A free node is in exactly one bin, the one of its size; an unmapped one is in the list of
//!    gaps; no other node is in any list.
//! 4. Unmapped nodes occur only in ranges and start and end on page boundaries; every other node's
//!    pages are in the range's page table, and no unmapped node's are. No page holds nodes of both
//!    pools.
//! 5. `totals` are the sums over all nodes, and `num_stuck` is the number of stuck ones.
#![forbid(unsafe_code)]

mod bins;
mod grow;
mod pages;

use self::bins::Bins;
pub(crate) use self::grow::Growth;
pub(crate) use self::pages::PageTable;
use crate::clock::{Stamps, StreamSlot};
use crate::stats::PoolKind;

/// Requests are rounded up to a multiple of this, as PyTorch does (its `kMinBlockSize`).
pub(crate) const MIN_BLOCK_BYTES: u64 = 512;

/// A request's bytes, rounded up.
#[inline]
pub(crate) const fn rounded(bytes: u64) -> u64 {
    (bytes + (MIN_BLOCK_BYTES - 1)) & !(MIN_BLOCK_BYTES - 1)
}

/// The most blocks looked at inside one bin for the best fit.
const MAX_SCAN: usize = 16;

/// A node's index in the slab.
pub(crate) type NodeId = u32;
pub(crate) const NIL: NodeId = NodeId::MAX;

/// What a stretch of addresses is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum State {
    /// Held by a caller.
    Live,
    /// Given back by the caller, but streams it was recorded on may still use it.
    Pending,
    /// In a bin.
    Free,
    /// Mapped, and claimed by the growth under way; in no bin.
    Claimed,
    /// Without memory, and claimed by the growth under way, which will map it.
    Planned,
    /// Mapped, but a device call failed half-way: unusable until it can be unmapped.
    Stuck,
    /// No memory behind it.
    Unmapped,
    /// Not a node: a slab slot to be used again.
    Vacant,
}

impl State {
    const fn is_mapped(self) -> bool {
        !matches!(self, Self::Unmapped | Self::Planned | Self::Vacant)
    }
}

/// One cache line: a walk through a bin costs one miss a node.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) addr: u64,
    pub(crate) bytes: u64,
    prev: NodeId,
    next: NodeId,
    list_prev: NodeId,
    list_next: NodeId,
    /// Of a live or pending node: the streams that use it. Of a free one: the frees it has seen.
    pub(crate) stamps: Stamps,
    pub(crate) region: u32,
    /// Of a live or pending node: the bytes that its caller did not ask for. 0 otherwise.
    rounding: u16,
    pub(crate) state: State,
    /// Of a node without memory: of no meaning.
    pub(crate) pool: PoolKind,
}

const _: () = assert!(size_of::<Node>() == 64);

impl Node {
    pub(crate) const fn end(&self) -> u64 {
        self.addr + self.bytes
    }

    /// Of a live or pending node: what its caller asked for. 0 otherwise.
    pub(crate) const fn requested(&self) -> u64 {
        match self.state {
            State::Live | State::Pending => self.bytes - self.rounding as u64,
            _ => 0,
        }
    }

    /// Sets what the caller asked for: less than its bytes by less than [`MIN_BLOCK_BYTES`].
    #[inline]
    const fn set_requested(&mut self, requested: u64) {
        debug_assert!(self.bytes - requested < MIN_BLOCK_BYTES);
        #[expect(clippy::cast_possible_truncation, reason = "it is less than 512")]
        {
            self.rounding = (self.bytes - requested) as u16;
        }
    }

    const fn is_free_in(&self, pool: PoolKind) -> bool {
        matches!(self.state, State::Free) && self.pool as u8 == pool as u8
    }
}

impl PoolKind {
    /// A measure of how far an address is from the pool's end of a range.
    const fn distance(self, addr: u64) -> u64 {
        match self {
            Self::Small => u64::MAX - addr,
            Self::Large => addr,
        }
    }
}

/// How a region got its memory.
#[derive(Debug)]
pub(crate) enum RegionKind {
    /// One call for all of it.
    Segment,
    /// Page by page.
    Range(PageTable),
}

#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) base: u64,
    pub(crate) bytes: u64,
    pub(crate) kind: RegionKind,
    first: NodeId,
}

/// Sums kept while nodes change, by pool.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Totals {
    /// Bytes with memory behind them.
    pub(crate) mapped_bytes: u64,
    /// Segments, counting each contiguous mapped stretch of one pool in a range as one.
    pub(crate) segments: u64,
    /// Bytes in free nodes.
    pub(crate) free_bytes: u64,
    /// Free nodes of which a part cannot go back to the device, because a block shares its
    /// segment or page; and the bytes of those parts.
    pub(crate) split_nodes: u64,
    pub(crate) split_bytes: u64,
}

/// What [`Totals`] have of one free node.
#[derive(Clone, Copy)]
struct Booked {
    bytes: u64,
    split: u64,
}

impl Booked {
    const NOTHING: Self = Self { bytes: 0, split: 0 };
}

impl Totals {
    /// Books `new` in the place of `old`.
    #[inline]
    fn rebook(&mut self, old: Booked, new: Booked) {
        self.free_bytes = self.free_bytes + new.bytes - old.bytes;
        self.split_bytes = self.split_bytes + new.split - old.split;
        self.split_nodes = self.split_nodes + u64::from(new.split > 0) - u64::from(old.split > 0);
    }

    pub(crate) const fn add(&mut self, other: &Self) {
        self.mapped_bytes += other.mapped_bytes;
        self.segments += other.segments;
        self.free_bytes += other.free_bytes;
        self.split_nodes += other.split_nodes;
        self.split_bytes += other.split_bytes;
    }
}

struct Zone {
    bins: Bins,
    totals: Totals,
}

/// A stretch of addresses of one region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Stretch {
    pub(crate) addr: u64,
    pub(crate) bytes: u64,
}

/// See the [module](self).
pub(crate) struct Heap {
    nodes: Vec<Node>,
    vacant: Vec<NodeId>,
    regions: Vec<Option<Region>>,
    zones: [Zone; 2],
    /// The first gap.
    gaps: NodeId,
    num_stuck: usize,
    page_bytes: u64,
    /// Whether regions are ranges. Otherwise they are segments.
    is_virtual: bool,
}

impl Heap {
    /// A heap of ranges with pages of `page_bytes` bytes, a power of two, or of segments.
    pub(crate) fn new(page_bytes: Option<u64>) -> Self {
        let zone = || Zone {
            bins: Bins::new(),
            totals: Totals::default(),
        };
        Self {
            nodes: Vec::new(),
            vacant: Vec::new(),
            regions: Vec::new(),
            zones: [zone(), zone()],
            gaps: NIL,
            num_stuck: 0,
            page_bytes: page_bytes.unwrap_or(MIN_BLOCK_BYTES),
            is_virtual: page_bytes.is_some(),
        }
    }

    #[inline]
    pub(crate) const fn totals(&self, pool: PoolKind) -> Totals {
        self.zones[pool as usize].totals
    }

    /// Split nodes and their bytes, of the [`Totals`].
    #[inline]
    pub(crate) const fn splits(&self, pool: PoolKind) -> (u64, u64) {
        let totals = &self.zones[pool as usize].totals;
        (totals.split_nodes, totals.split_bytes)
    }

    #[inline]
    pub(crate) fn node(&self, node: NodeId) -> &Node {
        &self.nodes[node as usize]
    }

    #[inline]
    pub(crate) fn node_mut(&mut self, node: NodeId) -> &mut Node {
        &mut self.nodes[node as usize]
    }

    pub(crate) fn region(&self, region: u32) -> &Region {
        self.regions[region as usize]
            .as_ref()
            .expect("region ids come from nodes and live as long")
    }

    fn table(&mut self, region: u32) -> (u64, &mut PageTable) {
        let region = self.regions[region as usize].as_mut();
        match region.map(|region| (region.base, &mut region.kind)) {
            Some((base, RegionKind::Range(pages))) => (base, pages),
            _ => unreachable!("only ranges are mapped and unmapped, and they stay"),
        }
    }

    pub(crate) fn regions(&self) -> impl Iterator<Item = (u32, &Region)> {
        (0..)
            .zip(&self.regions)
            .filter_map(|(id, region)| Some((id, region.as_ref()?)))
    }

    /// The nodes of a region in address order.
    pub(crate) fn nodes_of(&self, region: u32) -> impl Iterator<Item = (NodeId, &Node)> {
        self.nodes_from(self.region(region).first)
    }

    /// A node and those after it in its region.
    fn nodes_from(&self, first: NodeId) -> impl Iterator<Item = (NodeId, &Node)> {
        let mut next = first;
        std::iter::from_fn(move || {
            let node = self.nodes.get(next as usize)?;
            Some((std::mem::replace(&mut next, node.next), node))
        })
    }

    // ---- finding, taking and giving back ---------------------------------------------------

    /// The best usable free node of at least `bytes` bytes: of the first bin that has one, the
    /// smallest among the first [`MAX_SCAN`], among equals the one nearest to the pool's end.
    pub(crate) fn find(
        &self,
        pool: PoolKind,
        bytes: u64,
        usable: impl Fn(&Stamps) -> bool,
    ) -> Option<NodeId> {
        let bins = &self.zones[pool as usize].bins;
        let mut from = bins::bin_of(bytes);
        while let Some(bin) = bins.next_occupied(from) {
            let mut best = (u64::MAX, u64::MAX);
            let mut found = NIL;
            let mut scanned = 0;
            let mut id = bins.head(bin);
            while id != NIL && scanned < MAX_SCAN {
                let node = self.node(id);
                if node.bytes < bytes {
                    scanned += 1;
                } else if usable(&node.stamps) {
                    scanned += 1;
                    let candidate = (node.bytes, pool.distance(node.addr));
                    if candidate < best {
                        (best, found) = (candidate, id);
                    }
                }
                id = node.list_next;
            }
            if found != NIL {
                return Some(found);
            }
            from = bin + 1;
        }
        None
    }

    /// The size of the largest free node.
    pub(crate) fn largest_free(&self, pool: PoolKind) -> u64 {
        let bins = &self.zones[pool as usize].bins;
        let Some(bin) = bins.last_occupied() else {
            return 0;
        };
        self.list(bins.head(bin))
            .map(|id| self.node(id).bytes)
            .max()
            .unwrap_or(0)
    }

    /// The nodes of a bin or of the list of gaps, from its head on.
    fn list(&self, head: NodeId) -> impl Iterator<Item = NodeId> {
        let mut next = head;
        std::iter::from_fn(move || {
            let node = self.nodes.get(next as usize)?;
            Some(std::mem::replace(&mut next, node.list_next))
        })
    }

    /// Makes a part of a free node live for `stream`: of the `requested` bytes, rounded up, at the
    /// pool's end of the range. What the node has beside it stays free. Returns the live node.
    #[inline]
    pub(crate) fn take(&mut self, node: NodeId, requested: u64, stream: StreamSlot) -> NodeId {
        let bytes = rounded(requested);
        let taken = if self.node(node).bytes > bytes {
            self.cut_off(node, bytes)
        } else {
            self.unlink_free(node);
            node
        };
        self.hand_out(taken, requested, stream);
        taken
    }

    /// Cuts `bytes` bytes off a free node, at the pool's end: a new node, in no list. The free one
    /// keeps its identity, and mostly its place in its bin.
    #[inline]
    fn cut_off(&mut self, id: NodeId, bytes: u64) -> NodeId {
        let old = self.begin_resize(id);
        let new = self.vacant_node();
        let free = self.node_mut(id);
        free.bytes -= bytes;
        let (region, pool) = (free.region, free.pool);
        let (addr, prev, next) = match pool {
            PoolKind::Large => {
                let addr = free.addr;
                free.addr += bytes;
                (addr, std::mem::replace(&mut free.prev, new), id)
            }
            PoolKind::Small => (free.end(), id, std::mem::replace(&mut free.next, new)),
        };
        let node = self.node_mut(new);
        (node.addr, node.bytes) = (addr, bytes);
        (node.prev, node.next) = (prev, next);
        (node.region, node.pool) = (region, pool);
        match pool {
            PoolKind::Large => self.set_next(prev, region, new),
            PoolKind::Small if next != NIL => self.node_mut(next).prev = new,
            PoolKind::Small => {}
        }
        self.end_resize(id, old);
        new
    }

    /// Sets what comes after `prev`, or first in the region.
    #[inline]
    fn set_next(&mut self, prev: NodeId, region: u32, next: NodeId) {
        if prev != NIL {
            self.node_mut(prev).next = next;
        } else if let Some(region) = &mut self.regions[region as usize] {
            region.first = next;
        }
    }

    /// What is booked of a free node whose borders are about to move.
    #[inline]
    fn begin_resize(&self, id: NodeId) -> Booked {
        let node = self.node(id);
        Booked {
            bytes: node.bytes,
            split: self.split_bytes(node),
        }
    }

    /// Books the new borders of a free node, and puts it into another bin if it left that of its old
    /// size.
    #[inline]
    fn end_resize(&mut self, id: NodeId, old: Booked) {
        let new = self.begin_resize(id);
        let pool = self.node(id).pool;
        self.zones[pool as usize].totals.rebook(old, new);
        let (old_bin, bin) = (bins::bin_of(old.bytes), bins::bin_of(new.bytes));
        if old_bin != bin {
            self.change_bin(id, old_bin, bin);
        }
    }

    #[inline(never)]
    fn change_bin(&mut self, id: NodeId, old_bin: usize, bin: usize) {
        self.leave_bin(id, old_bin);
        self.enter_bin(id, bin);
    }

    /// Makes a node of the right size, in no list, live.
    #[inline]
    fn hand_out(&mut self, node: NodeId, requested: u64, stream: StreamSlot) {
        let node = self.node_mut(node);
        node.state = State::Live;
        node.stamps = Stamps::held(stream);
        node.set_requested(requested);
    }

    /// Gives a live node out anew as it is, to the same stream, if its size is right.
    #[inline]
    pub(crate) fn take_live(&mut self, id: NodeId, requested: u64, stream: StreamSlot) -> bool {
        let node = self.node_mut(id);
        debug_assert_eq!(node.state, State::Live);
        let fits = node.bytes == rounded(requested) && node.stamps.slot() == stream;
        if fits {
            node.stamps = Stamps::held(stream);
            node.set_requested(requested);
        }
        fits
    }

    /// Makes a live or pending node free, merged with its free neighbours. Of their stamps those
    /// that are `finished` are forgotten where there are others.
    #[inline]
    pub(crate) fn give_back(&mut self, node: NodeId, finished: impl Fn(StreamSlot, u64) -> bool) {
        self.node_mut(node).rounding = 0;
        self.free_and_merge(node, finished);
    }

    #[inline]
    fn free_and_merge(&mut self, node: NodeId, finished: impl Fn(StreamSlot, u64) -> bool) {
        let freed = self.node_mut(node);
        freed.state = State::Free;
        let Node {
            pool,
            prev,
            next,
            region,
            addr,
            bytes,
            ..
        } = *freed;
        let is_free = |id: NodeId| id != NIL && self.node(id).is_free_in(pool);
        // A free neighbour keeps its identity, and mostly its place in its bin.
        match (is_free(prev), is_free(next)) {
            (false, false) => self.link_free(node),
            (false, true) => {
                let old = self.begin_resize(next);
                self.merge_stamps(next, node, &finished);
                let grown = self.node_mut(next);
                grown.prev = prev;
                grown.addr = addr;
                grown.bytes += bytes;
                self.set_next(prev, region, next);
                self.remove_node(node);
                self.end_resize(next, old);
            }
            (true, next_too) => {
                if next_too {
                    self.unlink_free(next);
                    self.absorb_next(node, &finished);
                }
                let old = self.begin_resize(prev);
                self.absorb_next(prev, &finished);
                self.end_resize(prev, old);
            }
        }
    }

    // ---- segments --------------------------------------------------------------------------

    /// Adds a segment as one free node.
    pub(crate) fn add_segment(&mut self, pool: PoolKind, addr: u64, bytes: u64) -> NodeId {
        let node = self.add_region(pool, addr, bytes, RegionKind::Segment, State::Free);
        let totals = &mut self.zones[pool as usize].totals;
        totals.mapped_bytes += bytes;
        totals.segments += 1;
        self.link_free(node);
        node
    }

    /// Free nodes that are a whole segment.
    pub(crate) fn free_segments(&self) -> Vec<NodeId> {
        let segments = self
            .regions()
            .filter(|(_, r)| matches!(r.kind, RegionKind::Segment));
        segments
            .map(|(_, region)| region.first)
            .filter(|first| self.node(*first).state == State::Free && self.node(*first).next == NIL)
            .collect()
    }

    /// Forgets a segment that is one free node.
    pub(crate) fn remove_segment(&mut self, node: NodeId) {
        self.unlink_free(node);
        let Node {
            region,
            bytes,
            pool,
            ..
        } = *self.node(node);
        let totals = &mut self.zones[pool as usize].totals;
        totals.mapped_bytes -= bytes;
        totals.segments -= 1;
        self.remove_node(node);
        self.regions[region as usize] = None;
    }

    fn add_region(
        &mut self,
        pool: PoolKind,
        base: u64,
        bytes: u64,
        kind: RegionKind,
        state: State,
    ) -> NodeId {
        let slot = self
            .regions
            .iter()
            .position(Option::is_none)
            .unwrap_or_else(|| {
                self.regions.push(None);
                self.regions.len() - 1
            });
        let region = u32::try_from(slot).expect("under 2^32 regions exist");
        let node = self.new_node(Node {
            addr: base,
            bytes,
            prev: NIL,
            next: NIL,
            list_prev: NIL,
            list_next: NIL,
            stamps: Stamps::default(),
            region,
            rounding: 0,
            state,
            pool,
        });
        self.regions[slot] = Some(Region {
            base,
            bytes,
            kind,
            first: node,
        });
        node
    }

    // ---- pages -----------------------------------------------------------------------------

    /// The whole pages inside a node of a range.
    #[inline]
    fn whole_pages(&self, node: &Node) -> Stretch {
        // Ranges begin on a page boundary, counted from address 0.
        let mask = self.page_bytes - 1;
        let addr = (node.addr + mask) & !mask;
        let end = node.end() & !mask;
        Stretch {
            addr,
            bytes: end.saturating_sub(addr),
        }
    }

    /// Bytes of a free node that cannot go back to the device.
    #[inline]
    fn split_bytes(&self, node: &Node) -> u64 {
        node.bytes - self.releasable(node)
    }

    /// Bytes of a free node that could go back to the device.
    #[inline]
    pub(crate) fn releasable(&self, node: &Node) -> u64 {
        if self.is_virtual {
            self.whole_pages(node).bytes
        } else if (node.prev, node.next) == (NIL, NIL) {
            node.bytes
        } else {
            0
        }
    }

    // ---- nodes -----------------------------------------------------------------------------

    fn new_node(&mut self, node: Node) -> NodeId {
        let id = self.vacant_node();
        *self.node_mut(id) = node;
        id
    }

    /// A node of no meaning yet, which has no stamps.
    #[inline]
    fn vacant_node(&mut self) -> NodeId {
        match self.vacant.pop() {
            Some(id) => id,
            None => self.another_node(),
        }
    }

    #[cold]
    fn another_node(&mut self) -> NodeId {
        let id = NodeId::try_from(self.nodes.len()).expect("under 2^32 nodes exist");
        self.nodes.push(Node {
            addr: 0,
            bytes: 0,
            prev: NIL,
            next: NIL,
            list_prev: NIL,
            list_next: NIL,
            stamps: Stamps::default(),
            region: 0,
            rounding: 0,
            state: State::Vacant,
            pool: PoolKind::Small,
        });
        id
    }

    /// Cuts a node (in no list) after `bytes` bytes; the new second part has the same state, pool
    /// and stamps.
    fn split(&mut self, node: NodeId, bytes: u64) -> NodeId {
        let first = self.node_mut(node);
        debug_assert!(0 < bytes && bytes < first.bytes);
        let rest = Node {
            addr: first.addr + bytes,
            bytes: first.bytes - bytes,
            prev: node,
            next: first.next,
            list_prev: NIL,
            list_next: NIL,
            stamps: first.stamps.clone(),
            region: first.region,
            rounding: 0,
            state: first.state,
            pool: first.pool,
        };
        first.bytes = bytes;
        let after = rest.next;
        let rest = self.new_node(rest);
        self.node_mut(node).next = rest;
        if after != NIL {
            self.node_mut(after).prev = rest;
        }
        rest
    }

    /// Makes the next node (in no list) part of this one; stamps are joined.
    #[inline]
    fn absorb_next(&mut self, node: NodeId, finished: &impl Fn(StreamSlot, u64) -> bool) {
        let next = self.node(node).next;
        self.merge_stamps(node, next, finished);
        let absorbed = self.node(next);
        let (bytes, after) = (absorbed.bytes, absorbed.next);
        let grown = self.node_mut(node);
        grown.bytes += bytes;
        grown.next = after;
        if after != NIL {
            self.node_mut(after).prev = node;
        }
        self.remove_node(next);
    }

    /// Adds the stamps of a node that is about to be part of `node`.
    #[inline]
    fn merge_stamps(
        &mut self,
        node: NodeId,
        absorbed: NodeId,
        finished: &impl Fn(StreamSlot, u64) -> bool,
    ) {
        let (slot, tick, is_alone) = self.node(absorbed).stamps.first();
        let stamps = &mut self.node_mut(node).stamps;
        if !is_alone || !stamps.merge_same((slot, tick)) {
            self.merge_other_stamps(node, absorbed, finished);
        }
    }

    #[cold]
    #[inline(never)]
    fn merge_other_stamps(
        &mut self,
        node: NodeId,
        absorbed: NodeId,
        finished: &impl Fn(StreamSlot, u64) -> bool,
    ) {
        let stamps = std::mem::take(&mut self.node_mut(absorbed).stamps);
        self.node_mut(node).stamps.merge(&stamps, finished);
    }

    #[inline]
    fn remove_node(&mut self, node: NodeId) {
        self.node_mut(node).state = State::Vacant;
        self.vacant.push(node);
    }

    #[inline]
    fn link_free(&mut self, id: NodeId) {
        debug_assert_eq!(self.node(id).state, State::Free);
        let new = self.begin_resize(id);
        let pool = self.node(id).pool;
        let totals = &mut self.zones[pool as usize].totals;
        totals.rebook(Booked::NOTHING, new);
        self.enter_bin(id, bins::bin_of(new.bytes));
    }

    #[inline]
    fn unlink_free(&mut self, id: NodeId) {
        debug_assert_eq!(self.node(id).state, State::Free);
        let old = self.begin_resize(id);
        let pool = self.node(id).pool;
        let totals = &mut self.zones[pool as usize].totals;
        totals.rebook(old, Booked::NOTHING);
        self.leave_bin(id, bins::bin_of(old.bytes));
    }

    #[inline]
    fn enter_bin(&mut self, id: NodeId, bin: usize) {
        let pool = self.node(id).pool;
        let bins = &mut self.zones[pool as usize].bins;
        let head = bins.head(bin);
        bins.set_head(bin, id);
        self.link_before(id, head);
    }

    #[inline]
    fn leave_bin(&mut self, id: NodeId, bin: usize) {
        let pool = self.node(id).pool;
        if let Some(head) = self.unlink(id) {
            self.zones[pool as usize].bins.set_head(bin, head);
        }
    }

    fn link_gap(&mut self, id: NodeId) {
        debug_assert_eq!(self.node(id).state, State::Unmapped);
        let head = std::mem::replace(&mut self.gaps, id);
        self.link_before(id, head);
    }

    fn unlink_gap(&mut self, id: NodeId) {
        if let Some(head) = self.unlink(id) {
            self.gaps = head;
        }
    }

    /// Makes a node the one before `head`, the head of a list so far.
    #[inline]
    fn link_before(&mut self, id: NodeId, head: NodeId) {
        if head != NIL {
            self.node_mut(head).list_prev = id;
        }
        let node = self.node_mut(id);
        (node.list_prev, node.list_next) = (NIL, head);
    }

    /// Takes a node out of its list. If it was the head, returns the next one.
    #[inline]
    fn unlink(&mut self, id: NodeId) -> Option<NodeId> {
        let Node {
            list_prev,
            list_next,
            ..
        } = *self.node(id);
        if list_next != NIL {
            self.node_mut(list_next).list_prev = list_prev;
        }
        if list_prev == NIL {
            return Some(list_next);
        }
        self.node_mut(list_prev).list_next = list_next;
        None
    }

    /// Books the memory of a node that is being mapped or unmapped. A mapped stretch of one pool
    /// counts as one segment: joining two makes one fewer, cutting one in two makes one more.
    fn count_mapped(&mut self, id: NodeId, mapped: bool) {
        let node = self.node(id);
        let (bytes, pool) = (node.bytes, node.pool);
        let joins = |id: NodeId| {
            self.nodes
                .get(id as usize)
                .is_some_and(|other| other.state.is_mapped() && other.pool == pool)
        };
        let neighbours = u64::from(joins(node.prev)) + u64::from(joins(node.next));
        let totals = &mut self.zones[pool as usize].totals;
        if mapped {
            totals.mapped_bytes += bytes;
            totals.segments = totals.segments + 1 - neighbours;
        } else {
            totals.mapped_bytes -= bytes;
            totals.segments = totals.segments + neighbours - 1;
        }
    }
}

impl std::fmt::Debug for Heap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Heap")
            .field("nodes", &(self.nodes.len() - self.vacant.len()))
            .field("small", &self.totals(PoolKind::Small))
            .field("large", &self.totals(PoolKind::Large))
            .finish_non_exhaustive()
    }
}

mod check;
