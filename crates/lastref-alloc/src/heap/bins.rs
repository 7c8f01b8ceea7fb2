//! Size bins of free blocks: two-level segregated fit (TLSF) with five mantissa bits.
//!
//! A bin holds the blocks whose size, in units of [`MIN_BLOCK_BYTES`], shares its leading six bits:
//! exact below 64 units, within 3.2 % above. A bitmap finds the next bin that holds anything in a
//! handful of instructions. The lists themselves run through the nodes (see [`super::Heap`]); this
//! file knows only heads.

use super::{MIN_BLOCK_BYTES, NIL, NodeId};

const MANTISSA_BITS: u32 = 5;
const PER_OCTAVE: usize = 1 << MANTISSA_BITS;
/// Sizes reach 2^60 bytes (1 EiB), 2^51 units: 47 octaves above the exact ones.
pub(super) const NUM_BINS: usize = PER_OCTAVE * 48;
const NUM_WORDS: usize = NUM_BINS / 64;

/// The bin that holds blocks of `bytes` bytes.
#[inline]
pub(super) const fn bin_of(bytes: u64) -> usize {
    let units = bytes / MIN_BLOCK_BYTES;
    // How many bits follow the leading six: none below 64 units.
    let shift = (units | PER_OCTAVE as u64).ilog2() - MANTISSA_BITS;
    shift as usize * PER_OCTAVE + (units >> shift) as usize
}

/// Heads of the free lists of one zone, and which of them are not empty.
#[derive(Debug)]
pub(super) struct Bins {
    heads: Box<[NodeId; NUM_BINS]>,
    occupied: [u64; NUM_WORDS],
    /// Which of those words are not zero.
    words: u32,
}

const _: () = assert!(NUM_WORDS < 32);

impl Bins {
    pub(super) fn new() -> Self {
        Self {
            heads: Box::new([NIL; NUM_BINS]),
            occupied: [0; NUM_WORDS],
            words: 0,
        }
    }

    #[inline]
    pub(super) fn head(&self, bin: usize) -> NodeId {
        self.heads[bin]
    }

    #[inline]
    pub(super) fn set_head(&mut self, bin: usize, node: NodeId) {
        self.heads[bin] = node;
        let word = &mut self.occupied[bin / 64];
        let bit = 1 << (bin % 64);
        if node != NIL {
            *word |= bit;
            self.words |= 1 << (bin / 64);
        } else {
            *word &= !bit;
            if *word == 0 {
                self.words &= !(1 << (bin / 64));
            }
        }
    }

    /// The first bin at or after `from` that is not empty.
    #[inline]
    pub(super) fn next_occupied(&self, from: usize) -> Option<usize> {
        let word = from / 64;
        let bits = self.occupied.get(word)? & (u64::MAX << (from % 64));
        if bits != 0 {
            return Some(word * 64 + bits.trailing_zeros() as usize);
        }
        // Of the words after that one.
        let words = self.words & (!1 << word);
        if words == 0 {
            return None;
        }
        let word = words.trailing_zeros() as usize;
        Some(word * 64 + self.occupied[word].trailing_zeros() as usize)
    }

    /// The last bin that is not empty.
    pub(super) fn last_occupied(&self) -> Option<usize> {
        let word = self.words.checked_ilog2()? as usize;
        Some(word * 64 + 63 - self.occupied[word].leading_zeros() as usize)
    }

    /// Whether the bitmap says that `bin` is occupied; for the invariant check.
    pub(super) fn is_marked(&self, bin: usize) -> bool {
        self.occupied[bin / 64] & (1 << (bin % 64)) != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_grow_with_size_and_stay_within_a_thirtieth() {
        let mut last = 0;
        let mut bytes = MIN_BLOCK_BYTES;
        while bytes < 1 << 60 {
            let bin = bin_of(bytes);
            assert!(
                bin >= last && bin < NUM_BINS,
                "{bytes} bytes fell into bin {bin} after {last}"
            );
            // The smallest size of the same bin is at most 1/32 smaller.
            let below = |bytes: u64| bytes - bytes / 32 - MIN_BLOCK_BYTES;
            assert!(
                bytes < 64 * MIN_BLOCK_BYTES || bin_of(below(bytes)) < bin,
                "bin {bin} is too wide"
            );
            last = bin;
            bytes += (bytes / 97 / MIN_BLOCK_BYTES + 1) * MIN_BLOCK_BYTES;
        }
        for units in 1..64 {
            assert_eq!(
                bin_of(units * MIN_BLOCK_BYTES) as u64,
                units,
                "exact below 64 units"
            );
        }
    }

    #[test]
    fn bitmap_finds_the_next_occupied_bin() {
        let mut bins = Bins::new();
        assert_eq!(bins.next_occupied(0), None);
        bins.set_head(5, 1);
        bins.set_head(700, 2);
        assert_eq!(bins.next_occupied(0), Some(5));
        assert_eq!(bins.next_occupied(6), Some(700));
        assert_eq!(bins.next_occupied(701), None);
        assert_eq!(bins.next_occupied(NUM_BINS), None);
        assert_eq!(bins.last_occupied(), Some(700));
        bins.set_head(700, NIL);
        assert_eq!(bins.last_occupied(), Some(5));
        assert_eq!(bins.next_occupied(6), None);
        bins.set_head(63, 3);
        bins.set_head(64, 4);
        assert_eq!(
            (bins.next_occupied(6), bins.next_occupied(64)),
            (Some(63), Some(64))
        );
        bins.set_head(63, NIL);
        assert_eq!(
            (bins.next_occupied(5), bins.next_occupied(6)),
            (Some(5), Some(64))
        );
    }
}
