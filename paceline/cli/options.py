"""Command-line options generated from frozen dataclasses.

`@options_from_fields` replaces every parameter annotated with a dataclass by one option per field, each with
an environment variable, and passes the validated object to the command. An option's help is its entry in
`_HELP`, else the field's docstring. Fields of mapping and dataclass types have no option.
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
    "port": "Port to listen on; 0 takes a free port, which is announced on standard output.",
    "target_model": "A directory, a hub id, or `embedded:target` (the default).",
    "draft_model": "A directory, a hub id, or `embedded:draft`; with `none`, only prompt lookup proposes "
    "tokens. The default is the embedded draft for the embedded target, and none for any other. May be "
    "repeated: each model has a draft worker, and all propose for every sequence.",
    "target_port": "Port of the target worker; 0 takes a free port.",
    "draft_port": "Port of the draft worker; 0 takes a free port.",
    "device": "auto, cpu, cuda or cuda:N.",
    "target_device": "Device of the target worker.",
    "draft_device": "Device of the draft worker.",
    "dtype": "auto, float32, bfloat16 or float16.",
    "target_dtype": "Number format of the target worker.",
    "draft_dtype": "Number format of the draft worker.",
    "draft_threads": "CPU threads of the draft; 0 as for the target.",
    "block_size": "Positions per cache block; the default is 16, or 256 where attention reads in place.",
    "num_blocks": "Blocks of a worker's cache; the default is derived from free memory.",
    "gpu_memory_utilization": "Share of a GPU's total memory for a worker, or for both together if "
    "they share it. By default, all but the weights takes 85 % of the free memory.",
    "max_model_len": "Longest sequence; the default is the model's own length. A target refuses a greater "
    "value, a draft falls back to its own length.",
    "max_sequences": "Most concurrent sequences.",
    "max_running": "Most sequences (each of n) generating concurrently.",
    "max_waiting": "Most sequences waiting to generate.",
    "support_bound": "Most tokens of that distribution.",
    "num_speculative_tokens": "Draft tokens per round (K); 0 switches drafting off, auto chooses.",
    "tree_width": "Most children of a node of a draft tree; 1 drafts chains, auto chooses for every round.",
    "max_tree_nodes": "Most draft tokens of a round with a tree.",
    "acceptance": "How the target decides on draft tokens; no mode changes its distribution.",
    "trust_remote_code": "Run model code that comes with the checkpoint.",
    "exit_with_parent": "Stop when standard input closes, so that a child never outlives its supervisor.",
    "temperature": "0 is greedy.",
    "top_p": "Keep the most likely tokens that together have this probability; 1 keeps all.",
    "top_k": "Keep this many of the most likely tokens; 0 keeps all.",
    "min_p": "Keep tokens with at least this share of the highest probability.",
    "repetition_penalty": "Above 1, tokens that occurred before become less likely.",
    "presence_penalty": "Subtracted from the logit of every generated token.",
    "frequency_penalty": "Subtracted from a token's logit for each time it was generated.",
    "seed": "The same seed gives the same tokens, in coupled mode and at temperature 0. By default the "
    "server draws one; a load test counts from 0.",
    "max_tokens": "Most tokens to generate.",
    "min_tokens": "Fewest tokens before generation may stop.",
    "stop": "Text that ends the generation; may be repeated.",
    "stop_token_ids": "Id of a token that ends the generation; may be repeated.",
    "ignore_eos": "Continue after the end-of-sequence token.",
    "include_stop_str_in_output": "Keep the stop text at the end.",
    "skip_special_tokens": "Leave special tokens out of the text.",
    "bad_words": "Text that must not be generated; may be repeated.",
    "allowed_token_ids": "Id of an allowed token; all others are excluded; may be repeated.",
}


def _draft_tokens(text: str | int) -> DraftTokens:
    try:
        return AUTO if text == AUTO else int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither an integer nor {AUTO!r}") from None


DRAFT_TOKENS: Mapping[str, Any] = {"parser": _draft_tokens, "metavar": f"INTEGER|{AUTO}"}
"""Settings of an option with K or `auto` as its value."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """Annotation of a dataclass parameter: defaults that override the dataclass's in this command."""

    values: Mapping[str, Any] = field(default_factory=dict)


def option(name: str, description: str | None, *, negative: bool = False, **settings: Any) -> Any:
    """One option with its environment variable; `negative` adds the disabling option."""
    flags = f"{flag(name)}/{negative_flag(name)}" if negative else flag(name)
    return typer.Option(flags, envvar=variable(name), help=description, **settings)


def options_from_fields(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the command's dataclass parameters by options."""
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
    """The type for typer to parse; None for a mapping or a dataclass, which have no option."""
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
    """The values of a Literal in the hint."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(value for member in get_args(hint) for value in _literals(member))
    return ()


def _restore(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def field_docs(cls: type[Any]) -> dict[str, str]:
    """The docstrings below the fields of a dataclass; empty if its source is not available."""
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
