//! The heap's invariants, checked by walking everything.

use super::bins::NUM_BINS;
use super::{Heap, MIN_BLOCK_BYTES, NIL, RegionKind, State, Totals, bins};
use crate::stats::PoolKind;

impl Heap {
    /// Walks all regions, nodes and bins; says which invariant of the [module](super) is broken.
    pub(crate) fn check(&self) -> Result<(), String> {
        let mut totals = [Totals::default(); 2];
        let mut num_nodes = 0;
        for (id, region) in self.regions() {
            let sums = &mut totals[region.pool as usize];
            let mut at = region.base;
            let mut prev = NIL;
            let mut prev_state = State::Vacant;
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
                if matches!(node.state, State::Fresh | State::Vacant) {
                    return Err(format!("2: {place} should not be left"));
                }
                if node.state == prev_state && matches!(node.state, State::Free | State::Unmapped) {
                    return Err(format!("2: {place} was not merged with the node before"));
                }
                if node.state == State::Free {
                    let bin = bins::bin_of(node.bytes);
                    if !self
                        .bin_nodes(region.pool, bin)
                        .any(|other| other == node_id)
                    {
                        return Err(format!("3: {place} is not in its bin"));
                    }
                    let split = node.bytes - self.releasable(node);
                    sums.free_bytes += node.bytes;
                    sums.split_nodes += u64::from(split > 0);
                    sums.split_bytes += split;
                }
                if node.state.is_mapped() {
                    sums.mapped_bytes += node.bytes;
                    sums.segments += u64::from(!prev_state.is_mapped());
                }
                if let RegionKind::Range { .. } = region.kind {
                    self.check_pages(id, region.base, node)
                        .map_err(|e| format!("4: {place} {e}"))?;
                } else if node.state == State::Unmapped {
                    return Err(format!("4: {place} is unmapped in a segment"));
                }
                at = node.end();
                prev = node_id;
                prev_state = node.state;
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
        // The tail of a range may be terabytes of nothing: its table is short.
        let table_end = match &self.region(region).kind {
            RegionKind::Range { pages } => base + pages.len() as u64 * page,
            RegionKind::Segment => base,
        };
        let end = if unmapped {
            node.end().min(table_end)
        } else {
            node.end()
        };
        while at < end {
            if self.page_at(region, at).is_some() == unmapped {
                return Err(format!("disagrees with the page table at {at:#x}"));
            }
            at += page;
        }
        Ok(())
    }

    fn check_bins(&self, pool: PoolKind) -> Result<(), String> {
        for bin in 0..NUM_BINS {
            let mut prev = NIL;
            for id in self.bin_nodes(pool, bin) {
                let node = self.node(id);
                if node.state != State::Free || bins::bin_of(node.bytes) != bin {
                    return Err(format!("3: node {id} ({:?}) is in bin {bin}", node.state));
                }
                if node.bin_prev != prev || self.pool_of(id) != pool {
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
