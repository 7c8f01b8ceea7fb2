//! The one frame of a stack that a person looks for: where their own program asked for memory.

use std::fmt;

use crate::dump::{Dump, FrameId, StackId};

/// The place in the program that a stack belongs to, as text. See [`Dump::place`].
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    dump: &'a Dump,
    frame: Option<FrameId>,
}

impl Dump {
    /// Every stack of the dump, the one that stands for "not recorded" first.
    pub fn stack_ids(&self) -> impl ExactSizeIterator<Item = StackId> + use<> {
        (0..u32::try_from(self.num_stacks()).unwrap_or(u32::MAX)).map(StackId)
    }

    /// Where the program asked: the innermost Python frame that belongs to no installed package,
    /// else the innermost Python frame, else the innermost frame that is not PyTorch's own way from an
    /// operator to the recording of the stack, else the innermost frame.
    #[must_use]
    pub fn place(&self, stack: StackId) -> Place<'_> {
        let frames = self.stack(stack);
        let file = |id: &FrameId| self.text(self.frame(*id).file);
        let frame = frames
            .iter()
            .find(|id| is_python(file(id)) && !is_installed(file(id)))
            .or_else(|| frames.iter().find(|id| is_python(file(id))))
            .or_else(|| {
                let name = |id: &&FrameId| self.text(self.frame(**id).name);
                frames.iter().find(|id| !is_plumbing(name(id)))
            })
            .or_else(|| frames.first());
        Place {
            dump: self,
            frame: frame.copied(),
        }
    }
}

fn is_python(file: &str) -> bool {
    let is_cell = file.starts_with("<ipython") || file.contains("ipykernel");
    file.ends_with(".py") || is_cell
}

/// Whether a function is of those between what a program calls and the recording of the stack, which
/// are in every one.
fn is_plumbing(name: &str) -> bool {
    const STARTS: [&str; 7] = [
        "torch::unwind::",
        "torch::CapturedTraceback::",
        "torch::cuda::(anonymous namespace)::",
        "c10::",
        "at::detail::",
        "at::(anonymous namespace)::",
        "std::",
    ];
    STARTS.iter().any(|start| name.starts_with(start))
}

/// Whether a file came with a package or with Python itself.
fn is_installed(file: &str) -> bool {
    ["site-packages/", "dist-packages/", "/torch/", "lib/python"]
        .iter()
        .any(|part| file.contains(part))
}

impl Place<'_> {
    /// Whether a stack was recorded.
    #[must_use]
    pub const fn is_known(&self) -> bool {
        self.frame.is_some()
    }
}

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.frame {
            Some(frame) => self.dump.frame_text(frame).fmt(f),
            None => f.write_str("stack not recorded"),
        }
    }
}
