"""Where the tokens of a completion begin in its text."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from coordinator.ledger import Commit, Ledger
from coordinator.vocabulary import Vocabulary
from paceline.core.types import TokenLogprobs, TokenOrigin
from paceline.rpc.codec import GenerateCall
from tests.unit.http.test_answers import stream


@pytest.fixture
def bytewise() -> Vocabulary:
    """Tokens of one byte each, and a special one that begins every text."""
    tokens = ["<s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 0)])
    return Vocabulary(tokenizer, "fingerprint", len(tokens))


@pytest.mark.parametrize("shown", ["日é x", ""])
@pytest.mark.parametrize("echo", [True, False])
async def test_offsets_are_where_the_tokens_begin_in_the_text(
    echo: bool, shown: str, bytewise: Vocabulary, coordinator: Any, client: httpx2.AsyncClient
) -> None:
    prompt = await bytewise.encode(shown)
    generated = [*(await bytewise.encode("🙂 ö", add_special_tokens=False)), 0, prompt[-1]]
    text = bytewise.decode(prompt) if echo else ""

    async def scripted(call: GenerateCall) -> AsyncIterator[Commit]:
        ledger = Ledger(
            prompt,
            call.sampling,
            detokenizer=bytewise.detokenizer(prompt),
            eos_token_ids=frozenset(),
            max_model_len=100,
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
    (whole,) = (await client.post("/v1/completions", json=values)).json()["choices"]
    *chunks, _ = await stream(client, "/v1/completions", values)
    parts = [chunk["choices"][0] for chunk in chunks]
    token_ids = [*(prompt if echo else ()), *generated]
    # All characters are whole in the end; one that is not yet does not count.
    begins = [len(bytewise.decode(token_ids[:i]).rstrip("\ufffd")) for i in range(len(token_ids))]
    assert whole["text"] == "".join(part["text"] for part in parts) == bytewise.decode(token_ids)
    for name, want in (("text_offset", begins), ("tokens", [bytewise.token_text(i) for i in token_ids])):
        assert whole["logprobs"][name] == want
        assert [value for part in parts for value in part["logprobs"][name]] == want
