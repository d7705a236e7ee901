import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from ddp_mnist.cluster.device import choose_device, has_native_bf16, set_threads
from ddp_mnist.cluster.launch import Launch
from ddp_mnist.config.distribution import Distribution
from ddp_mnist.errors import UsageError

Patch = pytest.MonkeyPatch

PAIR = Launch("torchrun", 0, 2, 0, 2, 1, "127.0.0.1", 29500, agent_store=True)


def on_a(device: str, monkeypatch: Patch, native: bool = True) -> None:
    """Let this machine have a GPU or none; it computes in bf16 natively, or not."""
    monkeypatch.setattr("ddp_mnist.cluster.device.gpus", lambda: int(device == "cuda"))
    monkeypatch.setattr("ddp_mnist.cluster.device.has_native_bf16", lambda _: native)


@pytest.mark.parametrize(
    ("device", "native", "auto"),
    [("cuda", True, "bf16"), ("cuda", False, "fp16"), ("cpu", True, "bf16"), ("cpu", False, "no")],
)
def test_precision_in_effect(device: str, native: bool, auto: str, monkeypatch: Patch) -> None:
    """The flag beats the launcher."""
    on_a(device, monkeypatch, native)
    for flag, launcher, expected in (
        (None, "", auto),
        ("auto", "no", auto),
        (None, "no", "no"),
        (None, "bf16", "bf16"),
        ("no", "fp16", "no"),
        ("bf16", "fp16", "bf16"),
        ("fp64", "bf16", "fp64"),
        ("fp16", "no", "fp16"),
        (None, "fp16", "fp16"),
    ):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launcher)
        flags = Distribution(mixed_precision=flag)
        assert choose_device(flags, Launch(), full_precision=True).precision == "no"
        if (device, expected) != ("cpu", "fp16"):  # which is refused
            assert choose_device(flags, Launch()).precision == expected


@pytest.mark.parametrize(
    "case",  # device, flag and launcher now; precision and launcher then; what it has now
    [
        ("cpu", None, None, "no", "no", "no"),
        ("cpu", "auto", "bf16", "no", "no", "no"),  # as make says it
        ("cpu", None, "no", "bf16", "no", "bf16"),  # accelerate launch says no by itself
        ("cpu", None, None, "fp64", "no", "fp64"),
        ("cuda", None, "fp16", "bf16", "fp16", "bf16"),  # the flag beat the launcher then
        ("cuda", None, "fp16", "no", "no", "fp16"),  # another launcher
        ("cuda", None, None, "fp16", "fp16", "fp16"),  # none now, which names no other
        ("cuda", None, "no", "fp16", "fp16", "no"),
        ("cuda", "no", "fp16", "fp16", "fp16", "no"),
        ("cuda", "bf16", None, "no", "no", "bf16"),
        ("cpu", None, None, "fp16", "no", "bf16, as this machine has no fp16"),
        ("cpu without", None, None, "bf16", "no", "no, as this machine has no bf16"),
        ("cuda without", "auto", None, "bf16", "no", "fp16, as this machine has no bf16"),
        ("cpu without", "bf16", None, "bf16", "no", "bf16"),
        ("cpu without", None, None, "bf16 emulated", "no", "bf16"),
    ],
)
def test_the_precision_of_a_resumed_run(case: tuple[str, ...], monkeypatch: Patch) -> None:
    device, flag, launcher, had, launcher_then, kept = case
    device, _, without = device.partition(" ")
    on_a(device, monkeypatch, native=not without)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launcher or "")
    had, _, emulated = had.partition(" ")
    earlier: dict[str, Any] = {"mixed_precision": had, "launcher_precision": launcher_then}
    earlier |= {"has_bf16": False} if emulated else {}  # older runs lack it
    found = choose_device(Distribution(mixed_precision=flag), Launch(), earlier=earlier)
    precision, _, why = kept.partition(", ")
    told = (f"--mixed-precision {had} -> {precision}, {why}",) if why else ()
    assert (found.precision, found.notes) == (precision, told)


def test_which_processors_compute_in_bf16(monkeypatch: Patch) -> None:
    for capabilities, native in (
        ([(7, 5)], False),  # T4
        ([(8, 0)], True),  # A100
        ([(9, 0), (7, 0)], False),  # all ranks have to train alike
    ):
        monkeypatch.setattr("ddp_mnist.cluster.device.gpus", lambda found=capabilities: len(found))
        monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
        assert has_native_bf16("cuda") is native
    for has_mkldnn in (True, False):  # torch's wheels for macOS have none
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda it=has_mkldnn: it)
        for names, native in ((["bf16"], has_mkldnn), (["amx_bf16"], has_mkldnn), ([], False)):
            monkeypatch.setattr(torch.cpu, "get_capabilities", lambda n=names: dict.fromkeys(n, 1))
            assert has_native_bf16("cpu") is native


def test_fault_25_fp16_on_a_cpu(monkeypatch: Patch) -> None:
    use = "fp16: needs a GPU; use --mixed-precision bf16, no or auto$"
    with pytest.raises(UsageError, match=rf"^--mixed-precision {use}"):
        choose_device(Distribution(mixed_precision="fp16"), PAIR)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(UsageError, match=rf"^ACCELERATE_MIXED_PRECISION={use}"):
        choose_device(Distribution(), PAIR)
    # the flag --cpu overrides the YAML
    assert choose_device(Distribution(cpu=True), PAIR).precision != "fp16"


def test_the_compiler_that_the_launcher_names_beats_the_flags(monkeypatch: Patch) -> None:
    plain, compiled = Distribution(), Distribution(compile=True)
    assert choose_device(plain, Launch()).compile_options == {}
    assert choose_device(compiled, Launch()).compile_options == {"backend": "inductor"}
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "AOT_EAGER")
    for flags in (plain, compiled):
        assert choose_device(flags, Launch()).compile_options["backend"] == "aot_eager"
        assert choose_device(flags, Launch(), full_precision=True).compile_options == {}
    for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"):
        with monkeypatch.context() as switched_off:
            switched_off.setenv(name, "1")
            found = choose_device(compiled, Launch())
            assert (found.compile_options, found.compiled_by) == ({}, "no")
            assert [note.partition(": ")[0] for note in found.notes] == [f"{name}=1"]
    assert choose_device(compiled, Launch()).notes == ()
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "TVMM")
    with pytest.raises(UsageError, match=r"^ACCELERATE_DYNAMO_\*: "):
        choose_device(plain, Launch())


@pytest.mark.parametrize("has_gpu", [True, False])
@pytest.mark.parametrize(
    ("flag", "variable", "wants_cpu"),
    [(False, "no", False), (True, "no", True), (False, "True", True), (False, "1", True)],
)
def test_the_device(
    flag: bool, variable: str, wants_cpu: bool, has_gpu: bool, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", variable)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    on_a("cuda" if has_gpu else "cpu", monkeypatch)
    expected = "cuda" if has_gpu and not wants_cpu else "cpu"
    assert choose_device(Distribution(cpu=flag), Launch()).device == expected
    # a request for the CPU hides the GPUs, before torch looks for them
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ("" if wants_cpu else "0")


@pytest.mark.parametrize(
    ("flag", "launch", "device", "backend"),
    [
        ("auto", Launch(), "cpu", "none"),
        ("auto", PAIR, "cpu", "gloo"),
        ("auto", PAIR, "cuda", "nccl"),
        ("gloo", PAIR, "cuda", "gloo"),
        # a launcher that serves a store has formed a world, if only of one
        ("auto", replace(PAIR, world_size=1), "cpu", "gloo"),
    ],
)
def test_the_backend(
    flag: str, launch: Launch, device: str, backend: str, monkeypatch: Patch
) -> None:
    on_a(device, monkeypatch)
    assert choose_device(Distribution(backend=flag), launch).backend == backend


def test_what_is_unknown_or_not_here_is_refused(monkeypatch: Patch) -> None:
    for launch in (PAIR, Launch()):
        with pytest.raises(UsageError, match=r"^--backend nccl: needs a GPU, and none is visible"):
            choose_device(Distribution(backend="nccl"), launch)
    with monkeypatch.context() as on_a_gpu:
        on_a("cuda", on_a_gpu, native=False)
        for precision in ("fp16", None):
            with pytest.raises(UsageError, match=r"^--comm-hook powersgd: .*; add --mixed-precisi"):
                flags = Distribution(comm_hook="powersgd", mixed_precision=precision)
                choose_device(flags, Launch())
    monkeypatch.setenv("ACCELERATE_USE_CPU", "")
    with pytest.raises(UsageError, match=r"^ACCELERATE_USE_CPU: ValueError: "):
        choose_device(Distribution(cpu=True), Launch())
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(UsageError, match=r"^--mixed_precision fp8: choose from no, fp16, bf16$"):
        choose_device(Distribution(), Launch())
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    with pytest.raises(UsageError, match=r"^OMP_NUM_THREADS=many: ValueError: "):
        set_threads(Launch(), "cpu", 1)


BY_TORCHRUN = Launch("torchrun", local_world_size=2)


@pytest.mark.parametrize(
    ("variable", "launch", "device", "here", "before", "threads", "is_open"),
    [
        ("", Launch(), "cpu", 1, 0, 8, True),
        ("", Launch("tcp"), "cpu", 2, 0, 4, True),
        ("", Launch("tcp"), "cpu", 100, 0, 1, False),
        ("", Launch(), "cuda", 1, 0, 1, False),
        ("1", Launch("accelerate"), "cpu", 2, 0, 4, True),  # set by the launcher, of its own accord
        ("1", Launch("tcp"), "cpu", 2, 0, 1, False),  # set by a person
        ("3", Launch("torchrun"), "cpu", 2, 0, 3, False),
        ("4,2", Launch(), "cpu", 1, 0, 4, False),  # OpenMP's form for nested regions
        # after the / what SLURM gave to the task: to each process ...
        ("/4", Launch("slurm"), "cpu", 2, 0, 4, True),
        ("/16", Launch("slurm"), "cpu", 2, 0, 8, True),  # more than it may use
        # ... or to the launcher
        ("1/4", BY_TORCHRUN, "cpu", 2, 0, 2, True),
        # what the resumed run had: kept unless it is set, or more than there are cores
        ("", Launch(), "cpu", 1, 1, 1, False),
        ("1", Launch("accelerate"), "cpu", 2, 4, 4, False),
        ("3", Launch("torchrun"), "cpu", 2, 1, 3, False),
        ("", Launch(), "cpu", 1, 16, 8, True),
    ],
)
def test_set_threads(
    variable: str,
    launch: Launch,
    device: str,
    here: int,
    before: int,
    threads: int,
    is_open: bool,
    monkeypatch: Patch,
) -> None:
    given, _, of_task = variable.partition("/")
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", of_task)
    set_to: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.setattr("ddp_mnist.cluster.device.cores", lambda: 8)
    assert set_threads(launch, device, here, before) == is_open
    assert set_to == [threads]
    assert os.environ["OMP_NUM_THREADS"] == str(threads)
