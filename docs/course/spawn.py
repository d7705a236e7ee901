import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank: int, world_size: int) -> None:
    address = "tcp://127.0.0.1:29501"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    print(f"rank {rank} of {world_size}: the ranks add up to {total.item():g}\n", end="")
    dist.destroy_process_group()


if __name__ == "__main__":  # spawn imports this file again in each process
    mp.spawn(work, args=(4,), nprocs=4)
