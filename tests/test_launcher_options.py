"""What a person's own accelerate config, or the launcher's flags, ask for: done or refused.

Accelerate's own code reads the config and prepares the processes' variables; in the fast tests only
the start of processes is left out.
"""

import ast
import os
import re
from pathlib import Path
from unittest.mock import Mock

import accelerate
import pytest
from accelerate.commands.config.cluster import get_cluster_input
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.config.default import write_basic_config

from ddp_mnist import cli
from ddp_mnist.cluster import launcher_options
from ddp_mnist.cluster.device import (
    choose_device,
    compile_options_in_effect,
    precision_in_effect,
    set_threads,
)
from ddp_mnist.cluster.launch import find_launch
from ddp_mnist.cluster.local_world import free_port
from ddp_mnist.config.distribution import Distribution
from ddp_mnist.config.flag_fields import flag_values
from ddp_mnist.errors import UsageError
from ddp_mnist.run import resume
from ddp_mnist.run.folder import read_json
from ddp_mnist.run.set_up import apply_launcher_options
from tests.commands import CONFIGS, PROOF, REPOSITORY, TRAIN, Started, all_succeed
from tests.gpu_standin import workers
from tests.training import check_equal

Patch = pytest.MonkeyPatch
SOURCES = Path(accelerate.__file__).parent
PAGE = (REPOSITORY / "docs" / "reference.md").read_text("utf-8")
SECTION = PAGE[PAGE.index("## An accelerate config of your own") :].split("\n## ")[0]
CELLS = [row.split("|")[2] for row in SECTION.splitlines() if row.startswith("|")]
NAMES = [name for cell in CELLS for name in re.findall(r"`([A-Z][A-Z0-9_]+)`", cell)]
DDP = "this trainer is DDP on NVIDIA GPUs or CPUs; use --config_file accelerate_configs/multi_gpu"

# --- The page's tables, where a name that ends with _ begins the names of several


def is_listed(variable: str) -> bool:
    begins = tuple(name for name in NAMES if name.endswith("_"))
    return variable in {*NAMES, *launcher_options.REFUSED} or variable.startswith(begins)


def set_in(path: Path) -> set[str]:
    """Return the variables that a module assigns: ENVIRONMENT["NAME"], or [PREFIX + "NAME"]."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            found |= set(re.findall(r"'([A-Z][A-Z0-9_]+)'", ast.unparse(node.slice)))
    return found


def test_the_page_has_every_variable_that_the_launcher_sets() -> None:
    prefixes = ("FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_", "ACCELERATE_")
    in_utils, in_launch = (set_in(SOURCES / at / "launch.py") for at in ("utils", "commands"))
    assert {"ACCELERATE_USE_FSDP", "FSDP_VERSION", "TP_DEGREE", "KMP_AFFINITY"} <= in_utils
    assert "NCCL_P2P_DISABLE" in in_launch
    text = (SOURCES / "utils" / "launch.py").read_text()
    added = set(re.findall(r'prefix \+ "([A-Z0-9_]+)"', text))  # to one of them, which are listed
    assert set(re.findall(r'prefix = "([A-Z_]+)"', text)) | {"FSDP_"} == set(prefixes)
    assert {name for name in (in_utils | in_launch) - added if not is_listed(name)} == set()
    assert all(is_listed(prefix + "X") for prefix in prefixes[:3])


def test_the_page_has_every_variable_that_accelerate_reads() -> None:
    ours = [path for path in SOURCES.rglob("*.py") if "test_utils" not in path.parts]
    names = {name for p in ours for name in re.findall(r'"(ACCELERATE_[A-Z0-9_]+)"', p.read_text())}
    prefixes = {"ACCELERATE_", "ACCELERATE_FP8_", "ACCELERATE_DYNAMO_"}
    assert len(names) > 30
    assert {name for name in names - prefixes if not is_listed(name)} == set()


def test_the_page_has_every_variable_that_is_refused() -> None:
    assert launcher_options.REFUSED.keys() - NAMES == set()


def test_what_the_page_begins_a_row_with_is_a_flag_or_a_key_at_the_top_of_the_config() -> None:
    names = {*re.findall(r"^\| `(\w+)", SECTION.partition("Without meaning")[0], re.MULTILINE)}
    assert names - ClusterConfig.__dataclass_fields__.keys() == set() != names


@pytest.mark.parametrize("variable", launcher_options.REFUSED)
def test_a_variable_that_asks_for_something_else_is_refused(variable: str) -> None:
    for off in ("", "0", "False", "no"):
        find_launch(Distribution(), {variable: off})
    with pytest.raises(UsageError) as raised:
        find_launch(Distribution(), {variable: "true"})
    name, refusal = launcher_options.REFUSED[variable]
    assert str(raised.value).startswith(f"{name}: {refusal}")
    assert f"unset {variable if name != variable else 'it'}" in str(raised.value)
    assert "\n" not in str(raised.value)


# --- Configs, through accelerate's own launcher


def in_effect(words: list[str], folder: Path, patch: Patch) -> str:
    """Return what rank 0 of `accelerate launch WORDS` takes up, or the line that refuses it."""
    words, flags = ["--main_process_port", "0", *words], Distribution()
    with patch.context() as context:
        try:
            env = workers(*words)[0]
        except (ImportError, RuntimeError, ValueError) as error:
            return f"accelerate: {str(error).strip()}"
        for name, value in env.items():
            context.setenv(name, value)
        line = [*words, "-m", "ddp_mnist", "train"]
        context.setattr(launcher_options, "_command_line", lambda: (line, str(folder)))
        context.setattr("ddp_mnist.cluster.device.gpus", lambda: int("GPU" in os.environ))
        context.setattr("ddp_mnist.cluster.device.too_old", lambda _: "")
        context.setattr("ddp_mnist.cluster.device.unused_gpus", lambda: "")
        try:
            launch, options = find_launch(flags, env), launcher_options.read_launcher_options(env)
            device = choose_device(flags, options)
            precision = precision_in_effect(flags, launch, device)
            compiler = compile_options_in_effect(flags).get("backend", "no")
        except UsageError as error:
            return str(error)
    parts = options.grad_accum or 1
    shown = f"{launch.world_size} on {device}, {precision}, compiled by {compiler}, {parts} parts"
    return "; ".join(filter(None, [shown, options.note]))


ONE, TWO = "distributed_type: 'NO'", "distributed_type: MULTI_GPU, num_processes: 2"
BLOCK = "dynamo_mode: default, dynamo_use_dynamic: false, dynamo_use_fullgraph: false"
PLAIN = "1 on cpu, no, compiled by no, 1 parts"
PAIR = "2 on cpu, no, compiled by no, 1 parts"
MULTI = "deepspeed_multinode_launcher: standard, zero_stage: 2, gradient_accumulation_steps: 4"
FOR_DDP = {  # by config and flags, the beginning of what comes of it
    (ONE, ""): PLAIN,
    (f"{ONE}, use_cpu: true, mixed_precision: bf16", ""): PLAIN.replace("no,", "bf16,", 1),
    (
        f"{ONE}, use_cpu: true, mixed_precision: fp16",
        "",
    ): "accelerate launch: its config asks for f",
    (f"{ONE}, mixed_precision: fp8", ""): "accelerate: FP8 is not available on this machine",
    (
        f"{ONE}, num_processes: 2",
        "",
    ): "MASTER_ADDR=127.0.0.1: is set, but accelerate launch started",
    (f"{ONE}, debug: true, enable_cpu_affinity: true, downcast_bf16: 'no'", ""): PLAIN,
    (f"{ONE}, dynamo_config: {{dynamo_backend: INDUCTOR, {BLOCK}}}", ""): (
        "1 on cpu, no, compiled by inductor, 1 parts"
    ),
    (f"{ONE}, dynamo_backend: EAGER", ""): "1 on cpu, no, compiled by eager, 1 parts",
    (ONE, "--dynamo_backend tvm"): "dynamo_backend tvm: choose from inductor, cudagraphs, aot_eag",
    (ONE, "--dynamo_backend eager --dynamo_use_regional_compilation"): (
        "dynamo_use_regional_compilation: the net is compiled whole; leave it out"
    ),
    (ONE, "--gradient_accumulation_steps 4"): "1 on cpu, no, compiled by no, 4 parts",
    (ONE, "--gradient-accumulation-steps=0"): (
        "gradient_accumulation_steps 0: must be a whole number of at least 1"
    ),
    (
        ONE,
        "--gradient_clipping 1",
    ): "gradient_clipping: is DeepSpeed's; leave it out, and add --max",
    ("distributed_type: MULTI_CPU, use_cpu: true, num_processes: 1", ""): PLAIN,
    (
        "distributed_type: MULTI_CPU, use_cpu: true, num_processes: 2",
        "",
    ): "MASTER_ADDR=127.0.0.1: is",
    (TWO, ""): PAIR,
    (f"{TWO}, mixed_precision: bf16, debug: true", ""): PAIR.replace("no,", "bf16,", 1),
    (f"{TWO}, mixed_precision: fp16", ""): "accelerate launch: its config asks for fp16",
    (TWO, "--gradient_accumulation_steps 4 --dynamo_backend aot_eager"): (
        "2 on cpu, no, compiled by aot_eager, 4 parts"
    ),
    (f"{TWO}, deepspeed_config: [1]", ""): PAIR,  # of another distributed_type
    (f"{TWO}, deepspeed_config: {{gradient_accumulation_steps: 2}}", ""): (
        "2 on cpu, no, compiled by no, 2 parts"
    ),
    (f"{TWO}, num_machines: 1, rdzv_backend: c10d, same_network: true", ""): (
        f"{PAIR}; rdzv_backend c10d: accelerate launch takes it as a flag only, and"
    ),
    (f"{TWO}, rdzv_backend: c10d", "--rdzv_backend c10d"): PAIR,
    (f"{TWO}, fsdp_config: {{fsdp_version: 1}}", ""): PAIR,  # of another distributed_type
    (TWO, "--use_fsdp"): f"distributed_type FSDP, or --use_fsdp: {DDP}",
    ("distributed_type: FSDP, num_processes: 2, fsdp_config: {fsdp_version: 2}", ""): (
        f"distributed_type FSDP, or --use_fsdp: {DDP}"
    ),
    ("distributed_type: FSDP, num_processes: 1, use_cpu: true", "--cpu"): (
        f"distributed_type FSDP: {DDP}"
    ),
    (f"distributed_type: DEEPSPEED, num_processes: 2, deepspeed_config: {{{MULTI}}}", ""): (
        "accelerate: DeepSpeed is not installed"
    ),
    ("distributed_type: DEEPSPEED, num_processes: 1", "--cpu"): (
        f"distributed_type DEEPSPEED: {DDP}"
    ),
    ("distributed_type: MEGATRON_LM, num_processes: 2", ""): (
        f"distributed_type MEGATRON_LM, or --use_megatron_lm: {DDP}"
    ),
    (f"{TWO}, parallelism_config: {{parallelism_config_tp_size: 2}}", ""): (
        f"parallelism_config, or --use_parallelism_config: {DDP}"
    ),
    ("distributed_type: XLA, num_processes: 8, downcast_bf16: 'yes'", ""): (
        "accelerate: No module named 'torch_xla'"
    ),
    ("distributed_type: XLA, num_processes: 1", "--cpu"): f"distributed_type XLA: {DDP}",
    ("distributed_type: MULTI_XPU, num_processes: 2", ""): f"distributed_type MULTI_XPU: {DDP}",
}


@pytest.mark.parametrize(
    ("config", "flags", "expected"),
    [(*given, expected) for given, expected in FOR_DDP.items()],
    ids=[" ".join(given) for given in FOR_DDP],
)
def test_a_config_does_what_it_says_or_one_line_refuses_it(
    config: str, flags: str, expected: str, here: Path, monkeypatch: Patch
) -> None:
    (here / "own.yaml").write_text(f"{{compute_environment: LOCAL_MACHINE, {config}}}")
    found = in_effect(["--config_file", "own.yaml", *flags.split()], here, monkeypatch)
    assert found.startswith(expected)
    assert "\n" not in found or found.startswith("accelerate:")


def test_use_cpu_holds_for_several_processes_beside_gpus(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """The launcher passes it on to one process alone."""
    monkeypatch.setenv("GPU", "1")
    for use_cpu, device in (("true", "cpu"), ("false", "cuda")):
        file = tmp_path / f"{use_cpu}.yaml"
        file.write_text(f"{{{TWO}, use_cpu: {use_cpu}}}")
        found = in_effect(["--config_file", str(file)], tmp_path, monkeypatch)
        assert found.startswith(f"2 on {device}, no,")


def test_affinity_takes_a_package(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("GPU", "1")
    for there, expected in ((True, "1 on cuda, no,"), (False, "enable_cpu_affinity: Accelerate n")):
        monkeypatch.setattr(
            "ddp_mnist.cluster.device.is_pynvml_available", lambda there=there: there
        )
        found = in_effect(["--num_processes", "1", "--enable_cpu_affinity"], tmp_path, monkeypatch)
        assert found.startswith(expected)


def test_one_thread_that_was_typed_is_one_thread(monkeypatch: Patch) -> None:
    env = {"OMP_NUM_THREADS": "1", "ACCELERATE_MIXED_PRECISION": "no"}
    launch = find_launch(Distribution(), env)
    monkeypatch.setattr("ddp_mnist.cluster.device.cores", lambda: 8)
    for words, threads in (([], 8), (["--num_cpu_threads_per_process", "1"], 1)):
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        line = ([*words, "--cpu", "x.py"], ".")
        monkeypatch.setattr(launcher_options, "_command_line", lambda line=line: line)
        assert set_threads(launch, "cpu", 1, launcher_options.read_launcher_options(env)) == threads


def test_the_config_that_accelerate_writes_by_default(tmp_path: Path, monkeypatch: Patch) -> None:
    for precision in ("no", "bf16"):
        file = tmp_path / f"{precision}.json"
        write_basic_config(precision, file)
        found = in_effect(["--config_file", str(file)], tmp_path, monkeypatch)
        assert found == f"1 on cpu, {precision}, compiled by no, 1 parts"


@pytest.mark.parametrize(("asked", "parts"), [(None, 2), (1, 2), (2, 2), (4, 4)])
def test_a_run_that_goes_on_keeps_its_parts_unless_the_launcher_asks_for_others(
    asked: int | None, parts: int
) -> None:
    options, console = launcher_options.LauncherOptions(grad_accum=asked), Mock()
    config = cli.train_config(["--grad-accum", "2"])
    flags = flag_values(config.run) | flag_values(config.recipe)
    began = resume.EarlierRun("run", "id", "digest", flags)
    again = apply_launcher_options(cli.train_config(["--resume", "run"]), options, console)
    assert resume.inherit(again, began).recipe.grad_accum == parts
    console.print.assert_not_called()


# Answers to accelerate's questions, one a line; of a menu the number, else its default.
QUESTIONNAIRE: dict[str, tuple[str, str]] = {
    "one process": ("0\nyes\nno\nno\nno\nno\n0", PLAIN),
    "several GPUs": ("4\n1\nno\nno\nno\nno\nno\n2\nall\nno\n0", PAIR),
    "several GPUs, compiled": (
        "4\n1\nyes\nyes\n2\nno\nno\nno\nno\n2\nall\nyes\n2",
        "2 on cpu, bf16, compiled by inductor, 1 parts",
    ),
}


@pytest.mark.parametrize(("answers", "expected"), QUESTIONNAIRE.values(), ids=QUESTIONNAIRE)
def test_the_config_that_accelerate_asks_for(
    answers: str, expected: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    lines = iter(answers.split("\n"))

    monkeypatch.setattr("builtins.input", lambda _="": next(lines, ""))
    monkeypatch.setattr("accelerate.commands.menu.selection_menu.in_colab", True)  # no arrow keys
    get_cluster_input().to_yaml_file(str(tmp_path / "own.yaml"))
    found = in_effect(["--config_file", str(tmp_path / "own.yaml")], tmp_path, monkeypatch)
    assert found == expected


# --- The real launchers


def accelerate_(command: str, *words: str, folder: Path) -> Started:
    slower = "ignore:Guards may run slower:RuntimeWarning"  # says torch's compiler on Python 3.13.0
    words = ("-m", "accelerate.commands.accelerate_cli", command, *words)
    return Started([*words], folder, {"PYTHONWARNINGS": slower})


@pytest.mark.system
def test_accumulation_and_a_compiler_that_the_launcher_asks_for_change_no_weight(
    alone: Path, tmp_path: Path
) -> None:
    """Both reach the run; neither a config nor a flag of ours names them."""
    (tmp_path / "own.yaml").write_text(
        "{distributed_type: MULTI_GPU, num_processes: 2, debug: true, enable_cpu_affinity: true,"
        " dynamo_config: {dynamo_backend: EAGER}}"
    )
    config = ["--config_file", "own.yaml", "--main_process_port", "0"]
    asked = ["--gradient_accumulation_steps", "4", *TRAIN, *PROOF.split(), "run"]
    [printed] = all_succeed([accelerate_("launch", *config, *asked, folder=tmp_path)])
    check_equal(tmp_path / "run", alone, 2)
    summary, settings = (read_json(tmp_path / "run" / f) for f in ("summary.json", "config.json"))
    assert (summary["grad_accum"], summary["compile"]) == (4, "eager")
    assert (settings["recipe"]["grad_accum"], settings["distribution"]["compile"]) == (4, True)
    plan = " ".join(printed.split())
    assert "precision fp64, compiled by eager" in plan
    assert "72 images a step = 2 processes x 4 parts x 9" in plan


@pytest.mark.system
def test_a_typed_flag_beats_the_launcher_and_a_line_says_so(tmp_path: Path) -> None:
    words = ["--cpu", "--gradient-accumulation-steps=4", *TRAIN, "--dataset", "digits", "--dry-run"]
    ended = accelerate_("launch", *words, "--grad-accum", "2", folder=tmp_path).ended()
    assert ended.code == 0
    note = "launcher   gradient_accumulation_steps 4: --grad-accum 2 was typed, and counts\n"
    assert note in ended.out
    assert "72 images a step = 1 process x 2 parts x 36" in ended.out


@pytest.mark.system
def test_what_is_not_ddp_is_one_line_of_one_process(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(
        "{distributed_type: FSDP, num_processes: 2, use_cpu: true, fsdp_config: {fsdp_version: 2}}"
    )
    words = ["--config_file", "own.yaml", "--main_process_port", "0", *TRAIN, "--dataset", "digits"]
    ended = accelerate_("launch", *words, folder=tmp_path).ended()
    [line] = ended.error_lines
    assert line.startswith(f"ddp-mnist: error: distributed_type FSDP, or --use_fsdp: {DDP}")
    assert line.endswith("(code 2)")
    assert not (tmp_path / "runs").exists()


@pytest.mark.system
def test_accelerates_own_test_passes_with_our_configs(tmp_path: Path) -> None:
    """With those for CPUs; the two machines are two launchers here. `accelerate test` starts this.

    Without the variable, a script that does not ask for CPUs itself, as theirs, would be two runs
    of one process each.
    """
    text, port = (CONFIGS / "multi_node_cpu.yaml").read_text(), str(free_port())
    text = text.replace("192.168.1.201", "127.0.0.1").replace("12345", port)
    for rank in range(2):
        node = text.replace("machine_rank: 0", f"machine_rank: {rank}")
        (tmp_path / f"node{rank}.yaml").write_text(node)
    script = str(Path(accelerate.__file__).with_name("test_utils") / "scripts" / "test_script.py")
    for files, size in (
        ([CONFIGS / "cpu.yaml"], 1),
        ([CONFIGS / "multi_cpu.yaml"], 2),
        ([tmp_path / "node0.yaml", tmp_path / "node1.yaml"], 2),
    ):
        started = []
        for file in files:
            words = ["-m", "accelerate.commands.launch", "--config_file", str(file), script]
            started.append(Started(words, tmp_path, {"ACCELERATE_USE_CPU": "true"}))
        ended = [each.ended(300) for each in started]
        assert not any(each.code for each in ended), "\n".join(each.err for each in ended)
        assert f"Num processes: {size}" in ended[0].out
        assert "**Test reinstantiated state**" in ended[0].out  # the last of its tests
