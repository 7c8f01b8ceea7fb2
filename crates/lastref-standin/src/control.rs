//! The stand-in's own functions, for tests that run in the process: `ctypes.CDLL(None).lastref_standin_calls(b"cudaMalloc")`.

use std::ffi::{c_int, c_uint};

use lastref_alloc::Device as _;

use crate::abi::Text;
use crate::entry::{self, exports, plain_exports};
use crate::error::Code;
use crate::names;
use crate::settings::Fault;
use crate::state;

plain_exports! {
    Control;

    // How often the functions that a name means were called.
    fn lastref_standin_calls(name: Text) -> u64 {
        name.get().map_or(0, |name| names::calls(&name))
    } or 0;
    // How many kernels were launched.
    fn lastref_standin_kernels() -> u64 {
        state::peek(|state| state.kernels_launched).unwrap_or(0)
    } or 0;
    // Bytes of a device that this process holds.
    fn lastref_standin_used(device: c_int) -> u64 {
        let used = state::peek(|state| Some(state.used_bytes(state.device(device).ok()?)));
        used.flatten().unwrap_or(0)
    } or 0;
    // Pieces of work that have been submitted to a device and have not run.
    fn lastref_standin_pending(device: c_int) -> u64 {
        let pending = state::peek(|state| {
            let device = state.device(device).ok()?;
            Some(state.gpus[device].sim.pending_ops() as u64)
        });
        pending.flatten().unwrap_or(0)
    } or 0;
}

exports! {
    Control;

    fn lastref_standin_delay_events(late: c_uint) {
        state::initialise()?;
        state::driver(|state| {
            for gpu in &state.gpus {
                gpu.sim.delay_events(if late == 0 { 0 } else { u32::MAX });
            }
            Ok(())
        })
    }
    fn lastref_standin_fail(name: Text, n: u64, code: c_int) {
        let name = name.get()?;
        let any = name == "*";
        if n == 0 || !(any || names::is_known(&name)) {
            return Err(Code::INVALID_VALUE);
        }
        let code = (code != 0).then_some(Code(code));
        entry::add_fault(Fault::nth((!any).then_some(name), n, false, code));
        Ok(())
    }
    fn lastref_standin_clear_faults() {
        entry::clear_faults();
        Ok(())
    }
    fn lastref_standin_synchronize() {
        state::driver(|state| {
            for gpu in &state.gpus {
                gpu.sim.synchronize()?;
            }
            Ok(())
        })
    }
}
