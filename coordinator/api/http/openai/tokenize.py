"""`/tokenize` and `/detokenize`, in vLLM's form."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from coordinator.api.conversations import Conversations
from coordinator.api.http.openai.schema.bodies import DetokenizeRequest, TokenizeRequest
from coordinator.api.http.openai.schema.parameters import check_request_model
from coordinator.api.http.server import body
from coordinator.api.http.server.encoding import JsonResponse
from coordinator.api.http.server.errors import from_error
from coordinator.app import Coordinator
from paceline.core.errors import InvalidArgumentError, PacelineError


class Text:
    """The two endpoints."""

    def __init__(self, coordinator: Coordinator, conversations: Conversations) -> None:
        self._coordinator = coordinator
        self._conversations = conversations

    async def tokenize(self, request: Request) -> Response:
        """A prompt or a conversation as tokens. Raises HttpError."""
        wanted = await body.read(request, TokenizeRequest)
        try:
            check_request_model(wanted.model, self._coordinator.model_name)
            tokens = await self._encode(wanted)
            length = self._coordinator.target_info().max_model_len
        except PacelineError as error:
            raise from_error(error, {"text": "messages" if wanted.prompt is None else "prompt"}) from None
        told = {"tokens": tokens, "count": len(tokens), "max_model_len": length}
        if wanted.return_token_strs:
            told["token_strs"] = self._coordinator.vocabulary.token_names(tokens)
        return JsonResponse(told)

    async def _encode(self, wanted: TokenizeRequest) -> list[int]:
        if (wanted.prompt is None) == (wanted.messages is None):
            raise InvalidArgumentError("prompt", "is required, or else messages")
        if wanted.messages is not None:
            return await self._conversations.encode(
                [message.shown for message in wanted.messages],
                add_generation_prompt=wanted.add_generation_prompt,
                continue_final_message=bool(wanted.continue_final_message),
                variables=wanted.chat_template_kwargs,
                add_special_tokens=bool(wanted.add_special_tokens),
            )
        for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            harmless = (None, False) if name == "continue_final_message" else (None,)
            if getattr(wanted, name) not in harmless:
                raise InvalidArgumentError(name, "requires messages")
        assert wanted.prompt is not None
        special = wanted.add_special_tokens is not False
        return await self._coordinator.tokenize(wanted.prompt, add_special_tokens=special)

    async def detokenize(self, request: Request) -> Response:
        """Tokens as text, without special tokens. Raises HttpError."""
        wanted = await body.read(request, DetokenizeRequest)
        try:
            check_request_model(wanted.model, self._coordinator.model_name)
            return JsonResponse({"prompt": await self._coordinator.detokenize(wanted.tokens)})
        except PacelineError as error:
            raise from_error(error, {"token_ids": "tokens"}) from None
