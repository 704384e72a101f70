"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from coordinator.api.conversations import Conversations
from coordinator.api.http.openai.answer import Answer, until_named
from coordinator.api.http.openai.completions import choice_report, finish_of
from coordinator.api.http.openai.logprobs import LogprobWriter
from coordinator.api.http.openai.schema.bodies import ChatRequest
from coordinator.api.http.openai.schema.parameters import fingerprinted, head_of, make_call, writer_of
from coordinator.api.http.server import body
from coordinator.api.http.server.errors import from_error
from coordinator.api.sampling_defaults import SamplingDefaults
from coordinator.app import Coordinator
from coordinator.requests.generation import Generation
from coordinator.sequence.ledger import Commit
from coordinator.telemetry import call_log
from paceline.core.errors import InvalidArgumentError, PacelineError
from paceline.rpc.codec import GenerateCall


class ChatCompletions:
    """The endpoint."""

    def __init__(
        self, coordinator: Coordinator, conversations: Conversations, defaults: SamplingDefaults
    ) -> None:
        self._coordinator = coordinator
        self._conversations = conversations
        self._defaults = defaults

    async def create(self, request: Request) -> Answer:
        """The assistant's next message. Raises HttpError."""
        if (of := call_log.current.get()) is not None:
            of.operation = call_log.CHAT
        wanted = await body.read(request, ChatRequest)
        try:
            await until_named(request, self._coordinator, needs_length=self._needs_length(wanted))
            head = head_of("chatcmpl", wanted, self._coordinator)
            call = await self._call(wanted, head["id"])

            def wording(generations: Sequence[Generation]) -> ChatWording:
                known = fingerprinted(head, self._coordinator)
                return ChatWording(known, wanted, writer_of(wanted, self._coordinator), generations)

            return Answer(self._coordinator, [call], wording, wanted, head["id"])
        except PacelineError as error:
            raise from_error(error, wanted.names) from None

    def _needs_length(self, wanted: ChatRequest) -> bool:
        has_default = self._defaults.max_tokens is not None
        return wanted.needs_model_length or (has_default and wanted.token_limit is None)

    async def _call(self, wanted: ChatRequest, request_id: str) -> GenerateCall:
        # Cheap checks come first. Unlike a completion, an answer may fill the model's length by default.
        sampling = wanted.sampling(
            self._defaults.values, max_tokens=wanted.token_limit, logprobs=wanted.num_logprobs
        )
        if wanted.stream and wanted.prompt_logprobs is not None:
            raise InvalidArgumentError("prompt_logprobs", "cannot be streamed")
        speculation = wanted.speculation()
        token_ids = await self._conversations.encode(
            [message.shown for message in wanted.messages],
            add_generation_prompt=wanted.add_generation_prompt,
            variables=wanted.chat_template_kwargs,
            continue_final_message=bool(wanted.continue_final_message),
            add_special_tokens=bool(wanted.add_special_tokens),
        )
        prompt = wanted.truncated(token_ids, sampling.max_tokens, self._coordinator)
        if sampling.max_tokens is None and self._defaults.max_tokens is not None:
            room = self._coordinator.target_info().max_model_len - len(prompt)
            sampling = replace(sampling, max_tokens=self._defaults.limit(room))
        return make_call(request_id, prompt, sampling, speculation, wanted.cache_salt)


class ChatWording:
    """Answers as OpenAI's `chat.completion` objects."""

    def __init__(
        self,
        head: Mapping[str, Any],
        wanted: ChatRequest,
        logprobs: LogprobWriter,
        generations: Sequence[Generation],
    ) -> None:
        self._head = dict(head)
        self._wanted = wanted
        self._logprobs = logprobs
        (self._generation,) = generations

    def opening(self) -> list[dict[str, Any]]:
        """Role events of all choices, in order.

        Clients collect choices in a list, in which a choice needs those before it.
        """
        delta = {"role": "assistant", "content": ""}
        events = [self._event(each, delta) for each in range(len(self._generation.choices))]
        if self._wanted.return_token_ids:
            events[0]["prompt_token_ids"] = list(self._generation.prompt)
        return events

    def chunks(self, choice: int, commit: Commit) -> list[dict[str, Any]]:
        """The event for one commit; none for tokens whose text is not complete yet."""
        ids = self._wanted.return_token_ids and commit.token_ids
        if not (commit.text or commit.logprobs or commit.finish or ids):
            return []
        return [self._event(choice, {"content": commit.text} if commit.text else {}, commit)]

    def _event(self, choice: int, delta: Mapping[str, Any], commit: Commit | None = None) -> dict[str, Any]:
        """One event of a choice; without a commit it reports no token."""
        logprobs, finish = (None, None) if commit is None else (self._told([commit]), commit.finish)
        more = {} if commit is None else self._more(choice, [commit])
        told = {"index": choice, "delta": delta, "logprobs": logprobs, **finish_of(finish), **more}
        return self._chunk([told])

    def _more(self, choice: int, commits: Sequence[Commit]) -> dict[str, Any]:
        return choice_report(self._wanted, self._generation.machines[choice], commits)

    def usage_chunk(self, counts: dict[str, Any]) -> dict[str, Any]:
        """The event after all choices have ended."""
        return self._chunk([]) | {"usage": counts}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": choices}

    def whole(self, choices: Sequence[Sequence[Commit]], counts: dict[str, Any]) -> dict[str, Any]:
        """The answer without streaming."""
        told = []
        for index, commits in enumerate(choices):
            text = "".join(commit.text for commit in commits)
            message = {"role": "assistant", "content": text, "refusal": None}
            logprobs = self._told(commits)
            finish = finish_of(commits[-1].finish)
            more = self._more(index, commits)
            told.append({"index": index, "message": message, "logprobs": logprobs, **finish, **more})
        answer = {**self._head, "object": "chat.completion", "choices": told, "usage": counts}
        if self._wanted.return_token_ids:
            answer["prompt_token_ids"] = list(self._generation.prompt)
        if self._wanted.prompt_logprobs is not None:
            # The core reports the prompt once, with the first choice.
            prompt = [entry for commit in choices[0] for entry in commit.prompt_logprobs]
            answer["prompt_logprobs"] = self._logprobs.prompt(prompt)
        return answer

    def _told(self, commits: Sequence[Commit]) -> dict[str, Any] | None:
        if not self._wanted.logprobs:
            return None
        return self._logprobs.chat([entry for commit in commits for entry in commit.logprobs])
