"""The least that a program can do which trains with Accelerate: what start-up is compared with.

    python ddp_mnist/bench/floor.py
    accelerate launch --config_file accelerate_configs/multi_cpu.yaml ddp_mnist/bench/floor.py

Run as a file, so that nothing else of this package is imported. Prints the
Unix time at the end of its first step.
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
