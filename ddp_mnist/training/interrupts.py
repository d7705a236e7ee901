"""What a run says of Ctrl-C as it is pressed; what it does then, `fit` and the folder decide."""

from functools import partial

from ddp_mnist.cluster.signals import StopSignals
from ddp_mnist.cluster.world import World
from ddp_mnist.system.console import tell_at_once
from ddp_mnist.training import checkpoint
from ddp_mnist.training.folder import FOLDER_KEY, RunFolder


def answer_interrupts(stop: StopSignals, world: World, folder: RunFolder, verbose: bool) -> None:
    """Let a first and a second Ctrl-C be answered at once."""
    stop.on_first_sigint = partial(acknowledge, world) if verbose else stop.on_first_sigint
    stop.on_second_sigint = partial(report_last_checkpoint, folder)


def acknowledge(world: World) -> None:
    """Say what a first Ctrl-C does, once on each machine on which it is pressed."""
    if FOLDER_KEY in world.store.received and world.local_rank == 0:
        tell_at_once("ddp-mnist: stopping after this step")


def report_last_checkpoint(folder: RunFolder) -> None:
    """After a second Ctrl-C, report the last checkpoint; nothing more is saved."""
    if folder.path is None:
        return
    folder.record_outcome("failed", 130, "interrupted twice")
    rest = "nothing is saved"
    if saved := checkpoint.newest_first(folder.path):
        step = checkpoint.step_of(saved[0])
        rest = f"nothing after step {step} is saved; to go on, add --resume {folder.path}"
    tell_at_once(f"ddp-mnist: interrupted twice: stopped at once, {rest} (code 130)")
