"""The public names of the package."""

from __future__ import annotations

import dataclasses
import inspect
import json

import pytest
from harness.commands import python

import paceline
import paceline.client
from paceline.client.server_status import ServerStatus, status_from_proto
from paceline.core import errors
from paceline.v1 import common_pb2, generation_pb2


def test_the_package_exports_its_names() -> None:
    assert sorted(paceline.__all__) == [
        "AcceptanceMode",
        "AlreadyExistsError",
        "AsyncClient",
        "CancelledError",
        "Client",
        "DeadlineExceededError",
        "FailedPreconditionError",
        "GenerationChunk",
        "GenerationResult",
        "InternalError",
        "InvalidArgumentError",
        "NotFoundError",
        "PacelineError",
        "PermissionDeniedError",
        "ResourceExhaustedError",
        "SamplingParams",
        "SpeculationParams",
        "StaleEpochError",
        "StructuredOutputs",
        "Tls",
        "TokenOrigin",
        "TokenizerMismatchError",
        "UnauthenticatedError",
        "UnavailableError",
        "__version__",
        "errors",
    ]
    for name in paceline.__all__:
        assert getattr(paceline, name) is not None
        assert name in dir(paceline)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = paceline.no_such_name


def test_every_error_is_exported_twice() -> None:
    tree = {
        name for name, cls in inspect.getmembers(errors, inspect.isclass) if cls.__module__ == errors.__name__
    }
    assert tree <= set(paceline.__all__)
    assert tree <= set(paceline.client.__all__)
    assert paceline.errors is errors


def test_client_exports_resolve() -> None:
    for name in paceline.client.__all__:
        assert getattr(paceline.client, name) is not None


def test_both_clients_have_the_same_interface() -> None:
    def interface(cls: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(member).parameters)
            for name, member in inspect.getmembers(cls, inspect.isfunction)
            if not name.startswith("_")
        }

    assert interface(paceline.Client) == interface(paceline.AsyncClient)


@pytest.mark.slow
@pytest.mark.parametrize("statement", ["import paceline", "from paceline import *", "import paceline.client"])
def test_importing_loads_no_heavy_package(statement: str) -> None:
    heavy = ("torch", "numpy", "transformers", "tokenizers")
    code = f"{statement}\nimport json, sys\nprint(json.dumps([m for m in {heavy!r} if m in sys.modules]))"
    assert json.loads(python(code).stdout) == []


@pytest.mark.slow
def test_importing_the_core_does_not_import_grpc() -> None:
    code = "import paceline, paceline.core.types, sys\nprint('grpc' in sys.modules)"
    assert python(code).stdout.strip() == "False"


def test_status_has_every_field_of_the_message() -> None:
    pairs = {
        "CoordinatorStatus": generation_pb2.CoordinatorStatus,
        "WorkerStatus": generation_pb2.WorkerStatus,
        "Model": generation_pb2.Model,
        "Usage": generation_pb2.Usage,
        "SpeculativeDecoding": generation_pb2.SpeculativeDecoding,
        "WorkerInfo": common_pb2.WorkerInfo,
        "CacheInfo": common_pb2.CacheInfo,
        "MemoryInfo": common_pb2.MemoryInfo,
    }
    for name, message in pairs.items():
        ours = {field.name for field in dataclasses.fields(getattr(paceline.client, name))}
        # A number and whether it is `auto` are one value to users.
        flags = {"auto_num_speculative_tokens", "auto_tree_width"}
        theirs = {field.name for field in message.DESCRIPTOR.fields} - flags
        assert ours == theirs, name


def test_a_worker_reports_memory_only_with_a_gpu() -> None:
    memory = common_pb2.MemoryInfo(total=24, weights=16, cache=2, recordings=1, passes=3)
    for info, expected in (
        (common_pb2.WorkerInfo(), None),
        (common_pb2.WorkerInfo(memory=memory), paceline.client.MemoryInfo(24, 16, 2, 1, 3)),
    ):
        worker = generation_pb2.WorkerStatus(info=info)
        (told,) = status_from_proto(generation_pb2.GetStatusResponse(workers=[worker])).workers
        assert told.info is not None
        assert told.info.memory == expected


def test_status_tells_if_k_is_automatic() -> None:
    for k, message in {
        "auto": generation_pb2.CoordinatorStatus(
            auto_num_speculative_tokens=True, max_num_speculative_tokens=8
        ),
        3: generation_pb2.CoordinatorStatus(num_speculative_tokens=3, max_num_speculative_tokens=8),
    }.items():
        status = status_from_proto(generation_pb2.GetStatusResponse(coordinator=message))
        assert status.coordinator.num_speculative_tokens == k
        assert status.coordinator.max_num_speculative_tokens == 8


def test_status_tells_how_trees_are_drafted() -> None:
    for width, message in {
        "auto": generation_pb2.CoordinatorStatus(
            auto_tree_width=True, max_tree_nodes=9, drafts_per_sequence=2
        ),
        3: generation_pb2.CoordinatorStatus(tree_width=3, max_tree_nodes=9, drafts_per_sequence=2),
    }.items():
        told = status_from_proto(generation_pb2.GetStatusResponse(coordinator=message)).coordinator
        assert (told.tree_width, told.max_tree_nodes, told.drafts_per_sequence) == (width, 9, 2)
    older = status_from_proto(generation_pb2.GetStatusResponse()).coordinator
    assert (older.tree_width, older.drafts_per_sequence) == (1, 1)


def test_status_is_json_and_tolerates_a_newer_server() -> None:
    response = generation_pb2.GetStatusResponse(
        coordinator=generation_pb2.CoordinatorStatus(acceptance_mode=42),  # type: ignore[arg-type]
        workers=[generation_pb2.WorkerStatus(state=42)],  # type: ignore[arg-type]
    )
    status = status_from_proto(response)
    assert isinstance(status, ServerStatus)
    plain = json.loads(json.dumps(status.to_dict()))
    assert plain["coordinator"]["acceptance_mode"] is None
    assert plain["workers"][0]["state"] == "unknown"
    assert plain["workers"][0]["info"] is None
