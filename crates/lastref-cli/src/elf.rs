//! Takes functions out of a copy of the stand-in, so that programs meet a driver that does not have them.
//!
//! In the table of dynamic symbols of an ELF file, the value of a symbol is set to 0, which the loader takes for a symbol
//! that is not defined here.

use anyhow::{Result, bail, ensure};

/// Endings by which versions of a function are told apart.
const VERSIONS: [&str; 4] = ["", "_v2", "_v3", "_v4"];
const THREADS: [&str; 3] = ["", "_ptsz", "_ptds"];

const SECTION_BYTES: usize = 64;
const SYMBOL_BYTES: usize = 24;
const DYNAMIC_SYMBOLS: u32 = 11;

fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

fn long(bytes: &[u8], at: usize) -> Option<usize> {
    usize::try_from(u64::from_le_bytes(number(bytes, at)?)).ok()
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(number(bytes, at)?))
}

fn half(bytes: &[u8], at: usize) -> Option<usize> {
    Some(usize::from(u16::from_le_bytes(number(bytes, at)?)))
}

/// Where a section is, and how long it is.
fn section(bytes: &[u8], header: usize) -> Option<(usize, usize)> {
    let place = long(bytes, header.checked_add(24)?)?;
    Some((place, long(bytes, header.checked_add(32)?)?))
}

/// The places of all dynamic symbols, and where their names begin.
fn symbols(bytes: &[u8]) -> Option<(std::ops::Range<usize>, usize)> {
    if bytes.get(..6)? != b"\x7fELF\x02\x01" {
        return None;
    }
    let (sections, count) = (long(bytes, 40)?, half(bytes, 60)?);
    // Within the file, so that no sum below overflows.
    (sections <= bytes.len()).then_some(())?;
    let header = |index: usize| sections + index * SECTION_BYTES;
    let is_it = |index: &usize| word(bytes, header(*index) + 4) == Some(DYNAMIC_SYMBOLS);
    let table = header((0..count).find(is_it)?);
    let names = usize::try_from(word(bytes, table.checked_add(40)?)?).ok()?;
    let (start, length) = section(bytes, table)?;
    let end = start
        .checked_add(length)
        .filter(|end| *end <= bytes.len())?;
    Some((start..end, section(bytes, header(names))?.0))
}

/// Hides the function `name`, in all its versions, in the shared object `bytes`.
pub(crate) fn hide(bytes: &mut [u8], name: &str) -> Result<()> {
    let Some((table, names)) = symbols(bytes) else {
        bail!("the stand-in is not a shared object of a 64-bit Linux");
    };
    let wanted: Vec<String> = VERSIONS
        .iter()
        .flat_map(|version| THREADS.map(|thread| format!("{name}{version}{thread}\0")))
        .collect();
    let mut hidden = 0;
    for symbol in table.step_by(SYMBOL_BYTES) {
        let Some(at) = word(bytes, symbol).and_then(|offset| names.checked_add(offset as usize))
        else {
            continue;
        };
        let is_wanted = |name: &String| {
            bytes
                .get(at..)
                .is_some_and(|text| text.starts_with(name.as_bytes()))
        };
        let value = symbol + 8..symbol + 16;
        if wanted.iter().any(is_wanted)
            && let Some(value) = bytes.get_mut(value)
        {
            value.fill(0);
            hidden += 1;
        }
    }
    ensure!(hidden > 0, "there is no function {name} in the stand-in");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_shared_object_is_refused() {
        assert!(hide(&mut [], "cuInit").is_err());
        assert!(hide(&mut [0; 100], "cuInit").is_err());
        // Sections said to lie beyond the end.
        let mut bytes = [0xff; 64];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        assert!(hide(&mut bytes, "cuInit").is_err());
    }
}
