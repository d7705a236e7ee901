"""The package is a house with floors: what may import what, and how long anything may become."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.commands import REPOSITORY

PACKAGE = REPOSITORY / "ddp_mnist"
# From the ground up. A name is a module of the top folder, or a folder; imports go down only. One
# file of a folder stands lower than the others: errors words its lines by system/text.py.
FLOORS = (
    ("__init__", "system.text", "core"),
    ("errors",),
    ("system", "config"),
    ("data", "cluster"),
    ("task",),
    ("nets",),
    ("training",),
    ("train",),
    ("verbs",),
    ("api", "cli"),
    ("__main__",),
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
CORE = "ddp_mnist.core"
# What the trainer's core must not need to be understood
HOUSE = {"argparse", "filelock", "multiprocessing", "signal", "socket", "subprocess"}
FLOOR_OF = {name: number for number, names in enumerate(FLOORS) for name in names}


@cache
def files() -> dict[str, ast.Module]:
    """Return the syntax tree of each module by its name, e.g. ddp_mnist.core.state."""
    trees = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(REPOSITORY).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        trees[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return trees


def names_in(tree: ast.Module, module: str = "") -> Iterator[str]:
    """Yield all that a module imports anywhere, and each string that is a dotted name of ours.

    Relative imports are the core's, which is one folder, and may be copied under another name.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            assert (module.rpartition(".")[0], node.level) == (CORE, 1), module
            base = ".".join(filter(None, [CORE, node.module]))
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"^ddp_mnist(?:\.\w+)+$", node.value)


@cache
def imports() -> dict[str, set[str]]:
    """Return the modules of this package that each of them imports, perhaps a name in one."""
    found = {}
    for name, tree in files().items():
        ours = [each for each in names_in(tree, name) if each.startswith("ddp_mnist")]
        modules = {each if each in files() else each.rpartition(".")[0] for each in ours}
        found[name] = modules - {name, "ddp_mnist"}
    return found


def closure(start: str) -> set[str]:
    """Return the module and all that it imports of this package, to the ground."""
    found, queue = set[str](), [start]
    while queue:
        if (module := queue.pop()) not in found:
            found.add(module)
            queue += imports()[module]
    return found


def unit(module: str) -> str:
    """Return the name in FLOORS that a module belongs to."""
    path = module.partition(".")[2]
    return path if path in FLOOR_OF else path.partition(".")[0] or "__init__"


# --- Names and imports


def test_the_tests_of_a_room_have_the_names_of_its_modules() -> None:
    """What needs several rooms, or machines, is in whole/, machines/ and pages/."""
    for room in (path for path in PACKAGE.iterdir() if (path / "__init__.py").exists()):
        tested = {path.stem for path in (REPOSITORY / "tests" / room.name).glob("test_*.py")}
        modules = {f"test_{path.stem}" for path in room.iterdir()}
        assert tested and tested <= modules, sorted(tested - modules)


def test_every_file_has_a_floor() -> None:
    assert {unit(module) for module in files()} == set(FLOOR_OF)


def test_no_import_goes_up() -> None:
    """Imports in functions and for type checkers count too; a folder is one unit."""
    upwards = [
        f"{module} imports {target}"
        for module, targets in imports().items()
        for target in targets
        if unit(module) != unit(target) and FLOOR_OF[unit(module)] <= FLOOR_OF[unit(target)]
    ]
    assert upwards == []


def test_no_circle_between_files() -> None:
    try:
        TopologicalSorter(imports()).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_only_the_cluster_opens_sockets_and_nobody_mocks() -> None:
    for name, tree in files().items():
        modules = [each.partition(".")[0] for each in names_in(tree, name)]
        assert "socket" not in modules or name.startswith("ddp_mnist.cluster."), name
        assert "unittest.mock" not in "\n".join(names_in(tree, name)), name


def test_the_core_is_read_without_the_house() -> None:
    """Neither flags, nor folders, locks, sockets, signals: not in what `fit` reaches."""
    assert len(closure("ddp_mnist.core.fit")) >= 15
    for module in closure("ddp_mnist.core.fit"):
        found = {each.partition(".")[0] for each in names_in(files()[module], module)}
        assert module.startswith(CORE) and not found & HOUSE, module
    assert {unit(each) for each in imports()["ddp_mnist.core.__main__"]} == {"core"}
