"""What Accelerate and DDP are told, and what they do not do by themselves."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    broadcast,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

COMM_HOOKS = {
    "none": DDPCommunicationHookType.NO,
    "fp16": DDPCommunicationHookType.FP16,
    "bf16": DDPCommunicationHookType.BF16,
    "powersgd": DDPCommunicationHookType.POWER_SGD,
}
# By default PowerSGD begins to compress at step 1,000, which MNIST's default run does not reach. A
# gradient of zeros cannot be orthogonalised without the epsilon.
POWERSGD = {"start_powerSGD_iter": 32, "orthogonalization_epsilon": 1e-8}


def make_accelerator(
    cpu: bool, mixed_precision: str | None = None, backend: str | None = None, hook: str = "none"
) -> Accelerator:
    """Return the Accelerator of this process, which joins the others if a launcher started it.

    Pass `cpu` where there is no GPU: without it Accelerate, which then finds no backend for the
    launcher's processes, lets each train alone. Without `mixed_precision` (no, fp16 or bf16) it is
    the launcher's. `hook`, one of COMM_HOOKS, compresses the gradients that DDP sends.
    """
    return Accelerator(
        cpu=cpu,
        mixed_precision=mixed_precision,
        dynamo_backend="no",  # whoever compiles the net does it before DDP wraps it
        # The loader's batches are global, and each rank gets its part.
        dataloader_config=DataLoaderConfiguration(split_batches=True, non_blocking=True),
        kwargs_handlers=[
            InitProcessGroupKwargs(backend=backend),
            DistributedDataParallelKwargs(
                gradient_as_bucket_view=True,
                comm_hook=COMM_HOOKS[hook],
                comm_state_option=POWERSGD if hook == "powersgd" else {},
            ),
        ],
    )


def warm_up_ddp(accelerator: Accelerator, model: nn.Module, micro_batch: Tensor) -> None:
    """Do one forward and backward pass and discard the result, in fresh and resumed runs alike.

    DDP regroups its gradient buckets after the first backward pass, which changes the order of
    sums, and with it the last bits. The pass runs in eval mode, which leaves BatchNorm's statistics
    alone, and with as many images as this rank trains on at once, because torch.compile would
    compile for each other number.
    """
    share = micro_batch[: len(micro_batch) // accelerator.num_processes]
    model.eval()
    with warnings.catch_warnings():
        # Harmless: a kernel of one input channel has several strides that are channels_last.
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
        model(share.to(accelerator.device)).sum().backward()
    model.zero_grad()


def check_reduced(model: nn.Module) -> None:
    """Raise DDP's error if a parameter had no part in the last step on this rank.

    DDP itself looks in the next forward. An all-reduce before that would meet the gradients of
    the other ranks, and gloo would abort the process.
    """
    if isinstance(model, DistributedDataParallel):
        model._check_reducer_finalized()


def sum_over_ranks(accelerator: Accelerator, numbers: Sequence[float]) -> list[float]:
    """Return the sum of each number over all ranks, on every rank."""
    mine = torch.tensor(numbers, dtype=torch.float64, device=accelerator.device)
    return accelerator.reduce(mine).tolist()


def broadcast_bytes(accelerator: Accelerator, content: bytes) -> bytes:
    """Return rank 0's `content`, which is not empty, on every rank.

    Bytes, not objects: objects travel as pickles, and unpickling runs the sender's code.
    """
    device = accelerator.device
    size = broadcast(torch.tensor(len(content), device=device)).item()
    mine = bytearray(content) if accelerator.is_main_process else bytearray(size)
    payload = broadcast(torch.frombuffer(mine, dtype=torch.uint8).to(device))
    return payload.cpu().numpy().tobytes()


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """Compute float32 convolutions in full precision in the block; a GPU would use TF32."""
    cudnn: Any = torch.backends.cudnn
    before, cudnn.conv.fp32_precision = cudnn.conv.fp32_precision, "ieee"
    try:
        yield
    finally:
        cudnn.conv.fp32_precision = before
