import gc

import torch

import lastref.torch


class Node:
    def __init__(self, parent=None):
        self.parent = parent
        self.children = []
        self.values = torch.empty(1024, 1024, 256, device="cuda")  # 1 GiB
        if parent is not None:
            parent.children.append(self)


gc.disable()  # as trainers do; with it enabled Python may also wait for a long time
tree = Node(Node())
del tree
print(lastref.torch.report(top=2))

with lastref.torch.guard():
    kept = [torch.empty(1024, 1024, 256, device="cuda") for _ in range(10)]
print(f"{len(kept)} GiB more fit under guard")
