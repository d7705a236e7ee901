"""Python imports this first on a stand-in machine: its GPUs compute, on the CPU.

What asks for a GPU that is there gets a CPU tensor; one that is not there is an error in CUDA's
words. NCCL is gloo. Everything else is torch's, accelerate's and our own code, which goes on
believing in `cuda:N`. What this cannot show: whether a kernel, NCCL or fp16 on a GPU works.
"""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import parallel
from torch.overrides import TorchFunctionMode

from ddp_mnist.cluster import hardware

current = [0]
MOST = 256  # rows of a product: what is right for a GPU takes a CPU minutes


def count() -> int:
    visible = torch.cuda._parse_visible_devices()
    return len([gpu for gpu in visible if int(gpu) < int(os.environ["STANDIN_GPUS"])])


def checked(index: int | None) -> int:
    if (index or 0) >= torch.cuda.device_count():
        raise RuntimeError("CUDA error: invalid device ordinal")
    return index or 0


def on_cpu(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("cuda"):
        value = torch.device(value)
    if isinstance(value, torch.device) and value.type == "cuda":
        checked(value.index)
        torch.cuda.opened = True  # type: ignore[attr-defined]
        return torch.device("cpu")
    return value


class OnTheCpu(TorchFunctionMode):
    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.device:
            return function(*args, **kwargs)
        if function is torch.ones:
            args = tuple(min(size, MOST) if isinstance(size, int) else size for size in args)
        given = {name: on_cpu(value) for name, value in kwargs.items()}
        return function(*map(on_cpu, args), **given)


def set_device(device: Any) -> None:
    current[0] = checked(device if isinstance(device, int) else torch.device(device).index)


def number(index: int) -> str:
    """Of all GPUs of the machine, that of the visible one with this index."""
    return str(torch.cuda._parse_visible_devices()[index])


def properties(index: int) -> SimpleNamespace:
    torch.cuda.opened = True  # type: ignore[attr-defined]
    return SimpleNamespace(pci_domain_id=0, pci_bus_id=int(number(index)), pci_device_id=0)


def current_accelerator(check_available: bool = False) -> None:
    """An optimizer asks this in each step, and opens the GPU if there is one."""
    if check_available and torch.cuda.is_available():
        torch.cuda.opened = True  # type: ignore[attr-defined]


def init_process_group(_: str | None = None, **options: Any) -> None:
    """NCCL's refusal is the one that it has for two ranks on one GPU."""
    device = options.pop("device_id", None)
    real_init("gloo", **options)
    if device is not None:
        mine, taken = number(device.index), [""] * dist.get_world_size()
        dist.all_gather_object(taken, mine)
        if taken.count(mine) > 1:
            raise RuntimeError(
                "Failed to initialize NCCL communicator: invalid usage (run with NCCL_DEBUG=WARN"
                " for details)"
            )


class DistributedDataParallel(parallel.DistributedDataParallel):
    def __init__(self, module: Any, device_ids: Any = None, **options: Any) -> None:
        options.pop("output_device", None)
        for index in device_ids or []:
            checked(index)  # the first forward would fail, when it moves its input there
        super().__init__(module, **options)


def works() -> bool:
    """Return False for a driver that is too old for this torch."""
    return bool(os.environ["STANDIN_WORKS"]) and count() > 0


real_init = dist.init_process_group
for owner, name, stand_in in (
    (torch.cuda, "opened", False),
    (torch.cuda, "device_count", count),
    (torch._C, "_cuda_getDeviceCount", count),
    (hardware, "DEVICES", Path(__file__).parent / "dev"),
    (hardware, "gpus_shown", lambda: int(os.environ["STANDIN_GPUS"])),
    (torch.cuda, "is_available", works),
    (torch.cuda, "set_device", set_device),
    (torch.cuda, "current_device", lambda: current[0]),
    (torch.cuda, "synchronize", lambda *_: None),
    (torch.cuda, "get_device_capability", lambda *_: (8, 0)),
    (torch.cuda, "is_bf16_supported", lambda *_: True),
    (torch.cuda, "memory_reserved", lambda *_: 0),
    (torch.cuda, "get_device_properties", properties),
    (torch.cuda, "get_device_name", lambda *_: "stand-in"),
    (torch.cuda, "mem_get_info", lambda *_: (2**30, 2**30)),
    (torch.cuda.nccl, "version", lambda: (2, 0, 0)),
    (torch.accelerator, "current_accelerator", current_accelerator),
    (dist, "init_process_group", init_process_group),
    (parallel, "DistributedDataParallel", DistributedDataParallel),
):
    setattr(owner, name, stand_in)
OnTheCpu().__enter__()
