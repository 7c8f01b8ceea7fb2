//! The command `lastref`. Everything it does is in the library, which the Python package calls too.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(lastref_cli::run(std::env::args_os()))
}
