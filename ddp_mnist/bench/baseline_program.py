"""The least that a program which trains with Accelerate can do: `bench startup` compares with it.

    python ddp_mnist/bench/baseline_program.py --run-dir FOLDER

It is run as a file, alone or under `accelerate launch`, so that nothing else of this package is
imported, and writes a line to FOLDER/metrics.jsonl after its first step.
"""

import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=not torch.cuda.is_available())
net = torch.nn.Linear(784, 10)
model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
accelerator.backward(model(torch.zeros(72, 784, device=accelerator.device)).sum())
optimizer.step()
if accelerator.is_main_process:
    folder = Path(sys.argv[-1])
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("{}\n")
del model
accelerator.end_training()
os._exit(0)  # as ddp_mnist: the interpreter's own end takes a second, and now and then aborts
