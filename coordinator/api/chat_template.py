"""The model's chat template: renders a conversation in the text format of its training.

Output equals transformers' output, without transformers: the same sandbox, variables and helpers. Templates
come with the model and are trusted only as far as the sandbox allows.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline import assets
from paceline.core.errors import InvalidArgumentError
from paceline.core.system.small_files import read_text

_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_OWN_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt", *_SPECIAL_TOKENS})
"""Variables that a request's `chat_template_kwargs` may not set."""


class TemplateRefusalError(jinja2.TemplateError):
    """The template's own `raise_exception`, with a message for the caller."""


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks text for training; only its content is rendered."""

    tags = {"generation"}  # noqa: RUF012 - jinja's interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class _Dictionaries:
    """`dict` in a template: makes dictionaries without exposing the type itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _raise_exception(message: str) -> None:
    raise TemplateRefusalError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, **options: Any) -> str:
    # jinja's own filter escapes characters for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dictionaries(),
    }
    return environment


class ChatTemplate:
    """A compiled template with its special tokens."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Raises InvalidArgumentError if the template cannot be compiled."""
        environment = _environment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise InvalidArgumentError("chat_template", f"cannot be compiled: {error}") from None
        self._special_tokens = dict(special_tokens or {})
        self._variables = frozenset(meta.find_undeclared_variables(tree))
        self._knows_developers = any(c.value == "developer" for c in tree.find_all(nodes.Const))
        self._takes_parts = _iterates_content(tree)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as text. Raises InvalidArgumentError naming `messages` or `chat_template_kwargs`.

        Args:
            messages: `role`, `content` (a string or a list of text parts) and optionally `name`.
            add_generation_prompt: end with the opening of the assistant's turn.
            continue_final_message: end at the end of the last message's content.
            variables: more variables of the template. A variable that the template does not read is refused.
        """
        for name in variables or {}:
            if name in _OWN_VARIABLES or name not in self._variables:
                raise InvalidArgumentError(
                    "chat_template_kwargs", f"the model's chat template has no variable {name!r}"
                )
        shown = [self._message(message) for message in messages]
        mark = f"<{secrets.token_hex(8)}>"
        if continue_final_message:
            shown[-1] = _with_end(shown[-1], f"{mark} ")
        text = self._render(shown, add_generation_prompt, variables or {})
        named: dict[str, int] = {}
        for index, message in enumerate(shown):
            role = messages[index]["role"]
            # Some clients set the name of every message to its role; such a name may be dropped.
            if message.get("name", role) != role:
                named.setdefault(message["role"], index)
        # One check for each role: a rendering for each of thousands of names would take too long.
        for role, first in named.items():
            nameless = [_without_name(m) if m["role"] == role else m for m in shown]
            if self._renders_to(text, nameless, add_generation_prompt, variables or {}):
                says = f"the model's chat template shows no name with the role {messages[first]['role']}"
                raise InvalidArgumentError(f"messages[{first}].name", says)
        return _up_to(text, mark) if continue_final_message else text

    def _renders_to(self, text: str, *conversation: Any) -> bool:
        try:
            return self._render(*conversation) == text
        except InvalidArgumentError:
            return False

    def _render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        values = self._special_tokens | dict(variables)
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **values,
            )
        except TemplateRefusalError as error:
            raise InvalidArgumentError("messages", f"the model's chat template says: {error}") from None
        except Exception:
            # A template is foreign code and may fail on any input.
            message = "the model's chat template cannot render this conversation"
            raise InvalidArgumentError("messages", message) from None

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The message as the template sees it."""
        shown = {key: value for key, value in message.items() if value is not None}
        if shown["role"] == "developer" and not self._knows_developers:
            shown["role"] = "system"
        if not isinstance(shown["content"], str) and not self._takes_parts:
            shown["content"] = "\n".join(part["text"] for part in shown["content"])
        return shown


def _with_end(message: Mapping[str, Any], end: str) -> dict[str, Any]:
    """The message with `end` appended to its content."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + end}
    if not content:
        raise InvalidArgumentError("continue_final_message", "the last message has no text to continue")
    return {**message, "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + end}]}


def _up_to(text: str, mark: str) -> str:
    """A rendered conversation up to the mark that follows the last message's content.

    The mark is followed by a space. A template that strips contents removes that space, and would also have
    removed the white space before the mark. Raises InvalidArgumentError.
    """
    at = text.rfind(mark)
    if at < 0:
        message = "the model's chat template does not show the last message's content"
        raise InvalidArgumentError("continue_final_message", message)
    kept = text.startswith(f"{mark} ", at)
    return text[:at] if kept else text[:at].rstrip()


def _without_name(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "name"}


def _iterates_content(tree: nodes.Template) -> bool:
    """True if a template loops over a message's content, and so accepts it in parts."""
    names = {
        assignment.target.name
        for assignment in tree.find_all(nodes.Assign)
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node, frozenset())
    }
    return any(_is_content(loop.iter, frozenset(names)) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node, names: frozenset[str]) -> bool:
    match node:
        case nodes.Getattr():
            return node.attr == "content"
        case nodes.Getitem():
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        case nodes.Name():
            return node.name in names
    return False


def load(tokenizer: str, override: str = "") -> ChatTemplate | None:
    """The template of a tokenizer; None if it has none.

    Args:
        tokenizer: as `CoordinatorConfig.tokenizer`.
        override: a file that replaces the tokenizer's own template.

    Raises InvalidArgumentError naming `chat_template`.
    """
    config = read_json(tokenizer, "tokenizer_config.json")
    if override:
        source: str | None = read_text("chat_template", override)
    else:
        source = _read(tokenizer, "chat_template.jinja") or _default(config.get("chat_template"))
    return None if source is None else ChatTemplate(source, _special_tokens(tokenizer, config))


def _default(entry: Any) -> str | None:
    """One template, or the one named `default` of several."""
    if isinstance(entry, list):
        named = {each.get("name"): each.get("template") for each in entry if isinstance(each, dict)}
        entry = named.get("default")
    return entry if isinstance(entry, str) else None


def _special_tokens(tokenizer: str, config: Mapping[str, Any]) -> dict[str, str]:
    values = dict(config)
    if "added_tokens_decoder" not in config:
        # Older checkpoints keep special tokens in a separate file, which takes precedence.
        values |= read_json(tokenizer, "special_tokens_map.json")
    tokens = {name: values.get(name) for name in _SPECIAL_TOKENS}
    texts = {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def read_json(tokenizer: str, file: str) -> dict[str, Any]:
    """The JSON object in a file beside tokenizer.json; empty if there is no such file.

    Raises InvalidArgumentError naming `tokenizer`.
    """
    text = _read(tokenizer, file)
    try:
        values = json.loads(text) if text else {}
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise InvalidArgumentError("tokenizer", f"{tokenizer} has a {file} that is not a JSON object")
    return values


def _read(tokenizer: str, file: str) -> str | None:
    """The text of a file beside tokenizer.json, local or on the hub; None if there is none."""
    path = Path(assets.resolve(tokenizer))
    if path.exists():
        found = (path if path.is_dir() else path.parent) / file
    else:
        from huggingface_hub import _CACHED_NO_EXIST, constants, hf_hub_download, try_to_load_from_cache
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        try:
            found = Path(hf_hub_download(tokenizer, file))
        except Exception as error:  # any network error
            # The hub reports that the file does not exist. If the hub did not answer, a cached report of the
            # same counts; in offline mode, the local files are taken to be complete.
            if isinstance(error, EntryNotFoundError) and (
                not isinstance(error, LocalEntryNotFoundError)
                or try_to_load_from_cache(tokenizer, file) is _CACHED_NO_EXIST
                or constants.HF_HUB_OFFLINE
            ):
                return None
            raise InvalidArgumentError("tokenizer", f"{file} of {tokenizer} cannot be fetched") from error
    return found.read_text(encoding="utf-8") if found.is_file() else None
