"""template_ddp.py with Hugging Face's Accelerate: the same weights, as it has the same order.

    python docs/template_accelerate.py --epochs 2                              # one process
    torchrun --nproc-per-node 2 docs/template_accelerate.py --stop-after 2     # two
    torchrun --nproc-per-node 2 docs/template_accelerate.py --resume           # the other epochs
    accelerate launch --config_file accelerate_configs/multi_cpu.yaml docs/template_accelerate.py

Copy it and replace four functions. It needs accelerate, and scikit-learn for the digits. Mixed
precision is the launcher's: accelerate launch --mixed_precision bf16 ..., or before torchrun
ACCELERATE_MIXED_PRECISION=bf16. With BatchNorm or Dropout the weights are not those of
template_ddp.py on more than one process: ranks have other rows of each batch.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import broadcast
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset, TensorDataset


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=4, help="the rate falls to 0 over them")
    parser.add_argument("--stop-after", type=int, help="epochs; --resume does the others")
    parser.add_argument("--batch-size", type=int, default=32, help="of all processes together")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradients")
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


# --- Training


def train(arguments: argparse.Namespace, accelerator: Accelerator) -> None:
    rank, world_size = accelerator.process_index, accelerator.num_processes
    if arguments.batch_size % world_size:
        raise SystemExit(f"--batch-size {arguments.batch_size}: must be a multiple of {world_size}")
    torch.manual_seed(0)
    train_rows, val_rows = make_data()
    order = torch.Generator()  # seeded in each epoch, alike on all ranks
    sampler = RandomSampler(train_rows, generator=order)
    loader = DataLoader(train_rows, arguments.batch_size, sampler=sampler, drop_last=True)
    if not (len(loader) and len(val_rows)):
        rows = f"{len(train_rows)} rows to train on, {len(val_rows)} to validate on"
        raise SystemExit(f"--batch-size {arguments.batch_size}: {rows}; both need some")
    torch.manual_seed(0)
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=arguments.lr, momentum=0.9)
    model, optimizer, loader, val_loader = accelerator.prepare(
        net, optimizer, loader, DataLoader(val_rows, arguments.batch_size)
    )
    net = accelerator.unwrap_model(model)  # without DDP, whose keys begin with "module."

    parts = {"net": net, "optimizer": optimizer}
    if accelerator.scaler:
        parts["scaler"] = accelerator.scaler
    epochs_done, file = 0, arguments.checkpoint
    file.parent.mkdir(parents=True, exist_ok=True)
    found = accelerator.reduce(torch.tensor(float(file.exists()), device=accelerator.device))
    if arguments.resume and found:
        if found < world_size:
            raise SystemExit(f"--checkpoint {file}: {found:.0f} of {world_size} processes have it")
        saved = torch.load(file, map_location="cpu", weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        epochs_done = saved["epoch"]
        accelerator.print(
            f"resumed from {file}, which has {epochs_done} of {arguments.epochs} epochs"
        )
    for epoch in range(
        epochs_done, min(arguments.epochs, arguments.stop_after or arguments.epochs)
    ):
        for group in optimizer.param_groups:  # a function of the epoch: nothing to save
            group["lr"] = arguments.lr * (1 - epoch / arguments.epochs)
        order.manual_seed(epoch)  # another order in each epoch
        torch.manual_seed(1000 * epoch + rank)  # dropout: other on each rank
        model.train()
        loss_sum = torch.zeros((), device=accelerator.device)
        for inputs, targets in loader:  # this rank's part of each batch, on its device
            loss = loss_of(model(inputs), targets)
            optimizer.zero_grad()
            accelerator.backward(loss)  # DDP averages the gradients over the ranks
            accelerator.clip_grad_norm_(model.parameters(), arguments.clip)
            optimizer.step()
            loss_sum += loss.detach()

        if buffers := list(net.buffers()):  # BatchNorm's: DDP sends them only before a forward pass
            broadcast(buffers)
        net.eval()
        score = seen = 0
        with torch.no_grad():  # in the precision of training
            for inputs, targets in val_loader:
                # drops the rows that were repeated to give all ranks equally many
                outputs, targets = accelerator.gather_for_metrics((net(inputs), targets))
                score += score_of(outputs, targets).item()
                seen += len(targets)
        loss_mean = accelerator.reduce(loss_sum, "mean").item() / len(loader)
        means = f"loss {loss_mean:.4f}, score {score / seen:.4f} over {seen} rows"
        accelerator.print(f"epoch {epoch + 1}: {means}")
        if accelerator.is_main_process:
            # Under another name first: a kill in between leaves the old file whole. save_state of
            # Accelerate writes into its final folder, where a kill leaves a part.
            states = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**states, "epoch": epoch + 1}, unfinished := file.with_suffix(".tmp"))
            os.replace(unfinished, file)


def main() -> None:
    arguments = parse_arguments()
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),  # else torchrun's processes would each train alone
        dataloader_config=DataLoaderConfiguration(split_batches=True),  # --batch-size is of all
    )
    train(arguments, accelerator)
    accelerator.free_memory()  # DDP before the group: else gloo's threads may abort as Python exits
    accelerator.end_training()


if __name__ == "__main__":
    main()
