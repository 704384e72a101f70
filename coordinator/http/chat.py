"""`/v1/chat/completions`, and conversations as tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request

from coordinator.coordinator import Coordinator
from coordinator.generation import Generation
from coordinator.http import body
from coordinator.http.answer import Answer, until_named
from coordinator.http.chat_template import ChatTemplate
from coordinator.http.completions import finish_of
from coordinator.http.errors import from_error
from coordinator.http.logprobs import LogprobWriter
from coordinator.http.parameters import head_of, make_call
from coordinator.http.schemas import ChatRequest, Message
from coordinator.ledger import Commit
from coordinator.vocabulary import LONG_TEXT
from paceline.core import limits
from paceline.core.errors import InvalidArgumentError, PacelineError
from paceline.rpc.codec import GenerateCall


class Conversations:
    """The model's chat template with its tokenizer: messages in, tokens out."""

    def __init__(self, coordinator: Coordinator, template: ChatTemplate | None) -> None:
        self._coordinator = coordinator
        self._template = template

    async def encode(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool | None = None,
        variables: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """The prompt as tokens. A template writes the special tokens itself. Raises InvalidArgumentError."""
        if self._template is None:
            raise InvalidArgumentError(
                "messages",
                "the model's tokenizer has no chat template; use /v1/completions, or start the"
                " coordinator with --chat-template",
            )
        shown = [message.shown for message in messages]
        size = sum(message.size for message in messages)
        if size > limits.MAX_PROMPT_CHARACTERS:
            raise InvalidArgumentError("messages", f"at most {limits.MAX_PROMPT_CHARACTERS} characters")
        render = partial(
            self._template.render,
            shown,
            add_generation_prompt=add_generation_prompt is not False,
            variables=variables,
        )
        # Other streams go on while a long conversation is rendered, or one with names several times.
        long = size > LONG_TEXT or any("name" in message for message in shown)
        text = await asyncio.to_thread(render) if long else render()
        return await self._coordinator.tokenize(text, add_special_tokens=add_special_tokens)


class ChatCompletions:
    """The endpoint."""

    def __init__(self, coordinator: Coordinator, conversations: Conversations) -> None:
        self._coordinator = coordinator
        self._conversations = conversations

    async def create(self, request: Request) -> Answer:
        """The assistant's next message. Raises HttpError."""
        wanted = await body.read(request, ChatRequest)
        try:
            await until_named(request, self._coordinator)
            head = head_of("chatcmpl", wanted, self._coordinator)
            call = await self._call(wanted, head["id"])
            wording = partial(ChatWording, head, wanted, LogprobWriter(self._coordinator.vocabulary))
            return Answer(self._coordinator, [call], wording, wanted, head["id"])
        except PacelineError as error:
            raise from_error(error, wanted.names) from None

    async def _call(self, wanted: ChatRequest, request_id: str) -> GenerateCall:
        # First what costs nothing; unlike a completion, an answer may fill the model's length by default.
        sampling = wanted.sampling(max_tokens=wanted.token_limit, logprobs=wanted.num_logprobs)
        if wanted.stream and wanted.prompt_logprobs is not None:
            raise InvalidArgumentError("prompt_logprobs", "cannot be streamed")
        speculation = wanted.speculation()
        token_ids = await self._conversations.encode(
            wanted.messages,
            add_generation_prompt=wanted.add_generation_prompt,
            variables=wanted.chat_template_kwargs,
        )
        return make_call(request_id, tuple(token_ids), sampling, speculation, wanted.cache_salt)


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
        self._num_choices = sum(len(each.choices) for each in generations)

    def opening(self) -> list[dict[str, Any]]:
        """The events that say whose turn it is, of all choices and in order: clients gather choices in a
        list, in which a choice needs those before it.
        """
        delta = {"role": "assistant", "content": ""}
        return [self._event(each, delta) for each in range(self._num_choices)]

    def chunks(self, choice: int, commit: Commit) -> list[dict[str, Any]]:
        """The event for one commit; none for tokens whose text is not there yet."""
        if not (commit.text or commit.logprobs or commit.finish):
            return []
        return [self._event(choice, {"content": commit.text} if commit.text else {}, commit)]

    def _event(self, choice: int, delta: Mapping[str, Any], commit: Commit | None = None) -> dict[str, Any]:
        """One of one choice; without a commit it tells of no token."""
        logprobs, finish = (None, None) if commit is None else (self._told([commit]), commit.finish)
        return self._chunk([{"index": choice, "delta": delta, "logprobs": logprobs, **finish_of(finish)}])

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
            told.append({"index": index, "message": message, "logprobs": logprobs, **finish})
        answer = {**self._head, "object": "chat.completion", "choices": told, "usage": counts}
        if self._wanted.prompt_logprobs is not None:
            # The core reports the prompt once, with its first choice.
            prompt = [entry for commit in choices[0] for entry in commit.prompt_logprobs]
            answer["prompt_logprobs"] = self._logprobs.prompt(prompt)
        return answer

    def _told(self, commits: Sequence[Commit]) -> dict[str, Any] | None:
        if not self._wanted.logprobs:
            return None
        return self._logprobs.chat([entry for commit in commits for entry in commit.logprobs])
