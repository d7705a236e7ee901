import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
digits = load_digits()
images, labels = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
train_rows = TensorDataset(images[:1400], labels[:1400])
sampler = DistributedSampler(train_rows, seed=0)  # instead of shuffle=True
loader = DataLoader(train_rows, batch_size=32 // world_size, sampler=sampler, drop_last=True)

net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
rows = 0
for epoch in range(1, 4):
    sampler.set_epoch(epoch)
    loss_sum = torch.zeros(1)
    for x, y in loader:
        rows += len(x)
        loss = F.cross_entropy(model(x), y)  # through DDP; net(x) would average nothing
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss_sum += loss.item()
    dist.all_reduce(loss_sum)  # on all ranks, not inside the `if`
    if rank == 0:
        print(f"epoch {epoch}: loss {loss_sum.item() / len(loader) / world_size:.4f}")

x, y = images[1400 + rank :: world_size], labels[1400 + rank :: world_size]  # each row once
with torch.no_grad():
    counts = torch.tensor([(net(x).argmax(1) == y).sum(), len(y)])
dist.all_reduce(counts)
if rank == 0:
    print(f"test: {counts[0]} of {counts[1]} right; rank 0 trained on {rows} rows")
del model  # before the group, whose threads may else crash Python as it exits
dist.destroy_process_group()
