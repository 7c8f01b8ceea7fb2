import torch

import lastref.torch


class Trainer:
    def __init__(self, model):
        self.model = model
        self.best = {name: weight for name, weight in model.named_parameters()}


model = torch.nn.Linear(16384, 16384, bias=False, device="cuda")  # 1 GiB
trainer = Trainer(model)

del model
torch.cuda.empty_cache()
print(lastref.torch.report(top=1))
