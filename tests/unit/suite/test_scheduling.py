"""Tests that share a stack are scheduled to one process."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness.scheduling import UNITS, UnitScheduling, place_of, unit_of

TESTS = Path(__file__).parents[2]
OF_THE_SHARED_STACK = {"stack", "client", "http"}


def arguments_and_fixtures(file: Path) -> tuple[set[str], set[str]]:
    """What the functions of a test file ask for, and those of them that are its own fixtures."""
    functions = [
        node
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    own = {f.name for f in functions if any("fixture" in ast.unparse(d) for d in f.decorator_list)}
    asking = [f for f in functions if f.name.startswith("test_") or f.name in own]
    return {argument.arg for f in asking for argument in f.args.args}, own


def test_unit_files_exist_and_are_in_one_unit_each() -> None:
    files = [file for unit in UNITS.values() for file in unit]
    assert len(files) == len(set(files))
    assert [file for file in files if not (TESTS / file).is_file()] == []


def test_users_of_the_shared_stack_are_in_its_unit() -> None:
    asking = set()
    for file in (TESTS / "integration").glob("test_*.py"):
        wanted, own = arguments_and_fixtures(file)
        if (wanted - own) & OF_THE_SHARED_STACK:
            asking.add(f"integration/{file.name}")
    assert asking == {*UNITS["the shared stack"]}


def test_faults_share_one_stack() -> None:
    """Its fixture is asked for by every test of the folder."""
    assert {f"fault/{file.name}" for file in (TESTS / "fault").glob("test_*.py")} == {*UNITS["faults"]}


@pytest.mark.parametrize("folder", ["integration", "fault", "gpu", "cuda"])
def test_a_file_with_processes_runs_in_one_test_process(folder: str) -> None:
    for file in (TESTS / folder).glob("test_*.py"):
        node = f"tests/{folder}/{file.name}::test"
        assert unit_of(f"{node}_a[x::y@z]") == unit_of(f"{node}_b") != f"{node}_b"


def test_other_tests_are_scheduled_singly_and_last() -> None:
    node = "tests/unit/core/test_types.py::test_one"
    assert unit_of(node) == node
    ordered = sorted(
        [node, "tests/integration/test_edge.py::t", "tests/integration/test_cli.py::t"], key=place_of
    )
    assert ordered[-1] == node
    assert ordered[0].startswith("tests/integration/test_cli.py")


def test_the_scheduler_assigns_whole_units_in_order() -> None:
    class Node:
        """One process of xdist's."""

        shutting_down = False
        gateway = SimpleNamespace(id="gw")

        def __init__(self) -> None:
            self.sent: list[int] = []

        def send_runtest_some(self, indices: list[int]) -> None:
            self.sent.extend(indices)

        def shutdown(self) -> None:
            self.shutting_down = True

    options = SimpleNamespace(loadscopereorder=True)
    config = SimpleNamespace(option=options, getvalue=lambda name: ["popen", "popen"])
    first, second = (f"tests/{files[0]}" for files in list(UNITS.values())[:2])
    collected = [f"{first}::a", f"{first}::b[1]", f"{first}::c", *(f"{second}::{i}" for i in range(40))]
    scheduler = UnitScheduling(config)
    nodes = Node(), Node()
    for node in nodes:
        scheduler.add_node(node)
        scheduler.add_node_collection(node, collected)
    scheduler.schedule()
    assert (nodes[0].sent, nodes[1].sent) == ([0, 1, 2], list(range(3, 43)))
