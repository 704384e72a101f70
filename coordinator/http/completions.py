"""`/v1/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

from starlette.requests import Request

from coordinator.coordinator import Coordinator
from coordinator.generation import Generation
from coordinator.http import body
from coordinator.http.answer import Answer
from coordinator.http.errors import from_error
from coordinator.http.logprobs import LogprobWriter
from coordinator.http.parameters import head_of, make_call
from coordinator.http.schemas import CompletionRequest
from coordinator.ledger import Commit
from paceline.core import limits
from paceline.core.errors import InvalidArgumentError, PacelineError
from paceline.core.types import TokenLogprobs
from paceline.rpc.codec import GenerateCall


class Completions:
    """The endpoint."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    async def create(self, request: Request) -> Answer:
        """Continue one prompt or several. Raises HttpError."""
        wanted = await body.read(request, CompletionRequest)
        try:
            head = head_of("cmpl", wanted, self._coordinator)
            wording = partial(CompletionWording, head, wanted, LogprobWriter(self._coordinator.vocabulary))
            return Answer(self._coordinator, calls_of(wanted, head["id"]), wording, wanted, head["id"])
        except PacelineError as error:
            raise from_error(error, wanted.names) from None


def calls_of(wanted: CompletionRequest, request_id: str) -> list[GenerateCall]:
    """One call a prompt; choices are counted through all of them.

    Raises InvalidArgumentError naming the core field.
    """
    sampling = wanted.sampling(**_prompt_report(wanted))
    if wanted.best_of not in (None, sampling.n):
        raise InvalidArgumentError("best_of", f"must be n, which is {sampling.n}: no choice is thrown away")
    prompts = prompts_of(wanted.prompt)
    if len(prompts) * sampling.n > limits.MAX_CHOICES:
        raise InvalidArgumentError(
            "prompt", f"{len(prompts)} prompts of {sampling.n} choices are more than {limits.MAX_CHOICES}"
        )
    speculation = wanted.speculation()
    return [
        make_call(f"{request_id}-{index}", prompt, sampling, speculation, wanted.cache_salt)
        for index, prompt in enumerate(prompts)
    ]


def _prompt_report(wanted: CompletionRequest) -> dict[str, int]:
    """With `echo` the log-probabilities are those of the whole text, prompt included."""
    if wanted.stream and wanted.prompt_logprobs is not None:
        raise InvalidArgumentError("prompt_logprobs", "cannot be streamed")
    if not wanted.echo or wanted.logprobs is None:
        return {}
    if wanted.stream and wanted.n not in (None, 1):
        raise InvalidArgumentError("n", "must be 1 to stream logprobs with echo")
    if wanted.prompt_logprobs not in (None, wanted.logprobs):
        raise InvalidArgumentError("prompt_logprobs", "must equal logprobs with echo")
    return {"prompt_logprobs": wanted.logprobs}


def prompts_of(value: str | list[str] | list[int] | list[list[int]]) -> list[str | tuple[int, ...]]:
    """The prompts in whichever of OpenAI's four shapes they come."""
    if isinstance(value, str):
        return [value]
    if not value:
        raise InvalidArgumentError("prompt", "must not be empty")
    if isinstance(value[0], int):
        return [tuple(value)]
    return [each if isinstance(each, str) else tuple(each) for each in cast("list[str | list[int]]", value)]


class CompletionWording:
    """Answers as OpenAI's `text_completion` objects."""

    def __init__(
        self,
        head: Mapping[str, Any],
        wanted: CompletionRequest,
        logprobs: LogprobWriter,
        generations: Sequence[Generation],
    ) -> None:
        self._head = {**head, "object": "text_completion"}
        self._wanted = wanted
        self._logprobs = logprobs
        self._generations = generations
        self._offsets: dict[int, int] = {}
        """Characters of a choice's text whose log-probabilities were told."""

    def chunk(self, choice: int, commit: Commit) -> dict[str, Any] | None:
        """The event for one commit; None for tokens whose text is not there yet."""
        if not (commit.text or commit.logprobs or commit.prompt_logprobs or commit.finish):
            return None
        return {**self._head, "choices": [self._choice(choice, [commit], commit.prompt_logprobs)]}

    def usage_chunk(self, counts: dict[str, Any]) -> dict[str, Any]:
        """The event after all choices have ended."""
        return {**self._head, "choices": [], "usage": counts}

    def whole(self, choices: Sequence[Sequence[Commit]], counts: dict[str, Any]) -> dict[str, Any]:
        """The answer without streaming."""
        told = []
        for index, commits in enumerate(choices):
            # The core reports a prompt once, with its first choice.
            first = choices[index - index % self._choices_a_prompt]
            prompt = [entry for commit in first for entry in commit.prompt_logprobs]
            choice = self._choice(index, commits, prompt)
            if self._wanted.prompt_logprobs is not None:
                choice["prompt_logprobs"] = self._logprobs.prompt(prompt)
            told.append(choice)
        return {**self._head, "choices": told, "usage": counts}

    def _choice(
        self, index: int, commits: Sequence[Commit], prompt: Sequence[TokenLogprobs]
    ) -> dict[str, Any]:
        text = "".join(commit.text for commit in commits)
        logprobs = None
        if self._wanted.logprobs is not None:
            entries = [entry for commit in commits for entry in commit.logprobs]
            logprobs = self._lists(index, [*prompt, *entries] if self._wanted.echo else entries)
        return {"index": index, "text": text, "logprobs": logprobs, **finish_of(commits[-1])}

    def _lists(self, index: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        begins = index not in self._offsets
        generation = self._generations[index // self._choices_a_prompt]
        first_token = generation.prompt[0] if begins and self._wanted.echo else None
        lists, self._offsets[index] = self._logprobs.completion(
            entries, self._offsets.get(index, 0), first_token=first_token
        )
        return lists

    @property
    def _choices_a_prompt(self) -> int:
        return len(self._generations[0].choices)


def finish_of(commit: Commit) -> dict[str, Any]:
    """Why a choice ended, if it did; `stop_reason` is the stop string or token id, as with vLLM."""
    finish = commit.finish
    if finish is None:
        return {"finish_reason": None, "stop_reason": None}
    reason = finish.stop_string if finish.stop_string is not None else finish.stop_token_id
    return {"finish_reason": finish.reason.value, "stop_reason": reason}
