import re
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, x):
        return self.used(x)


dist.init_process_group("gloo")
model = DistributedDataParallel(Net(), find_unused_parameters="--find" in sys.argv)
for step in (1, 2):
    model.zero_grad()
    try:
        model(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()
        said = [f"gradient {model.module.used.weight.grad.item()}"]
    except RuntimeError as error:  # its two sentences that matter
        said = re.findall("Expected to have finished reduction|Parameter indices.*", str(error))
    if dist.get_rank() == 0:
        print(f"step {step}:", ", ".join(said))
dist.destroy_process_group()
