"""Where the tokens of a completion begin in its text."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from coordinator.api.http.openai.logprobs import LogprobWriter
from coordinator.sequence.ledger import Commit, Ledger
from coordinator.text.vocabulary import Vocabulary
from paceline.core.types import TokenLogprobs, TokenOrigin
from paceline.rpc.codec import GenerateCall
from tests.unit.http.api import Api, script


@pytest.fixture
def bytewise() -> Vocabulary:
    """Tokens of one byte each; special are `<s>`, which begins texts, and `<e>`, which takes in space."""
    tokens = ["<s>", "<e>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", AddedToken("<e>", rstrip=True, special=True)])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 0)])
    return Vocabulary(tokenizer, "fingerprint", len(tokens))


@pytest.mark.parametrize("shown", ["日é x", ""])
@pytest.mark.parametrize("echo", [True, False])
async def test_offsets_are_where_tokens_begin_in_the_text(
    echo: bool, shown: str, bytewise: Vocabulary, coordinator: Any, api: Api
) -> None:
    prompt = bytewise.encode(shown)
    generated = [*(bytewise.encode("🙂 ö", add_special_tokens=False)), 0, prompt[-1]]
    text = bytewise.decode(prompt) if echo else ""

    async def scripted(call: GenerateCall) -> AsyncIterator[Commit]:
        detokenizer = bytewise.detokenizer(prompt)
        ledger = Ledger(
            prompt, call.sampling, detokenizer=detokenizer, eos_token_ids=frozenset(), max_model_len=100
        )
        if text:
            yield Commit(0, (), (), text)
        for i in range(1, len(prompt), 2):
            entries = tuple(TokenLogprobs(token, -0.5, 1) for token in prompt[i : i + 2])
            yield Commit(0, (), (), "", prompt_logprobs=entries if echo else ())
        for i in range(0, len(generated), 2):
            some = generated[i : i + 2]
            yield ledger.commit(
                [(token, TokenOrigin.TARGET) for token in some], [TokenLogprobs(t, -0.5, 1) for t in some]
            )

    coordinator.vocabulary, coordinator.script = bytewise, scripted
    values = {"prompt": prompt, "echo": echo, "logprobs": 0, "max_tokens": len(generated)}
    whole = await api.choice(**values)
    parts = [chunk["choices"][0] for chunk in await api.stream(**values)]
    token_ids = [*(prompt if echo else ()), *generated]
    # All characters are whole in the end; one that is not yet does not count.
    begins = [len(bytewise.decode(token_ids[:i]).rstrip("\ufffd")) for i in range(len(token_ids))]
    assert whole["text"] == "".join(part["text"] for part in parts) == bytewise.decode(token_ids)
    for name, want in (("text_offset", begins), ("tokens", [bytewise.token_text(i) for i in token_ids])):
        assert whole["logprobs"][name] == want
        assert [value for part in parts for value in part["logprobs"][name]] == want


def reporting(vocabulary: Vocabulary, prompt: list[int], echo: str) -> Any:
    """A script that reports a prompt in parts, and generates `x<s>y` behind it."""
    report = [TokenLogprobs(token, -0.5, 1) for token in prompt]
    parts = [tuple(report[i : i + 2]) for i in range(1, len(prompt), 2)]
    generated = vocabulary.tokenizer.encode("x<s>y", add_special_tokens=False).ids
    return script(
        Commit(0, (), (), echo),
        *(Commit(0, (), (), "", prompt_logprobs=part) for part in parts),
        *(
            Commit(i, (token,), (TokenOrigin.TARGET,), text, logprobs=(TokenLogprobs(token, -0.5, 1),))
            for i, (token, text) in enumerate(zip(generated, ("x", "", "y"), strict=True))
        ),
    )


@pytest.mark.parametrize("as_text", [True, False])
async def test_shown_special_tokens_count_in_offsets(
    as_text: bool, bytewise: Vocabulary, coordinator: Any, api: Api
) -> None:
    text = "é<s>b<e> \nc<s><s>"
    prompt = bytewise.encode(text)
    # `<s>` that the tokenizer puts in front, the two bytes of `é`, `<s>`, `b`, `<e>`, `c`, `<s>`, `<s>`.
    begins = [0, 0, 0, 1, 4, 5, 10, 11, 14, 17, 18, 18]
    if not as_text:
        # Letters that look like the token in front of them do not make room for it.
        letters = [bytewise.tokenizer.token_to_id(letter) for letter in "<s>"]
        prompt = [*prompt, *letters]
        text, begins = bytewise.decode(prompt), [0, 0, 0, 1, 1, 2, 2, 3, 3, 3, 4, 5, 6, 7, 7]
    coordinator.vocabulary, coordinator.script = bytewise, reporting(bytewise, prompt, text)
    values = {"prompt": text if as_text else prompt, "echo": True, "logprobs": 0, "max_tokens": 3}
    whole = await api.choice(**values)
    assert whole["text"] == text + "xy"
    assert whole["logprobs"]["text_offset"] == begins
    parts = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in await api.stream(**values)]
    assert [offset for part in parts for offset in part] == begins


async def test_a_whole_answer_is_made_outside_the_loops_thread(
    bytewise: Vocabulary, coordinator: Any, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt's offsets take a second, and other streams go on meanwhile."""
    made_by, make = set(), LogprobWriter.completion

    def noted(*args: Any, **more: Any) -> Any:
        made_by.add(threading.get_ident())
        return make(*args, **more)

    monkeypatch.setattr(LogprobWriter, "completion", noted)
    prompt = bytewise.encode("ab")
    coordinator.vocabulary, coordinator.script = bytewise, reporting(bytewise, prompt, "ab")
    values = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 3}
    choice = await api.choice(**values)
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2, 3, 3]
    assert made_by
    assert threading.get_ident() not in made_by
