import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
right, left = (rank + 1) % size, (rank - 1) % size
tensor = (rank + 1) * torch.tensor([1.0, 10.0, 100.0, 1000.0])
parts = list(tensor.split(1))  # as many parts as ranks


def pass_on(send: int, receive: int, add: bool) -> None:
    # send one part to the right while receiving another from the left
    received = torch.empty_like(parts[receive])
    sending = dist.isend(parts[send], right)
    dist.recv(received, left)
    sending.wait()
    parts[receive] = parts[receive] + received if add else received


for step in range(size - 1):  # reduce-scatter: each rank ends with the sum of one part
    pass_on((rank - step) % size, (rank - step - 1) % size, add=True)
for step in range(size - 1):  # all-gather: the sums go round
    pass_on((rank + 1 - step) % size, (rank - step) % size, add=False)
print(f"rank {rank} has {torch.cat(parts).tolist()}\n", end="")
dist.destroy_process_group()
