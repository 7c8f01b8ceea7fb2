//! What a device has given out: segments, ranges, pages, and memory of others that it was told of.
//!
//! The driver cannot tell a slip from a use: it takes an address inside another's segment, and
//! reports work on unmapped memory only after the context is lost. So every call is checked here
//! first. No unsafe code, no calls: numbers only.
//!
//! # Invariants
//!
//! 1. Segments, ranges and foreign memory do not overlap, except that foreign memory may lie in
//!    a segment or another's foreign memory (two tensors on one allocation).
//! 2. A page is mapped at most once, inside one range, at a multiple of the page size.
//! 3. What is in the books is what the driver holds for us: an entry is made after the call that
//!    takes succeeded, and removed before the call that gives back, to return if that fails.

use std::collections::{BTreeMap, HashMap};

/// A mapped page.
#[derive(Clone, Copy, Debug)]
struct Mapping {
    page: u64,
    is_open: bool,
}

/// A physical page.
#[derive(Clone, Copy, Debug)]
struct Page {
    handle: u64,
    is_mapped: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Books {
    page_bytes: u64,
    segments: BTreeMap<u64, u64>,
    ranges: BTreeMap<u64, u64>,
    mapped: BTreeMap<u64, Mapping>,
    pages: HashMap<u64, Page>,
    /// By start: ends, as often as they were told.
    foreign: BTreeMap<u64, Vec<u64>>,
    next_page: u64,
}

pub(crate) type Checked<T> = Result<T, String>;

impl Books {
    pub(crate) fn new(page_bytes: Option<u64>) -> Self {
        Self {
            page_bytes: page_bytes.unwrap_or(0),
            next_page: 1,
            ..Self::default()
        }
    }

    // ---- segments -------------------------------------------------------------------------

    pub(crate) fn add_segment(&mut self, ptr: u64, bytes: u64) {
        self.segments.insert(ptr, bytes);
    }

    /// Takes a segment out; its size, to put it back.
    pub(crate) fn take_segment(&mut self, ptr: u64) -> Checked<u64> {
        self.segments
            .remove(&ptr)
            .ok_or_else(|| format!("no segment starts at {ptr:#x}"))
    }

    // ---- ranges ---------------------------------------------------------------------------

    pub(crate) fn check_range_size(&self, bytes: u64) -> Checked<()> {
        if bytes == 0 || !bytes.is_multiple_of(self.page_bytes) {
            return Err(format!(
                "{bytes} bytes are no multiple of a page, {}",
                self.page_bytes
            ));
        }
        Ok(())
    }

    pub(crate) fn add_range(&mut self, ptr: u64, bytes: u64) {
        self.ranges.insert(ptr, bytes);
    }

    pub(crate) fn take_range(&mut self, ptr: u64, bytes: u64) -> Checked<()> {
        if self.ranges.get(&ptr) != Some(&bytes) {
            return Err(format!("no range of {bytes} bytes starts at {ptr:#x}"));
        }
        if let Some((at, _)) = self.mapped.range(ptr..ptr + bytes).next() {
            return Err(format!("a page is mapped at {at:#x}; unmap it first"));
        }
        self.ranges.remove(&ptr);
        Ok(())
    }

    fn in_range(&self, ptr: u64, bytes: u64) -> bool {
        self.ranges
            .range(..=ptr)
            .next_back()
            .is_some_and(|(start, len)| within(ptr, bytes, *start, start + len))
    }

    // ---- pages ----------------------------------------------------------------------------

    /// Enters a page that the driver calls `handle`; its number here, never used again.
    pub(crate) fn add_page(&mut self, handle: u64) -> u64 {
        let page = self.next_page;
        self.next_page += 1;
        self.pages.insert(
            page,
            Page {
                handle,
                is_mapped: false,
            },
        );
        page
    }

    /// Takes a page out; the driver's handle.
    pub(crate) fn take_page(&mut self, page: u64) -> Checked<u64> {
        let handle = self.unmapped(page)?;
        self.pages.remove(&page);
        Ok(handle)
    }

    pub(crate) fn put_page_back(&mut self, page: u64, handle: u64) {
        self.pages.insert(
            page,
            Page {
                handle,
                is_mapped: false,
            },
        );
    }

    fn unmapped(&self, page: u64) -> Checked<u64> {
        match self.pages.get(&page) {
            None => Err(format!("there is no page {page}")),
            Some(page_there) if page_there.is_mapped => Err(format!("page {page} is mapped")),
            Some(page_there) => Ok(page_there.handle),
        }
    }

    /// That `page` can be mapped at `ptr`; the driver's handle.
    pub(crate) fn check_map(&self, ptr: u64, page: u64) -> Checked<u64> {
        let handle = self.unmapped(page)?;
        if !ptr.is_multiple_of(self.page_bytes) {
            return Err(format!(
                "{ptr:#x} is no multiple of a page, {}",
                self.page_bytes
            ));
        }
        if !self.in_range(ptr, self.page_bytes) {
            return Err(format!("{ptr:#x} is in no reserved range"));
        }
        if self.mapped.contains_key(&ptr) {
            return Err(format!("a page is mapped at {ptr:#x} already"));
        }
        Ok(handle)
    }

    pub(crate) fn mapped(&mut self, ptr: u64, page: u64) {
        let is_open = false;
        self.mapped.insert(ptr, Mapping { page, is_open });
        if let Some(page) = self.pages.get_mut(&page) {
            page.is_mapped = true;
        }
    }

    pub(crate) fn check_unmap(&self, ptr: u64) -> Checked<()> {
        if self.mapped.contains_key(&ptr) {
            return Ok(());
        }
        Err(format!("no page is mapped at {ptr:#x}"))
    }

    pub(crate) fn unmapped_at(&mut self, ptr: u64) {
        if let Some(mapping) = self.mapped.remove(&ptr)
            && let Some(page) = self.pages.get_mut(&mapping.page)
        {
            page.is_mapped = false;
        }
    }

    /// That whole pages are mapped all over the stretch.
    pub(crate) fn check_access(&self, ptr: u64, bytes: u64) -> Checked<()> {
        self.check_range_size(bytes)?;
        let end = ptr
            .checked_add(bytes)
            .ok_or_else(|| format!("{bytes} bytes at {ptr:#x} pass the end of memory"))?;
        let wanted = bytes / self.page_bytes;
        let there = self.mapped.range(ptr..end).count() as u64;
        if !ptr.is_multiple_of(self.page_bytes) || there != wanted {
            return Err(format!("of {wanted} pages at {ptr:#x}, {there} are mapped"));
        }
        Ok(())
    }

    pub(crate) fn opened(&mut self, ptr: u64, bytes: u64) {
        for mapping in self.mapped.range_mut(ptr..ptr + bytes) {
            mapping.1.is_open = true;
        }
    }

    // ---- memory of others -----------------------------------------------------------------

    pub(crate) fn add_foreign(&mut self, ptr: u64, bytes: u64) -> Checked<()> {
        let end = ptr
            .checked_add(bytes)
            .ok_or_else(|| format!("{bytes} bytes at {ptr:#x} pass the end of memory"))?;
        self.foreign.entry(ptr).or_default().push(end);
        Ok(())
    }

    pub(crate) fn remove_foreign(&mut self, ptr: u64, bytes: u64) {
        let Some(ends) = self.foreign.get_mut(&ptr) else {
            return;
        };
        if let Some(at) = ends.iter().position(|end| *end == ptr + bytes) {
            ends.swap_remove(at);
        }
        if ends.is_empty() {
            self.foreign.remove(&ptr);
        }
    }

    // ---- use ------------------------------------------------------------------------------

    /// That `bytes` bytes at `ptr` may be read and written.
    pub(crate) fn check(&self, ptr: u64, bytes: u64) -> Checked<()> {
        if bytes == 0 {
            return Ok(());
        }
        let end = ptr
            .checked_add(bytes)
            .ok_or_else(|| format!("{bytes} bytes at {ptr:#x} pass the end of memory"))?;
        if self.is_open(ptr, end) || self.is_segment(ptr, end) || self.is_foreign(ptr, end) {
            return Ok(());
        }
        Err(format!(
            "{bytes} bytes at {ptr:#x} are not device memory that is held and mapped"
        ))
    }

    fn is_open(&self, ptr: u64, end: u64) -> bool {
        if self.page_bytes == 0 || self.mapped.is_empty() {
            return false;
        }
        let first = ptr - ptr % self.page_bytes;
        let wanted = (end - first).div_ceil(self.page_bytes);
        let open = self.mapped.range(first..end);
        open.filter(|(_, mapping)| mapping.is_open).count() as u64 == wanted
    }

    fn is_segment(&self, ptr: u64, end: u64) -> bool {
        self.segments
            .range(..=ptr)
            .next_back()
            .is_some_and(|(start, bytes)| within(ptr, end - ptr, *start, start + bytes))
    }

    fn is_foreign(&self, ptr: u64, end: u64) -> bool {
        self.foreign
            .range(..=ptr)
            .any(|(_, ends)| ends.iter().any(|foreign_end| end <= *foreign_end))
    }
}

fn within(ptr: u64, bytes: u64, start: u64, end: u64) -> bool {
    ptr >= start && bytes <= end - start && ptr - start <= end - start - bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 2 << 20;

    #[test]
    fn only_what_is_held_may_be_used() {
        let mut books = Books::new(None);
        books.add_segment(0x10_000, 4096);
        for (ptr, bytes) in [(0x10_000, 4096), (0x10_fff, 1), (0, 0)] {
            assert_eq!(books.check(ptr, bytes), Ok(()), "{bytes} at {ptr:#x}");
        }
        for (ptr, bytes) in [(0x10_000, 4097), (0xffff, 2), (0x11_000, 1), (u64::MAX, 2)] {
            assert!(books.check(ptr, bytes).is_err(), "{bytes} at {ptr:#x}");
        }
        assert!(books.take_segment(0x10_200).is_err());
        assert_eq!(books.take_segment(0x10_000), Ok(4096));
        assert!(books.check(0x10_000, 1).is_err());
    }

    #[test]
    fn mapped_pages_may_be_used_once_they_are_open() {
        let mut books = Books::new(Some(PAGE));
        books.add_range(8 * PAGE, 4 * PAGE);
        let pages = [books.add_page(70), books.add_page(71)];
        for (page, slot) in pages.into_iter().zip([9, 10]) {
            assert!(books.check_map(slot * PAGE, page).is_ok());
            books.mapped(slot * PAGE, page);
        }
        let across = (10 * PAGE - 5, 10);
        assert!(books.check(across.0, across.1).is_err(), "closed");
        assert!(books.check_access(9 * PAGE, 3 * PAGE).is_err());
        assert_eq!(books.check_access(9 * PAGE, 2 * PAGE), Ok(()));
        books.opened(9 * PAGE, PAGE);
        assert!(books.check(across.0, across.1).is_err(), "half open");
        books.opened(10 * PAGE, PAGE);
        assert_eq!(books.check(across.0, across.1), Ok(()));
        assert!(books.check_map(9 * PAGE, pages[0]).is_err());
        assert!(books.take_page(pages[0]).is_err());
        assert!(books.take_range(8 * PAGE, 4 * PAGE).is_err());
        books.unmapped_at(9 * PAGE);
        assert_eq!(books.take_page(pages[0]), Ok(70));
        assert!(books.check(across.0, across.1).is_err());
    }

    #[test]
    fn foreign_memory_counts_as_often_as_it_was_told() {
        let mut books = Books::new(None);
        books.add_foreign(4096, 512).unwrap();
        books.add_foreign(4096, 1024).unwrap();
        assert_eq!(books.check(4096, 1024), Ok(()));
        books.remove_foreign(4096, 1024);
        assert!(books.check(4096, 1024).is_err());
        assert_eq!(books.check(4200, 100), Ok(()));
        books.remove_foreign(4096, 512);
        assert!(books.check(4200, 100).is_err());
    }
}
