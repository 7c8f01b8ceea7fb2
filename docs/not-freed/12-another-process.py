import torch

import lastref.torch

x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
print(lastref.torch.report())
