import torch

import lastref.torch

x = torch.empty(1024, 1024, 1024, device="cuda")  # 4 GiB
del x
print(lastref.torch.report())

torch.cuda.empty_cache()
print(lastref.torch.report())
