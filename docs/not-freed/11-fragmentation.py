import torch

import lastref.torch


def make(mib):
    return torch.empty(mib << 20, dtype=torch.uint8, device="cuda")


warm_up = make(8000)
del warm_up  # cached: what follows is cut out of it

large, small = [], []
for _ in range(8):
    large.append(make(950))
    small.append(make(25))
del large

try:
    make(4000)
except torch.OutOfMemoryError:
    print(lastref.torch.report(top=1))
