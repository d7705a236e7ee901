"""The least that a program which trains with Accelerate can do: `bench startup` and `bench memory`
compare with it.

    python ddp_mnist/bench/baseline_program.py

It is run as a file, alone or under `accelerate launch`, so that nothing else of this package is
imported, and prints the Unix time at the end of its first step.
"""

import json
import os
import time

import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=not torch.cuda.is_available())
net = torch.nn.Linear(784, 10)
model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
accelerator.backward(model(torch.zeros(72, 784, device=accelerator.device)).sum())
optimizer.step()
line = json.dumps({"first_step": time.time()}) + "\n"
print(line, end="", flush=True)  # at once: processes share the output
del model
accelerator.end_training()
os._exit(0)  # as ddp_mnist: the interpreter's own end takes a second, and now and then aborts
