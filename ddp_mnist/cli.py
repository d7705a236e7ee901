"""The command line: it turns a verb into a call, and an error into one line and the exit code.

Heavy imports are inside the functions, so that `--help` and a wrong flag answer at once.
"""

import argparse
import atexit
import contextlib
import gc
import importlib
import inspect
import io
import json
import logging
import os
import re
import shlex
import signal
import sys
import textwrap
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from ddp_mnist import __version__, errors
from ddp_mnist.cluster.launch import Launch, die_with_parent, find_launch
from ddp_mnist.cluster.signals import end_at_signals, end_undisturbed
from ddp_mnist.config.distribution import Distribution
from ddp_mnist.config.flag_fields import Flags, add_flags
from ddp_mnist.config.recipe import Recipe
from ddp_mnist.config.train_config import RunFlags, TrainConfig, fields_of
from ddp_mnist.errors import UsageError
from ddp_mnist.system.console import Console, tell, write_stdout
from ddp_mnist.system.text import did_you_mean, printable

VERBS = {
    "train": "Train and validate a model, test it once, and write a run folder.",
    "evaluate": "Compute exact metrics of a finished run on one split.",
    "predict": "Classify image files; print one JSON line for each.",
    "report": "Write an HTML page about a run; it opens without a network.",
    "export": "Export the weights of a run, with a model card, for use elsewhere.",
    "prepare": "Download and decode a data set into the cache.",
    "doctor": "Check this machine, or several that a launcher joins, before training.",
    "verify": "Prove on this machine that N processes train as one and resume exactly.",
}
USED_MOST = (  # of train's flags, in the order in which --help shows them
    *("dataset", "model", "epochs", "batch_size", "lr", "preset", "augment", "mixed_precision"),
    *("val_size", "seed", "run_dir", "resume", "weights", "target_accuracy", "dry_run"),
)
HELP = """usage: ddp-mnist [-h] [--version] VERB ...

Train MNIST or your own images with PyTorch DDP: one process, many, or many machines.

{}

ddp-mnist VERB --help shows the flags of a verb, and an example.
@FILE stands for the flags in a file, one a line.

exit codes: 0 done, 1 check failed, 2 usage or configuration, 3 data, 4 checkpoint,
5 storage, 6 peer lost or time-out, 7 diverged, 129 SIGHUP, 130 SIGINT,
143 SIGTERM or SIGUSR1"""
# Of verbs whose `run` is not in ddp_mnist.verbs.VERB, where it is in ddp_mnist.verbs
MODULES = {"doctor": "doctor.verb", "verify": "verify.proofs"}
# Verbs other than train that run on several processes, with their own defaults. The user waits for
# doctor, which computes in the precision that training uses.
SHARED: dict[str, Any] = {"evaluate": {}, "doctor": {"dist_timeout": 60.0, "mixed_precision": None}}


def program() -> NoReturn:
    """Call `main`, then end the process at once: unloading torch would take a second."""
    end_at_signals()
    open_closed_streams()
    try:
        main()
    except (SystemExit, errors.Stopped) as ended:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(int(ended.code or 0))


def open_closed_streams() -> None:
    """Give stdin, stdout and stderr a file if the shell closed them, as `>&-` does.

    Python has None in their place, and the next file to be opened would get their number. What is
    printed there fails, as on a full disk.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDONLY if number < 2 else os.O_WRONLY)
            setattr(sys, name, os.fdopen(opened, "w" if number else "r", closefd=False))


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one verb and exit with its code; a failure is one line on stderr.

    With --debug the whole traceback is printed before it.
    """
    # When a peer is lost, torch's store would print a C++ stack for each call; it raises as well.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's starts and stops
    # Without a home folder, Matplotlib would log where it puts its cache.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a folder's name may not be UTF-8
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = run_verb(words) or 0
    except HelpShown:
        code = 0
    except BaseException as error:  # own code may call sys.exit()
        end_undisturbed()
        failed = as_failure(error, words)
        code = failed.code
        if speaks(failed):
            if "--debug" in words:
                tell("".join(traceback.format_exception(error)).rstrip())
            tell(line := errors.one_line(failed))
            leave_for_the_launcher(line)
        elif is_first_here() and (os.environ.get("RANK", "0") != "0" or failed.where):
            there = f"{failed.where}: " if failed.where else ""
            tell(f"ended      {printable(f'{there}{failed}')}")
    end_undisturbed()
    try:
        write_stdout()
    except errors.StorageError as error:
        if not code:  # else the verb's own error counts
            code = error.code
            tell(errors.one_line(error))
    sys.exit(code)


def speaks(error: errors.DdpMnistError) -> bool:
    """Return whether this process prints the error.

    Once all have joined, the rank that failed first does. Before, all hit the same wrong flag:
    local rank 0 prints it, and while the others wait, their launcher ends them. One that is still
    there then hit a problem of its own.
    """
    if isinstance(error, errors.FailedElsewhere):
        return False
    if not (error.agreed or is_first_here()):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(3)
    return True


def leave_for_the_launcher(line: str) -> None:
    """Write the line where torchrun and accelerate launch look for the cause of a failure.

    They end with a traceback of their own and a table, whose last row then is this line.
    """
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        before_others = int(time.time()) - 1  # which end in the same second, as this one failed
        with contextlib.suppress(OSError):
            Path(file).write_text(json.dumps({"message": line, "timestamp": before_others}))


def as_failure(error: BaseException, words: Sequence[str]) -> errors.DdpMnistError:
    """Return the error as one of ours; of one that nobody foresaw, say what was typed."""
    if isinstance(error, errors.DdpMnistError):
        return error
    if isinstance(error, KeyboardInterrupt):  # a launcher passes its signal on to all processes
        mine = is_first_here() or getattr(error, "agreed", False)
        failure = errors.Preempted if mine else errors.FailedElsewhere
        return failure(str(error) or "interrupted", errors.exit_code(error))
    if isinstance(error, ModuleNotFoundError) and error.name and "ddp_mnist" not in error.name:
        if found := sys.modules.get(error.name.partition(".")[0]):  # a file of that name
            fix = "rename it if it is yours, else install the package anew"
            return UsageError(f"{found.__file__}: there is no {error.name} in it; {fix}")
        fix = "activate the environment that has it (source .venv/bin/activate), or make venv"
        return UsageError(f"{error.name}: is not installed for {sys.executable}; {fix}")
    typed = textwrap.shorten(shlex.join(words), 120, placeholder=" ...")
    failed = errors.blamed(typed, errors.DdpMnistError, error, "")
    failed.traceback_file = getattr(error, "traceback_file", "")
    failed.blamed = True  # also an error of the system, which nobody foresaw here
    return failed


def is_first_here() -> bool:
    """Return whether this is local rank 0, as the launcher or `join_world` numbers processes.

    torchrun --virtual-local-rank tells all that they are; their files are numbered nevertheless.
    """
    if file := re.search(r"/(\d+)/error\.json$", os.environ.get("TORCHELASTIC_ERROR_FILE", "")):
        return file[1] == "0"
    return (os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0") == "0"


def run_verb(argv: list[str]) -> int | None:
    """Run the verb that `argv` begins with. Return its exit code; None is 0."""
    # torch.distributed.launch puts --local-rank=N first; LOCAL_RANK says the same.
    while rank := re.match(r"--local[-_]rank(=| )\d+( |$)", " ".join(argv[:2])):
        argv = argv[1 if rank[1] == "=" else 2 :]
    name, *rest = argv or ["--help"]
    if function := {"train": train, "multinode": multinode}.get(name):
        return function(rest)
    size = os.environ.get("WORLD_SIZE", "1") if "TORCHELASTIC_RUN_ID" in os.environ else "1"
    if name in ("predict", "report", "export", "verify") and size != "1":
        raise UsageError(f"{name}: every process would do all of it; start it without a launcher")
    if name in VERBS:
        flags = parse_verb(name, rest)
        if name in SHARED:
            launch_of(flags[1], trains=name != "evaluate")
        return load(f"ddp_mnist.verbs.{MODULES.get(name, name)}").run(*flags)
    if name in ("-h", "--help"):
        listed = "\n".join(f"    {verb:<10} {sentence}" for verb, sentence in VERBS.items())
        Console(True).print(HELP.format(listed))
    elif name == "--version":
        Console(True).print(f"ddp-mnist {__version__}")
    else:
        raise UsageError(f"{name}: choose from {', '.join(VERBS)}{did_you_mean(name, VERBS)}")
    return 0


def load(module: str) -> ModuleType:
    """Import what brings PyTorch along.

    Objects of modules stay, so looking for garbage among them, now or later, would cost 0.6 s for
    nothing. Raise UsageError in a folder that was removed, where oneMKL would end the process.
    """
    with errors.blame("the working folder", UsageError, "cd to one that exists"):
        Path.cwd()
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # without `program`, Triton would complain of leaks
        gc.enable()


# --- Parsing

NO_FLAGS = "give a file of flags, one a line; a value that begins so is --flag=@x, a path ./@x"


class HelpShown(BaseException):
    """argparse has printed the help, and would call sys.exit()."""


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are UsageErrors that begin with what was typed."""

    def exit(self, *_: Any) -> NoReturn:
        raise HelpShown

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        """Return the words of a line of @FILE, as a shell would; none of a comment."""
        is_comment = arg_line.lstrip().startswith("#")
        return [] if is_comment else with_dashes(shlex.split(arg_line))

    def error(self, message: str) -> NoReturn:
        if isinstance(sys.exception(), OSError):  # of @FILE, which `parse` blames
            raise
        typed = message.removeprefix("argument ")
        if typed == message:  # e.g. that RUN is missing
            typed = f"{self.prog.split()[-1]}: {message}"
        raise UsageError(f"{typed}; see {self.prog} --help")


def parse(name: str, argv: Sequence[str], documented: Any, *groups: type[Flags]) -> dict[str, Any]:
    """Return the typed values, as text, by field name. Raise UsageError for unknown flags.

    What follows an empty line in the docstring of `documented` is shown below the flags: examples.
    """
    parser = Parser(
        prog=f"ddp-mnist {name}",
        usage="%(prog)s [FLAG ...]" if name == "train" else None,
        description=VERBS.get(name),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        fromfile_prefix_chars="@",
    )
    defaults, first = SHARED.get(name, {}), USED_MOST if name == "train" else ()
    found = fields_of(*groups, more=defaults)
    every = {field.name: field for fields in found.values() for field in fields}
    if first:
        most = parser.add_argument_group("the flags that are used most")
        add_flags(most, [every[field] for field in first], defaults)
    for group, fields in found.items():
        section = parser.add_argument_group(group.__name__, group.__doc__) if first else parser
        add_flags(section, [field for field in fields if field.name not in first], defaults)
    _, _, parser.epilog = inspect.cleandoc(documented.__doc__ or "").partition("\n\n")
    parser.add_argument("--debug", action="store_true", help="Show the traceback of an error.")
    words = with_dashes(argv)
    files = " ".join(word for word in words if word.startswith("@"))
    with errors.blame(files, UsageError, NO_FLAGS):
        known, unknown = parser.parse_known_args(words)
    if unknown:
        flags = [word for word in unknown if word.startswith("-")] or unknown
        typed = dict(zip(words, argv, strict=True)).get(flags[0], flags[0]).partition("=")[0]
        if re.match(r"-g[\d,]*$", typed):
            fix = "leave it out, and put CUDA_VISIBLE_DEVICES=0 before the command"
            raise UsageError(f"{typed}: each process takes the GPU of its local rank; {fix}")
        legal = re.findall(r"--[a-z-]+", parser.format_help())
        page = ", and docs/tutorials.md for what other trainers call it" if first else ""
        hint = did_you_mean(typed, legal) or f"; see {parser.prog} --help{page}"
        raise UsageError(f"{typed}: unknown flag or argument{hint}")
    return {field: value for field, value in vars(known).items() if field != "debug"}


def with_dashes(argv: Sequence[str]) -> list[str]:
    """Return the words with `-` for `_` in the names of flags, and --use-mix-precision as ours.

    Tutorials write both.
    """
    end = [*argv, "--"].index("--")
    flags = (re.sub("^--[^=]+", lambda name: name[0].replace("_", "-"), w) for w in argv[:end])
    ours = {"--use-mix-precision": "--mixed-precision=auto"}
    return [*(ours.get(flag, flag) for flag in flags), *argv[end:]]


def parse_verb(name: str, argv: Sequence[str]) -> tuple[Any, ...]:
    """Return the verb's own flags, and those of Distribution if several processes share it."""
    from ddp_mnist.verbs import flags  # whoever only trains may delete that folder

    own: type[Flags] = getattr(flags, name.capitalize())
    if name not in SHARED:
        return (own.from_flags(parse(name, argv, own, own)),)
    typed = parse(name, argv, own, own, Distribution)
    return own.from_flags(typed), Distribution.from_flags(SHARED[name] | typed)


def train_config(argv: Sequence[str]) -> TrainConfig:
    """Return the flags as typed; the preset fills in others."""
    return TrainConfig.from_flags(parse("train", argv, train, RunFlags, Recipe, Distribution))


def launch_of(flags: Distribution, trains: bool = True) -> Launch:
    """Return this process's place. From here on, a launcher's worker ends with its launcher.

    That holds during the import of PyTorch too: seconds, or minutes from a cluster's disk.
    """
    launch = find_launch(flags, trains=trains)
    if launch.child_of_launcher:
        die_with_parent()
    return launch


# --- Verbs implemented here; the last is for the Makefile


def train(argv: list[str]) -> None:
    """Meet the other processes, if any, and train.

    for example:
      ddp-mnist train --epochs 5 --lr 0.005
      torchrun --nproc-per-node 2 -m ddp_mnist train --dataset photos --model own_net:Net
    """
    config = train_config(argv)
    launch = launch_of(config.distribution)
    console = Console(launch.rank == 0 and not config.run.quiet, must_arrive=config.run.dry_run)
    console.print("loading    PyTorch and Accelerate")
    run = load("ddp_mnist.train").train

    def make_mistake(training_run: Any) -> Any:  # --inject is the lab's, and costs others nothing
        return load("ddp_mnist.verbs.verify.mistakes").make_mistake(training_run)

    if launch.world_size > 1:
        console.print(f"joining    {launch.world_size} processes")
    run(config, launch, make_mistake)


def multinode(argv: list[str]) -> int:
    """Run this machine's part of a multi-node run, or rehearse two here:

    FLAGS -- FLAGS of the verb.
    """
    from ddp_mnist.verbs.multinode import Multinode, run

    end = argv.index("--") if "--" in argv else len(argv)
    arguments = argv[end + 1 :]
    own = [word for word in argv[:end] if not word.endswith("=")]  # make was not given these
    try:
        flags = Multinode.from_flags(parse("multinode", own, Multinode, Multinode))
    except UsageError as error:  # the user gave make MACHINE_RANK=0, not --machine-rank 0
        name, _, problem = str(error).removeprefix("--").partition(" ")
        raise UsageError(f"{name.replace('-', '_').upper()}={problem}") from None
    if flags.verb == "train":
        distribution = train_config(arguments).distribution
    else:
        _, distribution = parse_verb("doctor", arguments)
    return run(flags, arguments, distribution.start_timeout or distribution.dist_timeout)
