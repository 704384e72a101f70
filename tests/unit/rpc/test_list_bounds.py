"""Too long lists are refused by their length, whatever they hold.

All lists of all requests are found by the descriptors of the services, so that a new one is tested too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from harness.refusals import refused

from coordinator.app import Coordinator
from paceline.core import limits
from paceline.core.errors import InvalidArgumentError
from paceline.core.limits import MAX_LEDGER_TOKENS, MAX_RECEIVED_TOKENS, MAX_TOKENS
from paceline.core.messages import CloseSequence, SequenceFailed
from paceline.rpc import codec
from paceline.rpc.codec.chat import chat_from_proto
from paceline.rpc.streams import frames
from paceline.v1 import common_pb2, draft_pb2, generation_pb2, target_pb2

MANY_NUMBERS, MANY_OTHERS = MAX_LEDGER_TOKENS + 2**19, 2**18
"""More elements than any list may have: of numbers, of texts or messages."""

Path = tuple[FieldDescriptor, ...]


def detokenize(request: Any) -> Any:
    return asyncio.run(Coordinator.detokenize(SimpleNamespace(), request.token_ids))  # type: ignore[arg-type]


READERS: dict[type[Message], Callable[[Any], Any]] = {
    generation_pb2.GenerateRequest: codec.generate_request_from_proto,
    generation_pb2.ApplyChatTemplateRequest: chat_from_proto,
    generation_pb2.DetokenizeRequest: detokenize,
    target_pb2.VerifyRequest: frames.target_commands,
    draft_pb2.DraftRequest: frames.draft_commands,
}
FILES = (generation_pb2, target_pb2, draft_pb2)


def requests() -> Iterator[Descriptor]:
    for file in FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            yield from (method.input_type for method in service.methods)


def lists(descriptor: Descriptor, above: Path = ()) -> Iterator[Path]:
    """The paths of all lists and maps in a message."""
    for field in descriptor.fields:
        assert field.message_type is None or field.message_type not in [f.message_type for f in above]
        if field.is_repeated:
            yield (*above, field)
        if field.message_type is not None:
            yield from lists(field.message_type, (*above, field))


def named(path: Path) -> str:
    return ".".join([path[0].containing_type.name, *(field.name for field in path)])


PATHS = {named(path): path for request in requests() for path in lists(request)}


def complete(message: Any) -> None:
    """What a message needs besides its list, so that the list is what is wrong."""
    if isinstance(message, generation_pb2.GenerateRequest):
        message.request_id, message.text = "r", "a"
    elif isinstance(message, common_pb2.SequenceParams):
        message.sampling.seed, message.acceptance_mode = 1, common_pb2.ACCEPTANCE_MODE_COUPLED
    elif isinstance(message, draft_pb2.DraftRound):
        message.num_draft_tokens = 1


def overfull(path: Path) -> tuple[Any, Sequence[Any]]:
    """A request with one list that is too long, and that list."""
    classes = {reader.DESCRIPTOR: reader for reader in READERS}
    request: Any = classes[path[0].containing_type]()
    message = request
    complete(message)
    for field in path[:-1]:
        inner = getattr(message, field.name)
        message = inner.add() if field.is_repeated else inner
        message.SetInParent()
        complete(message)
    last = path[-1]
    number, of_bytes = last.number, last.message_type is not None or last.cpp_type == last.CPPTYPE_STRING
    count = MANY_OTHERS if of_bytes else MANY_NUMBERS
    if last.message_type is common_pb2.LogitBias.DESCRIPTOR:
        # Each of another token: the same one twice is refused as such.
        pairs = (common_pb2.LogitBias(token_id=each).SerializeToString() for each in range(count))
        message.MergeFromString(b"".join(_varint(number << 3 | 2) + bytes([len(p)]) + p for p in pairs))
    else:
        # Empty or zero.
        message.MergeFromString((_varint(number << 3 | 2 * of_bytes) + b"\x00") * count)
    values = getattr(message, last.name)
    assert len(values) >= count
    return request, values


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + _varint(value >> 7)


def seconds(work: Callable[[], Any]) -> float:
    """Processor time of this thread."""
    begun = time.thread_time()
    work()
    return time.thread_time() - begun


def is_refused(read: Callable[[Any], Any], request: Any) -> None:
    try:
        read_commands = read(request)
    except InvalidArgumentError:
        return
    assert isinstance(read_commands, list)
    (failure,) = read_commands
    assert isinstance(failure, SequenceFailed)
    assert isinstance(failure.error, InvalidArgumentError)


def test_every_request_with_a_list_has_a_reader() -> None:
    assert {path[0].containing_type for path in PATHS.values()} == {each.DESCRIPTOR for each in READERS}
    assert len(PATHS) > 30


@pytest.mark.parametrize("name", PATHS)
def test_a_list_is_counted_before_it_is_read(name: str) -> None:
    """Refusing it takes much less time than visiting each element."""
    request, values = overfull(PATHS[name])
    reader = next(read for kind, read in READERS.items() if isinstance(request, kind))
    refusing = seconds(lambda: is_refused(reader, request))
    walking = seconds(lambda: [None for _ in values])
    assert refusing < walking / 4, f"{refusing:.3f} s, and {walking:.3f} s for all elements"


def test_many_unknown_fields_are_refused_quickly() -> None:
    unknown = b"\xf8\x06\x01" * 2**20
    listing = seconds(lambda: [None for _ in range(2**20)])
    for message, name in (
        (generation_pb2.GenerateRequest(text="a"), "request"),
        (generation_pb2.GenerateRequest(text="a").sampling, "sampling"),
    ):
        message.MergeFromString(unknown)

        def refuse(message: Any = message, name: str = name) -> None:
            with refused(name, "unknown parameter"):
                codec.refuse_unknown_fields(message, name)

        assert seconds(refuse) < 5 * listing


def test_unknown_fields_deep_in_a_large_message_are_found() -> None:
    large = generation_pb2.GenerateRequest(text="a" * 200_000)
    codec.refuse_unknown_fields(large, "request")
    large.sampling.MergeFromString(b"\xf8\x06\x01")
    with pytest.raises(InvalidArgumentError, match="unknown parameters"):
        codec.refuse_unknown_fields(large, "request")


def test_received_tokens_are_bounded_over_all_choices() -> None:
    request = generation_pb2.GenerateRequest(request_id="r", text="a")
    request.sampling.n = MAX_RECEIVED_TOKENS // MAX_TOKENS + 1
    for _ in range(request.sampling.n):
        request.resume_from.append(MAX_TOKENS)
        request.received.add().MergeFromString(b"\x08\x00" * MAX_TOKENS)
    with refused("received"):
        codec.generate_request_from_proto(request)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_long_sequence_id_is_refused(role: str) -> None:
    """Before it is repeated in an answer."""
    closing = [CloseSequence("x" * (limits.MAX_SEQUENCE_ID_CHARACTERS + 1), 1)]
    read: Callable[[], Any] = (
        (lambda: frames.target_commands(frames.verify_request(closing)))
        if role == "target"
        else (lambda: frames.draft_commands(frames.draft_request(closing)))
    )
    with refused("sequence_id") as error:
        read()
    assert "xx" not in str(error.value)
