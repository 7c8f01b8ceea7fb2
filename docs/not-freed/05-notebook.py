# The cells of a notebook, run one after the other.
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance(colors="nocolor")
for cell in (
    "import torch",
    "%load_ext lastref.torch",
    "def train():\n    x = torch.empty(1024, 1024, 512, device='cuda')\n    raise ValueError('a mistake')",
    "train()",
    "%gpu_memory top=1",
    "torch.empty(1024, 1024, 768, device='cuda')[0, 0, :3]",
    "%gpu_memory top=1",
):
    shell.run_cell(cell, store_history=True)
