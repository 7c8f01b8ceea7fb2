//! The heap's invariants, checked by walking everything.

use super::bins::NUM_BINS;
use super::{Heap, MIN_BLOCK_BYTES, NIL, Node, RegionKind, State, Totals, bins};
use crate::stats::PoolKind;

impl Heap {
    /// Walks all regions, nodes and bins; says which invariant of the [module](super) is broken.
    pub(crate) fn check(&self) -> Result<(), String> {
        let mut totals = [Totals::default(); 2];
        let (mut num_nodes, mut num_gaps, mut num_stuck) = (0, 0, 0);
        for (id, region) in self.regions() {
            let is_range = matches!(region.kind, RegionKind::Range(_));
            if is_range != self.is_virtual
                || is_range && !region.base.is_multiple_of(self.page_bytes)
            {
                return Err(format!(
                    "region {id} is of the wrong kind, or off a page boundary"
                ));
            }
            let mut at = region.base;
            let mut prev = NIL;
            let mut before: Option<&Node> = None;
            for (node_id, node) in self.nodes_of(id) {
                let place = format!("node {node_id} at {:#x} ({:?})", node.addr, node.state);
                num_nodes += 1;
                if node.addr != at || node.bytes == 0 || node.bytes % MIN_BLOCK_BYTES != 0 {
                    return Err(format!(
                        "1: {place} does not tile its region, expected {at:#x}"
                    ));
                }
                if node.prev != prev || node.region != id {
                    return Err(format!("1: {place} is not linked to its neighbour"));
                }
                if matches!(node.state, State::Claimed | State::Planned | State::Vacant) {
                    return Err(format!("2: {place} should not be left"));
                }
                let same_state = before.filter(|before| before.state == node.state);
                if same_state.is_some_and(|before| match node.state {
                    State::Free => before.pool == node.pool,
                    state => state == State::Unmapped,
                }) {
                    return Err(format!("2: {place} was not merged with the node before"));
                }
                num_gaps += usize::from(node.state == State::Unmapped);
                num_stuck += usize::from(node.state == State::Stuck);
                if node.requested() > node.bytes
                    || node.state != State::Live
                        && node.state != State::Pending
                        && node.rounding > 0
                {
                    return Err(format!("{place} has a wrong size"));
                }
                let sums = &mut totals[node.pool as usize];
                if node.state == State::Free {
                    let bin = bins::bin_of(node.bytes);
                    let bins = &self.zones[node.pool as usize].bins;
                    if !self.list(bins.head(bin)).any(|other| other == node_id) {
                        return Err(format!("3: {place} is not in its bin"));
                    }
                    let split = self.split_bytes(node);
                    sums.free_bytes += node.bytes;
                    sums.split_nodes += u64::from(split > 0);
                    sums.split_bytes += split;
                }
                if node.state.is_mapped() {
                    sums.mapped_bytes += node.bytes;
                    let joined = before.filter(|before| before.state.is_mapped());
                    let joined = joined.filter(|before| before.pool == node.pool);
                    sums.segments += u64::from(joined.is_none());
                }
                if let Some(before) = before
                    && before.state.is_mapped()
                    && node.state.is_mapped()
                    && before.pool != node.pool
                    && !node.addr.is_multiple_of(self.page_bytes)
                {
                    return Err(format!("4: {place} shares a page with the other pool"));
                }
                if is_range {
                    self.check_pages(id, region.base, node)
                        .map_err(|e| format!("4: {place} {e}"))?;
                } else if node.state == State::Unmapped {
                    return Err(format!("4: {place} is unmapped in a segment"));
                }
                at = node.end();
                prev = node_id;
                before = Some(node);
            }
            if at != region.base + region.bytes {
                return Err(format!(
                    "1: region {id} ends at {at:#x}, not where it should"
                ));
            }
        }
        if num_nodes + self.vacant.len() != self.nodes.len() {
            return Err(format!(
                "1: {num_nodes} nodes are linked, {} lost",
                self.nodes.len()
            ));
        }
        if (num_gaps, num_stuck) != (self.check_gaps()?, self.num_stuck) {
            return Err(format!(
                "3, 5: {num_gaps} gaps and {num_stuck} stuck nodes are not what is listed"
            ));
        }
        for pool in [PoolKind::Small, PoolKind::Large] {
            if totals[pool as usize] != self.totals(pool) {
                return Err(format!(
                    "5: totals of the {pool} pool are {:?}, the nodes sum to {:?}",
                    self.totals(pool),
                    totals[pool as usize],
                ));
            }
            self.check_bins(pool)?;
        }
        Ok(())
    }

    fn check_pages(&self, region: u32, base: u64, node: &super::Node) -> Result<(), String> {
        let page = self.page_bytes;
        let unmapped = node.state == State::Unmapped;
        if unmapped && !((node.addr - base).is_multiple_of(page) && node.bytes.is_multiple_of(page))
        {
            return Err("is unmapped off a page boundary".into());
        }
        let mut at = node.addr - (node.addr - base) % page;
        // A gap may be terabytes of nothing: of those it is enough to see that the table is empty.
        if unmapped && let RegionKind::Range(pages) = &self.region(region).kind {
            let inside = |(number, _)| {
                let addr = base + number as u64 * page;
                node.addr <= addr && addr < node.end()
            };
            return match pages.iter().find(|entry| inside(*entry)) {
                Some((number, _)) => Err(format!("is unmapped, but page {number} is there")),
                None => Ok(()),
            };
        }
        let end = node.end();
        while at < end {
            if self.page_at(region, at).is_none() {
                return Err(format!("disagrees with the page table at {at:#x}"));
            }
            at += page;
        }
        Ok(())
    }

    /// Checks the list of gaps and returns its length.
    fn check_gaps(&self) -> Result<usize, String> {
        let (mut prev, mut count) = (NIL, 0);
        for id in self.list(self.gaps) {
            let node = self.node(id);
            if node.state != State::Unmapped || node.list_prev != prev {
                return Err(format!(
                    "3: node {id} ({:?}) is not a linked gap",
                    node.state
                ));
            }
            (prev, count) = (id, count + 1);
        }
        Ok(count)
    }

    fn check_bins(&self, pool: PoolKind) -> Result<(), String> {
        for bin in 0..NUM_BINS {
            let mut prev = NIL;
            let bins = &self.zones[pool as usize].bins;
            for id in self.list(bins.head(bin)) {
                let node = self.node(id);
                if node.state != State::Free || bins::bin_of(node.bytes) != bin {
                    return Err(format!("3: node {id} ({:?}) is in bin {bin}", node.state));
                }
                if node.list_prev != prev || node.pool != pool {
                    return Err(format!(
                        "3: node {id} is not linked in bin {bin} of its pool"
                    ));
                }
                prev = id;
            }
            if self.zones[pool as usize].bins.is_marked(bin) == (prev == NIL) {
                return Err(format!("3: the bitmap is wrong about bin {bin}"));
            }
        }
        Ok(())
    }
}
