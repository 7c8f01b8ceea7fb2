import torch

import lastref.torch


def batches():
    for _ in range(3):
        yield torch.empty(1024, 1024, 512, device="cuda")  # 2 GiB


def evaluate():
    for batch in batches():
        output = batch[:, :, :1].contiguous()
    # `batch` is still there, though the loop has ended.
    print(lastref.torch.report(top=1))
    return output


evaluate()
print(f"{torch.cuda.max_memory_allocated() >> 20} MiB at the most: two batches at once")
