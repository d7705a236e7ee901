import time
from datetime import timedelta

import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=2))  # default: 30 minutes
if dist.get_rank() == 0:  # the mistake: a collective that not all ranks call
    started = time.monotonic()
    try:
        dist.barrier()
    except RuntimeError as error:
        waited = time.monotonic() - started
        print(f"rank 0 waited {waited:.0f} s:", str(error).rpartition("] ")[2])
else:
    time.sleep(6)  # rank 1 computes on, unaware of rank 0
dist.destroy_process_group()
