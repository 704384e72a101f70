"""Conversations render like transformers; what a template would ignore is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from harness.refusals import refused

from coordinator.api import chat_template
from coordinator.api.chat_template import ChatTemplate, load
from coordinator.api.conversations import Conversations
from paceline import assets
from paceline.core import limits
from paceline.core.errors import InvalidArgumentError

TURNS = """\
{%- for message in messages %}
{{- '<|turn|>' + message['role'] + '\\n' + message['content'] + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|turn|>assistant\\n' }}{% endif %}"""
STRICT = """\
{{ bos_token }}{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}
{{ messages[0].content | trim }}{% else %}{% set rest = messages %}{% endif %}
{% for message in rest %}
    {% if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('roles must alternate, but got ' + message.role) }}
    {% endif %}
    {% if message.role == 'user' %}
[I]{{ message.content | trim }}[/I]
    {% else %}{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}{% endif %}
{% endfor %}"""
HELPERS = """\
{%- set state = namespace(count=0) -%}
{%- for message in messages -%}
    {%- if message.content == 'stop' %}{% break %}{% endif -%}
    {%- set state.count = state.count + 1 -%}
    {{- {'é': message.content, 'n': state.count} | tojson }}{{ [1, 2] | tojson(indent=1) -}}
    {{- dict(a=1).a }}{{ dict.fromkeys(['x'], 2).x -}}
{%- endfor -%}
{{- strftime_now('%Y') }} {{ tools is none }} {{ documents is none -}}"""
PARTS = """\
{% for message in messages %}{% set content = message['content'] %}{{ message.role }}:
{% if content is string %}{{ content }}{% else %}
{% for part in content %}{% if part.type == 'text' %}<{{ part.text }}>{% endif %}{% endfor %}{% endif %}
{% endfor %}"""
NAMED = (
    "{% for m in messages %}{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}: {{ m.content }}\n"
    "{% endfor %}"
)
THINKING = (
    "{% if think is defined and think %}<think>{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
)

USER, ASSISTANT, SYSTEM = "user", "assistant", "system"
CONVERSATIONS = [
    [{"role": USER, "content": " hello <b>&amp; \n"}],
    [{"role": SYSTEM, "content": " be kind "}, {"role": USER, "content": "été {{ 1 + 1 }}"}],
    [
        {"role": USER, "content": "a"},
        {"role": ASSISTANT, "content": " b "},
        {"role": USER, "content": "stop"},
    ],
]


def turn(content: Any, role: str = USER, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The embedded target's tokenizer, without its weights."""
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(assets.path("target") / name, tmp_path / name)
    return tmp_path


def configure(folder: Path, **changes: Any) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def transformers_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


sources = pytest.mark.parametrize(
    "source", [TURNS, STRICT, HELPERS, PARTS], ids=["turns", "strict", "helpers", "parts"]
)
CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}


def both(folder: Path, source: str) -> tuple[Any, ChatTemplate]:
    """transformers' tokenizer and ours, of one model with this template."""
    configure(folder, chat_template=source)
    template = load(str(folder))
    assert template is not None
    return transformers_tokenizer(folder), template


@sources
@pytest.mark.parametrize("opens", [True, False])
async def test_text_and_tokens_equal_transformers(
    source: str, opens: bool, folder: Path, coordinator: Any
) -> None:
    oracle, template = both(folder, source)
    options = {"add_generation_prompt": opens}
    for messages in CONVERSATIONS:
        want = oracle.apply_chat_template(messages, tokenize=False, **options)
        assert template.render(messages, **options) == want
        tokens = oracle.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
        assert await Conversations(coordinator, template).encode(messages, **options) == tokens


@sources
@pytest.mark.parametrize("end", ["an answer", "an answer  ", " x\n", ""])
def test_a_continued_message_ends_like_transformers(source: str, end: str, folder: Path) -> None:
    oracle, template = both(folder, source)
    messages = [turn("hello"), turn(end, ASSISTANT)]
    want = oracle.apply_chat_template(messages, tokenize=False, **CONTINUED)
    assert template.render(messages, **CONTINUED) == want


@pytest.mark.parametrize("source", [PARTS, TURNS], ids=["parts", "turns"])
def test_a_continued_message_may_have_parts(source: str) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}]
    text = ChatTemplate(source).render([turn("x"), turn(parts, ASSISTANT)], **CONTINUED)
    assert text.endswith("b ")


@pytest.mark.parametrize("last", ["y", []])
def test_an_unshown_message_cannot_be_continued(last: Any) -> None:
    with refused("continue_final_message"):
        ChatTemplate("{{ messages[0].content }}").render([turn("x"), turn(last, ASSISTANT)], **CONTINUED)


def test_text_parts_are_passed_or_joined(folder: Path) -> None:
    parts = [turn([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])]
    configure(folder, chat_template=PARTS)
    want = transformers_tokenizer(folder).apply_chat_template(parts, tokenize=False)
    assert ChatTemplate(PARTS).render(parts) == want
    assert "<a><b>" in want
    assert ChatTemplate(TURNS).render(parts) == ChatTemplate(TURNS).render([turn("a\nb")])


def test_a_developer_role_becomes_system_if_unknown() -> None:
    developer, system = [turn("x", "developer")], [turn("x", "system")]
    assert ChatTemplate(TURNS).render(developer) == ChatTemplate(TURNS).render(system)
    knowing = "{% for m in messages %}{{ 'D' if m.role == 'developer' else 'S' }}{% endfor %}"
    assert ChatTemplate(knowing).render(developer) == "D"


# A template may show names of one role only.
OF_USERS = NAMED.replace("m.name %}", "m.name and m.role == 'user' %}")
ANN, BOB = turn("x", name="Ann"), turn("z", ASSISTANT, name="Bob")


@pytest.mark.parametrize(
    ("source", "messages", "text"),
    [
        (NAMED, [turn("x"), ANN], "user: x\nuser Ann: x\n"),
        (NAMED, [ANN, BOB], "user Ann: x\nassistant Bob: z\n"),
        # A name equal to the role may be shown, and need not.
        (NAMED, [turn("y", name=USER), turn("z", ASSISTANT)], "user user: y\nassistant: z\n"),
        (TURNS, [turn("y", name=USER)], "<|turn|>user\ny<|end|>\n<|turn|>assistant\n"),
        (TURNS, [turn("x", "developer", name="developer")], "<|turn|>system\nx<|end|>\n<|turn|>assistant\n"),
    ],
)
def test_a_name_is_shown(source: str, messages: Any, text: str) -> None:
    assert ChatTemplate(source).render(messages) == text


@pytest.mark.parametrize(
    ("source", "last", "role"),
    [
        (TURNS, ANN, USER),
        (TURNS, turn("a", name="User"), USER),
        (TURNS, turn("a", ASSISTANT, name=USER), ASSISTANT),
        (OF_USERS, BOB, ASSISTANT),
        (OF_USERS, turn("x", "developer", name="Cy"), "developer"),
    ],
)
def test_an_unshown_name_is_refused(source: str, last: Any, role: str) -> None:
    messages = [turn("y", name=USER), turn("z", ASSISTANT), last]
    with refused("messages[2].name", f"no name with the role {role}"):
        ChatTemplate(source).render(messages)


def test_a_name_required_by_the_template_is_accepted() -> None:
    demanding = "{% for m in messages %}{{ m.content if m.name else raise_exception('who?') }}{% endfor %}"
    assert ChatTemplate(demanding).render([turn("x", name="Ann")]) == "x"


def test_variables_are_used_or_refused() -> None:
    assert ChatTemplate(THINKING).render([turn("x")], variables={"think": True}) == "<think>x"
    for name in ("other", "messages", "tools", "bos_token", "add_generation_prompt"):
        with refused("chat_template_kwargs"):
            ChatTemplate(THINKING).render([turn("x")], variables={name: True})


def test_a_templates_refusal_is_the_callers_error() -> None:
    with refused("messages", "roles must alternate, but got assistant"):
        ChatTemplate(STRICT).render([turn("x", ASSISTANT)])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[7].content }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ dict.__init__.__globals__ }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_a_failing_template_ends_one_request(source: str) -> None:
    with refused("messages", "cannot render"):
        ChatTemplate(source).render([turn("x")])


def test_an_invalid_template_is_refused_at_once() -> None:
    with refused("chat_template"):
        ChatTemplate("{% for %}")


def test_the_embedded_pair_has_no_template() -> None:
    assert load("embedded:target") is None


def rendered(template: ChatTemplate | None) -> str:
    return template.render([turn("x")])


def test_templates_are_found_in_the_documented_places(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    configure(
        folder, chat_template=[{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    )
    assert rendered(load(str(folder))) == "d"
    assert rendered(load(str(folder / "tokenizer.json"))) == "d"
    (folder / "chat_template.jinja").write_text("of its own file")
    assert rendered(load(str(folder))) == "of its own file"
    mine = tmp_path_factory.mktemp("mine") / "mine.jinja"
    mine.write_text("mine {{ bos_token }}")
    assert rendered(load(str(folder), str(mine))) == "mine <|endoftext|>"
    assert rendered(load("embedded:target", str(mine))) == "mine <|endoftext|>"
    with refused("chat_template"):
        load(str(folder), str(mine.parent / "none"))


@pytest.mark.parametrize("decoder", [False, True])
def test_special_tokens_equal_transformers(decoder: bool, folder: Path) -> None:
    end = {"content": "<|endoftext|>", "lstrip": False, "normalized": False, "rstrip": False}
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": end}))
    more = {"added_tokens_decoder": {"0": {**end, "special": True}}} if decoder else {}
    source = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}"
    bos = {"__type": "AddedToken", **end, "special": True}
    configure(folder, eos_token=None, bos_token=bos, chat_template=source, **more)
    want = transformers_tokenizer(folder).apply_chat_template([turn("x")], tokenize=False)
    assert rendered(load(str(folder))) == want


@pytest.mark.parametrize("content", ["[1]", "{"])
def test_a_broken_tokenizer_config_is_named(content: str, folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(content)
    with refused("tokenizer"):
        load(str(folder))


def test_a_hub_models_template_is_fetched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError

    configure(folder, chat_template="from the hub")

    def download(name: str, file: str) -> str:
        assert name == "some/model"
        if not (folder / file).is_file():
            raise EntryNotFoundError(file)
        return str(folder / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert rendered(load("some/model")) == "from the hub"

    def broken(name: str, file: str) -> str:
        raise ConnectionError(f"{name} {file}")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", broken)
    with pytest.raises(InvalidArgumentError, match="cannot be fetched"):
        load("some/model")


@pytest.mark.parametrize(
    ("marked", "offline"),
    [(True, False), (False, True), (False, False)],
    ids=["known not to be there", "all is here", "unknown"],
)
def test_an_unreachable_hub_is_not_a_missing_file(
    marked: bool, offline: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the model would lose its bos_token."""
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    def download(name: str, file: str) -> str:
        raise LocalEntryNotFoundError("Please check your connection")

    kept = tmp_path / "models--some--model"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("abc")
    if marked:
        for file in ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
            mark = kept / ".no_exist" / "abc" / file
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    if marked or offline:
        assert load("some/model") is None
        return
    with pytest.raises(InvalidArgumentError, match=r"tokenizer_config\.json of some/model cannot be fetched"):
        load("some/model")


async def test_a_conversation_is_bounded_before_rendering(
    coordinator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_PROMPT_CHARACTERS", 10)
    monkeypatch.setattr(chat_template.ChatTemplate, "render", None)
    conversations = Conversations(coordinator, ChatTemplate(TURNS))
    with refused("messages"):
        await conversations.encode([turn("x" * 6), turn("y" * 6)])


async def test_a_long_conversation_renders_the_same(coordinator: Any) -> None:
    conversations = Conversations(coordinator, ChatTemplate(TURNS))
    text = "word " * 4000
    tokens = await conversations.encode([turn(text)])
    rendering = ChatTemplate(TURNS).render([turn(text)])
    assert tokens == await coordinator.tokenize(rendering, add_special_tokens=False)
