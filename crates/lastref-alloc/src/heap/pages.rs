//! Which pages lie behind a range of virtual memory.

use crate::device::PageId;

/// The pages of one range by number. It is filled from both ends, and only what lies between an end
/// and the furthest page mapped from there takes room.
#[derive(Debug)]
pub(crate) struct PageTable {
    low: Vec<Option<PageId>>,
    /// From the last page down.
    high: Vec<Option<PageId>>,
    num_pages: usize,
}

impl PageTable {
    /// The table of a range with room for `num_pages`.
    pub(super) const fn new(num_pages: usize) -> Self {
        Self {
            low: Vec::new(),
            high: Vec::new(),
            num_pages,
        }
    }

    /// The page at `number`, which is less than the number of pages.
    pub(super) fn get(&self, number: usize) -> Option<PageId> {
        let page = if number < self.num_pages / 2 {
            self.low.get(number)
        } else {
            self.high.get(self.num_pages - 1 - number)
        };
        page.copied().flatten()
    }

    /// Sets what is at `number`, and returns what was.
    pub(super) fn set(&mut self, number: usize, page: Option<PageId>) -> Option<PageId> {
        let (side, at) = if number < self.num_pages / 2 {
            (&mut self.low, number)
        } else {
            (&mut self.high, self.num_pages - 1 - number)
        };
        if side.len() <= at {
            side.resize(at + 1, None);
        }
        std::mem::replace(&mut side[at], page)
    }

    /// Every page that is mapped, with its number.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (usize, PageId)> + '_ {
        let low = (0..).zip(&self.low);
        let high = (0..self.num_pages).rev().zip(&self.high);
        low.chain(high)
            .filter_map(|(number, page)| Some((number, (*page)?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ends_hold_pages_and_the_middle_takes_no_room() {
        for num_pages in [4, 5, 1 << 40] {
            let mut table = PageTable::new(num_pages);
            let numbers = [0, 1, num_pages - 2, num_pages - 1];
            for (id, number) in (7..).zip(numbers) {
                assert_eq!(table.set(number, Some(PageId(id))), None);
            }
            let mut all: Vec<_> = table.iter().collect();
            all.sort_unstable();
            let expected: Vec<_> = numbers.into_iter().zip((7..).map(PageId)).collect();
            assert_eq!(all, expected);
            assert_eq!(
                table.get(num_pages / 2),
                expected
                    .iter()
                    .find(|(n, _)| *n == num_pages / 2)
                    .map(|(_, page)| *page)
            );
            assert_eq!(table.set(1, None), Some(PageId(8)));
            assert_eq!((table.get(1), table.get(0)), (None, Some(PageId(7))));
            assert_eq!(table.iter().count(), 3);
        }
    }
}
