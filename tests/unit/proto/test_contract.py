"""The contract: stubs that match it, and buf's STANDARD rules, of which protolint checks the rest."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pool import Default

ROOT = Path(__file__).resolve().parents[3]
PROTO = ROOT / "proto"
_GRPC = re.compile(r"GRPC_GENERATED_VERSION = '([\d.]+)'")
_PROTOBUF = re.compile(r"ValidateProtobufRuntimeVersion\(\s*_runtime_version\.Domain\.PUBLIC,\s*([\d,\s]+),")
NAMES = sorted(path.relative_to(PROTO).as_posix() for path in PROTO.rglob("*.proto"))


def parsed(name: str) -> descriptor_pb2.FileDescriptorProto:
    """A file as protoc understood it when the stubs were made."""
    __import__(name.removesuffix(".proto").replace("/", ".") + "_pb2")
    file = descriptor_pb2.FileDescriptorProto()
    Default().FindFileByName(name).CopyToProto(file)  # type: ignore[no-untyped-call]
    return file


def all_enums(file: descriptor_pb2.FileDescriptorProto) -> list[descriptor_pb2.EnumDescriptorProto]:
    found, messages = list(file.enum_type), list(file.message_type)
    while messages:
        message = messages.pop()
        found += message.enum_type
        messages += message.nested_type
    return found


def test_dependency_bounds_match_the_stubs() -> None:
    """The stubs refuse older libraries on import."""
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [needed["dependencies"], *needed["optional-dependencies"].values()]
    bounds = dict(
        each.split(">=") for group in groups for each in group if each.startswith(("grpc", "protobuf"))
    )
    stubs = ROOT / "paceline/v1"
    (grpc,) = {found for file in stubs.glob("*_grpc.py") for found in _GRPC.findall(file.read_text())}
    (protobuf,) = {found for file in stubs.glob("*_pb2.py") for found in _PROTOBUF.findall(file.read_text())}
    assert bounds.pop("protobuf") == ".".join(part.strip() for part in protobuf.split(",")[:3])
    assert set(bounds.values()) == {grpc}


each_file = pytest.mark.parametrize("name", NAMES)


def test_the_contract_has_its_files() -> None:
    names = "admin", "common", "draft", "fleet", "generation", "target"
    assert [f"paceline/v1/{name}.proto" for name in names] == NAMES


@pytest.mark.slow
def test_stubs_are_fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make proto` would change nothing."""
    monkeypatch.syspath_prepend(str(ROOT))
    from tools.generate_proto import generate

    generate(tmp_path)
    fresh = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*_pb2*")}
    package = ROOT / "paceline" / "v1"
    committed = {path.relative_to(ROOT): path.read_bytes() for path in package.glob("*_pb2*")}
    assert sorted(fresh) == sorted(committed)
    assert [path for path in fresh if fresh[path] != committed[path]] == []


@pytest.mark.slow
def test_protolint_passes() -> None:
    protolint = Path(sys.executable).parent / "protolint"
    result = subprocess.run(
        [protolint, "lint", "-config_path=.protolint.yaml", "proto"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@each_file
def test_package_matches_directory(name: str) -> None:
    """PACKAGE_DIRECTORY_MATCH, PACKAGE_DEFINED, PACKAGE_VERSION_SUFFIX, PACKAGE_LOWER_SNAKE_CASE."""
    package = parsed(name).package
    assert package == Path(name).parent.as_posix().replace("/", ".")
    assert re.fullmatch(r"[a-z][a-z0-9_.]*\.v[1-9][0-9]*", package)


@each_file
def test_files_are_proto3_without_public_imports(name: str) -> None:
    """FILE_LOWER_SNAKE_CASE, SYNTAX_SPECIFIED, and no public or weak imports."""
    file = parsed(name)
    assert re.fullmatch(r"[a-z][a-z0-9_]*\.proto", Path(name).name)
    assert file.syntax == "proto3"
    assert list(file.public_dependency) == []
    assert list(file.weak_dependency) == []


@each_file
def test_services_have_the_suffix(name: str) -> None:
    """SERVICE_SUFFIX, SERVICE_PASCAL_CASE, RPC_PASCAL_CASE."""
    for service in parsed(name).service:
        assert re.fullmatch(r"([A-Z][a-z0-9]*)+Service", service.name)
        for method in service.method:
            assert re.fullmatch(r"([A-Z][a-z0-9]*)+", method.name)


@each_file
def test_enums_have_prefixes_and_an_unspecified_zero(name: str) -> None:
    """ENUM_VALUE_PREFIX, ENUM_ZERO_VALUE_SUFFIX, ENUM_FIRST_VALUE_ZERO, ENUM_NO_ALLOW_ALIAS."""
    for enum in all_enums(parsed(name)):
        prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper() + "_"
        assert all(value.name.startswith(prefix) for value in enum.value), enum.name
        assert (enum.value[0].name, enum.value[0].number) == (f"{prefix}UNSPECIFIED", 0)
        assert not enum.options.allow_alias
        assert len({value.number for value in enum.value}) == len(enum.value)


def test_every_rpc_has_its_own_request_and_response() -> None:
    """RPC_REQUEST_RESPONSE_UNIQUE, RPC_REQUEST_STANDARD_NAME, RPC_RESPONSE_STANDARD_NAME."""
    used: Counter[str] = Counter()
    for name in NAMES:
        file = parsed(name)
        for service in file.service:
            for method in service.method:
                used.update((method.input_type, method.output_type))
                for type_name, suffix in ((method.input_type, "Request"), (method.output_type, "Response")):
                    allowed = (f"{method.name}{suffix}", f"{service.name}{method.name}{suffix}")
                    assert type_name in {f".{file.package}.{standard}" for standard in allowed}
    assert [name for name, count in used.items() if count > 1] == []


@each_file
def test_every_import_is_used(name: str) -> None:
    """IMPORT_USED: some field or method names a type of each imported file."""
    file = parsed(name)
    types = {field.type_name for message in file.message_type for field in message.field}
    types |= {
        type_name
        for service in file.service
        for method in service.method
        for type_name in (method.input_type, method.output_type)
    }
    for dependency in file.dependency:
        imported = Default().FindFileByName(dependency)  # type: ignore[no-untyped-call]
        names = {
            f".{imported.package}.{kind}"
            for kind in (*imported.message_types_by_name, *imported.enum_types_by_name)
        }
        assert names & types, dependency
