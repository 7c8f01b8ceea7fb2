//! The heap: which addresses are live, free or unmapped. Policy on numbers only, no device calls.
//!
//! ```text
//!  region (an address range)      one node a stretch, in address order, linked both ways
//!  ┌───────┬────────┬──────┬────────────┬──────────────────────────────────────────────┐
//!  │ live  │ free   │ live │ free       │ unmapped                                     │
//!  └───────┴────────┴──────┴────────────┴──────────────────────────────────────────────┘
//!              │                 └──────────────┐  free nodes are also in the bin of their size
//!          bins of the zone ── [.][x][.][.][x][.]
//! ```
//!
//! A **region** is one contiguous address range: a segment, fully backed, or a reserved range of
//! virtual memory in which pages are mapped as needed. A **zone** is the small or the large pool:
//! regions never mix the two, so that small blocks do not pin pages that large ones need. Nodes
//! live outside the memory they describe (it is on a device) in one slab, and a block is named by
//! its node's index. Splitting and merging touch neighbours only.
//!
//! # Invariants
//!
//! 1. The nodes of a region tile it: each starts where the one before ends; none is empty; sizes
//!    are multiples of [`MIN_BLOCK_BYTES`].
//! 2. No two neighbours are both free, and no two are both unmapped: merging is immediate. (While
//!    a growth is under way, freshly mapped nodes are [`State::Fresh`] and not merged.)
//! 3. A free node is in exactly one bin, the one of its size; no other node is in any.
//! 4. Unmapped nodes occur only in ranges and start and end on page boundaries; every other node's
//!    pages are in the range's page table, and no unmapped node's are.
//! 5. `totals` are the sums over all nodes.
#![forbid(unsafe_code)]

mod bins;

use smallvec::SmallVec;

use self::bins::Bins;
use crate::clock::{Stamps, StreamSlot};
use crate::device::PageId;
use crate::stats::PoolKind;

/// Requests are rounded up to a multiple of this, as PyTorch does (its `kMinBlockSize`).
pub(crate) const MIN_BLOCK_BYTES: u64 = 512;
/// The most blocks looked at inside one bin for the best fit.
const MAX_SCAN: usize = 16;

/// A node's index in the slab.
pub(crate) type NodeId = u32;
pub(crate) const NIL: NodeId = NodeId::MAX;

/// What a stretch of addresses is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum State {
    /// Held by a caller.
    Live,
    /// Given back by the caller, but streams it was recorded on may still use it.
    Pending,
    /// In a bin.
    Free,
    /// Mapped by the growth under way; in no bin yet.
    Fresh,
    /// Mapped, but a device call failed half-way: unusable until it can be unmapped.
    Stuck,
    /// No memory behind it.
    Unmapped,
    /// Not a node: a slab slot to be used again.
    Vacant,
}

impl State {
    const fn is_mapped(self) -> bool {
        !matches!(self, Self::Unmapped | Self::Vacant)
    }
}

#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) addr: u64,
    pub(crate) bytes: u64,
    pub(crate) region: u32,
    pub(crate) state: State,
    prev: NodeId,
    next: NodeId,
    bin_prev: NodeId,
    bin_next: NodeId,
    /// Of a live or pending node: what the caller asked for.
    pub(crate) requested: u64,
    /// Of a live or pending node: the stream it was allocated on.
    pub(crate) stream: StreamSlot,
    /// Of a live or pending node: streams it was recorded on beside its own.
    pub(crate) recorded: SmallVec<[StreamSlot; 2]>,
    /// Of a free or pending node: the frees it has seen.
    pub(crate) stamps: Stamps,
}

impl Node {
    pub(crate) const fn end(&self) -> u64 {
        self.addr + self.bytes
    }
}

/// How a region got its memory.
#[derive(Debug)]
pub(crate) enum RegionKind {
    /// One call for all of it.
    Segment,
    /// Page by page; the table holds the page mapped at each page-sized step from the base.
    Range {
        /// Index: page number in the range. Shorter than the range: the rest is unmapped.
        pages: Vec<Option<PageId>>,
    },
}

#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) base: u64,
    pub(crate) bytes: u64,
    pub(crate) pool: PoolKind,
    pub(crate) kind: RegionKind,
    first: NodeId,
}

/// Sums kept while nodes change, by pool.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Totals {
    /// Bytes with memory behind them.
    pub(crate) mapped_bytes: u64,
    /// Segments, counting each contiguous mapped stretch of a range as one.
    pub(crate) segments: u64,
    /// Bytes in free nodes.
    pub(crate) free_bytes: u64,
    /// Free nodes of which a part cannot go back to the device, because a block shares its
    /// segment or page; and the bytes of those parts.
    pub(crate) split_nodes: u64,
    pub(crate) split_bytes: u64,
}

struct Zone {
    bins: Bins,
    totals: Totals,
}

/// Where a growth puts the new block, and which pages that takes.
#[derive(Clone, Debug)]
pub(crate) struct Growth {
    pub(crate) region: u32,
    pub(crate) addr: u64,
    pub(crate) missing: SmallVec<[Stretch; 4]>,
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
    page_bytes: u64,
}

impl Heap {
    /// `page_bytes` is the size of a page of virtual memory; any value where there is none.
    pub(crate) fn new(page_bytes: u64) -> Self {
        let zone = || Zone {
            bins: Bins::new(),
            totals: Totals::default(),
        };
        Self {
            nodes: Vec::new(),
            vacant: Vec::new(),
            regions: Vec::new(),
            zones: [zone(), zone()],
            page_bytes,
        }
    }

    pub(crate) fn totals(&self, pool: PoolKind) -> Totals {
        self.zones[pool as usize].totals
    }

    pub(crate) fn node(&self, node: NodeId) -> &Node {
        &self.nodes[node as usize]
    }

    pub(crate) fn node_mut(&mut self, node: NodeId) -> &mut Node {
        &mut self.nodes[node as usize]
    }

    pub(crate) fn region(&self, region: u32) -> &Region {
        self.regions[region as usize]
            .as_ref()
            .expect("region ids come from nodes and live as long")
    }

    fn region_mut(&mut self, region: u32) -> &mut Region {
        self.regions[region as usize]
            .as_mut()
            .expect("region ids come from nodes and live as long")
    }

    pub(crate) fn regions(&self) -> impl Iterator<Item = (u32, &Region)> {
        (0..)
            .zip(&self.regions)
            .filter_map(|(id, region)| Some((id, region.as_ref()?)))
    }

    /// The nodes of a region in address order.
    pub(crate) fn nodes_of(&self, region: u32) -> impl Iterator<Item = (NodeId, &Node)> {
        let mut next = self.region(region).first;
        std::iter::from_fn(move || {
            let node = self.nodes.get(next as usize)?;
            Some((std::mem::replace(&mut next, node.next), node))
        })
    }

    pub(crate) fn pool_of(&self, node: NodeId) -> PoolKind {
        self.region(self.node(node).region).pool
    }

    fn is_range(&self, region: u32) -> bool {
        matches!(self.region(region).kind, RegionKind::Range { .. })
    }

    // ---- finding, taking and giving back ---------------------------------------------------

    /// The best usable free node of at least `bytes` bytes: of the first bin that has one, the
    /// smallest among the first [`MAX_SCAN`], the lowest address among equals.
    pub(crate) fn find(
        &self,
        pool: PoolKind,
        bytes: u64,
        usable: impl Fn(&Stamps) -> bool,
    ) -> Option<NodeId> {
        let bins = &self.zones[pool as usize].bins;
        let mut from = bins::bin_of(bytes);
        while let Some(bin) = bins.next_occupied(from) {
            let mut best: Option<(u64, u64, NodeId)> = None;
            let mut scanned = 0;
            let mut id = bins.head(bin);
            while id != NIL && scanned < MAX_SCAN {
                let node = self.node(id);
                if node.bytes >= bytes && usable(&node.stamps) {
                    let candidate = (node.bytes, node.addr, id);
                    best = Some(best.map_or(candidate, |best| best.min(candidate)));
                    scanned += 1;
                } else if node.bytes < bytes {
                    scanned += 1;
                }
                id = node.bin_next;
            }
            if let Some((_, _, id)) = best {
                return Some(id);
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
        self.bin_nodes(pool, bin)
            .map(|id| self.node(id).bytes)
            .max()
            .unwrap_or(0)
    }

    fn bin_nodes(&self, pool: PoolKind, bin: usize) -> impl Iterator<Item = NodeId> {
        let mut next = self.zones[pool as usize].bins.head(bin);
        std::iter::from_fn(move || {
            let node = self.nodes.get(next as usize)?;
            Some(std::mem::replace(&mut next, node.bin_next))
        })
    }

    /// Makes a free node live, giving back what it has over `bytes`.
    pub(crate) fn take(&mut self, node: NodeId, bytes: u64) {
        self.unlink_free(node);
        self.node_mut(node).state = State::Live;
        if self.node(node).bytes > bytes {
            let rest = self.split(node, bytes);
            self.node_mut(rest).state = State::Free;
            self.link_free(rest);
        }
        self.node_mut(node).stamps = Stamps::default();
    }

    /// Makes a live or pending node free, merged with its free neighbours.
    pub(crate) fn give_back(&mut self, node: NodeId, stamps: Stamps) {
        let freed = self.node_mut(node);
        freed.recorded.clear();
        freed.requested = 0;
        freed.stamps = stamps;
        self.free_and_merge(node);
    }

    fn free_and_merge(&mut self, node: NodeId) -> NodeId {
        self.node_mut(node).state = State::Free;
        let next = self.node(node).next;
        if next != NIL && self.node(next).state == State::Free {
            self.unlink_free(next);
            self.absorb_next(node);
        }
        let prev = self.node(node).prev;
        let merged = if prev != NIL && self.node(prev).state == State::Free {
            self.unlink_free(prev);
            self.absorb_next(prev);
            prev
        } else {
            node
        };
        self.link_free(merged);
        merged
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
        let Node { region, bytes, .. } = *self.node(node);
        let totals = &mut self.zones[self.region(region).pool as usize].totals;
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
            region,
            state,
            prev: NIL,
            next: NIL,
            bin_prev: NIL,
            bin_next: NIL,
            requested: 0,
            stream: StreamSlot::DEFAULT,
            recorded: SmallVec::new(),
            stamps: Stamps::default(),
        });
        self.regions[slot] = Some(Region {
            base,
            bytes,
            pool,
            kind,
            first: node,
        });
        node
    }

    // ---- ranges of virtual memory ----------------------------------------------------------

    /// Adds a reserved range as one unmapped node.
    pub(crate) fn add_range(&mut self, pool: PoolKind, addr: u64, bytes: u64) {
        let kind = RegionKind::Range { pages: Vec::new() };
        self.add_region(pool, addr, bytes, kind, State::Unmapped);
    }

    /// Where to put `bytes` bytes that fit in no free node: the place inside the reserved ranges
    /// that needs the fewest new pages, then the one at the lowest address. Free neighbours that
    /// are usable are made part of it. `None` if no range has room.
    pub(crate) fn plan_growth(
        &self,
        pool: PoolKind,
        bytes: u64,
        usable: impl Fn(&Stamps) -> bool,
    ) -> Option<Growth> {
        let mut best: Option<(u64, u64, u32)> = None;
        for (id, region) in self.regions() {
            if region.pool != pool || matches!(region.kind, RegionKind::Segment) {
                continue;
            }
            // Runs of nodes that a block could lie across.
            let mut run: Vec<&Node> = Vec::new();
            let mut judge = |run: &mut Vec<&Node>| {
                if run.iter().any(|node| node.state == State::Unmapped) {
                    for (new_bytes, addr) in self.placements(run, bytes) {
                        let candidate = (new_bytes, addr, id);
                        best = Some(best.map_or(candidate, |best| best.min(candidate)));
                    }
                }
                run.clear();
            };
            for (_, node) in self.nodes_of(id) {
                match node.state {
                    State::Unmapped => run.push(node),
                    State::Free if usable(&node.stamps) => run.push(node),
                    _ => judge(&mut run),
                }
            }
            judge(&mut run);
        }
        let (_, addr, region) = best?;
        let covered = self.nodes_of(region).map(|(_, node)| node);
        let missing = covered
            .filter(|node| node.state == State::Unmapped)
            .map(|node| self.missing_in(node, addr, bytes))
            .filter(|stretch| stretch.bytes > 0)
            .collect();
        Some(Growth {
            region,
            addr,
            missing,
        })
    }

    /// Places in a run where `bytes` bytes fit, with the bytes of pages each would add: flush with
    /// the start of a node, or with the end of one.
    fn placements(&self, run: &[&Node], bytes: u64) -> Vec<(u64, u64)> {
        let (Some(first), Some(last)) = (run.first(), run.last()) else {
            return Vec::new();
        };
        let (start, end) = (first.addr, last.end());
        let starts = run.iter().map(|node| node.addr);
        let ends = run.iter().filter_map(|node| node.end().checked_sub(bytes));
        let mut addrs: Vec<u64> = starts.chain(ends).collect();
        addrs.retain(|addr| *addr >= start && addr.checked_add(bytes).is_some_and(|e| e <= end));
        addrs
            .into_iter()
            .map(|addr| {
                let unmapped = run.iter().filter(|node| node.state == State::Unmapped);
                let new = unmapped
                    .map(|node| self.missing_in(node, addr, bytes).bytes)
                    .sum();
                (new, addr)
            })
            .collect()
    }

    /// The pages of an unmapped node that a block of `bytes` bytes at `addr` needs.
    fn missing_in(&self, node: &Node, addr: u64, bytes: u64) -> Stretch {
        let start = addr.max(node.addr);
        let end = (addr + bytes).min(node.end());
        if start >= end {
            return Stretch {
                addr: start,
                bytes: 0,
            };
        }
        // Pages count from the base of the region, which is page-aligned, as the node is.
        let down = start - (start - node.addr) % self.page_bytes;
        let up = node.addr + (end - node.addr).next_multiple_of(self.page_bytes);
        Stretch {
            addr: down,
            bytes: up - down,
        }
    }

    /// Notes that pages now lie behind a stretch inside an unmapped node. The node made of it is
    /// [`State::Fresh`] until the growth ends.
    pub(crate) fn mark_mapped(
        &mut self,
        region: u32,
        stretch: Stretch,
        pages: impl IntoIterator<Item = PageId>,
    ) -> NodeId {
        let found = self
            .nodes_of(region)
            .find(|(_, node)| node.addr <= stretch.addr && stretch.addr < node.end());
        let (mut node, _) = found.expect("growth was planned in this region");
        debug_assert_eq!(self.node(node).state, State::Unmapped);
        if self.node(node).addr < stretch.addr {
            let head = stretch.addr - self.node(node).addr;
            node = self.split(node, head);
        }
        if self.node(node).bytes > stretch.bytes {
            self.split(node, stretch.bytes);
        }
        let page_bytes = self.page_bytes;
        let entry = self.region_mut(region);
        let first_page = page_number(stretch.addr - entry.base, page_bytes);
        let RegionKind::Range { pages: table } = &mut entry.kind else {
            unreachable!("only ranges are mapped")
        };
        for (at, page) in (first_page..).zip(pages) {
            if table.len() <= at {
                table.resize(at + 1, None);
            }
            debug_assert!(table[at].is_none());
            table[at] = Some(page);
        }
        self.count_mapped(node, true);
        self.node_mut(node).state = State::Fresh;
        node
    }

    /// Notes that no page lies behind a free, fresh or stuck node's pages from `stretch` on any
    /// more. What the node has beside them stays free (or stuck).
    pub(crate) fn mark_unmapped(&mut self, node: NodeId, stretch: Stretch) {
        let state = self.node(node).state;
        if state == State::Free {
            self.unlink_free(node);
        }
        let mut middle = node;
        if self.node(node).addr < stretch.addr {
            middle = self.split(node, stretch.addr - self.node(node).addr);
            if state == State::Free {
                self.link_free(node);
            }
        }
        if self.node(middle).bytes > stretch.bytes {
            let tail = self.split(middle, stretch.bytes);
            self.node_mut(tail).state = state;
            if state == State::Free {
                self.link_free(tail);
            }
        }
        let page_bytes = self.page_bytes;
        let region = self.node(middle).region;
        let entry = self.region_mut(region);
        let first_page = page_number(stretch.addr - entry.base, page_bytes);
        let count = page_number(stretch.bytes, page_bytes);
        let RegionKind::Range { pages } = &mut entry.kind else {
            unreachable!("only ranges are unmapped")
        };
        for page in &mut pages[first_page..first_page + count] {
            *page = None;
        }
        self.count_mapped(middle, false);
        let unmapped = self.node_mut(middle);
        unmapped.state = State::Unmapped;
        unmapped.stamps = Stamps::default();
        let next = self.node(middle).next;
        if next != NIL && self.node(next).state == State::Unmapped {
            self.absorb_next(middle);
        }
        let prev = self.node(middle).prev;
        if prev != NIL && self.node(prev).state == State::Unmapped {
            self.absorb_next(prev);
        }
    }

    /// The page mapped at `addr`.
    pub(crate) fn page_at(&self, region: u32, addr: u64) -> Option<PageId> {
        let region = self.region(region);
        match &region.kind {
            RegionKind::Segment => None,
            RegionKind::Range { pages } => {
                *pages.get(page_number(addr - region.base, self.page_bytes))?
            }
        }
    }

    /// Ends a growth: the fresh and free nodes that cover `bytes` bytes at `addr` become one live
    /// node; what they have beside it becomes free.
    pub(crate) fn carve(&mut self, region: u32, addr: u64, bytes: u64) -> NodeId {
        let found = self
            .nodes_of(region)
            .find(|(_, node)| node.addr <= addr && addr < node.end());
        let (mut node, _) = found.expect("growth was planned in this region");
        if self.node(node).state == State::Free {
            self.unlink_free(node);
        }
        if self.node(node).addr < addr {
            let head = node;
            node = self.split(head, addr - self.node(head).addr);
            self.free_and_merge(head);
        }
        self.node_mut(node).state = State::Live;
        while self.node(node).bytes < bytes {
            let next = self.node(node).next;
            debug_assert!(matches!(self.node(next).state, State::Free | State::Fresh));
            if self.node(next).state == State::Free {
                self.unlink_free(next);
            }
            self.absorb_next(node);
        }
        if self.node(node).bytes > bytes {
            let tail = self.split(node, bytes);
            self.free_and_merge(tail);
        }
        self.node_mut(node).stamps = Stamps::default();
        node
    }

    /// Makes a fresh node of a failed growth stuck.
    pub(crate) fn set_stuck(&mut self, node: NodeId) {
        debug_assert_eq!(self.node(node).state, State::Fresh);
        self.node_mut(node).state = State::Stuck;
    }

    /// Whole pages inside free nodes, and stuck ones: what could be unmapped.
    pub(crate) fn free_pages(&self) -> Vec<(NodeId, Stretch)> {
        let mut found = Vec::new();
        for (id, _) in self.regions().filter(|(id, _)| self.is_range(*id)) {
            let nodes = self.nodes_of(id);
            found.extend(nodes.filter_map(|(id, node)| match node.state {
                State::Stuck => Some((
                    id,
                    Stretch {
                        addr: node.addr,
                        bytes: node.bytes,
                    },
                )),
                State::Free => {
                    let pages = self.whole_pages(node);
                    (pages.bytes > 0).then_some((id, pages))
                }
                _ => None,
            }));
        }
        found
    }

    /// The whole pages inside a node of a range.
    fn whole_pages(&self, node: &Node) -> Stretch {
        let base = self.region(node.region).base;
        let start = base + (node.addr - base).next_multiple_of(self.page_bytes);
        let end = node.end() - (node.end() - base) % self.page_bytes;
        Stretch {
            addr: start,
            bytes: end.saturating_sub(start),
        }
    }

    /// Bytes of a free node that could go back to the device.
    pub(crate) fn releasable(&self, node: &Node) -> u64 {
        match self.region(node.region).kind {
            RegionKind::Range { .. } => self.whole_pages(node).bytes,
            RegionKind::Segment if node.bytes == self.region(node.region).bytes => node.bytes,
            RegionKind::Segment => 0,
        }
    }

    // ---- nodes -----------------------------------------------------------------------------

    fn new_node(&mut self, node: Node) -> NodeId {
        if let Some(id) = self.vacant.pop() {
            self.nodes[id as usize] = node;
            return id;
        }
        let id = NodeId::try_from(self.nodes.len()).expect("under 2^32 nodes exist");
        self.nodes.push(node);
        id
    }

    /// Cuts a node (in no bin) after `bytes` bytes; the new second part has the same state and
    /// stamps.
    fn split(&mut self, node: NodeId, bytes: u64) -> NodeId {
        let first = self.node_mut(node);
        debug_assert!(0 < bytes && bytes < first.bytes);
        let rest = Node {
            addr: first.addr + bytes,
            bytes: first.bytes - bytes,
            region: first.region,
            state: first.state,
            prev: node,
            next: first.next,
            bin_prev: NIL,
            bin_next: NIL,
            requested: 0,
            stream: StreamSlot::DEFAULT,
            recorded: SmallVec::new(),
            stamps: first.stamps.clone(),
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

    /// Makes the next node (in no bin) part of this one; stamps are joined.
    fn absorb_next(&mut self, node: NodeId) {
        let next = self.node(node).next;
        let stamps = std::mem::take(&mut self.node_mut(next).stamps);
        let Node {
            bytes, next: after, ..
        } = *self.node(next);
        let grown = self.node_mut(node);
        grown.bytes += bytes;
        grown.next = after;
        grown.stamps.merge(&stamps);
        if after != NIL {
            self.node_mut(after).prev = node;
        }
        self.remove_node(next);
    }

    fn remove_node(&mut self, node: NodeId) {
        self.node_mut(node).state = State::Vacant;
        self.vacant.push(node);
    }

    fn link_free(&mut self, id: NodeId) {
        let node = self.node(id);
        debug_assert_eq!(node.state, State::Free);
        let (bytes, bin) = (node.bytes, bins::bin_of(node.bytes));
        let split = bytes - self.releasable(node);
        let pool = self.pool_of(id);
        let zone = &mut self.zones[pool as usize];
        zone.totals.free_bytes += bytes;
        zone.totals.split_nodes += u64::from(split > 0);
        zone.totals.split_bytes += split;
        let head = zone.bins.head(bin);
        zone.bins.set_head(bin, id);
        if head != NIL {
            self.node_mut(head).bin_prev = id;
        }
        let node = self.node_mut(id);
        node.bin_prev = NIL;
        node.bin_next = head;
    }

    fn unlink_free(&mut self, id: NodeId) {
        let node = self.node(id);
        debug_assert_eq!(node.state, State::Free);
        let (bytes, bin) = (node.bytes, bins::bin_of(node.bytes));
        let (before, after) = (node.bin_prev, node.bin_next);
        let split = bytes - self.releasable(node);
        let pool = self.pool_of(id);
        let zone = &mut self.zones[pool as usize];
        zone.totals.free_bytes -= bytes;
        zone.totals.split_nodes -= u64::from(split > 0);
        zone.totals.split_bytes -= split;
        if before == NIL {
            zone.bins.set_head(bin, after);
        } else {
            self.node_mut(before).bin_next = after;
        }
        if after != NIL {
            self.node_mut(after).bin_prev = before;
        }
    }

    /// Books the memory of a node that is being mapped or unmapped. A mapped stretch counts as one
    /// segment: joining two makes one fewer, cutting one in two makes one more.
    fn count_mapped(&mut self, node: NodeId, mapped: bool) {
        let Node {
            prev, next, bytes, ..
        } = *self.node(node);
        let is_mapped = |id: NodeId| id != NIL && self.node(id).state.is_mapped();
        let neighbours = u64::from(is_mapped(prev)) + u64::from(is_mapped(next));
        let pool = self.pool_of(node);
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

fn page_number(bytes: u64, page_bytes: u64) -> usize {
    usize::try_from(bytes / page_bytes).expect("page numbers fit the address space")
}

mod check;
