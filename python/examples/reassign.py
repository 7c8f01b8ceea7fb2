"""Give a variable that held a GPU tensor a new value: the GPU tensor is not moved, it is freed.

Run it on a simulated GPU with ``LASTREF_SIM=8GiB python reassign.py``: it prints True, then False.
"""

import gc

import lastref as torch

t1 = torch.empty(4, 5)
if torch.cuda.is_available():
    t1 = t1.cuda()
print(t1.is_cuda)
t1 = torch.empty(4, 5)
print(t1.is_cuda)
gc.collect()
torch.cuda.empty_cache()
