import functools

import torch

import lastref.torch

activations = {}


def record(module, inputs, output):
    activations[module] = output


@functools.lru_cache
def mask(size):
    return torch.empty(size, size, dtype=torch.bool, device="cuda")


def predict():
    model = torch.nn.Linear(8192, 8192, bias=False, device="cuda")  # 256 MiB
    model.register_forward_hook(record)
    mask(16384)  # 256 MiB
    with torch.no_grad():
        model(torch.randn(8192, 8192, device="cuda"))


predict()
print(lastref.torch.report(top=3))
