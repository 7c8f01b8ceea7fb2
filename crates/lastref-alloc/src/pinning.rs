//! Which blocks stand in the way: why an allocation fails although enough memory is free.
//!
//! A request needs one contiguous stretch. The stretch that would be free with the least given up
//! is looked for in every region that is long enough; the blocks in it are the ones to look at. If
//! no region is long enough (segments shorter than the request), it is the blocks that keep partly
//! free segments from going back to the device.
#![forbid(unsafe_code)]

use std::cmp::Reverse;

use crate::clock::Clocks;
use crate::device::DevicePtr;
use crate::error::{Pinned, PinningBlock};
use crate::heap::{Heap, Node, NodeId, RegionKind, State};

/// The blocks in the way of `bytes` bytes in one piece.
pub(crate) fn pinned(heap: &Heap, clocks: &Clocks, bytes: u64) -> Pinned {
    let nodes = best_window(heap, bytes).unwrap_or_else(|| partly_free_segments(heap));
    let mut found = Pinned::default();
    for id in nodes {
        let node = heap.node(id);
        match node.state {
            State::Live | State::Pending => found.blocks.push(PinningBlock {
                ptr: DevicePtr(node.addr),
                bytes: node.bytes,
                stream: clocks.stream(node.stamps.slot()),
                pending: node.state == State::Pending,
            }),
            State::Free => found.free_bytes += node.bytes,
            _ => {}
        }
    }
    found
}

/// What stands in the way in a node.
fn cost(node: &Node) -> u64 {
    match node.state {
        State::Free | State::Unmapped => 0,
        _ => node.bytes,
    }
}

/// The nodes of the stretch of at least `bytes` bytes in which the least is held.
fn best_window(heap: &Heap, bytes: u64) -> Option<Vec<NodeId>> {
    let mut best: Option<(u64, Vec<NodeId>)> = None;
    for (region, _) in heap.regions() {
        let nodes: Vec<(NodeId, &Node)> = heap.nodes_of(region).collect();
        let (mut end, mut length, mut held) = (0, 0, 0);
        // A best window starts or ends at the border of a node; one that starts at a border and
        // takes whole nodes is within one node of it.
        for start in 0..nodes.len() {
            while length < bytes && end < nodes.len() {
                length += nodes[end].1.bytes;
                held += cost(nodes[end].1);
                end += 1;
            }
            if length < bytes {
                break;
            }
            if best.as_ref().is_none_or(|(least, _)| held < *least) {
                let window = nodes[start..end].iter().map(|(id, _)| *id).collect();
                best = Some((held, window));
            }
            length -= nodes[start].1.bytes;
            held -= cost(nodes[start].1);
        }
    }
    best.map(|(_, nodes)| nodes)
}

/// The nodes of the segments that are free in part, the most free bytes first.
fn partly_free_segments(heap: &Heap) -> Vec<NodeId> {
    let mut segments: Vec<(u64, Vec<NodeId>)> = Vec::new();
    let regions = heap.regions();
    for (region, _) in regions.filter(|(_, r)| matches!(r.kind, RegionKind::Segment)) {
        let free = |node: &Node| node.state == State::Free;
        let nodes = heap.nodes_of(region);
        let free_bytes = nodes.filter(|(_, n)| free(n)).map(|(_, n)| n.bytes).sum();
        let nodes: Vec<NodeId> = heap.nodes_of(region).map(|(id, _)| id).collect();
        if free_bytes > 0 && nodes.len() > 1 {
            segments.push((free_bytes, nodes));
        }
    }
    segments.sort_by_key(|(free_bytes, _)| Reverse(*free_bytes));
    segments.into_iter().flat_map(|(_, nodes)| nodes).collect()
}
