"""Starts and ends this process's part of the world: group, device, precision, threads, Accelerator.

The only module that makes an Accelerator. World size 1 takes the same path as any other.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import re
import signal
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import accelerate.optimizer
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import (
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    is_lomo_available,
)

from ddp_mnist import nccl
from ddp_mnist.config import Distribution
from ddp_mnist.errors import PeerError, UsageError, cause
from ddp_mnist.hardware import cores, gpus, hide_gpus
from ddp_mnist.launch import CONFIGS, Launch, interface_towards, is_loopback
from ddp_mnist.rendezvous import Board, check_same, first_cause, meet

PR_SET_PDEATHSIG = 1  # from linux/prctl.h
COMM_HOOKS = {
    "none": DDPCommunicationHookType.NO,
    "fp16": DDPCommunicationHookType.FP16,
    "bf16": DDPCommunicationHookType.BF16,
    "powersgd": DDPCommunicationHookType.POWER_SGD,
}
# By default it would begin at step 1,000, which a run of MNIST does not reach, and until then send
# all. Orthogonalising a gradient of zeros needs the epsilon.
POWERSGD = {"start_powerSGD_iter": 32, "orthogonalization_epsilon": 1e-8}

CRASHES_IN_DETAIL = "2.15."  # of torch: a segmentation fault where DDP begins to log


@dataclass(frozen=True)
class World:
    """This process's view of all processes.

    Attributes:
        accelerator: prepared for this device, precision and world size.
        board: what the ranks tell each other outside of collectives.
        backend: nccl, gloo, or none for a process on its own.
        precision: what is in effect: no, fp16, bf16 or fp64.
        num_machines: how many hosts take part.
        local_rank: this process's place among those that its launcher, or else its host, has.
        threads: CPU threads of this process.
        started: time.monotonic() when this process began to look for the others.
    """

    accelerator: Accelerator
    board: Board
    backend: str
    precision: str
    num_machines: int
    local_rank: int
    threads: int
    started: float

    def send_from_rank_0(self, content: bytes) -> bytes:
        """Returns rank 0's `content` on every rank: its machine alone has the file."""
        return broadcast_bytes(self.accelerator, content)

    def wait_for_gpu(self) -> None:
        """Returns once this process's GPU has done what it was given so far; at once on a CPU.

        Raises:
            RuntimeError: over NCCL, a peer is lost; see `nccl.NcclAccelerator.wait_for_gpu`.
        """
        if isinstance(self.accelerator, nccl.NcclAccelerator):
            self.accelerator.wait_for_gpu()
        elif self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()


# Objects would travel as pickles, and whoever reads a pickle runs what its sender put there.
def broadcast_bytes(accelerator: Accelerator, content: bytes) -> bytes:
    """Returns rank 0's `content` on every rank.

    As a sum with zeros, because over NCCL the Accelerator's reduce can be waited for and notices a
    lost peer, where a broadcast could not.
    """
    device = accelerator.device
    mine = content if accelerator.is_main_process else b""
    size = int(accelerator.reduce(torch.tensor(len(mine), device=device)).item())
    if not size:
        return b""
    payload = torch.frombuffer(bytearray(mine or size), dtype=torch.uint8).to(device)
    return accelerator.reduce(payload).cpu().numpy().tobytes()


def gather_bytes(accelerator: Accelerator, content: bytes) -> list[bytes]:
    """Each rank's `content`, not empty, in the order of the ranks; on every rank."""
    device = accelerator.device
    sizes = accelerator.gather(torch.tensor([len(content)], device=device)).tolist()
    mine = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
    everyone = accelerator.gather(accelerator.pad_across_processes(mine)).view(len(sizes), -1)
    return [row[:size].cpu().numpy().tobytes() for row, size in zip(everyone, sizes, strict=True)]


@contextlib.contextmanager
def start(
    flags: Distribution,
    launch: Launch,
    *,
    full_precision: bool = False,
) -> Iterator[World]:
    """Meets the other processes, yields the World, and ends it in order on every path.

    Args:
        flags: the distribution flags.
        launch: this process's place.
        full_precision: compute in the dtype of the weights, whatever flags and launcher say.

    Raises:
        UsageError: device, backend and precision do not fit together or do not exist here.
        PeerError: another process did not come, was lost, or did not answer in time.
        FailedElsewhere: another rank failed first.
    """
    started = time.monotonic()
    device = choose_device(flags)
    precision = "no" if full_precision else precision_in_effect(flags, launch, device)
    backend = choose_backend(flags, launch, device)
    if flags.sync_bn and device == "cpu":
        raise UsageError("--sync-bn: needs GPUs; on a CPU use --model cnn, which has GroupNorm")
    if flags.comm_hook == "powersgd" and precision == "fp16":
        # It adds what it left unsent to the next gradient: an infinity, which the loss scaler
        # skips once, would come back in every step.
        raise UsageError(
            "--comm-hook powersgd: cannot recover from an overflow, and fp16 has some in most runs;"
            " add --mixed-precision bf16, or no"
        )
    if launch.child_of_launcher:
        die_with_parent()
    board = meet(launch, flags.dist_timeout)
    gc.freeze()  # what was imported stays: walking it would cost 0.3 s in each full collection
    try:
        with first_error_wins(board):
            place = place_on_machine(launch, board)
            threads = set_threads(launch, device, place.processes_here)
            if backend != "none":
                choose_interface(launch, board)
                check_same(
                    board, {"--backend": backend, "--mixed-precision": precision}, "what auto chose"
                )
                if backend == "nccl":
                    check_gpus_differ(board, place)
                form_group(board, backend, place, flags.dist_timeout)
            with telling_accelerate(launch, place, device):
                accelerator = make_accelerator(flags, device, backend, precision, board)
            refuse_loner(launch, accelerator)
            yield World(
                accelerator=accelerator,
                board=board,
                backend=backend,
                precision=precision,
                num_machines=launch.num_machines or len(set(board.hosts)),
                local_rank=place.local_rank,
                threads=threads,
                started=started,
            )
            board.leave()
    finally:
        end(in_order=True)
        gc.unfreeze()


@contextlib.contextmanager
def first_error_wins(board: Board) -> Iterator[None]:
    """Of the errors that end the ranks, the first is raised, where it came up; the rest is silent.

    Raises:
        FailedElsewhere: instead of this rank's error, because another rank failed before.
        PeerError: instead of a broken connection; it names the rank that was lost.
    """
    try:
        yield
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # they hold the model, and it the group
        with signals_ignored():
            cause = first_cause(board, as_expected(board, error))
            end()  # the others' connections break now, and they look for the cause
            board.go_last(board.world_size - 1, patience_s=2)  # which they read from its store
        if cause is error:
            raise
        raise cause from error


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """A launcher that sees one worker end sends the others SIGTERM while they find out why."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may change handlers
        return
    signals = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(each, signal.SIG_IGN) for each in signals]
    try:
        yield
    finally:
        for each, handler in zip(signals, before, strict=True):
            signal.signal(each, handler)


def end(*, in_order: bool = False) -> None:
    """Drops DDP's reducer before the group: the other way round a gloo thread may abort at exit.

    The frames that held the model are gone by now, or cleared.

    Args:
        in_order: all ranks have come to their end; else NCCL's collectives may wait for a lost one.
    """
    if not dist.is_initialized() or dist.group.WORLD in nccl.aborted:
        return
    gc.collect()
    if dist.get_backend() == "nccl" and not in_order:
        nccl.abort()
    else:
        dist.destroy_process_group()


def make_accelerator(
    flags: Distribution, device: str, backend: str, precision: str, board: Board
) -> Accelerator:
    # Its optimizer looks for a package on the disk twice in each step: half a millisecond, and on a
    # cluster's network disk all ranks at once. One look is enough.
    accelerate.optimizer.is_lomo_available = functools.cache(is_lomo_available)
    kind: Callable[..., Accelerator] = Accelerator
    if backend == "nccl":
        kind = functools.partial(nccl.NcclAccelerator, board, flags.dist_timeout)
    return kind(
        cpu=device == "cpu",
        mixed_precision="no" if precision == "fp64" else precision,
        dataloader_config=DataLoaderConfiguration(split_batches=True, non_blocking=True),
        kwargs_handlers=[
            InitProcessGroupKwargs(backend=None if backend == "none" else backend),
            DistributedDataParallelKwargs(
                gradient_as_bucket_view=True,
                comm_hook=COMM_HOOKS[flags.comm_hook],
                comm_state_option=POWERSGD if flags.comm_hook == "powersgd" else {},
            ),
        ],
    )


def choose_device(flags: Distribution) -> str:
    """cuda where there is one and nobody asked for the CPU, else cpu."""
    if flags.cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1"):
        hide_gpus()
        return "cpu"
    return "cuda" if gpus() else "cpu"


def choose_backend(flags: Distribution, launch: Launch, device: str) -> str:
    """none for a process on its own, else gloo or nccl."""
    if flags.backend == "nccl" and device == "cpu":
        raise UsageError("--backend nccl: needs a GPU and this machine shows none; use gloo")
    if launch.world_size == 1 and not launch.agent_store:
        return "none"
    if flags.backend != "auto":
        return flags.backend
    return "nccl" if device == "cuda" else "gloo"


def has_native_bf16() -> bool:
    """Whether the CPU multiplies bfloat16 itself, where emulating it would be slower than fp32."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def precision_in_effect(flags: Distribution, launch: Launch, device: str) -> str:
    """no, fp16, bf16 or fp64. The flag beats the launcher's YAML; neither given means auto.

    A YAML's fp16 was meant for the GPUs that --cpu leaves aside.
    """
    from_launcher = os.environ.get("ACCELERATE_MIXED_PRECISION")
    if flags.cpu and from_launcher == "fp16":
        from_launcher = None
    asked = flags.mixed_precision or from_launcher or "auto"
    if asked == "auto":
        if device == "cuda":
            return "fp16"
        return "bf16" if has_native_bf16() else "no"
    if asked == "fp16" and device == "cpu":
        raise UsageError(fp16_on_cpu(flags, launch))
    if asked not in ("no", "fp16", "bf16", "fp64"):
        raise UsageError(f"--mixed_precision {asked}: choose from no, fp16, bf16")
    return asked


def fp16_on_cpu(flags: Distribution, launch: Launch) -> str:
    """accelerate itself would train in fp32 and still report fp16."""
    if flags.mixed_precision:
        return "--mixed-precision fp16: needs a GPU; on a CPU use bf16, no or auto"
    machines = launch.num_machines or 1
    config = "multi_node_cpu" if machines > 1 else "multi_cpu" if launch.world_size > 1 else "cpu"
    return (
        "accelerate launch: its config asks for fp16, which needs a GPU, and this machine shows"
        f" none; use --config_file {CONFIGS}/{config}.yaml"
    )


@dataclass(frozen=True)
class Place:
    """Where a rank stands among the processes of its machine.

    A launcher's node may be a part of a host: two of them in a rehearsal share its cores.
    """

    local_rank: int
    local_world_size: int
    processes_here: int


def place_on_machine(launch: Launch, board: Board) -> Place:
    """As the launcher told, else by comparing the hosts that the ranks posted."""
    if not board.hosts:
        return Place(0, 1, 1)
    here = [rank for rank, host in enumerate(board.hosts) if host == board.hosts[launch.rank]]
    return Place(
        here.index(launch.rank) if launch.local_rank is None else launch.local_rank,
        launch.local_world_size or len(here),
        len(here),
    )


def set_threads(launch: Launch, device: str, processes_here: int) -> int:
    """Shares this machine's cores among its processes.

    A launcher sets OMP_NUM_THREADS=1 of its own accord, which leaves cores idle; a larger number,
    or one set without a launcher, was meant and stays.
    """
    told = os.environ.get("OMP_NUM_THREADS") or "0"
    outermost = told.partition(",")[0]  # OpenMP takes a list, one entry per level of nesting
    if not outermost.isdecimal():
        raise UsageError(f"OMP_NUM_THREADS={told}: must be a whole number; set it or unset it")
    threads = int(outermost)
    if threads < 1 or (threads == 1 and launch.child_of_launcher):
        ours, sharers = cores(), processes_here
        if (of_task := os.environ.get("SLURM_CPUS_PER_TASK", "")).isdecimal():
            # srun starts a process for each task, or a launcher, which starts several
            sharers = (launch.local_world_size or 1) if launch.child_of_launcher else 1
            ours = min(ours, int(of_task))
        threads = max(1, ours // sharers) if device == "cpu" else 1
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    return threads


def gpu_of(place: Place) -> int:
    """Number of the GPU that a rank takes: its local rank's, as far as it is shown so many.

    Ranks that share a GPU count on from the first one again; SLURM, or CUDA_VISIBLE_DEVICES, may
    show each rank a single GPU, its own, which is number 0 to all of them.
    """
    return place.local_rank % gpus()


def check_gpus_differ(board: Board, place: Place) -> None:
    """Raises UsageError if ranks of this machine would take the same GPU, which NCCL refuses late.

    Their numbers do not tell, where each rank is shown other GPUs; their UUIDs do.
    """
    mine = torch.cuda.get_device_properties(gpu_of(place)).uuid
    board.post(f"gpu/{board.rank}", str(mine))
    here = [rank for rank, host in enumerate(board.hosts) if host == board.hosts[board.rank]]
    taken = {board.read(f"gpu/{rank}", board.patience_s) for rank in here}
    if len(taken) < len(here):
        plural = "s" if len(taken) > 1 else ""
        raise UsageError(
            f"{len(here)} processes on this machine, but {len(taken)} GPU{plural}: NCCL needs one"
            " each; start fewer, or share a GPU with --backend gloo"
        )


def choose_interface(launch: Launch, board: Board) -> None:
    """Tells gloo and NCCL the interface that leads to rank 0; a variable that is set wins.

    To rank 0 its own name may lead over loopback: it takes the interface towards another host.
    """
    if not (launch.main_host and launch.main_port):
        return
    towards, own = launch.main_host, board.addresses[board.rank]
    if own is None or is_loopback(own):
        others = zip(board.hosts, board.addresses, strict=True)
        elsewhere = (a for host, a in others if host != board.hosts[board.rank] and a)
        towards = next(elsewhere, towards)
    interface = interface_towards(towards, launch.main_port)
    if interface is None:
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if interface != "lo":
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def form_group(board: Board, backend: str, place: Place, timeout_s: float) -> None:
    """All ranks have come: opens the connections between them.

    In a thread that can be left behind, because gloo tries five times as long as it is told.

    Raises:
        PeerError: some cannot be made, as where a firewall lets only the main port by.
    """
    if dist.is_initialized():
        raise UsageError(
            f"WORLD_SIZE={board.world_size}: a process group of {dist.get_world_size()} exists"
            " already in this process; start the trainer in a process of its own"
        )
    asked, version = os.environ.get("TORCH_DISTRIBUTED_DEBUG", ""), torch.__version__
    crashes = asked.upper() == "DETAIL" and version.startswith(CRASHES_IN_DETAIL)
    if crashes and board.world_size > 1:
        raise UsageError(
            f"TORCH_DISTRIBUTED_DEBUG={asked}: makes torch {version} crash in DDP; use INFO"
        )
    options: dict[str, Any] = {}
    if backend == "nccl":
        options["device_id"] = torch.device("cuda", gpu_of(place))
    outcome: list[RuntimeError | None] = []
    collectives_s = timeout_s + (nccl.WATCHDOG_MARGIN_S if backend == "nccl" else 0)

    def connect() -> None:
        try:
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("group", board.store),
                rank=board.rank,
                world_size=board.world_size,
                timeout=timedelta(seconds=collectives_s),
                **options,
            )
            outcome.append(None)
        except RuntimeError as error:
            outcome.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(timeout_s + 1)
    if outcome == [None]:
        return
    if outcome and outcome[0] and "connectFullMesh" not in str(outcome[0]):
        raise outcome[0]
    variable = "NCCL_SOCKET_IFNAME" if backend == "nccl" else "GLOO_SOCKET_IFNAME"
    raise PeerError(
        f"{board.world_size} processes met, but within {timeout_s:g} s rank {board.rank} could not"
        f" connect to all others; open all TCP ports between the machines, or set {variable} to the"
        f" interface that leads there (it is {os.environ.get(variable, 'not set')})"
    )


@contextlib.contextmanager
def telling_accelerate(launch: Launch, place: Place, device: str) -> Iterator[None]:
    """Accelerate learns from these variables that a group exists, however it was started.

    It takes the local rank for the number of a GPU, which DDP would send its batches to.
    """
    if not dist.is_initialized():
        os.environ.pop("LOCAL_RANK", None)  # alone: a stale one would have it look for a group
        yield
        return
    os.environ.update(
        RANK=str(launch.rank),
        WORLD_SIZE=str(launch.world_size),
        LOCAL_RANK=str(gpu_of(place) if device == "cuda" else place.local_rank),
        LOCAL_WORLD_SIZE=str(place.local_world_size),
        MASTER_ADDR=str(launch.main_host),
        MASTER_PORT=str(launch.main_port),
    )
    try:
        yield
    finally:
        os.environ["LOCAL_RANK"] = str(place.local_rank)


def refuse_loner(launch: Launch, accelerator: Accelerator) -> None:
    """N processes that each believe to be alone would be N unrelated trainings."""
    if accelerator.num_processes != launch.world_size:
        raise UsageError(
            f"WORLD_SIZE={launch.world_size}: but Accelerate formed a group of"
            f" {accelerator.num_processes}, so each process would train alone;"
            f" use a config from {CONFIGS}"
        )


def die_with_parent() -> None:
    """A worker whose launcher is killed would train on as an orphan (Linux only)."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died in between, and the signal will not come
        os.kill(os.getpid(), signal.SIGTERM)


def as_expected(board: Board, error: BaseException) -> BaseException:
    """A broken connection as a PeerError that names the lost rank; any other error as it is.

    gloo, NCCL and the store raise RuntimeErrors that only their texts tell apart.
    """
    signs = ("connection", "timed out", "timeout", "gloo", "nccl", "socket", "broken pipe")
    text = str(error).lower()
    if board.world_size == 1 or not isinstance(error, RuntimeError):
        return error
    if not any(sign in text for sign in signs):
        return error
    if "invalid usage" in text:
        return UsageError(
            f"--backend nccl: {textwrap.shorten(cause(error), 200)}; give each process a GPU of"
            " its own, or share one with --backend gloo; NCCL_DEBUG=WARN tells more"
        )
    board.call_roll()  # before the end, which may take seconds over NCCL
    end()  # closes this rank's connections too, or a rank that waits for this one would look lost
    lost = board.silent_ranks()
    who = f"rank {', '.join(map(str, lost))}" if lost else "another rank"
    if board.unreachable and board.served_by_launcher:
        who = "the launcher and a rank"
    reason = re.sub(r"^\[\S*\] ", "", cause(error))  # gloo's own source line
    peer_error = PeerError(
        f"lost contact with {who} of {board.world_size} ({textwrap.shorten(reason, 120)});"
        " see what that process says, then start the run again"
    )
    peer_error.__cause__ = error
    return peer_error
