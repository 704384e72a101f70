"""The API reference: docs/sdk.md, http.md and protocol.md list every public name, and no other."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Set
from pathlib import Path

import pytest
from google.protobuf.descriptor import FileDescriptor

import paceline
from coordinator.api.http.openai.schema.document import document
from paceline import client
from paceline.v1 import admin_pb2, common_pb2, draft_pb2, fleet_pb2, generation_pb2, target_pb2

DOCS = Path(__file__).parents[3] / "docs"
CODE = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CLASSES = {name: getattr(client, name) for name in client.__all__}
FILES: tuple[FileDescriptor, ...] = tuple(
    module.DESCRIPTOR for module in (common_pb2, draft_pb2, generation_pb2, admin_pb2, fleet_pb2, target_pb2)
)
OF_GOOGLE = {"BadRequest", "ErrorInfo", "RetryInfo"}
"""Messages of google.rpc that the protocol's page names."""


def page(name: str) -> str:
    """Without blocks of code."""
    return FENCE.sub("", (DOCS / name).read_text(encoding="utf-8"))


def section(text: str, heading: str) -> str:
    """From a heading of the second level to the next one; empty where it is not there."""
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return found.group(1) if found else ""


def tables(text: str) -> Iterator[list[list[str]]]:
    """Cells of each table, its header first."""
    for block in re.split(r"\n\n+", text):
        lines = [line for line in block.splitlines() if line.startswith("|")]
        if lines:
            cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
            yield [cells[0], *cells[2:]]


def first_column(text: str) -> set[str]:
    """Names in the first column of all tables."""
    return {name for table in tables(text) for row in table[1:] for name in CODE.findall(row[0])}


def own_members(cls: type) -> set[str]:
    """Public methods, fields, enum members, and attributes that its methods set."""
    names = {*vars(cls), *inspect.get_annotations(cls)}
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cls)))):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if isinstance(node.value, ast.Name) and node.value.id == "self" else set()
    return {name for name in names if not name.startswith("_")}


def members(cls: type, *, inherited: bool = False) -> set[str]:
    """Its own and those of bases that are not public; `inherited` adds those of public bases."""
    bases = [base for base in cls.__mro__ if base.__module__.startswith("paceline")]
    chosen = [base for base in bases if base is cls or inherited or base not in CLASSES.values()]
    return {name for base in chosen for name in own_members(base)}


def documented_members(text: str) -> dict[str, set[str]]:
    """Members of each class: in the reference, in tables named after it, in those of a section named so."""
    errors = {name for name in CODE.findall(section(text, "Errors")) if name.endswith("Error")}
    found: dict[str, set[str]] = {name: set() for name in errors - vars(builtins).keys()}
    for table in tables(section(text, "Reference")):
        for row in table[1:]:
            for name in CODE.findall(row[0]):
                found.setdefault(name, set()).update(CODE.findall(row[1]))
    _, *parts = re.split(r"^## (.*)$", text, flags=re.MULTILINE)
    for heading, body in zip(parts[::2], parts[1::2], strict=True):
        for table in tables(body):
            name = heading if table[0][0] == "field" else table[0][0]
            if re.fullmatch("[A-Z][a-z]+[A-Z][A-Za-z]+", name):
                rows = {word for row in table[1:] for word in CODE.findall(row[0])}
                found.setdefault(name, set()).update(rows)
    return found


def wrong_in_sdk(text: str) -> set[str]:
    """Names of the SDK that the page lacks, with -, and names that it has and the SDK has not, with +."""
    listed = documented_members(text)
    wrong = {f"-{name}" for name in CLASSES.keys() - listed.keys()}
    wrong |= {f"+{name}" for name in listed.keys() - CLASSES.keys()}
    wrong |= {f"-{name}" for name in paceline.__all__ if not re.search(rf"`{name}`", text)}
    for name in listed.keys() & CLASSES.keys():
        wrong |= {f"-{name}.{member}" for member in members(CLASSES[name]) - listed[name]}
        known = members(CLASSES[name], inherited=True)
        wrong |= {f"+{name}.{member}" for member in listed[name] - known}
    return wrong


def served() -> set[str]:
    """As "GET /path"; a test of the document holds it to the routes."""
    return {f"{method.upper()} {path}" for path, methods in document()["paths"].items() for method in methods}


def wrong_in_http(text: str) -> set[str]:
    """Endpoints that the page lacks, and that it has and the server has not."""
    listed = first_column(section(text, "Endpoints"))
    named = {name for name in CODE.findall(text) if name.startswith("/")}
    paths = {endpoint.partition(" ")[2] for endpoint in served()} | {"/openapi.json"}
    known = served() | {"GET /openapi.json"}
    return differences(listed, known) | {f"+{name}" for name in named - paths}


def differences(listed: Set[str], known: Set[str]) -> set[str]:
    """What is missing, with -, and what is invented, with +."""
    return {f"-{name}" for name in known - listed} | {f"+{name}" for name in listed - known}


def rpcs() -> set[tuple[str, ...]]:
    """Service, method, request and answer of each."""
    return {
        (service.name, method.name, method.input_type.name, method.output_type.name)
        for file in FILES
        for service in file.services_by_name.values()
        for method in service.methods
    }


def wrong_in_protocol(text: str) -> set[str]:
    """Services, methods, messages, enums and their values that are missing or invented."""
    service, listed = "", set()
    for row in next(tables(section(text, "Services")), [[]])[1:]:
        service = next(iter(CODE.findall(row[0])), service)
        listed.add((service, *CODE.findall(row[2]), *CODE.findall(row[3])))
    wrong = differences(set(map(" ".join, listed)), set(map(" ".join, rpcs())))

    messages = {name for file in FILES for name in file.message_types_by_name}
    enums = {name: enum for file in FILES for name, enum in file.enum_types_by_name.items()}
    known = messages | enums.keys() | {name for rpc in rpcs() for name in rpc[:2]}
    named = {name for name in CODE.findall(text) if re.fullmatch("[A-Z][A-Za-z]*[a-z][A-Za-z]*", name)}
    wrong |= differences(named - OF_GOOGLE, known)

    values = {row[0].strip("`"): set(row[1].split(", ")) for table in tables(text) for row in table[1:]}
    for name, enum in enums.items():
        prefix = re.sub("(?<=[a-z])(?=[A-Z])", "_", name).upper() + "_"
        known = {value.name.removeprefix(prefix) for value in enum.values if value.number}
        wrong |= differences(values.get(name, set()), known)
    return wrong


@pytest.mark.parametrize(
    ("name", "wrong_in"),
    [("sdk.md", wrong_in_sdk), ("http.md", wrong_in_http), ("protocol.md", wrong_in_protocol)],
)
def test_the_page_has_every_public_name(name: str, wrong_in: Callable[[str], set[str]]) -> None:
    assert wrong_in(page(name)) == set()


@pytest.mark.planted
@pytest.mark.parametrize(
    ("name", "wrong_in", "old", "new", "noticed"),
    [
        ("sdk.md", wrong_in_sdk, "`StaleEpochError`", "`LateError`", {"-StaleEpochError", "+LateError"}),
        ("sdk.md", wrong_in_sdk, "`num_resumes`, `aclose`", "`close`", {"-AsyncGenerationStream.aclose"}),
        ("sdk.md", wrong_in_sdk, "| `min_p` |", "| `max_p` |", {"+SamplingParams.max_p"}),
        ("sdk.md", wrong_in_sdk, "| `usage` |", "| `used` |", {"-GenerationResult.usage"}),
        ("sdk.md", wrong_in_sdk, "`__version__`", "a version", {"-__version__"}),
        ("http.md", wrong_in_http, "`POST /ping`", "`PUT /ping`", {"-POST /ping", "+PUT /ping"}),
        ("http.md", wrong_in_http, "New requests except `/health`", "Not `/healthz`", {"+/healthz"}),
        ("protocol.md", wrong_in_protocol, "`Cancel` |", "`Stop` |", {"+Stop"}),
        ("protocol.md", wrong_in_protocol, "`LogitBias`, ", "", {"-LogitBias"}),
        ("protocol.md", wrong_in_protocol, "`ChatMessage`", "`ChatTurn`", {"-ChatMessage", "+ChatTurn"}),
        ("protocol.md", wrong_in_protocol, "BONUS, TARGET", "BONUS, DRAFT", {"-TARGET", "+DRAFT"}),
    ],
)
def test_a_planted_mistake_is_noticed(
    name: str, wrong_in: Callable[[str], set[str]], old: str, new: str, noticed: set[str]
) -> None:
    text = page(name)
    assert old in text
    assert wrong_in(text.replace(old, new)) >= noticed
