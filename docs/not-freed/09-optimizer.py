import torch

import lastref.torch

model = torch.nn.Linear(8192, 8192, bias=False, device="cuda")  # 256 MiB
optimizer = torch.optim.Adam(model.parameters())
model(torch.randn(64, 8192, device="cuda")).sum().backward()
optimizer.step()

model = torch.nn.Linear(8192, 8192, bias=False, device="cuda")  # a new one; but the optimizer is the old one's
print(lastref.torch.report(top=5))
