"""HTTP of real processes, with OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
from harness.oracle import Oracle
from harness.pair import Pair
from harness.stacks import OwnCoordinator, RunningStack, own_coordinator, together
from harness.waiting import HANG
from harness.web import Http, connect

from paceline import AsyncClient
from paceline.core.errors import InvalidArgumentError

TEMPLATE = (
    "{% for message in messages %}{{ '# ' + message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '# assistant:' }}{% endif %}"
)
MESSAGES: list[Any] = [
    {"role": "system", "content": "Write Python."},
    {"role": "user", "content": "A function that adds two numbers."},
]
TERMINAL = {**os.environ, "TERM": "dumb"}
SAMPLING: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, "seed": 7}
EVERYTHING: dict[str, Any] = {"ignore_eos": True}


@pytest.fixture(scope="module")
def chat_pair(pair_paths: Pair, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The pair, with a chat template beside the target's tokenizer."""
    folder = tmp_path_factory.mktemp("chat") / "target"
    shutil.copytree(pair_paths.target, folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    return Pair(folder, pair_paths.draft)


@pytest.fixture(scope="module")
def chatting(stack: RunningStack, chat_pair: Pair) -> Iterator[OwnCoordinator]:
    """A coordinator with that tokenizer, of the shared workers."""
    workers = [stack.stack.address_of(role) for role in ("target", "draft")]
    with own_coordinator(chat_pair, workers[:1], workers[1:], model_name="chatty") as coordinator:
        yield coordinator


@pytest.fixture(scope="module")
def chat(chatting: OwnCoordinator) -> Iterator[Http]:
    yield from connect(chatting.supervisor.status("coordinator").http_address)


@pytest.fixture
async def async_openai(http: Http) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{http.url}/v1", api_key="none", timeout=HANG, max_retries=0
    ) as client:
        yield client


# ---- completions ----------------------------------------------------------------------------------


def test_a_completion_equals_the_sdks_result(http: Http, stack: RunningStack) -> None:
    """Whole and streamed."""
    want = stack.client.generate("def main():", SAMPLING, timeout=HANG)
    got = http.complete(**SAMPLING)
    (choice,) = got.choices
    assert (choice.text, choice.finish_reason) == (want.text, want.finish_reason)
    assert got.usage.prompt_tokens == want.usage.prompt_tokens
    *chunks, last = http.complete(stream=True, stream_options={"include_usage": True}, **SAMPLING)
    assert "".join(chunk.choices[0].text for chunk in chunks) == want.text
    assert chunks[-1].choices[0].finish_reason == want.finish_reason
    assert not last.choices
    assert last.usage.completion_tokens == got.usage.completion_tokens == want.usage.completion_tokens
    assert len(chunks) > 1


async def test_an_async_client_reads_many_streams(
    async_openai: openai.AsyncOpenAI, http: Http, stack: RunningStack
) -> None:
    async def text(seed: int) -> str:
        stream = await async_openai.completions.create(
            model=http.model, prompt="import os\n", max_tokens=24, temperature=1.0, seed=seed, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    texts = await asyncio.gather(*(text(seed) for seed in range(12)))
    wanted = together(
        [
            lambda seed=seed: (
                stack.client.generate(
                    "import os\n", {"max_tokens": 24, "temperature": 1.0, "seed": seed}, timeout=HANG
                ).text
            )
            for seed in range(12)
        ],
        4,
    )
    assert texts == wanted


def test_prompts_of_every_form_with_several_choices_work(http: Http, stack: RunningStack) -> None:
    ids = stack.client.tokenize("import os\n")
    parameters = {**SAMPLING, "n": 2, "max_tokens": 12}
    prompts: list[Any] = [
        "import os\n",
        ["import os\n", "def main():"],
        list(ids),
        [list(ids), list(stack.client.tokenize("def main():"))],
    ]
    wanted = [
        output.text
        for prompt in ("import os\n", "def main():")
        for output in stack.client.generate(prompt, parameters, timeout=HANG).outputs
    ]
    for prompt in prompts:
        got = http.complete(prompt, **parameters)
        assert [choice.text for choice in got.choices] == wanted[: len(got.choices)]
        assert [choice.index for choice in got.choices] == list(range(len(got.choices)))
    assert len(set(wanted)) > 2


def test_log_probabilities_equal_the_sdks(http: Http, stack: RunningStack) -> None:
    parameters = {**SAMPLING, "max_tokens": 8}
    want = stack.client.generate("def main():", {**parameters, "logprobs": 3}, timeout=HANG)
    got = http.complete(logprobs=3, echo=True, **parameters)
    (choice,) = got.choices
    assert choice.text == "def main():" + want.text
    assert choice.logprobs.token_logprobs[0] is None
    assert "".join(choice.logprobs.tokens) == choice.text
    told = choice.logprobs.token_logprobs[len(stack.client.tokenize("def main():")) :]
    assert told == pytest.approx(
        [at[token].logprob for at, token in zip(want.logprobs, want.token_ids, strict=True)], abs=1e-4
    )


def test_speculation_is_controlled_and_reported(http: Http) -> None:
    def create(**more: Any) -> Any:
        extra = {**EVERYTHING, "include_speculative_decoding": True, "speculative_decoding": more}
        got = http.complete(extra_body=extra, **SAMPLING)
        return got.choices[0].text, got.usage.model_dump()["speculative_decoding"]

    text, plain = create(num_speculative_tokens=0)
    assert (plain["num_rounds"], plain["num_draft_tokens"]) == (SAMPLING["max_tokens"], 0)
    same, drafted = create(num_speculative_tokens=3)
    assert same == text
    assert drafted["num_draft_tokens"] > 0
    assert drafted["num_rounds"] < plain["num_rounds"]
    assert create(num_speculative_tokens=3, acceptance="rejection")[1]["acceptance"] == "rejection"


def test_vllm_parameters_are_honoured(http: Http) -> None:
    def create(**more: Any) -> Any:
        extra = {**EVERYTHING, "min_tokens": 4, "top_k": 5, "include_stop_str_in_output": True}
        return http.complete(extra_body=extra, **SAMPLING, **more)

    text = create().choices[0].text
    end = text[-3:]
    stopped = create(stop=[end, "never"])
    (choice,) = stopped.choices
    assert choice.finish_reason == "stop"
    assert choice.model_dump()["stop_reason"] == end
    assert choice.text.endswith(end)
    assert text.startswith(choice.text)
    assert stopped.usage.completion_tokens > 4


# ---- chat -----------------------------------------------------------------------------------------


def chat_prompt(chat_pair: Pair) -> list[int]:
    ids = Oracle.load(chat_pair.target).tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=False
    )
    return list(ids)


def test_a_chat_continues_the_prompt_transformers_renders(
    chat: Http, chatting: OwnCoordinator, chat_pair: Pair
) -> None:
    want = chatting.client.generate(chat_prompt(chat_pair), SAMPLING, timeout=HANG)
    assert chat.model == "chatty"
    got = chat.chat(MESSAGES, **SAMPLING)
    (choice,) = got.choices
    assert choice.message.content == want.text
    assert choice.message.role == "assistant"
    assert choice.finish_reason == want.finish_reason
    assert got.usage.prompt_tokens == len(chat_prompt(chat_pair))

    again: list[Any] = [*MESSAGES, choice.message, {"role": "user", "content": "Go on."}]
    more = chat.chat(again, max_completion_tokens=4)
    assert more.usage.prompt_tokens > got.usage.prompt_tokens


def test_a_streamed_chat_equals_the_whole(chat: Http, chatting: OwnCoordinator, chat_pair: Pair) -> None:
    want = chatting.client.generate(chat_prompt(chat_pair), {**SAMPLING, "logprobs": 2}, timeout=HANG)
    stream = chat.chat(
        MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=2,
        **SAMPLING,
    )
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == want.text
    assert last.usage.completion_tokens == want.usage.completion_tokens
    reported = [
        token.logprob
        for chunk in chunks
        for token in (chunk.choices[0].logprobs and chunk.choices[0].logprobs.content) or ()
    ]
    assert reported == pytest.approx(
        [at[token].logprob for at, token in zip(want.logprobs, want.token_ids, strict=True)], abs=1e-4
    )


def test_openais_stream_helper_gathers_a_chat(chat: Http) -> None:
    whole = chat.chat(MESSAGES, **SAMPLING)
    text = whole.choices[0].message.content
    assert text
    end = text[-3:]
    with chat.openai.chat.completions.stream(
        model="chatty", messages=MESSAGES, stop=end, **SAMPLING
    ) as stream:
        final = stream.get_final_completion()  # it takes an answer for broken that ended by its length
    assert final.choices[0].finish_reason == "stop"
    assert final.choices[0].message.content == text.partition(end)[0]


def test_tokenize_accepts_a_conversation(chat: Http, chat_pair: Pair) -> None:
    answer = chat.post("/tokenize", {"messages": MESSAGES}).json()
    assert answer["tokens"] == chat_prompt(chat_pair)
    assert answer["count"] == len(answer["tokens"])


# ---- what the server says of itself ---------------------------------------------------------------


def test_health_version_and_metrics_are_served(http: Http, stack: RunningStack) -> None:
    assert http.get("/health").status_code == 200
    assert http.get("/version").json().keys() == {"version"}
    stack.good_request()
    status = stack.client.status().coordinator
    assert status.http_address == stack.stack.http_address
    values = dict(line.rsplit(" ", 1) for line in http.get("/metrics").text.splitlines())
    ended = (
        f'paceline:request_success_total{{finished_reason="{reason}",model_name="{http.model}"}}'
        for reason in ("stop", "length")
    )
    assert sum(float(values[metric]) for metric in ended) == status.finished_requests


def test_tokenize_and_detokenize_round_trip(http: Http, stack: RunningStack) -> None:
    tokens = http.post("/tokenize", {"prompt": "def main():"}).json()["tokens"]
    assert tuple(tokens) == tuple(stack.client.tokenize("def main():"))
    assert http.post("/detokenize", {"tokens": tokens}).json() == {"prompt": "def main():"}


# ---- what vLLM's clients ask for ------------------------------------------------------------------


def test_token_ids_of_a_chat_equal_the_sdks(chat: Http, chatting: OwnCoordinator) -> None:
    body: dict[str, Any] = {"return_token_ids": True, "include_speculative_decoding": True}
    got = chat.chat(MESSAGES, extra_body=body | EVERYTHING, **SAMPLING).model_dump()
    want = chatting.client.generate(got["prompt_token_ids"], {**SAMPLING, **EVERYTHING}, timeout=HANG)
    (choice,) = got["choices"]
    assert tuple(choice["token_ids"]) == want.token_ids
    stats = choice["speculative_decoding_stats"]
    assert stats["num_spec_steps"] == sum(stats["acceptance_histogram"].values())


def test_a_prompt_is_scored_without_an_answer(http: Http) -> None:
    asked: dict[str, Any] = {"model": http.model, "prompt": "def main():", "echo": True, "logprobs": 1}
    scored = http.openai.completions.create(max_tokens=0, **asked)
    longer = http.openai.completions.create(max_tokens=1, temperature=0, **asked)
    mine, other = scored.choices[0], longer.choices[0]
    assert mine.text == "def main():"
    assert mine.logprobs.token_logprobs == other.logprobs.token_logprobs[:-1]
    assert scored.usage.completion_tokens == 0


def test_special_tokens_are_shown_on_request(http: Http, oracle: Oracle) -> None:
    """The end token is special, and stays in the text with the stop strings."""
    end = oracle.tokenizer.eos_token
    (end_id,) = oracle.eos_token_ids
    asked: dict[str, Any] = {"include_stop_str_in_output": True, "logit_bias": {str(end_id): 100}}
    texts = []
    for skips in (True, False):
        body = {**asked, "skip_special_tokens": skips}
        got = http.complete(temperature=0, extra_body=body)
        texts.append(got.choices[0].text)
    assert texts == ["", end]


def test_an_answer_can_start_with_a_given_text(chat: Http, chatting: OwnCoordinator) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "def add("}]
    got = chat.openai.chat.completions.create(
        model="tgi",
        messages=messages,
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
        **SAMPLING,
    )
    prompt = "# system: Write Python.\n# user: A function that adds two numbers.\n# assistant: def add("
    ids = chatting.client.tokenize(prompt, timeout=HANG)
    assert got.usage.prompt_tokens == len(ids)
    assert got.choices[0].message.content == chatting.client.generate(ids, SAMPLING, timeout=HANG).text


# ---- conversations without HTTP -------------------------------------------------------------------


async def test_both_clients_chat_like_http(chat: Http, chatting: OwnCoordinator) -> None:
    want = chat.chat(MESSAGES, **SAMPLING)
    text = want.choices[0].message.content
    assert chatting.client.chat(MESSAGES, SAMPLING, timeout=HANG).text == text
    assert "".join(c.text for c in chatting.client.stream_chat(MESSAGES, SAMPLING, timeout=HANG)) == text
    async with AsyncClient(chatting.client.address) as client:
        assert (await client.chat(MESSAGES, SAMPLING, timeout=HANG)).text == text
        async with await client.stream_chat(MESSAGES, SAMPLING, timeout=HANG) as stream:
            assert "".join([chunk.text async for chunk in stream]) == text


def test_a_server_without_a_chat_template_names_the_option(stack: RunningStack) -> None:
    with pytest.raises(InvalidArgumentError, match="--chat-template FILE"):
        stack.client.chat(MESSAGES, timeout=HANG)


def test_terminal_chat_ends_on_ctrl_c_and_ctrl_d(chatting: OwnCoordinator) -> None:
    """Ctrl-C while a reply is written, then Ctrl-D."""
    mine, theirs = pty.openpty()
    words = [sys.executable, "-P", "-m", "paceline", "chat", "--address", chatting.client.address]
    command = [*words, "--ignore-eos", "--temperature", "0"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=TERMINAL)
    os.close(theirs)
    seen = b""

    def until(words: bytes, more: int = 0) -> None:
        nonlocal seen
        while not (words in seen and len(seen) >= seen.index(words) + len(words) + more):
            ready, _, _ = select.select([mine], [], [], HANG)
            assert ready, seen
            seen += os.read(mine, 4096)

    try:
        until(b"> ")
        seen = b""
        os.write(mine, b"def main():\n")
        until(b"def main():\r\n", 20)
        process.send_signal(signal.SIGINT)
        seen = b""
        until(b"\r\n> ")
        os.write(mine, b"\x04")
        assert process.wait(HANG) == 0
    finally:
        process.kill()
        process.wait()
        os.close(mine)
    assert chatting.client.status(timeout=HANG).coordinator.running == 0
