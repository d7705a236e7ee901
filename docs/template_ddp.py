"""A training program in plain PyTorch to begin your own with: copy it, replace four functions.

    python docs/template_ddp.py --epochs 2                              # one process
    torchrun --nproc-per-node 2 docs/template_ddp.py --stop-after 2     # two
    torchrun --nproc-per-node 2 docs/template_ddp.py --resume           # the other epochs

DDP, mixed precision with clipping, validation that counts each row once, and a checkpoint after
each epoch, from which --resume continues with the same flags and number of processes: on a CPU to
the same weights, bit for bit. It needs torch, and scikit-learn for the digits. The same program
with Hugging Face's Accelerate, shorter by a third, is template_accelerate.py. To use the net later:
make_net().load_state_dict(torch.load("template_ddp.pt")["net"]).
"""

import argparse
import gc
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=4, help="the rate falls to 0 over them")
    parser.add_argument("--stop-after", type=int, help="epochs; --resume does the others")
    parser.add_argument("--batch-size", type=int, default=32, help="of all processes together")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradients")
    parser.add_argument(
        "--precision",
        choices=["no", "bf16", "fp16"],
        help="default: bf16 or fp16, whichever the GPU computes in; no on a CPU",
    )
    parser.add_argument("--checkpoint", type=Path, default=Path(f"{Path(__file__).stem}.pt"))
    parser.add_argument("--resume", action="store_true", help="from --checkpoint, if it exists")
    return parser.parse_args()


# --- Your task: replace these four functions; the loop stays. The optimizer is in `train`


def make_data() -> tuple[Dataset, Dataset]:
    """Return the rows to train on and to validate on. Download before: all processes call this.

    They must be the same on every process and in every start: what is drawn needs a seed.
    """
    digits = load_digits()
    rows = TensorDataset(torch.tensor(digits.data).float() / 16, torch.tensor(digits.target))
    return Subset(rows, range(1400)), Subset(rows, range(1400, len(rows)))


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of a batch, a scalar: ranks have equally many rows.

    Divide by nothing but the number of rows. `weight=` and `ignore_index=` of cross-entropy divide
    by a sum over this rank's own rows, and so does a mean over a mask: without an error, that is
    another loss on each number of processes. With constant weights w of the classes (or, in place
    of w[targets], a mask of the rows), write
    (F.cross_entropy(outputs, targets, reduction="none") * w[targets]).mean()
    """
    return F.cross_entropy(outputs, targets)


def score_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the rows' scores, a scalar; here a row scores 1 if it is right."""
    return (outputs.argmax(1) == targets).sum()


# --- Processes


def join_group() -> torch.device:
    """Join the process group. Return this process's device: the GPU of LOCAL_RANK, or the CPU."""
    alone = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "localhost"}
    if not os.environ.keys() & {"RANK", "WORLD_SIZE", "SLURM_PROCID"}:  # without a launcher
        os.environ |= {name: str(value) for name, value in alone.items()} | {"MASTER_PORT": "0"}
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)  # else whatever means "the current GPU" opens GPU 0 as well
    dist.init_process_group("nccl", device_id=device)
    return device


def sum_over_ranks(device: torch.device, *numbers: float) -> list[float]:
    total = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.tolist()


# --- Checkpoints


def save(file: Path, parts: dict, epoch: int) -> None:
    """Save on rank 0, under another name first: a kill in between leaves the old file whole."""
    if dist.get_rank() == 0:
        unfinished = file.with_suffix(".tmp")
        with unfinished.open("wb") as stream:
            states = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**states, "epoch": epoch}, stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(unfinished, file)


def load(file: Path, parts: dict, device: torch.device) -> int:
    """Load on every rank, each onto its own device. Return the number of complete epochs.

    All machines read the file, so it has to be on a disk that they share.
    """
    saved = torch.load(file, map_location=device, weights_only=True)  # else all load onto GPU 0
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    return saved["epoch"]


# --- Training


def train(arguments: argparse.Namespace, device: torch.device) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if arguments.batch_size % world_size:
        raise SystemExit(f"--batch-size {arguments.batch_size}: must be a multiple of {world_size}")
    torch.manual_seed(0)
    train_rows, val_rows = make_data()
    sampler = DistributedSampler(train_rows, seed=0, drop_last=True)
    share = arguments.batch_size // world_size
    on_gpu = device.type == "cuda"
    loader = DataLoader(
        train_rows,
        batch_size=share,
        sampler=sampler,
        drop_last=True,
        num_workers=2 if on_gpu else 0,  # processes that prepare batches while the GPU computes
        pin_memory=on_gpu,  # so that the copies to the GPU need not be waited for
    )
    if not (len(loader) and len(val_rows)):
        rows = f"{len(train_rows)} rows to train on, {len(val_rows)} to validate on"
        raise SystemExit(f"--batch-size {arguments.batch_size}: {rows}; both need some")
    mine = Subset(val_rows, range(rank, len(val_rows), world_size))  # no row on two ranks
    val_loader = DataLoader(mine, batch_size=500)

    torch.manual_seed(0)
    net = make_net().to(device)
    model = DistributedDataParallel(net, device_ids=[device] if on_gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9)

    native_bf16 = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    precision = arguments.precision or ("bf16" if native_bf16 else "fp16" if on_gpu else "no")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    autocast = torch.autocast(device.type, dtype) if dtype else nullcontext()
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")

    parts = {"net": net, "optimizer": optimizer, "scaler": scaler}
    epochs_done, file = 0, arguments.checkpoint
    file.parent.mkdir(parents=True, exist_ok=True)
    if arguments.resume and (found := sum_over_ranks(device, file.exists())[0]):
        if found < world_size:
            raise SystemExit(f"--checkpoint {file}: {found:.0f} of {world_size} processes have it")
        epochs_done = load(file, parts, device)
        if rank == 0:
            print(f"resumed from {file}, which has {epochs_done} of {arguments.epochs} epochs")
    for epoch in range(
        epochs_done, min(arguments.epochs, arguments.stop_after or arguments.epochs)
    ):
        for group in optimizer.param_groups:  # a function of the epoch: nothing to save
            group["lr"] = arguments.lr * (1 - epoch / arguments.epochs)
        sampler.set_epoch(epoch)  # another order in each epoch
        # Dropout, and workers if they augment: other on each rank, and the same after --resume.
        # Who draws from NumPy or random without workers seeds them here as well.
        torch.manual_seed(1000 * epoch + rank)
        model.train()
        loss_sum = torch.zeros((), device=device)  # stays there: .item() would wait in each step
        for inputs, targets in loader:
            inputs = inputs.to(device, non_blocking=True)
            targets = targets.to(device, non_blocking=True)
            with autocast:
                loss = loss_of(model(inputs), targets)
            optimizer.zero_grad()
            scaler.scale(loss).backward()  # DDP averages the gradients over the ranks
            scaler.unscale_(optimizer)  # so that clipping sees the true gradients
            nn.utils.clip_grad_norm_(model.parameters(), arguments.clip)
            scaler.step(optimizer)
            scaler.update()
            loss_sum += loss.detach()

        for buffer in net.buffers():  # BatchNorm's: DDP sends them only before a forward pass
            dist.broadcast(buffer, 0)
        net.eval()
        score = seen = 0
        with torch.no_grad():  # in full precision
            for inputs, targets in val_loader:  # `net`, not `model`: no communication in forward
                score += score_of(net(inputs.to(device)), targets.to(device)).item()
                seen += len(targets)
        loss_mean, score, seen = sum_over_ranks(
            device, loss_sum.item() / len(loader) / world_size, score, seen
        )
        if rank == 0:
            means = f"loss {loss_mean:.4f}, score {score / seen:.4f} over {seen:.0f} rows"
            print(f"epoch {epoch + 1}: {means}")
        save(file, parts, epoch + 1)


def main() -> None:
    arguments = parse_arguments()
    train(arguments, join_group())
    gc.collect()  # frees DDP before the group: else gloo's threads may abort as Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
