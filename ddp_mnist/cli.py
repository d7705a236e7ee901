"""The command line: the only place that knows flags, verbs and exit codes.

Heavy imports stand inside the verbs, so that `--help` and a wrong flag answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import logging
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ddp_mnist import __version__
from ddp_mnist.config import NETS, PRESETS, Distribution, Recipe, Run, TrainConfig
from ddp_mnist.errors import (
    CheckFailed,
    DataError,
    DdpMnistError,
    FailedElsewhere,
    StorageError,
    UsageError,
    did_you_mean,
    one_line,
    printable,
)
from ddp_mnist.flags import Flags, describe_bounds, flag_name, value_type
from ddp_mnist.run.console import Console, flush_stdout, open_what_is_closed, tell
from ddp_mnist.verify.faults import FAULTS

EXIT_CODES = """exit codes: 0 done, 1 check failed, 2 usage or configuration, 3 data, 4 checkpoint,
5 storage, 6 peer lost or time-out, 7 diverged, 130 SIGINT, 143 SIGTERM"""
BENCHES = {
    "feed": "train.py's loop against the same step on one batch that lies ready (a minute)",
    "loop": "train.py's loop against plain_ddp.py's (a minute)",
    "evaluation": "exact metrics of a split, against training on as many images (a minute)",
    "scaling": "1 to N processes against as many independent ones, and where time goes (minutes)",
    "strategies": "one process, DataParallel and DDP with several hooks (minutes)",
    "startup": "command to first optimizer step, against a ten-line program's (minutes)",
    "memory": "a process's private memory at its highest, against that program's (minutes)",
}
EXPORTS = ("safetensors", "torch", "onnx")
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
DOCTOR_TIMEOUT_S = 60.0  # a person waits for the verdict
MATRIX_COLUMNS = 80  # of evaluate's table with the classes' names, before there are numbers instead
RUN, CACHE_DIR = "run folder, e.g. runs/latest", "folder of decoded data sets"


def program() -> NoReturn:
    """`main` for a process of its own, which ends without taking apart what it imported.

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
    """Runs one verb and exits with its code; an expected failure is one line on stderr."""
    # When a peer is gone, torch's store would print a C++ stack for each call; it raises as well.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's starts and stops
    # Who has no home would be told on stderr where its cache is.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a folder's name may be no UTF-8
    code = 0
    try:
        try:
            run_verb(list(sys.argv[1:] if argv is None else argv))
        finally:
            flush_stdout()  # what argparse prints waits in the buffer
    except DdpMnistError as error:
        code = error.code
        if speaks_for_its_machine(error):
            tell(one_line(error))
    except KeyboardInterrupt:
        code = 130
        if local_rank() == "0":
            tell("ddp-mnist: interrupted (code 130)")
    sys.exit(code)


def run_verb(argv: list[str]) -> None:
    # torch.distributed.launch puts --local-rank=N first; LOCAL_RANK says the same.
    while rank := re.match(r"--local[-_]rank(=| )\d+( |$)", " ".join(argv[:2])):
        argv = argv[1 if rank[1] == "=" else 2 :]
    parser = make_parser()
    if not argv:
        parser.print_help()
        return
    if argv[0].startswith("-") and argv[0] not in ("-h", "--help", "--version"):
        raise UsageError(f"{argv[0]}: comes after the verb; see ddp-mnist --help")
    arguments = parser.parse_args(argv)
    arguments.verb(arguments)


def speaks_for_its_machine(error: DdpMnistError) -> bool:
    """Whether this rank prints the error, so that it is seen once and not once per rank.

    All ranks of a launcher meet the same wrong flag. Local rank 0 tells it; the launcher then ends
    the others, which hold their line back for as long as that takes. One that is still alive met
    something that local rank 0 did not, and tells it.
    """
    if isinstance(error, FailedElsewhere):
        return False
    if not error.agreed and local_rank() != "0":
        time.sleep(3)
    return True


def local_rank() -> str:
    return os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"


# --- Parsing


class Parser(argparse.ArgumentParser):
    """argparse whose errors are UsageErrors that begin with what was typed."""

    def error(self, message: str) -> NoReturn:
        if match := re.fullmatch(r"argument ([^:]+): (.*)", message):
            problem = match[2].replace("expected one argument", "needs a value")
            problem = re.sub("ignored explicit argument.*", "takes no value", problem)
            message = f"{match[1]}: {problem}"
        elif match := re.fullmatch(r"the following arguments are required: (.*)", message):
            message = f"{self.prog.split()[-1]}: {match[1]} is missing"
        raise UsageError(f"{message}; see {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """What is unknown is refused by the verb, which knows what would have been legal."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flags = [word for word in unknown if word.startswith("-")] or unknown
            typed = flags[0].partition("=")[0]
            legal = re.findall(r"--[a-z-]+", self.format_usage())
            hint = did_you_mean(typed, legal) or f"; see {self.prog} --help"
            if self.prog.endswith(" train") and typed in IN_TUTORIALS:
                hint = f"; {IN_TUTORIALS[typed]}"
            raise UsageError(f"{typed}: there is no such flag or argument here{hint}")
        return known, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            name = "".join(f"{option} " for option in action.option_strings)
            legal = list(action.choices)
            raise UsageError(
                f"{name}{value}: choose from {', '.join(legal)}{did_you_mean(value, legal)}"
            )


def make_parser() -> Parser:
    parser = Parser(
        prog="ddp-mnist",
        description="Trains MNIST with DDP on one process, many, or many machines.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ddp-mnist {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", parser_class=Parser, required=True)

    def add_verb(name: str, does: Callable[[argparse.Namespace], None], help: str) -> Parser:
        verb = verbs.add_parser(name, help=help, description=help, allow_abbrev=False)
        verb.set_defaults(verb=does)
        return verb

    verb = add_verb("train", train, "Train, validate, test once, and write the run folder.")
    for group in (Run, Recipe, Distribution):
        add_flags(verb, group)

    verb = add_verb("evaluate", evaluate, "Exact metrics of a finished run on a split.")
    verb.add_argument("run", metavar="RUN", type=text("RUN"), help=RUN)
    verb.add_argument(
        "--split", default="test", choices=("test", "validation", "train"), help="[test]"
    )
    verb.add_argument("--dataset", type=text("--dataset"), help="another data set than the run's")
    verb.add_argument("--cache-dir", type=text("--cache-dir"), help=CACHE_DIR)
    verb.add_argument(
        "--batch-size",
        type=number("--batch-size", int, "at least 1"),
        metavar="N",
        help="images per process and pass; changes no result",
    )
    verb.add_argument("--json", action="store_true", help="one JSON object on stdout")
    add_flags(verb, Distribution, without=("sync_bn", "comm_hook", "compile", "mixed_precision"))

    verb = add_verb("predict", predict, "Label image files; one JSON line each.")
    verb.add_argument("run", metavar="RUN", type=text("RUN"), help=RUN)
    verb.add_argument(
        "images",
        metavar="IMAGE",
        type=text("IMAGE"),
        nargs="+",
        help="image file, folder of images, or - for one on stdin",
    )
    verb.add_argument(
        "--show", type=text("--show"), metavar="FILE", help="a PNG of what the model saw, and said"
    )
    verb.add_argument(
        "--digit-photos",
        action=argparse.BooleanOptionalAction,
        help="take other files than 28x28 grey ones for photos of digits, and cut these out"
        " [if trained on MNIST or the like]",
    )

    verb = add_verb("report", report, "One HTML page about runs, which needs no network.")
    verb.add_argument("runs", metavar="RUN", type=text("RUN"), nargs="+", help=RUN)
    verb.add_argument(
        "--out",
        type=text("--out"),
        metavar="FILE",
        help="[RUN/report.html; of several runs, beside the first]",
    )
    verb.add_argument("--png", action="store_true", help="each curve as a PNG too, beside it")
    verb.add_argument("--dataset", type=text("--dataset"), help="where the runs' images are now")
    verb.add_argument("--cache-dir", type=text("--cache-dir"), help=CACHE_DIR)

    verb = add_verb("export", export, "The weights of a run for use elsewhere, with a model card.")
    verb.add_argument("run", metavar="RUN", type=text("RUN"), help=RUN)
    verb.add_argument(
        "--format",
        type=text("--format"),
        default="safetensors,torch",
        metavar="A,B",
        help="safetensors, torch (torch.export) or onnx, several with commas [safetensors,torch]",
    )
    verb.add_argument("--out", type=text("--out"), metavar="FOLDER", help="[RUN/export]")

    verb = add_verb("prepare", prepare, "Fetch and decode a data set once, into the cache.")
    verb.add_argument(
        "--dataset", type=text("--dataset"), default="mnist", help="as for train [mnist]"
    )
    verb.add_argument("--cache-dir", type=text("--cache-dir"), help=CACHE_DIR)
    verb.add_argument("--refresh", action="store_true", help="anew, although it is cached")

    verb = add_verb(
        "doctor", doctor, "Accept or reject this machine, or the machines that a launcher joins."
    )
    verb.add_argument(
        "--processes",
        type=at_least(2, "--processes"),
        metavar="N",
        help="to start on this machine, without a launcher [one per GPU, else 2]",
    )
    verb.add_argument(
        "--minutes",
        type=number("--minutes", float, "of at least 0"),
        default=0.0,
        metavar="X",
        help="burn-in: repeat collectives and training for so long [0]",
    )
    verb.add_argument("--dataset", type=text("--dataset"), default="mnist", help="[mnist]")
    verb.add_argument("--cache-dir", type=text("--cache-dir"), help=CACHE_DIR)
    verb.add_argument(
        "--run-dir", type=text("--run-dir"), default="runs", help="where runs would be made [runs]"
    )
    verb.add_argument("--json", action="store_true", help="one JSON object on stdout")
    verb.add_argument("--save", type=text("--save"), metavar="FILE", help="the same into a file")
    verb.add_argument(
        "--against",
        type=text("--against"),
        metavar="FILE",
        help="compare speeds with what another box of the same type saved",
    )
    verb.add_argument(
        "--tolerance",
        type=number("--tolerance", float, "of at least 0"),
        default=0.5,
        metavar="X",
        help="share by which a speed may be worse than there [0.5]",
    )
    add_flags(verb, Distribution, without=("sync_bn", "comm_hook", "compile", "mixed_precision"))

    verb = add_verb(
        "verify", verify, "Prove here that N processes train as one, resume exactly, count right."
    )
    verb.add_argument(
        "--processes",
        type=at_least(2, "--processes"),
        default=3,
        metavar="N",
        help="2, 3 ... N processes are compared with one, if they divide 24 [3]",
    )
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = "\n".join(f"{name:<11} {fault.sentence}" for name, fault in FAULTS.items())
    verb.add_argument(
        "--model", default="cnn", choices=NETS, metavar="NET", help="the net to train [cnn]"
    )
    verb.add_argument(
        "--inject", choices=FAULTS, help="a fault to be caught, one of those below; exit code 1"
    )
    verb.add_argument(
        "--save", type=text("--save"), default="verify.json", help="[verify.json]", metavar="FILE"
    )

    verb = add_verb("bench", bench, "How fast it is here, as ratios of what runs side by side.")
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = "\n".join(f"{what:<11} {sentence}" for what, sentence in BENCHES.items())
    verb.add_argument("what", metavar="WHAT", choices=BENCHES, help="one of those below")
    verb.add_argument("--dataset", type=text("--dataset"), default="mnist", help="[mnist]")
    verb.add_argument("--cache-dir", type=text("--cache-dir"), help=CACHE_DIR)
    verb.add_argument(
        "--processes",
        type=at_least(1, "--processes"),
        help="one per GPU, else with one CPU thread [GPUs, else 2; loop and strategies:"
        " at least 2]",
    )
    verb.add_argument("--repeats", type=at_least(5, "--repeats"), help="rounds [11; memory: 5]")
    verb.add_argument("--check", action="store_true", help="exit code 1 where a goal is missed")
    return parser


def add_flags(parser: Parser, group: type[Flags], without: tuple[str, ...] = ()) -> None:
    """One help group per dataclass, one flag per field."""
    section = parser.add_argument_group(group.__name__, (group.__doc__ or "").strip())
    for field in dataclasses.fields(group):  # type: ignore[arg-type]
        if field.name in without:
            continue
        kind, sentence = value_type(group, field), field.metadata["help"]
        if kind is bool:
            action = argparse.BooleanOptionalAction if field.name == "augment" else "store_true"
            section.add_argument(
                flag_name(field), action=action, default=argparse.SUPPRESS, help=sentence
            )
            continue
        default = "" if field.default is None else f" [{field.default}]"
        name, legal = flag_name(field), describe_bounds(field.metadata["bounds"])
        section.add_argument(
            name,
            type=text(name) if kind is str else number(name, kind, legal),
            default=argparse.SUPPRESS,  # what was typed is there, and nothing else
            metavar=metavar(field, kind),
            help=(sentence + default).replace("%", "%%"),
        )


def metavar(field: dataclasses.Field[Any], kind: type) -> str:
    choices = field.metadata["choices"]
    return "{" + ",".join(choices) + "}" if choices else {int: "N", float: "X", str: "TEXT"}[kind]


def text(name: str) -> Callable[[str], str]:
    """A parser for argparse: any text but an empty one."""

    def parse(typed: str) -> str:
        if not typed:
            raise UsageError(f"{name}: the value is empty; give one or leave it out")
        return typed

    return parse


def number(name: str, kind: type, legal: str) -> Callable[[str], float]:
    """A parser for argparse: a whole number, or a finite one, with the legal ones in the error."""
    what = "whole" if kind is int else "finite"

    def parse(typed: str) -> float:
        with contextlib.suppress(ValueError, OverflowError):
            if math.isfinite(value := kind(typed)):
                return value
        shown = typed[:60] or "''"
        raise UsageError(f"{name} {shown}: must be a {what} number {legal}")

    return parse


def at_least(least: int, name: str) -> Callable[[str], float]:
    """A parser for argparse: a whole number that is not less."""
    whole = number(name, int, f"at least {least}")

    def parse(typed: str) -> float:
        if (value := whole(typed)) < least:
            raise UsageError(f"{name} {typed}: must be at least {least}")
        return value

    return parse


def train_config(arguments: argparse.Namespace) -> TrainConfig:
    """What was typed, and what the preset says of the rest of a run that begins."""
    typed = vars(arguments)
    given = {**PRESETS.get(typed.get("preset", ""), {}), **typed}
    return TrainConfig(
        from_arguments(Run, given),
        from_arguments(Recipe, given),
        from_arguments(Distribution, given),
        typed=frozenset(typed) - {"verb"},
    )


def from_arguments(group: type[Flags], given: dict[str, Any]) -> Any:
    """The dataclass with the values given. Raises UsageError for an illegal one."""
    names = [f.name for f in dataclasses.fields(group)]  # type: ignore[arg-type]
    return group(**{name: given[name] for name in names if name in given})


# --- Verbs


def train(arguments: argparse.Namespace) -> None:
    config = train_config(arguments)
    from ddp_mnist.cluster.launch import find_launch

    launch = find_launch(config.distribution)
    console = Console(launch.rank == 0 and not config.run.quiet, must_arrive=config.run.dry_run)
    console.print("loading    PyTorch and Accelerate")
    from ddp_mnist.train import train as run

    if launch.world_size > 1:
        console.print(f"meeting    {launch.world_size} processes")

    run(config, launch)


def evaluate(arguments: argparse.Namespace) -> None:
    distribution = from_arguments(Distribution, vars(arguments))
    from ddp_mnist.cluster.launch import find_launch

    launch = find_launch(distribution)
    from ddp_mnist.verbs.evaluate import evaluate_run

    metrics = evaluate_run(
        arguments.run,
        arguments.split,
        distribution,
        launch,
        dataset=arguments.dataset,
        cache_dir=arguments.cache_dir,
        per_process=arguments.batch_size,
    )
    if metrics is not None:
        Console(True).print(json.dumps(metrics) if arguments.json else metrics_table(metrics))


def metrics_table(metrics: dict[str, Any]) -> str:
    """Accuracy, loss and confusion matrix; where names are too wide, columns are numbers."""
    names = [printable(name) for name in metrics["classes"]]
    counts = [f"{n}" for row in metrics["confusion"] for n in row]
    width = max(5, *map(len, names), *map(len, counts))
    columns, taken_for = names, "what they were taken for"
    if (width + 1) * len(names) + max(map(len, names)) > MATRIX_COLUMNS:
        columns = [str(number) for number in range(len(names))]
        names = [f"{number} {name}" for number, name in enumerate(names)]
        taken_for += ", by number"
        width = max(5, *map(len, columns), *map(len, counts))
    first = max(8, *map(len, names))
    lines = [
        f"{metrics['split']} split of {printable(metrics['dataset']['name'])}:"
        f" {metrics['count']:,} images",
        f"accuracy {metrics['accuracy']:.4f}   loss {metrics['loss']:.4f}",
        f"rows: what the images are; columns: {taken_for}",
        f"{'class':<{first}} accuracy   " + " ".join(f"{name:>{width}}" for name in columns),
    ]
    for name, accuracy, row in zip(
        names, metrics["class_accuracy"], metrics["confusion"], strict=True
    ):
        shown = "-" if accuracy is None else f"{accuracy:.4f}"
        lines.append(f"{name:<{first}} {shown:>8}   " + " ".join(f"{n:>{width}}" for n in row))
    return "\n".join(lines)


def predict(arguments: argparse.Namespace) -> None:
    picture = a_png("--show", arguments.show)
    from ddp_mnist.verbs.predict import draw
    from ddp_mnist.verbs.predict import predict as label

    console, answers, unread = Console(True), [], None
    try:
        found = label(arguments.run, arguments.images, arguments.digit_photos)
        for line, seen in found:
            console.print(json.dumps(line))
            if not (console.verbose or picture):
                return  # nobody reads the rest
            answers += [(line, seen)] if picture and seen is not None else []
    except DataError as error:
        unread = error
    if picture and answers:
        draw(answers, picture)
    if unread:
        raise unread


def a_png(flag: str, file: str | None) -> Path | None:
    """Where a picture is to be written; see `place_to_save`."""
    return place_to_save(file, flag, ".png")


def report(arguments: argparse.Namespace) -> None:
    out = place_to_save(arguments.out, "--out")
    from ddp_mnist.verbs.report import report as write

    console = Console(True)
    console.print("reading    the runs, and asking each model for its mistakes")
    for path in write(
        arguments.runs,
        str(out) if out else None,
        png=arguments.png,
        dataset=arguments.dataset,
        cache_dir=arguments.cache_dir,
    ):
        console.print(f"written to {path}")


def export(arguments: argparse.Namespace) -> None:
    formats = list(dict.fromkeys(name.strip() for name in arguments.format.split(",")))
    for name in formats:
        if name not in EXPORTS:
            hint = did_you_mean(name, EXPORTS)
            raise UsageError(f"--format {name}: choose from {', '.join(EXPORTS)}{hint}")
    from ddp_mnist.verbs.export import export as write

    console = Console(True)
    folder = write(arguments.run, formats, arguments.out, console.print)
    console.print(f"written to {folder}")
    console.print(f"to the Hub: hf upload YOUR_NAME/{Path(arguments.run).resolve().name} {folder}")


def prepare(arguments: argparse.Namespace) -> None:
    from ddp_mnist.data import cache

    console = Console(True)
    name, notes = cache.choose(arguments.dataset, arguments.cache_dir, console.print)
    images = cache.load(name, arguments.cache_dir, refresh=arguments.refresh, say=console.print)
    for note in [*notes, *images.warnings, *images.notes]:
        console.print(note)
    console.print(
        f"{images.name}: {len(images.train_labels):,} train and {len(images.test_labels):,} test"
        f" images of {len(images.classes)} classes in {cache.cache_folder(arguments.cache_dir)}"
    )
    console.print(f"digest {images.digest}")


def doctor(arguments: argparse.Namespace) -> None:
    for name in ("minutes", "tolerance"):
        if (value := getattr(arguments, name)) < 0:
            raise UsageError(f"--{name} {value:g}: must be at least 0")
    given = {"dist_timeout": DOCTOR_TIMEOUT_S, **vars(arguments)}
    distribution = from_arguments(Distribution, given)
    from ddp_mnist.cluster.launch import find_launch

    launch = find_launch(distribution)
    if distribution.cpu:
        from ddp_mnist.cluster.hardware import hide_gpus

        hide_gpus()
    is_rank0 = launch.rank == 0  # the files are on its machine
    save = place_to_save(arguments.save if is_rank0 else None)
    compared_with = saved_by_doctor(arguments.against if is_rank0 else None)
    from ddp_mnist.data.sources import find_source
    from ddp_mnist.doctor import examination
    from ddp_mnist.doctor.compare import against
    from ddp_mnist.verify.results import failure_summary

    dataset = "mnist" if arguments.dataset == "auto" else arguments.dataset
    find_source(dataset)  # a name that is none is told before anything else
    from ddp_mnist.doctor.machine import Options

    console = Console(is_rank0 and not arguments.json)
    options = Options(
        dataset=dataset,
        cache_dir=arguments.cache_dir,
        run_dir=arguments.run_dir,
        processes=arguments.processes or examination.default_processes(),
    )
    verbose = not arguments.json
    findings = examination.examine(
        distribution, launch, options, arguments.minutes, verbose=verbose
    )
    processes = launch.world_size if launch.world_size > 1 else options.processes
    if compared_with:
        compared = against(findings, compared_with, arguments.tolerance, processes)
        findings += compared
        for finding in compared:
            console.print(str(finding))
    verdict = examination.describe(findings, processes)
    if save:
        write_json(save, verdict)
    Console(is_rank0 and arguments.json).print(json.dumps(verdict))
    console.print(f"verdict: {verdict['verdict']}")
    if wrong := failure_summary("doctor", findings):
        raise CheckFailed(wrong) if is_rank0 else FailedElsewhere(wrong, CheckFailed.code)


def saved_by_doctor(file: str | None) -> dict[str, Any] | None:
    """What --save wrote there; read before minutes are spent on examining."""
    if file is None:
        return None
    try:
        saved = json.loads(Path(file).read_text(encoding="utf-8"))
        for finding in saved["findings"]:
            {name: float(value) for name, value in finding["figures"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or "not from doctor --save"
        raise UsageError(f"--against {file}: cannot be read ({reason}); name another") from error
    return saved


def place_to_save(file: str | None, flag: str = "--save", ending: str = "") -> Path | None:
    """Checked before minutes are spent on what is to be saved.

    Raises:
        UsageError: it is no place for a file; a device is none either, it would be replaced.
        StorageError: nothing can be written there.
    """
    if file is None:
        return None
    path = Path(file)
    try:
        there = path.absolute().parent.is_dir() and (path.is_file() or not path.exists())
        if not there or not path.name.endswith(ending):
            raise UsageError(
                f"{flag} {path}: must be a {ending or 'file'} in a folder that is there"
            )
        # Tried, as os.access knows nothing of a full disk, and lets root write anywhere.
        with tempfile.TemporaryFile(dir=path.absolute().parent, buffering=0) as probe:
            probe.write(bytes(4096))
    except OSError as error:
        raise cannot_be_saved(flag, path, error) from error
    return path


def cannot_be_saved(flag: str, path: Path, error: OSError) -> StorageError:
    return StorageError(f"{flag} {path}: cannot be written ({error.strerror}); name another file")


def write_json(path: Path, content: dict[str, Any]) -> None:
    from ddp_mnist.run.folder import to_json, write_atomically

    try:
        write_atomically(path, to_json(content).encode())
    except OSError as error:
        raise cannot_be_saved("--save", path, error) from error


def verify(arguments: argparse.Namespace) -> None:
    save = place_to_save(arguments.save)
    assert save
    if (os.environ.get("WORLD_SIZE") or "1") != "1":
        raise UsageError("verify: starts its own processes; start it without a launcher")
    from ddp_mnist.verify import proofs
    from ddp_mnist.verify.results import CheckResult

    console, checks, fault = Console(True), list[CheckResult](), arguments.inject
    sizes = proofs.sizes_up_to(arguments.processes)
    for line in proofs.verify(sizes, fault, arguments.model):
        console.print(str(line))
        if isinstance(line, CheckResult):
            checks.append(line)
    write_json(save, proofs.describe(checks, sizes, fault, arguments.model))
    if wrong := proofs.failure_summary(checks, fault, arguments.model):
        raise CheckFailed(wrong)
    console.print(f"all {len(checks)} checks passed; written to {save}")


def bench(arguments: argparse.Namespace) -> None:
    from ddp_mnist.bench import benches
    from ddp_mnist.data import cache

    console, what = Console(True), arguments.what
    name, notes = cache.choose(arguments.dataset, arguments.cache_dir)
    repeats = arguments.repeats or (5 if what == "memory" else 11)
    processes = arguments.processes or benches.default_processes(what)
    options = benches.Options(name, arguments.cache_dir, processes, repeats)
    for note in [*notes, *benches.notes(options)]:
        console.print(note)
    rows = benches.BENCHES[what](options)
    for row in rows:
        console.print(str(row))
    console.print(json.dumps(benches.describe(what, options, rows)))
    missed = [f"{row.what} {row.figure}, goal {row.goal}" for row in rows if not row.met]
    if arguments.check and missed:
        raise CheckFailed(
            f"bench {what}: {'; '.join(missed)} on MNIST and two free CPU cores; close other"
            " programs and repeat"
        )
