//! What the processes of one session hold of each device, so that each sees the others as on a real machine.
//!
//! A session is a file of records of fixed length, one for each process and device:
//!
//! ```text
//! process (u32) │ device (u32) │ start time of the process (u64) │ bytes (u64)      native byte order
//! ```
//!
//! A process appends records for itself and writes only those. A record counts while its process lives: its number and
//! start time are compared with the kernel's. Records are read and written whole, in single calls.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};

use crate::log;

const RECORD_BYTES: usize = 24;

#[derive(Debug)]
pub(crate) struct Session {
    file: File,
    process: u32,
    started: u64,
    /// Where this process's records are, by device.
    places: Vec<(u32, u64)>,
}

/// What a process holds of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Held {
    pub(crate) process: u32,
    pub(crate) device: u32,
    started: u64,
    pub(crate) bytes: u64,
}

impl Held {
    fn to_bytes(self) -> [u8; RECORD_BYTES] {
        let mut record = [0; RECORD_BYTES];
        record[..4].copy_from_slice(&self.process.to_ne_bytes());
        record[4..8].copy_from_slice(&self.device.to_ne_bytes());
        record[8..16].copy_from_slice(&self.started.to_ne_bytes());
        record[16..].copy_from_slice(&self.bytes.to_ne_bytes());
        record
    }

    fn from_bytes(record: &[u8]) -> Option<Self> {
        Some(Self {
            process: u32::from_ne_bytes(record.get(..4)?.try_into().ok()?),
            device: u32::from_ne_bytes(record.get(4..8)?.try_into().ok()?),
            started: u64::from_ne_bytes(record.get(8..16)?.try_into().ok()?),
            bytes: u64::from_ne_bytes(record.get(16..24)?.try_into().ok()?),
        })
    }
}

/// When a process started, in the kernel's ticks; `None` if there is no such process, or no more than its remains.
fn start_time(process: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name, in parentheses, may hold anything; the state comes after it, the start time 19 fields further on.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?;
    (!matches!(state, "Z" | "X")).then(|| fields.nth(18)?.parse().ok())?
}

impl Session {
    pub(crate) fn open(path: &Path) -> Option<Self> {
        let opened = File::options()
            .read(true)
            .append(false)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path);
        match opened {
            Ok(file) => {
                let process = std::process::id();
                Some(Self {
                    file,
                    process,
                    started: start_time(process).unwrap_or(0),
                    places: Vec::new(),
                })
            }
            Err(error) => {
                log::say(&format!(
                    "cannot open the session {}, other processes will not be seen: {error}",
                    path.display()
                ));
                None
            }
        }
    }

    /// Writes what this process holds of a device.
    pub(crate) fn tell(&mut self, device: u32, bytes: u64) {
        if let Err(error) = self.try_tell(device, bytes) {
            log::note(&format!("cannot write to the session: {error}"));
        }
    }

    fn try_tell(&mut self, device: u32, bytes: u64) -> io::Result<()> {
        let record = Held {
            process: self.process,
            device,
            started: self.started,
            bytes,
        };
        let record = record.to_bytes();
        if let Some((_, place)) = self.places.iter().find(|(of, _)| *of == device) {
            return self.file.write_all_at(&record, *place);
        }
        flock(&self.file, FlockOperation::LockExclusive)?;
        let place = self
            .file
            .metadata()?
            .len()
            .next_multiple_of(RECORD_BYTES as u64);
        let written = self.file.write_all_at(&record, place);
        flock(&self.file, FlockOperation::Unlock)?;
        written?;
        self.places.push((device, place));
        Ok(())
    }

    /// What every living process of the session holds, this one included.
    pub(crate) fn all(&self) -> Vec<Held> {
        let length = self.file.metadata().map_or(0, |metadata| metadata.len());
        let mut bytes = vec![0; usize::try_from(length).unwrap_or(0)];
        if self.file.read_exact_at(&mut bytes, 0).is_err() {
            return Vec::new();
        }
        let records = bytes
            .chunks_exact(RECORD_BYTES)
            .filter_map(Held::from_bytes);
        records
            .filter(|held| start_time(held.process) == Some(held.started))
            .collect()
    }

    /// What the other processes hold of a device.
    pub(crate) fn others(&self, device: u32) -> u64 {
        let all = self.all().into_iter();
        let others = all.filter(|held| held.device == device && held.process != self.process);
        others.map(|held| held.bytes).sum()
    }
}
