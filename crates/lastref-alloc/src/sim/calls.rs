//! The calls of a device by name, what each costs, and failures on demand.

use crate::device::DeviceError;

macro_rules! calls {
    ($($variant:ident = $name:literal),+ $(,)?) => {
        /// A call of [`Device`](crate::Device), to count, to charge for and to fail.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        #[non_exhaustive]
        pub enum Call {
            $(
                #[doc = concat!("[`", $name, "`](crate::Device::", $name, ")")]
                $variant,
            )+
        }

        impl Call {
            /// Every call.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// The name of the method.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)+
                }
            }
        }
    };
}

calls! {
    MemoryInfo = "memory_info",
    AllocSegment = "alloc_segment",
    FreeSegment = "free_segment",
    ReserveRange = "reserve_range",
    ReleaseRange = "release_range",
    CreatePage = "create_page",
    DestroyPage = "destroy_page",
    MapPage = "map_page",
    SetAccess = "set_access",
    UnmapPage = "unmap_page",
    CreateStream = "create_stream",
    DestroyStream = "destroy_stream",
    QueryStream = "query_stream",
    SynchronizeStream = "synchronize_stream",
    Synchronize = "synchronize",
    CreateEvent = "create_event",
    DestroyEvent = "destroy_event",
    RecordEvent = "record_event",
    QueryEvent = "query_event",
    SynchronizeEvent = "synchronize_event",
    WaitEvent = "wait_event",
    ElapsedMicroseconds = "elapsed_microseconds",
    CopyFromHost = "copy_from_host",
    CopyToHost = "copy_to_host",
    Copy = "copy",
    Copy2d = "copy_2d",
    CopyFromPeer = "copy_from_peer",
    Fill = "fill",
    Fill2d = "fill_2d",
}

impl From<Call> for &'static str {
    fn from(call: Call) -> Self {
        call.name()
    }
}

const NUM_CALLS: usize = Call::ALL.len();

/// One number for each [`Call`].
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct PerCall<T>([T; NUM_CALLS]);

impl<T: Copy> PerCall<T> {
    pub(super) const fn all(value: T) -> Self {
        Self([value; NUM_CALLS])
    }

    pub(super) const fn get(&self, call: Call) -> T {
        self.0[call as usize]
    }

    pub(super) const fn get_mut(&mut self, call: Call) -> &mut T {
        &mut self.0[call as usize]
    }
}

impl Call {
    /// Whether host time is measured in it. Reading the clock would be most of what the others
    /// cost.
    pub(super) const fn is_timed(self) -> bool {
        !matches!(
            self,
            Self::MemoryInfo
                | Self::CreateStream
                | Self::DestroyStream
                | Self::QueryStream
                | Self::CreateEvent
                | Self::DestroyEvent
                | Self::RecordEvent
                | Self::QueryEvent
                | Self::WaitEvent
                | Self::ElapsedMicroseconds
        )
    }
}

/// A time that depends on a size.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Cost {
    /// Microseconds, whatever the size.
    pub fixed: f64,
    /// Microseconds for each MiB on top.
    pub per_mib: f64,
}

impl Cost {
    /// The same for every size.
    #[must_use]
    pub const fn fixed(microseconds: f64) -> Self {
        Self {
            fixed: microseconds,
            per_mib: 0.0,
        }
    }

    /// In proportion to the size.
    #[must_use]
    pub const fn per_mib(microseconds: f64) -> Self {
        Self {
            fixed: 0.0,
            per_mib: microseconds,
        }
    }

    /// The time for `bytes` bytes, in microseconds.
    #[must_use]
    pub fn microseconds(self, bytes: u64) -> f64 {
        self.fixed + self.per_mib * (bytes as f64 / f64::from(1_u32 << 20))
    }
}

/// What device calls and device work cost. The simulated device adds these times up and never
/// waits for them.
///
/// The calls' costs are host time in the driver. `per_mib` applies to the bytes a call names: the
/// size of a segment, of a page, of a range, of a copy.
#[derive(Clone, PartialEq, Debug)]
pub struct LatencyTable {
    calls: PerCall<Cost>,
    /// Device time of a copy between host and device.
    pub host_copy: Cost,
    /// Device time of a copy inside the device.
    pub device_copy: Cost,
    /// Device time of a copy from a peer.
    pub peer_copy: Cost,
    /// Device time of a fill.
    pub fill: Cost,
}

impl LatencyTable {
    /// Everything is free.
    #[must_use]
    pub const fn free() -> Self {
        const FREE: Cost = Cost::fixed(0.0);
        Self {
            calls: PerCall::all(FREE),
            host_copy: FREE,
            device_copy: FREE,
            peer_copy: FREE,
            fill: FREE,
        }
    }

    /// An NVIDIA A100, from published figures where there are any.
    ///
    /// * Virtual memory, for 2 MiB pages, as [kvcached] publishes it for an A100: create 193, map
    ///   1.45, set access 36, unmap 25.6, reserve 19 (measured on 8 GiB), memory info 6. kvcached
    ///   sets access for one page at a time; here a call costs the same however many pages it
    ///   covers, since the work it saves (a call into the kernel, a flush of the device's address
    ///   cache) is done once a call. That makes long calls look as cheap as they can be.
    /// * Neighbouring pages that are unmapped together are unmapped by one call of the driver, as
    ///   [llama.cpp] does with a pool mapped piece by piece. The 25.6 are for its first page; each
    ///   other one costs what mapping it costs, 1.45, which is an assumption for the same reason.
    /// * `alloc_segment`: [50 up to 512 KiB][uva], measured on GPUs older than the A100. Its growth
    ///   by 1 a MiB beyond that, `free_segment` (the same 50), `destroy_page` (as unmapping one),
    ///   `release_range` (as reserving one) are assumptions.
    /// * Streams, events and submissions: assumptions, of the order of a call into the driver that
    ///   stays in the process (0.5) or rings the device (2).
    /// * Device work: 1555 GB/s of memory bandwidth and 300 GB/s of NVLink each way (the A100 40 GB
    ///   data sheet); a copy inside the device reads and writes. Pageable host copies at 10 GB/s
    ///   are an assumption.
    ///
    /// [kvcached]: https://github.com/ovg-project/kvcached
    /// [llama.cpp]: https://github.com/ggml-org/llama.cpp/pull/4606
    /// [uva]: https://www.cs.virginia.edu/~mwb7w/cuda_support/memory_management_overhead.html
    #[must_use]
    pub const fn a100() -> Self {
        const IN_PROCESS: Cost = Cost::fixed(0.5);
        const SUBMISSION: Cost = Cost::fixed(2.0);
        let mut table = Self {
            calls: PerCall::all(IN_PROCESS),
            // 1 MiB at so many GB/s.
            host_copy: Cost::per_mib(1048.576 / 10.0),
            device_copy: Cost::per_mib(2.0 * 1048.576 / 1555.0),
            peer_copy: Cost::per_mib(1048.576 / 300.0),
            fill: Cost::per_mib(1048.576 / 1555.0),
        };
        let known = [
            (Call::MemoryInfo, Cost::fixed(6.0)),
            (
                Call::AllocSegment,
                Cost {
                    fixed: 50.0,
                    per_mib: 1.0,
                },
            ),
            (Call::FreeSegment, Cost::fixed(50.0)),
            (Call::ReserveRange, Cost::fixed(19.0)),
            (Call::ReleaseRange, Cost::fixed(19.0)),
            (Call::CreatePage, Cost::fixed(193.0)),
            (Call::DestroyPage, Cost::fixed(25.6)),
            (Call::MapPage, Cost::fixed(1.45)),
            (Call::SetAccess, Cost::fixed(36.0)),
            (
                Call::UnmapPage,
                Cost {
                    fixed: 24.15,
                    per_mib: 0.725,
                },
            ),
            (Call::CopyFromHost, SUBMISSION),
            (Call::CopyToHost, SUBMISSION),
            (Call::Copy, SUBMISSION),
            (Call::Copy2d, SUBMISSION),
            (Call::CopyFromPeer, SUBMISSION),
            (Call::Fill, SUBMISSION),
            (Call::Fill2d, SUBMISSION),
        ];
        let mut i = 0;
        while i < known.len() {
            *table.calls.get_mut(known[i].0) = known[i].1;
            i += 1;
        }
        table
    }

    /// What `call` costs.
    #[must_use]
    pub const fn call(&self, call: Call) -> Cost {
        self.calls.get(call)
    }

    /// The same table with another cost for `call`.
    #[must_use]
    pub const fn with_call(mut self, call: Call, cost: Cost) -> Self {
        *self.calls.get_mut(call) = cost;
        self
    }
}

impl Default for LatencyTable {
    /// [`LatencyTable::a100`].
    fn default() -> Self {
        Self::a100()
    }
}

/// A failure on demand, for [`SimDevice::inject`](super::SimDevice::inject).
///
/// Without more, a call fails once, with a driver error.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fault {
    call: Option<Call>,
    /// Matching calls until it fires; 1 is the next one.
    pub(super) left: u64,
    pub(super) repeats: bool,
    error: FaultError,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum FaultError {
    OutOfMemory,
    Driver(i32),
}

impl Fault {
    /// Fails the `n`-th `call` from now; 1 is the next one, and so is 0.
    #[must_use]
    pub const fn nth(call: Call, n: u64) -> Self {
        Self::new(Some(call), n)
    }

    /// Fails the `n`-th call from now, whichever it is; 1 is the next one, and so is 0.
    #[must_use]
    pub const fn nth_of_any(n: u64) -> Self {
        Self::new(None, n)
    }

    const fn new(call: Option<Call>, n: u64) -> Self {
        Self {
            call,
            left: if n == 0 { 1 } else { n },
            repeats: false,
            error: FaultError::Driver(999),
        }
    }

    /// Fails every such call after that one too.
    #[must_use]
    pub const fn from_then_on(mut self) -> Self {
        self.repeats = true;
        self
    }

    /// Fails with [`DeviceError::OutOfMemory`].
    #[must_use]
    pub const fn out_of_memory(mut self) -> Self {
        self.error = FaultError::OutOfMemory;
        self
    }

    /// Fails with [`DeviceError::Driver`] and this code. The code without this is 999, CUDA's
    /// unknown error.
    #[must_use]
    pub const fn driver(mut self, code: i32) -> Self {
        self.error = FaultError::Driver(code);
        self
    }

    pub(super) fn matches(&self, call: Call) -> bool {
        self.call.is_none_or(|wanted| wanted == call)
    }

    pub(super) fn error(&self, call: Call, out_of_memory: DeviceError) -> DeviceError {
        match self.error {
            FaultError::OutOfMemory => out_of_memory,
            FaultError::Driver(code) => DeviceError::Driver {
                call: call.name(),
                code,
                text: "failure injected into the simulated device".to_owned(),
            },
        }
    }
}
