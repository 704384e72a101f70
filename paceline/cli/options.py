"""Command-line options from frozen dataclasses, so that a field and its option cannot drift apart.

`@options_from_fields` replaces every parameter that is annotated with a dataclass by one option a field,
each also settable by its environment variable, and hands the command the built, validated object. An
option's help is what stands here for its name, else its field's docstring, which may speak of Python. Fields
of mapping types, and of dataclasses, have no option.
"""

from __future__ import annotations

import ast
import enum
import inspect
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from paceline.core.validation import AUTO, DraftTokens
from paceline.supervisor.arguments import flag, negative_flag, variable

_HELP = {
    "host": "Address to listen on.",
    "port": "Port to listen on; 0 takes a free one, which standard output names.",
    "target_model": "A directory, a hub id, or `embedded:target`, which is taken if none is given.",
    "draft_model": "A directory, a hub id, or `embedded:draft`; with `none` only what a text repeats is "
    "proposed. If not given, the embedded draft for the embedded target, and none for any other.",
    "target_port": "Port of the target worker; 0 takes a free one.",
    "draft_port": "Port of the draft worker; 0 takes a free one.",
    "device": "auto, cpu, cuda or cuda:N.",
    "target_device": "Device of the target worker.",
    "draft_device": "Device of the draft worker.",
    "dtype": "auto, float32, bfloat16 or float16.",
    "target_dtype": "Number format of the target worker.",
    "draft_dtype": "Number format of the draft worker.",
    "draft_threads": "The same for the draft.",
    "block_size": "Positions per cache block.",
    "num_blocks": "Blocks of a worker's cache; derived from free memory if not given.",
    "gpu_memory_utilization": "Share of a GPU's whole memory for weights and cache, of both workers together "
    "where they share it. If not given, the cache takes 85 % of what is free.",
    "max_model_len": "The longest sequence; the model's own length if not given. A target refuses a greater "
    "one, a draft takes its own.",
    "max_sequences": "The most sequences at a time.",
    "max_running": "The most sequences (each of n) that generate at a time.",
    "max_waiting": "The most sequences that wait for one of those places.",
    "support_bound": "The most tokens of that distribution.",
    "num_speculative_tokens": "Draft tokens a round (K); 0 switches drafting off, auto chooses.",
    "acceptance": "How the target decides on draft tokens; none changes its distribution.",
    "prompt_lookup": "Copy draft tokens from the text so far where that is worth more than asking the draft.",
    "trust_remote_code": "Run model code that comes with the checkpoint.",
    "exit_with_parent": "Stop when standard input closes: a child never outlives its supervisor.",
    "temperature": "0 is greedy.",
    "top_p": "Keep the likeliest tokens that together have this probability; 1 keeps all.",
    "top_k": "Keep this many of the likeliest tokens; 0 keeps all.",
    "min_p": "Keep tokens with at least this share of the likeliest one's probability.",
    "repetition_penalty": "Above 1 makes tokens that were used less likely.",
    "presence_penalty": "Lowers the logit of every token that was generated.",
    "frequency_penalty": "Lowers it once for each time the token was generated.",
    "seed": "The same seed gives the same tokens, in coupled mode and at temperature 0. If none is given the "
    "server draws one; a load test counts from 0.",
    "max_tokens": "The most tokens to generate.",
    "min_tokens": "The fewest tokens before it may stop.",
    "stop": "Text that ends the generation; may be repeated.",
    "stop_token_ids": "Token that ends the generation; may be repeated.",
    "ignore_eos": "Go on after the end-of-sequence token.",
    "include_stop_str_in_output": "Keep the stop text at the end.",
    "skip_special_tokens": "Leave special tokens out of the text.",
    "bad_words": "Text that may not be generated; may be repeated.",
    "allowed_token_ids": "Token that may be generated, and no other; may be repeated.",
}


def _draft_tokens(text: str | int) -> DraftTokens:
    try:
        return AUTO if text == AUTO else int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither an integer nor {AUTO!r}") from None


DRAFT_TOKENS: Mapping[str, Any] = {"parser": _draft_tokens, "metavar": f"INTEGER|{AUTO}"}
"""Settings of an option that is K or `auto`."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """Annotates a dataclass parameter: defaults of this command that differ from the dataclass's."""

    values: Mapping[str, Any] = field(default_factory=dict)


def option(name: str, description: str | None, *, negative: bool = False, **settings: Any) -> Any:
    """A single option, with the environment variable that its name gives; `negative` adds its opposite."""
    flags = f"{flag(name)}/{negative_flag(name)}" if negative else flag(name)
    return typer.Option(flags, envvar=variable(name), help=description, **settings)


def options_from_fields(command: Callable[..., None]) -> Callable[..., None]:
    """The command with its dataclass parameters spread out into options."""
    hints = get_type_hints(command, include_extras=True)
    spread: dict[str, type[Any]] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        hint = hints[name]
        cls, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if not is_dataclass(cls):
            parameters.append(parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        assert isinstance(cls, type)
        defaults = {key: value for extra in extras for key, value in extra.values.items()}
        spread[name] = cls
        parameters += _parameters(cls, defaults)

    def spreading(**values: Any) -> None:
        built = {}
        for name, cls in spread.items():
            mine = {f.name: _restore(values.pop(f.name)) for f in fields(cls) if f.name in values}
            built[name] = cls(**mine)
        command(**values, **built)

    spreading.__name__ = command.__name__
    spreading.__doc__ = command.__doc__
    spreading.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return spreading


def _parameters(cls: type[Any], defaults: Mapping[str, Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(cls)
    docs = field_docs(cls)
    result = []
    for f in fields(cls):
        kind = _option_type(hints[f.name])
        if kind is None:
            continue
        both = f.default is True or kind == bool | None
        settings = DRAFT_TOKENS if AUTO in _literals(hints[f.name]) else {}
        description = _HELP.get(f.name, docs.get(f.name))
        described = option(f.name, description, negative=both, show_choices=True, **settings)
        result.append(
            inspect.Parameter(
                f.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults.get(f.name, _default(f)),
                annotation=Annotated[kind, described],
            )
        )
    return result


def _default(f: Field[Any]) -> Any:
    if f.default is MISSING:
        return inspect.Parameter.empty if f.default_factory is MISSING else f.default_factory()
    return list(f.default) if isinstance(f.default, tuple) else f.default


def _option_type(hint: Any) -> Any:
    """What typer is to parse for a field; None for a mapping or a dataclass, which have no option."""
    if get_origin(hint) in (Union, types.UnionType):
        members = [member for member in get_args(hint) if member is not types.NoneType]
        named = [m for m in members if isinstance(m, type) and issubclass(m, enum.Enum)]
        member = (named or members)[0]
        if get_origin(member) in (tuple, Sequence) or is_dataclass(member):
            return _option_type(member)
        return member | None
    if get_origin(hint) in (tuple, Sequence):
        return list[get_args(hint)[0]]  # type: ignore[misc]
    if get_origin(hint) is Mapping:
        return None
    if is_dataclass(hint):
        return None
    if isinstance(hint, type):
        return hint
    raise TypeError(f"no option can hold a {hint}")


def _literals(hint: Any) -> tuple[Any, ...]:
    """The values that the hint names one by one."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(value for member in get_args(hint) for value in _literals(member))
    return ()


def _restore(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def field_docs(cls: type[Any]) -> dict[str, str]:
    """The docstrings below the fields of a dataclass; empty where its source is not at hand."""
    docs: dict[str, str] = {}
    for base in filter(is_dataclass, cls.__bases__):
        docs |= field_docs(base)
    return docs | _own_field_docs(cls)


def _own_field_docs(cls: type[Any]) -> dict[str, str]:
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except OSError:
        return {}
    assert isinstance(tree, ast.ClassDef)
    docs = {}
    for statement, following in zip(tree.body, tree.body[1:], strict=False):
        match statement, following:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                docs[name] = inspect.cleandoc(text)
    return docs
