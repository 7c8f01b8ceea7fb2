import torch

import lastref.torch

features = torch.empty(4096, 262144, device="cuda")  # 4 GiB
first = features[:1]
del features
print(lastref.torch.report(top=1))

first = first.clone()
print(f"after clone: {torch.cuda.memory_allocated() >> 20} MiB live")
