"""`/v1/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from starlette.requests import Request

from coordinator.api.http.openai.answer import Answer, until_named
from coordinator.api.http.openai.logprobs import LogprobWriter, TextOffsets, spellings
from coordinator.api.http.openai.schema.bodies import CompletionRequest
from coordinator.api.http.openai.schema.parameters import (
    GenerationRequest,
    fingerprinted,
    head_of,
    make_calls,
    writer_of,
)
from coordinator.api.http.openai.usage import choice_stats
from coordinator.api.http.server import body
from coordinator.api.http.server.errors import from_error
from coordinator.api.sampling_defaults import SamplingDefaults
from coordinator.app import Coordinator
from coordinator.requests.generation import Generation
from coordinator.round.machine import RoundMachine
from coordinator.sequence.ledger import Commit, Finish
from paceline.core import limits
from paceline.core.errors import InvalidArgumentError, PacelineError
from paceline.rpc.codec import GenerateCall


class Completions:
    """The endpoint."""

    def __init__(self, coordinator: Coordinator, defaults: SamplingDefaults) -> None:
        self._coordinator = coordinator
        self._defaults = defaults

    async def create(self, request: Request) -> Answer:
        """Continue one prompt or several. Raises HttpError."""
        wanted = await body.read(request, CompletionRequest)
        try:
            await until_named(request, self._coordinator, needs_length=wanted.needs_model_length)
            head = head_of("cmpl", wanted, self._coordinator)
            calls = calls_of(wanted, head["id"], self._defaults.values)
            if wanted.changes_prompt:
                calls = [replace(call, prompt=await self._tokens(wanted, call)) for call in calls]

            def wording(generations: Sequence[Generation]) -> CompletionWording:
                known = fingerprinted(head, self._coordinator)
                return CompletionWording(known, wanted, writer_of(wanted, self._coordinator), generations)

            return Answer(self._coordinator, calls, wording, wanted, head["id"])
        except PacelineError as error:
            raise from_error(error, wanted.names) from None

    async def _tokens(self, wanted: CompletionRequest, call: GenerateCall) -> tuple[int, ...]:
        """The tokens of a prompt that the request truncates, or wants without special tokens."""
        tokens: Sequence[int] = call.prompt if not isinstance(call.prompt, str) else ()
        if isinstance(call.prompt, str):
            special = wanted.add_special_tokens is not False
            tokens = await self._coordinator.tokenize(call.prompt, add_special_tokens=special)
        return wanted.truncated(tokens, call.sampling.max_tokens, self._coordinator)


def calls_of(
    wanted: CompletionRequest, request_id: str, defaults: Mapping[str, Any] | None = None
) -> list[GenerateCall]:
    """One call a prompt. Choices are numbered across all calls.

    `defaults` are for sampling parameters that the request leaves out. Raises InvalidArgumentError naming the
    core field.
    """
    sampling = wanted.sampling(defaults, **_prompt_report(wanted), **_limit(wanted))
    if wanted.best_of not in (None, sampling.n):
        raise InvalidArgumentError(
            "best_of", f"must be n, which is {sampling.n}: choices are never discarded"
        )
    prompts = prompts_of(wanted.prompt)
    if len(prompts) * sampling.n > limits.MAX_CHOICES:
        raise InvalidArgumentError(
            "prompt", f"{len(prompts)} prompts of {sampling.n} choices are more than {limits.MAX_CHOICES}"
        )
    if wanted.truncate_prompt_tokens is None:
        told = sampling.n * sum(len(prompt) for prompt in prompts if not isinstance(prompt, str))
        check_reports(wanted, sampling.prompt_logprobs, told)
    return make_calls(request_id, prompts, sampling, wanted.speculation(), wanted.cache_salt)


def _prompt_report(wanted: CompletionRequest) -> dict[str, int]:
    """With `echo`, log-probabilities cover the whole text, prompt included."""
    if wanted.stream and wanted.prompt_logprobs is not None:
        raise InvalidArgumentError("prompt_logprobs", "cannot be streamed")
    if not wanted.echoes_logprobs:
        return {}
    if wanted.stream and wanted.n not in (None, 1):
        raise InvalidArgumentError("n", "must be 1 to stream logprobs with echo")
    if wanted.prompt_logprobs not in (None, wanted.logprobs):
        raise InvalidArgumentError("prompt_logprobs", "must equal logprobs with echo")
    assert wanted.logprobs is not None
    return {"prompt_logprobs": wanted.logprobs}


def _limit(wanted: CompletionRequest) -> dict[str, int]:
    """The prompt's report comes with a token, so one is generated even if none is asked for."""
    if wanted.max_tokens != 0:
        return {}
    if not wanted.echo:
        raise InvalidArgumentError("max_tokens", "must be at least 1; 0 scores a prompt and requires echo")
    if wanted.min_tokens:
        raise InvalidArgumentError("min_tokens", "must not be greater than max_tokens")
    return {"max_tokens": 1}


def check_reports(wanted: CompletionRequest, prompt_logprobs: int | None, num_tokens: int) -> None:
    """Limit the prompt reports in one answer.

    Args:
        wanted: the request.
        prompt_logprobs: number of likeliest tokens reported at each token.
        num_tokens: prompt tokens of all choices, since every choice repeats its prompt.

    Raises InvalidArgumentError naming the core field.
    """
    if wanted.return_token_ids and num_tokens > limits.MAX_PROMPT_LOGPROBS:
        raise InvalidArgumentError(
            "return_token_ids",
            f"at most {limits.MAX_PROMPT_LOGPROBS} tokens of prompts in all choices, not {num_tokens}",
        )
    if prompt_logprobs is None:
        return
    told = (prompt_logprobs + 1) * num_tokens
    if told > limits.MAX_PROMPT_LOGPROBS:
        raise InvalidArgumentError(
            "prompt_logprobs", f"at most {limits.MAX_PROMPT_LOGPROBS} in all choices together, not {told}"
        )


def prompts_of(value: str | list[str] | list[int] | list[list[int]]) -> list[str | tuple[int, ...]]:
    """The prompts, from any of OpenAI's four shapes."""
    if isinstance(value, str):
        return [value]
    if not value:
        raise InvalidArgumentError("prompt", "must not be empty")
    if isinstance(value[0], int):
        return [tuple(value)]
    return [each if isinstance(each, str) else tuple(each) for each in cast("list[str | list[int]]", value)]


class CompletionWording:
    """Answers as OpenAI's `text_completion` objects.

    Raises InvalidArgumentError if the reports of prompts whose length is only now known would be too large.
    """

    def __init__(
        self,
        head: Mapping[str, Any],
        wanted: CompletionRequest,
        logprobs: LogprobWriter,
        generations: Sequence[Generation],
    ) -> None:
        # Parameters of the first choice, which alone has the report, with `n` = 1.
        reported = generations[0].params.sampling.prompt_logprobs
        check_reports(wanted, reported, sum(len(each.prompt) * len(each.choices) for each in generations))
        self._head = {**head, "object": "text_completion"}
        self._wanted = wanted
        self._logprobs = logprobs
        self._generations = generations
        self._told: dict[int, TextOffsets] = {}
        """Offsets of each choice whose log-probabilities are sent in parts: first the prompt's, then the
        rest."""
        self._echoes: dict[int, int] = {}
        """Number of prompt characters shown by each choice."""
        self._opened: set[int] = set()
        """The choices that already have an event."""

    def opening(self) -> list[dict[str, Any]]:
        """No events before the text."""
        return []

    def chunks(self, choice: int, commit: Commit) -> list[dict[str, Any]]:
        """The event for one commit; none for tokens whose text is not complete yet."""
        ids = self._wanted.return_token_ids and commit.token_ids
        if not (commit.text or commit.logprobs or commit.prompt_logprobs or commit.finish or ids):
            return []
        lists = self._lists(choice, commit)
        told = _choice(choice, [commit], lists) | self._more(choice, [commit])
        if self._wanted.return_token_ids and choice not in self._opened:
            told["prompt_token_ids"] = list(self._generation_of(choice).prompt)
        self._opened.add(choice)
        return [{**self._head, "choices": [told]}]

    def usage_chunk(self, counts: dict[str, Any]) -> dict[str, Any]:
        """The event after all choices have ended."""
        return {**self._head, "choices": [], "usage": counts}

    def whole(self, choices: Sequence[Sequence[Commit]], counts: dict[str, Any]) -> dict[str, Any]:
        """The answer without streaming. May be called from any thread."""
        told: list[dict[str, Any]] = []
        for generation in self._generations:
            own = choices[len(told) : len(told) + len(generation.choices)]
            told += self._choices(len(told), generation.prompt, own)
        return {**self._head, "choices": told, "usage": counts}

    def _choices(
        self, first: int, prompt: Sequence[int], choices: Sequence[Sequence[Commit]]
    ) -> list[dict[str, Any]]:
        """The choices of one prompt. The core reports the prompt with the first one; all share it."""
        report = [entry for commit in choices[0] for entry in commit.prompt_logprobs]
        before: dict[str, list[Any]] = {}
        if self._wanted.echoes_logprobs:
            echo = "".join(map(_echoed, choices[0]))
            before = self._logprobs.completion(report, self._prompt_offsets(echo), first_token=prompt[0])
        ranked = {}
        if self._wanted.prompt_logprobs is not None:
            ranked = {"prompt_logprobs": self._logprobs.prompt(report)}
        told = []
        for index, commits in enumerate(choices, first):
            lists = None
            if self._wanted.logprobs is not None:
                entries = [entry for commit in commits for entry in commit.logprobs]
                echoed = sum(len(_echoed(commit)) for commit in commits)
                lists = self._logprobs.completion(entries, self._offsets(prompt, echoed))
                lists = {name: before.get(name, []) + values for name, values in lists.items()}
            told.append(_choice(index, commits, lists) | ranked | self._more(index, commits))
            if self._wanted.return_token_ids:
                told[-1]["prompt_token_ids"] = list(prompt)
        return told

    def _more(self, index: int, commits: Sequence[Commit]) -> dict[str, Any]:
        """Requested details of a choice besides its text."""
        generation = self._generation_of(index)
        return choice_report(self._wanted, generation.machines[index % len(generation.choices)], commits)

    def _generation_of(self, index: int) -> Generation:
        return self._generations[index // len(self._generations[0].choices)]

    def _lists(self, index: int, commit: Commit) -> dict[str, list[Any]] | None:
        """The log-probabilities in the next event of a choice."""
        if self._wanted.logprobs is None:
            return None
        prompt = self._generation_of(index).prompt
        lists: dict[str, list[Any]] = {}
        first_token = None
        if index not in self._told:
            # The echo comes first and in one part.
            echo = _echoed(commit)
            self._told[index], self._echoes[index] = self._prompt_offsets(echo), len(echo)
            first_token = prompt[0] if self._wanted.echo else None
        if first_token is not None or not commit.token_ids:
            lists = self._logprobs.completion(
                commit.prompt_logprobs, self._told[index], first_token=first_token
            )
        if commit.token_ids:
            if commit.index == 0:
                self._told[index] = self._offsets(prompt, self._echoes[index])
            own = self._logprobs.completion(commit.logprobs, self._told[index])
            lists = {name: lists.get(name, []) + values for name, values in own.items()}
        return lists

    def _prompt_offsets(self, echo: str) -> TextOffsets:
        """Offsets within a prompt. The echo is the prompt's text, or the text of its tokens."""
        prompt = self._wanted.prompt
        if self._wanted.changes_prompt or not (isinstance(prompt, str) or isinstance(prompt[0], str)):
            return self._offsets(())
        vocabulary = self._logprobs.vocabulary
        return TextOffsets(vocabulary.detokenizer(()), 0, echo, spellings(vocabulary.tokenizer))

    def _offsets(self, prompt: Sequence[int], begin: int = 0) -> TextOffsets:
        """Offsets after a prompt; `begin` is the first one in the choice's text."""
        skips = self._wanted.skip_special_tokens is not False
        detokenizer = self._logprobs.vocabulary.detokenizer(prompt, skip_special_tokens=skips)
        return TextOffsets(detokenizer, begin)


def _echoed(commit: Commit) -> str:
    """The prompt's text in a commit without tokens."""
    return "" if commit.token_ids else commit.text


def _choice(index: int, commits: Sequence[Commit], logprobs: Mapping[str, Any] | None) -> dict[str, Any]:
    text = "".join(commit.text for commit in commits)
    return {"index": index, "text": text, "logprobs": logprobs, **finish_of(commits[-1].finish)}


def choice_report(
    wanted: GenerationRequest, machine: RoundMachine, commits: Sequence[Commit]
) -> dict[str, Any]:
    """Requested details of a choice besides its text: tokens, and speculation counts at its end."""
    report: dict[str, Any] = {}
    if wanted.return_token_ids:
        report["token_ids"] = [token_id for commit in commits for token_id in commit.token_ids]
    if wanted.include_speculative_decoding and commits[-1].finish is not None:
        report["speculative_decoding_stats"] = choice_stats(machine)
    return report


def finish_of(finish: Finish | None) -> dict[str, Any]:
    """The reason for a choice's end, if any. `stop_reason` is the stop string or token id, as in vLLM."""
    if finish is None:
        return {"finish_reason": None, "stop_reason": None}
    reason = finish.stop_string if finish.stop_string is not None else finish.stop_token_id
    return {"finish_reason": finish.reason.value, "stop_reason": reason}
