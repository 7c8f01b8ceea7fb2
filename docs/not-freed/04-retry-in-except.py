import torch

import lastref.torch


def step(batch_size):
    activations = torch.empty(batch_size, 1 << 20, device="cuda")  # 4 MiB a sample
    return torch.empty_like(activations).numel()


try:
    step(1500)
except torch.OutOfMemoryError as error:
    # The error refers to the frame of step, and so to its variables, until this block ends.
    print(lastref.torch.report(top=1))

print(f"after the block: {torch.cuda.memory_allocated() >> 20} MiB live")
print(lastref.torch.retry(step, 1500, smaller="batch_size"))
