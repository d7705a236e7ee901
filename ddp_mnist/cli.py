"""The command line: the only place that knows verbs and exit codes.

Heavy imports stand inside the verbs, so that `--help` and a wrong flag answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from ddp_mnist import __version__
from ddp_mnist.config import PRESETS, Distribution, Recipe, Run, TrainConfig
from ddp_mnist.errors import (
    DdpMnistError,
    FailedElsewhere,
    StorageError,
    UsageError,
    did_you_mean,
    one_line,
    printable,
)
from ddp_mnist.flags import Flags, add_flags, flag_fields
from ddp_mnist.run.console import Console, open_what_is_closed, tell, write_stdout

EXIT_CODES = """exit codes: 0 done, 1 check failed, 2 usage or configuration, 3 data, 4 checkpoint,
5 storage, 6 peer lost or time-out, 7 diverged, 130 SIGINT, 143 SIGTERM"""
TRAIN = (Run, Recipe, Distribution)
OF_TRAINING = ("sync_bn", "comm_hook", "compile", "mixed_precision")  # flags of Distribution


class Verb(NamedTuple):
    """A verb beside `train`; both modules are imported when it is typed.

    Attributes:
        sentence: for the help.
        module: the one whose `run` is given the flags.
        flags: the module of its dataclass of flags, which imports no library.
        dist_timeout: the default of that flag, for a verb that several processes share.
    """

    sentence: str
    module: str
    flags: str = "ddp_mnist.verbs.flags"
    dist_timeout: float | None = None


VERBS = {
    "evaluate": Verb(
        "Print exact metrics of a finished run on a split.",
        "ddp_mnist.verbs.evaluate",
        dist_timeout=Distribution.dist_timeout,
    ),
    "predict": Verb("Label image files; one JSON line each.", "ddp_mnist.verbs.predict"),
    "report": Verb(
        "Write one HTML page about runs, which needs no network.", "ddp_mnist.verbs.report"
    ),
    "export": Verb(
        "Write the weights of a run for use elsewhere, with a model card.", "ddp_mnist.verbs.export"
    ),
    "prepare": Verb("Fetch and decode a data set once, into the cache.", "ddp_mnist.verbs.prepare"),
    "doctor": Verb(
        "Accept or reject this machine, or the machines that a launcher joins.",
        "ddp_mnist.doctor.checks",
        "ddp_mnist.doctor.flags",
        dist_timeout=60.0,  # a person waits for the verdict
    ),
    "verify": Verb(
        "Prove here that N processes train as one, resume exactly, count right.",
        "ddp_mnist.verify.proofs",
        "ddp_mnist.verify.flags",
    ),
    "bench": Verb(
        "Measure how fast it is here, as ratios of what runs side by side.",
        "ddp_mnist.bench.benches",
        "ddp_mnist.bench.benches",
    ),
}
IN_TUTORIALS = {  # flags of other trainers
    "--amp": "here it is --mixed-precision fp16",
    "--evaluate": "here it is another command: ddp-mnist evaluate RUN",
    "--opt-level": "here it is --mixed-precision fp16",
    "--dist-url": "here it is --init-method",
    "--dist-backend": "here it is --backend",
    "--fp16": "here it is --mixed-precision fp16",
    "--gpu": "CUDA_VISIBLE_DEVICES chooses; one process for each GPU, by a launcher",
    "--local_rank": "here it is --local-rank",
    "--no-cuda": "here it is --cpu",
    "--num-workers": "none are needed, the images are in memory",
    "--save-model": "leave it out, a run always does",
    "--workers": "none are needed, the images are in memory",
}
HINTS = {"train": IN_TUTORIALS, "verify": {"--plant": "here it is --inject"}}


def program() -> NoReturn:
    """Call `main` in a process of its own, and end without taking apart what it imported.

    With torch that takes a second, in which a launcher or a scheduler waits for nothing.
    """
    open_what_is_closed()
    try:
        main()
    except SystemExit as ended:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(int(ended.code or 0))


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one verb and exit with its code; an expected failure is one line on stderr."""
    # When a peer is lost, torch's store would print a C++ stack for each call; it raises as well.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's starts and stops
    # Matplotlib would log where its cache is to a person who has no home.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a folder's name may be no UTF-8
    try:
        code = run_verb(list(sys.argv[1:] if argv is None else argv)) or 0
    except DdpMnistError as error:
        code = error.code
        if isinstance(error, FailedElsewhere):
            if local_rank() == "0" != os.environ.get("RANK", "0"):  # on another machine than rank 0
                tell(f"ended      {printable(str(error))}")
        elif speaks_for_its_machine(error):
            tell(one_line(error))
    except KeyboardInterrupt:
        code = 130
        if local_rank() == "0":
            tell("ddp-mnist: interrupted (code 130)")
    except SystemExit as ended:  # argparse's, after --help
        code = int(ended.code or 0)
    try:
        write_stdout()
    except StorageError as error:
        if not code:  # else the verb's own error counts
            code = error.code
            tell(one_line(error))
    sys.exit(code)


def run_verb(argv: list[str]) -> int | None:
    """Run the verb that `argv` begins with. Return its exit code; None is 0."""
    # torch.distributed.launch puts --local-rank=N first; LOCAL_RANK says the same.
    while rank := re.match(r"--local[-_]rank(=| )\d+( |$)", " ".join(argv[:2])):
        argv = argv[1 if rank[1] == "=" else 2 :]
    if not argv or argv[0] in ("-h", "--help", "--version"):
        top_parser().parse_args(argv or ["--help"])
    name, rest = argv[0], argv[1:]
    try:
        if name in OWN_FUNCTIONS:
            return OWN_FUNCTIONS[name](rest)
        if name in VERBS:
            flags = parse_verb(name, rest)
            return importlib.import_module(VERBS[name].module).run(*flags)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("ddp_mnist."):
            raise
        raise UsageError(f"{name}: {error.name} was removed; restore it from git") from error
    if name.startswith("-"):
        raise UsageError(f"{name}: comes after the verb; see ddp-mnist --help")
    legal = ["train", *VERBS]
    raise UsageError(f"{name}: choose from {', '.join(legal)}{did_you_mean(name, legal)}")


def speaks_for_its_machine(error: DdpMnistError) -> bool:
    """Return whether this rank prints the error, so that it is seen once and not once per rank.

    All ranks of a launcher meet the same wrong flag. Local rank 0 prints it; the launcher then ends
    the others, which hold their line back for as long as that takes. One that is still alive met
    something that local rank 0 did not, and prints it.
    """
    if not error.agreed and local_rank() != "0":
        time.sleep(3)
    return True


def local_rank() -> str:
    return os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"


# --- Parsing


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are UsageErrors that begin with what was typed."""

    def error(self, message: str) -> NoReturn:
        if match := re.fullmatch(r"argument ([^:]+): (.*)", message):
            problem = match[2].replace("expected one argument", "needs a value")
            problem = re.sub("ignored explicit argument.*", "takes no value", problem)
            message = f"{match[1]}: {problem}"
        elif match := re.fullmatch(r"the following arguments are required: (.*)", message):
            message = f"{self.prog.split()[-1]}: {match[1]} is missing"
        raise UsageError(f"{message}; see {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse what is unknown, with what would have been legal."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flags = [word for word in unknown if word.startswith("-")] or unknown
            typed = flags[0].partition("=")[0]
            legal = re.findall(r"--[a-z-]+", self.format_usage())
            hint = did_you_mean(typed, legal) or f"; see {self.prog} --help"
            if known_elsewhere := HINTS.get(self.prog.split()[-1], {}).get(typed):
                hint = f"; {known_elsewhere}"
            raise UsageError(f"{typed}: there is no such flag or argument here{hint}")
        return known, unknown


def top_parser() -> Parser:
    sentences = {"train": train.__doc__} | {name: verb.sentence for name, verb in VERBS.items()}
    listed = "\n".join(f"    {name:<10} {sentence}" for name, sentence in sentences.items())
    parser = Parser(
        prog="ddp-mnist",
        usage="ddp-mnist [-h] [--version] VERB ...",
        description=f"Trains MNIST with DDP on one process, many, or many machines.\n\n{listed}",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ddp-mnist {__version__}")
    return parser


def parse(name: str, argv: Sequence[str], sentence: str, *groups: type[Flags]) -> dict[str, Any]:
    """Return the values that were typed, by field name.

    Raises:
        UsageError: a flag is unknown, or its value is of another kind.
    """
    parser = Parser(
        prog=f"ddp-mnist {name}",
        description=sentence,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for group in groups:
        section: argparse._ActionsContainer = parser
        if group in TRAIN:
            section = parser.add_argument_group(group.__name__, group.__doc__)
        add_flags(section, group, without=() if Recipe in groups else OF_TRAINING)
        for field in flag_fields(group):
            if isinstance(choices := field.metadata["choices"], Mapping):
                parser.epilog = "\n".join(f"{word:<11} {what}" for word, what in choices.items())
    return vars(parser.parse_args(argv))


def parse_verb(name: str, argv: Sequence[str]) -> tuple[Any, ...]:
    """Return the verb's own flags, and those of Distribution if several processes share it."""
    verb = VERBS[name]
    own: type[Flags] = getattr(importlib.import_module(verb.flags), name.capitalize())
    if verb.dist_timeout is None:
        return (own.of(parse(name, argv, verb.sentence, own)),)
    typed = parse(name, argv, verb.sentence, own, Distribution)
    return own.of(typed), Distribution.of({"dist_timeout": verb.dist_timeout} | typed)


def parse_train(argv: Sequence[str]) -> dict[str, Any]:
    return parse("train", argv, train.__doc__ or "", *TRAIN)


def train_config(argv: Sequence[str]) -> TrainConfig:
    """Return what was typed, and what the preset says of the rest of a run that begins."""
    typed = parse_train(argv)
    given = {**PRESETS[Recipe.of(typed).preset].recipe, **typed}
    return TrainConfig(
        Run.of(given), Recipe.of(given), Distribution.of(given), typed=frozenset(typed)
    )


# --- Verbs with functions of their own


def train(argv: list[str]) -> None:
    """Train, validate, test once, and write the run folder."""
    config = train_config(argv)
    from ddp_mnist.cluster.launch import find_launch

    launch = find_launch(config.distribution)
    console = Console(launch.rank == 0 and not config.run.quiet, must_arrive=config.run.dry_run)
    console.print("loading    PyTorch and Accelerate")
    from ddp_mnist.train import train as run

    if launch.world_size > 1:
        console.print(f"meeting    {launch.world_size} processes")
    run(config, launch)


def multinode(argv: list[str]) -> int:
    """Run this machine's part of several, or rehearse two here: FLAGS -- FLAGS of the verb."""
    from ddp_mnist.verbs.flags import Multinode

    end = argv.index("--") if "--" in argv else len(argv)
    own, given = argv[:end], argv[end + 1 :]
    own = [word for word in own if not word.endswith("=")]  # a variable that make was not given
    flags = Multinode.of(parse("multinode", own, multinode.__doc__ or "", Multinode))
    from ddp_mnist.cluster import nodes
    from ddp_mnist.verbs.multinode import run

    if flags.verb == "train":
        return run(flags, given, train_config(given).distribution.dist_timeout, nodes.meet)
    doctor_flags, distribution = parse_verb("doctor", given)
    from ddp_mnist.doctor.checks import run_preflight

    check = functools.partial(run_preflight, flags=doctor_flags)
    return run(flags, given, distribution.dist_timeout, check)


def restart(argv: list[str]) -> int:
    """Run a training command again when it lost a process: N -- COMMAND ... train FLAGS."""
    if argv[1:2] == ["--"] and not argv[0].isdecimal():
        raise UsageError(f"RESTARTS={argv[0]}: must be a whole number")
    if len(argv) < 3 or argv[1] != "--" or "train" not in argv:
        raise UsageError("restart: needs N -- COMMAND ... train FLAGS")
    flags = argv[argv.index("train") + 1 :]
    train_config(flags)  # refuses wrong ones once, and not in each process
    from ddp_mnist.verbs.restart import restart as run

    return run(int(argv[0]), argv[2:], parse_train(flags))


# The last two are what the Makefile calls.
OWN_FUNCTIONS: dict[str, Callable[[list[str]], int | None]] = {
    "train": train,
    "multinode": multinode,
    "restart": restart,
}
