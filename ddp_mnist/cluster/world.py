"""Join the processes of a run, and leave in order: `join_world`, which yields a World.

train and the verbs form their group and make their Accelerator only here; a single process forms no
group.
"""

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

from ddp_mnist.cluster.connections import keep_alive
from ddp_mnist.cluster.device import DeviceConfig, choose_device, gpu_of, in_effect, set_threads
from ddp_mnist.cluster.failures import end_group, propagate_first_error
from ddp_mnist.cluster.interfaces import choose_interface, first_address, interfaces_up
from ddp_mnist.cluster.launch import Launch, config_flag, die_with_parent
from ddp_mnist.cluster.rendezvous import check_same, join_store
from ddp_mnist.cluster.store import Store
from ddp_mnist.config.distribution import Distribution
from ddp_mnist.core.accelerator import make_accelerator
from ddp_mnist.errors import DdpMnistError, FailedElsewhere, PeerError, UsageError
from ddp_mnist.system.console import warn
from ddp_mnist.system.deadline import with_deadline
from ddp_mnist.system.text import reason

FOREVER = timedelta(days=365)
SHARED_STATES = (PartialState, AcceleratorState, GradientState)  # by all Accelerators of a process


@dataclass(frozen=True, kw_only=True)
class World(DeviceConfig):
    """This process's view of all processes."""

    accelerator: Accelerator  # prepared for this device, precision and world size
    store: Store  # for JSON between ranks, outside of collectives
    num_machines: int
    local_rank: int  # among the processes of its launcher, or else of its machine
    may_choose_threads: bool  # one or several, by timing: nobody has set their number
    start_time: float  # time.monotonic() when this process began to look for the others

    @property
    def device_name(self) -> str:
        """Return cpu or cuda:N. Accelerate numbers several processes' CPU, but no lone GPU."""
        found = self.accelerator.device
        return "cpu" if found.type == "cpu" else f"{found.type}:{found.index or 0}"

    def wait_for_gpu(self) -> None:
        """Return once this process's GPU has done its work so far; at once on a CPU."""
        if self.device == "cuda":
            torch.cuda.synchronize()


@contextlib.contextmanager
def join_world(
    flags: Distribution,
    launch: Launch,
    *,
    full_precision: bool = False,
    earlier: Callable[[Store], dict[str, Any] | None] = lambda _: None,
) -> Iterator[World]:
    """Join the other processes, yield the World, and shut it down cleanly however the block ends.

    `earlier` finds on rank 0 what `choose_device` is then given, which explains `full_precision`
    too. Raise as these do; PeerError if another process did not join, was lost or did not answer in
    time, FailedElsewhere if another rank failed first.
    """
    started = time.monotonic()
    config = choose_device(flags, launch, full_precision)
    if launch.child_of_launcher:
        die_with_parent()
    store = join_store(launch, flags.start_timeout or flags.dist_timeout, flags.dist_timeout)
    with accelerate_as_found(), propagate_first_error(store):
        here, local_rank = store.rank_info, launch.local_rank
        if local_rank is None:  # started by hand
            local_rank = here.local_rank
        if before := earlier(store):
            config = choose_device(flags, launch, full_precision, before)
        kept = before.get("threads", 0) if before else 0
        may_choose_threads = set_threads(launch, config.device, here.local_world_size, kept)
        if not launch.is_alone:
            chosen = {"torch": torch.__version__, "accelerate": accelerate.__version__}
            chosen |= {"--backend": config.backend, "--mixed-precision": config.precision}
            check_same(store, chosen, "what auto chose")
            choose_interface(launch, here.address, here.other_address)
            form_group(store, config.backend, local_rank, flags.dist_timeout)
        on_gpu = config.device == "cuda"
        export_env(launch, gpu_of(local_rank) if on_gpu else local_rank)
        accelerator = accelerator_for(config, flags)
        if not launch.is_alone:
            os.environ["LOCAL_RANK"] = str(local_rank)
        if accelerator.num_processes != launch.world_size:
            raise UsageError(
                f"WORLD_SIZE={launch.world_size}: but Accelerate formed a group of"
                f" {accelerator.num_processes}, so each process would train alone;"
                f" use {config_flag('multi_cpu')}, or one next to it"
            )
        yield World(
            **vars(in_effect(config, accelerator)),
            accelerator=accelerator,
            store=store,
            num_machines=launch.num_machines or here.num_machines,
            local_rank=local_rank,
            may_choose_threads=may_choose_threads,
            start_time=started,
        )
        say_goodbye(store)
    end_group()


def accelerator_for(config: DeviceConfig, flags: Distribution) -> Accelerator:
    """Return the Accelerator of this process."""
    return make_accelerator(
        cpu=config.device == "cpu",
        mixed_precision="no" if config.precision == "fp64" else config.precision,
        backend=None if config.backend == "none" else config.backend,
        hook=flags.comm_hook,
    )


def in_full_precision(world: World, flags: Distribution) -> World:
    """Return the world with an Accelerator that computes in the dtype of the weights."""
    AcceleratorState._shared_state.clear()  # of the other Accelerator; the group stays
    world = replace(world, precision="no")
    return replace(world, accelerator=accelerator_for(world, flags))


@contextlib.contextmanager
def accelerate_as_found() -> Iterator[None]:
    """Give the block an Accelerate that no Accelerator was made with; restore the state it had.

    All Accelerators of a process share device, precision and group. One left behind by a notebook
    or an earlier call would decide them for this run, or refuse another precision.
    """
    found = [dict(state._shared_state) for state in SHARED_STATES]
    for state in SHARED_STATES:
        state._shared_state.clear()
    try:
        yield
    finally:
        for state, content in zip(SHARED_STATES, found, strict=True):
            state._shared_state.clear()
            state._shared_state.update(content)


def export_env(launch: Launch, local_rank: int) -> None:
    """Set the variables that Accelerate reads the group from, however the process was started.

    Accelerate uses LOCAL_RANK as the GPU's index, and DDP moves its batches to that GPU.
    """
    if launch.is_alone:
        os.environ.pop("LOCAL_RANK", None)  # a stale one would make it look for a group
        return
    ranks = {"RANK": launch.rank, "WORLD_SIZE": launch.world_size, "LOCAL_RANK": local_rank}
    place = {"MASTER_ADDR": launch.main_host, "MASTER_PORT": launch.main_port}
    os.environ.update({name: str(value) for name, value in (ranks | place).items()})


def form_group(store: Store, backend: str, local_rank: int, timeout_s: float) -> None:
    """Open the connections between the ranks, all of which have joined.

    Raise PeerError if some cannot be made, for example because a firewall opens only the main port.
    """
    # With it gloo would connect on the way, and those connections are not known.
    os.environ.pop("TORCH_GLOO_LAZY_INIT", None)
    variable = f"{backend.upper()}_SOCKET_IFNAME"
    interface = os.environ.get(variable, "").lstrip("=").partition(",")[0]
    store.set(f"address/{store.rank}", f"{first_address(interface)} ({interface or 'not set'})")
    connect = functools.partial(
        dist.init_process_group,
        backend,
        store=dist.PrefixStore("group", store.c10d),
        rank=store.rank,
        world_size=store.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=torch.device("cuda", gpu_of(local_rank)) if backend == "nccl" else None,
    )
    before = keep_alive()
    try:
        with_deadline(connect, timeout_s + 1)  # gloo tries five times as long
    except (RuntimeError, TimeoutError) as error:
        if "Unable to find address" in str(error) and variable in os.environ:
            raise UsageError(
                f"{variable}={os.environ[variable]}: this machine has no such interface; unset it,"
                f" or name one of {', '.join(interfaces_up()) or 'lo'}"
            ) from error
        if isinstance(error, RuntimeError) and "gloo" not in str(error).lower():
            raise
        raise PeerError(
            f"{store.world_size} processes joined, but rank {store.rank} could not connect to all"
            f" others within {timeout_s:g} s ({store.addresses()}); open all TCP ports between"
            f" the machines, or set {variable} to the interface that leads there"
        ) from error
    connections = keep_alive() - before
    if backend == "gloo" and connections:  # which the heartbeat can break; NCCL's watchdog judges
        dist.set_timeout(FOREVER, dist.group.WORLD)
        store.connections = connections


def say_goodbye(store: Store) -> None:
    """Leave the store once all are done. What was done stands, even if a rank is lost by now."""
    try:
        store.close()
    except (RuntimeError, DdpMnistError) as error:
        if isinstance(error, DdpMnistError) and error.code != PeerError.code:
            raise
        store.shutdown()
        if not isinstance(error, FailedElsewhere):
            warn(f"all is done, but the ranks could not say goodbye ({reason(error)})")
