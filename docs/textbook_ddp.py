"""DDP as textbooks write it: torch alone, on the 1,797 digits inside scikit-learn, a few seconds.

    torchrun --nproc-per-node 2 docs/textbook_ddp.py
    torchrun --nproc-per-node 2 docs/textbook_ddp.py --forget-set-epoch

It shows two mistakes that textbooks make. DistributedSampler repeats rows if their number does not
divide evenly: the test counts 398 rows of 397. Without set_epoch, all epochs have one order.
"""

import gc
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def sum_over_ranks(*numbers):
    """Return the sums over the ranks; only sums and counts may be added up, never accuracies."""
    total = torch.tensor(numbers, dtype=torch.float64).to(device)
    dist.all_reduce(total)
    return total.tolist()


def test(title, loader):
    correct = seen = 0
    with torch.no_grad():
        for images, labels in loader:
            predictions = model.module(images.to(device)).argmax(1).cpu()
            correct += int((predictions == labels).sum())
            seen += len(labels)
    correct, seen = sum_over_ranks(correct, seen)
    if rank == 0:
        print(f"{title}: {correct:.0f} of {seen:.0f} rows right, accuracy {correct / seen:.4f}")


processes_here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
gpu = torch.cuda.is_available() and torch.cuda.device_count() >= processes_here
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
dist.init_process_group("nccl" if gpu else "gloo")  # reads RANK, WORLD_SIZE, MASTER_ADDR, _PORT
rank, world_size = dist.get_rank(), dist.get_world_size()

digits = load_digits()
rows = TensorDataset(torch.tensor(digits.data).float() / 16, torch.tensor(digits.target))
train_rows, test_rows = Subset(rows, range(1400)), Subset(rows, range(1400, 1797))
sampler = DistributedSampler(train_rows, seed=0)  # deals the rows out to the ranks, shuffled
train_loader = DataLoader(train_rows, batch_size=32, sampler=sampler)  # 32 on each rank

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
model = DistributedDataParallel(net, device_ids=[device] if gpu else None)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in range(5):
    if "--forget-set-epoch" not in sys.argv:
        sampler.set_epoch(epoch)  # otherwise all epochs have the same order
    loss_sum = seen = 0
    for images, labels in train_loader:
        loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()  # meanwhile DDP averages the gradients over the ranks
        optimizer.step()
        loss_sum, seen = loss_sum + loss.item() * len(labels), seen + len(labels)
    loss_sum, seen = sum_over_ranks(loss_sum, seen)
    if rank == 0:
        first = f"rank 0 began with rows {[*sampler][:4]}"
        print(f"epoch {epoch + 1}: loss {loss_sum / seen:.4f} over {seen:.0f} rows, {first}")

padded = DistributedSampler(test_rows, shuffle=False)  # the textbook's way
test("test, DistributedSampler", DataLoader(test_rows, batch_size=100, sampler=padded))
mine = Subset(test_rows, range(rank, len(test_rows), world_size))  # the right way
test("test, each row once     ", DataLoader(mine, batch_size=100))
# Otherwise gloo's threads outlive the group, and on a busy machine Python may abort as it exits.
model = net = optimizer = loss = images = labels = None
gc.collect()
dist.destroy_process_group()
