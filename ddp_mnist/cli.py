"""The command line: the only place that knows verbs and exit codes.

Heavy imports stand inside the verbs, so that `--help` and a wrong flag answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

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
from ddp_mnist.run.console import Console, flush_stdout, open_what_is_closed, tell

EXIT_CODES = """exit codes: 0 done, 1 check failed, 2 usage or configuration, 3 data, 4 checkpoint,
5 storage, 6 peer lost or time-out, 7 diverged, 130 SIGINT, 143 SIGTERM"""
TRAIN = (Run, Recipe, Distribution)
OF_TRAINING = ("sync_bn", "comm_hook", "compile", "mixed_precision")  # flags of Distribution
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
    # When a peer is gone, torch's store would print a C++ stack for each call; it raises as well.
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
        flush_stdout()
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
    verb = argv[0]
    if verb.startswith("-"):
        raise UsageError(f"{verb}: comes after the verb; see ddp-mnist --help")
    if run := (VERBS | HIDDEN_VERBS).get(verb):
        try:
            return run(argv[1:])
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if not missing.startswith("ddp_mnist."):
                raise
            raise UsageError(f"{verb}: {missing} was removed; restore it from git") from error
    raise UsageError(f"{verb}: choose from {', '.join(VERBS)}{did_you_mean(verb, VERBS)}")


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


make_parser = functools.partial(
    Parser, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
)


def top_parser() -> Parser:
    listed = "\n".join(f"    {name:<10} {verb.__doc__}" for name, verb in VERBS.items())
    parser = make_parser(
        prog="ddp-mnist",
        usage="ddp-mnist [-h] [--version] VERB ...",
        description=f"Trains MNIST with DDP on one process, many, or many machines.\n\n{listed}",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"ddp-mnist {__version__}")
    return parser


def parse(
    verb: str, argv: Sequence[str], *groups: type[Flags], without: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the values that were typed, by field name.

    Raises:
        UsageError: a flag is unknown, or its value is of another kind.
    """
    parser = make_parser(prog=f"ddp-mnist {verb}", description=(VERBS | HIDDEN_VERBS)[verb].__doc__)
    for group in groups:
        titled = group in TRAIN
        add_flags(
            parser.add_argument_group(group.__name__, group.__doc__) if titled else parser,
            group,
            without,
        )
        for field in flag_fields(group):
            if isinstance(choices := field.metadata["choices"], Mapping):
                parser.epilog = "\n".join(f"{name:<11} {what}" for name, what in choices.items())
    return vars(parser.parse_args(argv))


def train_config(argv: Sequence[str]) -> TrainConfig:
    """Return what was typed, and what the preset says of the rest of a run that begins."""
    typed = parse("train", argv, *TRAIN)
    given = {**PRESETS.get(typed.get("preset", ""), {}), **typed}
    return TrainConfig(
        Run.of(given), Recipe.of(given), Distribution.of(given), typed=frozenset(typed)
    )


# --- Verbs


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


def evaluate(argv: list[str]) -> None:
    """Print exact metrics of a finished run on a split."""
    from ddp_mnist.verbs.flags import Evaluate

    typed = parse("evaluate", argv, Evaluate, Distribution, without=OF_TRAINING)
    flags, distribution = Evaluate.of(typed), Distribution.of(typed)
    from ddp_mnist.verbs.evaluate import run

    run(flags, distribution)


def predict(argv: list[str]) -> None:
    """Label image files; one JSON line each."""
    from ddp_mnist.verbs.flags import Predict

    flags = Predict.of(parse("predict", argv, Predict))
    from ddp_mnist.verbs.predict import run

    run(flags)


def report(argv: list[str]) -> None:
    """Write one HTML page about runs, which needs no network."""
    from ddp_mnist.verbs.flags import Report

    flags = Report.of(parse("report", argv, Report))
    from ddp_mnist.verbs.report import run

    run(flags)


def export(argv: list[str]) -> None:
    """Write the weights of a run for use elsewhere, with a model card."""
    from ddp_mnist.verbs.flags import Export

    flags = Export.of(parse("export", argv, Export))
    from ddp_mnist.verbs.export import run

    run(flags)


def prepare(argv: list[str]) -> None:
    """Fetch and decode a data set once, into the cache."""
    from ddp_mnist.verbs.flags import Prepare

    flags = Prepare.of(parse("prepare", argv, Prepare))
    from ddp_mnist.verbs.prepare import run

    run(flags)


def parse_doctor(argv: list[str]) -> tuple[Any, Distribution]:
    """Return its own flags and those of Distribution."""
    from ddp_mnist.doctor.flags import TIMEOUT_S, Doctor

    typed = parse("doctor", argv, Doctor, Distribution, without=OF_TRAINING)
    return Doctor.of(typed), Distribution.of({"dist_timeout": TIMEOUT_S, **typed})


def doctor(argv: list[str]) -> None:
    """Accept or reject this machine, or the machines that a launcher joins."""
    flags, distribution = parse_doctor(argv)
    from ddp_mnist.doctor.checks import run

    run(flags, distribution)


def verify(argv: list[str]) -> None:
    """Prove here that N processes train as one, resume exactly, count right."""
    from ddp_mnist.verify.flags import Verify

    flags = Verify.of(parse("verify", argv, Verify))
    from ddp_mnist.verify.proofs import run

    run(flags)


def bench(argv: list[str]) -> None:
    """Measure how fast it is here, as ratios of what runs side by side."""
    from ddp_mnist.bench.benches import Bench, run

    run(Bench.of(parse("bench", argv, Bench)))


# --- For the Makefile


def multinode(argv: list[str]) -> int:
    """Run this machine's part of several, or rehearse two here: FLAGS -- FLAGS of the verb."""
    from ddp_mnist.verbs.flags import Multinode

    end = argv.index("--") if "--" in argv else len(argv)
    own, given = argv[:end], argv[end + 1 :]
    own = [word for word in own if not word.endswith("=")]  # a variable that was not given to make
    flags = Multinode.of(parse("multinode", own, Multinode))
    from ddp_mnist.cluster.nodes import meet
    from ddp_mnist.verbs.multinode import run

    if flags.verb == "train":
        timeout_s = train_config(given).distribution.dist_timeout
        return run(flags, given, timeout_s, meet)
    doctor_flags, distribution = parse_doctor(given)

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

    return run(int(argv[0]), argv[2:], parse("train", flags, *TRAIN))


VERBS: dict[str, Callable[[list[str]], int | None]] = {
    "train": train,
    "evaluate": evaluate,
    "predict": predict,
    "report": report,
    "export": export,
    "prepare": prepare,
    "doctor": doctor,
    "verify": verify,
    "bench": bench,
}
HIDDEN_VERBS: dict[str, Callable[[list[str]], int | None]] = {
    "multinode": multinode,
    "restart": restart,
}
