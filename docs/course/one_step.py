import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
x = torch.tensor([[1.0], [2.0], [3.0], [4.0]]).chunk(world_size)[rank]  # this rank's shard
net = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.ones_(net.weight)  # w = 1
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

own = ((net(x) - 3 * x) * x).flatten().tolist()  # each image's gradient, by hand
loss = ((model(x) - 3 * x) ** 2 / 2).mean()
loss.backward()  # here DDP averages over the ranks
optimizer.step()
averaged, w = net.weight.grad.item(), net.weight.item()
mine = f"{own}, mean {sum(own) / len(own)}"
print(f"rank {rank}: {mine}; averaged by DDP {averaged}, w = {w}\n", end="")  # a single write
dist.destroy_process_group()
