"""The wire as the last version speaks it: what its messages have, and messages with no more than that.

`python -m harness.last_version` in `tests/integration/support` prints the wire of this version. It replaces
`last_version.txt` when a version is released.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor
from google.protobuf.message import Message

from paceline.v1 import common_pb2, draft_pb2, generation_pb2, target_pb2

FILE = Path(__file__).with_suffix(".txt")
WIRE = tuple(module.DESCRIPTOR for module in (common_pb2, draft_pb2, target_pb2, generation_pb2))
"""What workers, coordinators and clients of different versions say to each other."""
M = TypeVar("M", bound=Message)
NEWER = b"\xfa\x7f\x03new"
"""A field of a later version: number 2047, a text."""


def lines(files: Iterable[FileDescriptor] = WIRE) -> list[str]:
    """One line for each field, enum value and method; none may ever change or go."""
    return sorted(line for file in files for line in _of_file(file))


@functools.cache
def known() -> frozenset[str]:
    """The lines of the last version."""
    return frozenset(FILE.read_text().splitlines())


def as_last_version(message: M) -> M:
    """A copy without the fields that the last version does not have."""
    copy = type(message)()
    copy.CopyFrom(message)
    for part in _parts(copy):
        for field, _ in part.ListFields():
            if _of_field(field) not in known():
                part.ClearField(field.name)
    return copy


def as_next_version(message: M, but: Container[str] = ()) -> M:
    """A copy with one more field in every part, except in messages with the names `but`."""
    copy = type(message)()
    copy.CopyFrom(message)
    for part in [*_parts(copy)]:
        if part.DESCRIPTOR.name not in but:
            part.MergeFromString(NEWER)
    return copy


def _parts(message: Any) -> Iterator[Any]:
    """The message and every message in it. The fields of a part may be cleared when it has been yielded."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for each in value if field.is_repeated else (value,):
                yield from _parts(each)


def _of_file(file: FileDescriptor) -> Iterator[str]:
    for message in file.message_types_by_name.values():
        yield from _of_message(message)
    for enum in file.enum_types_by_name.values():
        yield from _of_enum(enum)
    for service in file.services_by_name.values():
        for method in service.methods:
            takes = "stream " * method.client_streaming + method.input_type.full_name
            gives = "stream " * method.server_streaming + method.output_type.full_name
            yield f"{method.full_name}: {takes} -> {gives}"


def _of_message(message: Descriptor) -> Iterator[str]:
    yield from map(_of_field, message.fields)
    for nested in message.nested_types:
        yield from _of_message(nested)
    for enum in message.enum_types:
        yield from _of_enum(enum)


def _of_enum(enum: EnumDescriptor) -> Iterator[str]:
    for value in enum.values:
        yield f"{enum.full_name}.{value.name} = {value.number}"


_TYPES = {
    value: name.removeprefix("TYPE_").lower()
    for name, value in vars(FieldDescriptor).items()
    if name.startswith("TYPE_")
}


def _of_field(field: FieldDescriptor) -> str:
    kind = field.message_type or field.enum_type
    where = f" in {field.containing_oneof.name}" if field.containing_oneof is not None else ""
    repeated = "repeated " if field.is_repeated else ""
    name = kind.full_name if kind is not None else _TYPES[field.type]
    return f"{field.full_name} = {field.number}: {repeated}{name}{where}"


if __name__ == "__main__":
    print("\n".join(lines()))
