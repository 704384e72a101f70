"""Unsupported parameters of OpenAI, vLLM and TGI, and what to send instead.

Null is always accepted, and so is every value that asks for the normal behaviour. Any other value is refused
with the sentence given here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Unsupported:
    """One unsupported parameter."""

    why: str
    """Follows the parameter's name in the error message."""
    harmless: tuple[Any, ...] = ()
    """Values without effect."""


_NO_MEDIA: Final = "this server accepts text only"
_NO_TOOLS: Final = "this server does not call tools"
_NO_TRANSFER: Final = "this server does not transfer caches to other servers"

GENERATION: Final[Mapping[str, Unsupported]] = {
    "ec_transfer_params": Unsupported(_NO_TRANSFER),
    "guided_decoding_backend": Unsupported(
        "structured outputs have one backend, llguidance; leave it out", ("auto", "guidance", "llguidance")
    ),
    "guided_whitespace_pattern": Unsupported(
        "is not supported; structured_outputs has disable_any_whitespace"
    ),
    "kv_transfer_params": Unsupported(_NO_TRANSFER),
    "length_penalty": Unsupported("requires beam search, which this server does not support", (1.0, 1)),
    "logprob_token_ids": Unsupported("is not supported; logprobs reports the likeliest tokens"),
    "priority": Unsupported("must be 0: requests are served in order of arrival", (0,)),
    "repetition_detection": Unsupported("is not supported; repetition_penalty makes repetitions less likely"),
    "request_id": Unsupported("the server assigns request ids; the answer has it as its id"),
    "return_mm_kwargs": Unsupported(_NO_MEDIA, (True,)),
    "return_token_offsets": Unsupported("is not supported; logprobs have a text_offset", (False,)),
    "routed_experts_prompt_start": Unsupported("this server does not report a model's experts", (0,)),
    "spaces_between_special_tokens": Unsupported("must be true: the tokenizer's decoder decides it", (True,)),
    "stream_interval": Unsupported("is not supported; an event holds what one round committed", (1,)),
    "thinking_token_budget": Unsupported("is not supported; max_tokens bounds the whole answer", (-1,)),
    "use_beam_search": Unsupported("must be false: choices are sampled; use n for several", (False,)),
    "vllm_xargs": Unsupported("this server has no extensions", ({},)),
    "watermarking": Unsupported("this server adds no watermark", (False,)),
}
"""Parameters of both generating endpoints."""

COMPLETION: Final[Mapping[str, Unsupported]] = {
    **GENERATION,
    "prompt_embeds": Unsupported("is not supported; send the prompt as text or token ids"),
    "suffix": Unsupported("this server only continues texts; it must be empty", ("",)),
}

CHAT: Final[Mapping[str, Unsupported]] = {
    **GENERATION,
    "audio": Unsupported(_NO_MEDIA),
    "best_of": Unsupported("is not a chat parameter; use n for several choices"),
    "chat_template": Unsupported("the server's template is used: --chat-template sets it at the start"),
    "documents": Unsupported("is not supported; put the documents into the messages"),
    "echo": Unsupported("is not supported; continue_final_message continues the last message", (False,)),
    "function_call": Unsupported(f'{_NO_TOOLS}: it must be "none"', ("none",)),
    "functions": Unsupported(f'{_NO_TOOLS}: leave them out, or send function_call "none"', ([],)),
    "include_reasoning": Unsupported("an answer's text is not split into reasoning and the rest", (True,)),
    "media_io_kwargs": Unsupported(_NO_MEDIA, ({},)),
    "mm_processor_kwargs": Unsupported(_NO_MEDIA, ({},)),
    "modalities": Unsupported('this server answers with text: it must be ["text"]', (["text"],)),
    "moderation": Unsupported("this server does not moderate text"),
    "parallel_tool_calls": Unsupported(f"{_NO_TOOLS}; leave it out", (True, False)),
    "prediction": Unsupported("is not supported; draft tokens are copied from the conversation without it"),
    "prompt_cache_options": Unsupported("is not supported; cache_salt keeps cached prefixes apart"),
    "prompt_cache_retention": Unsupported("is not supported; prefixes are kept as long as there is room"),
    "reasoning_effort": Unsupported(
        "is not supported; where the model's template reads it, send it in chat_template_kwargs"
    ),
    "return_prompt_text": Unsupported("is not supported; return_token_ids returns its tokens", (False,)),
    "service_tier": Unsupported('this server has one tier: "auto" or "default"', ("auto", "default")),
    "store": Unsupported("must be false: this server keeps no conversations", (False,)),
    "tool_choice": Unsupported(f'{_NO_TOOLS}: it must be "none"', ("none",)),
    "tools": Unsupported(f'{_NO_TOOLS}: leave them out, or send tool_choice "none"', ([],)),
    "verbosity": Unsupported('is not supported; only "medium" changes nothing', ("medium",)),
    "web_search_options": Unsupported("this server does not search the web"),
}

TOKENIZE: Final[Mapping[str, Unsupported]] = {
    "chat_template": CHAT["chat_template"],
    "media_io_kwargs": CHAT["media_io_kwargs"],
    "mm_processor_kwargs": CHAT["mm_processor_kwargs"],
    "tools": Unsupported(f"{_NO_TOOLS}: no template is shown any", ([],)),
}

SWITCHED_OFF_BY: Final[Mapping[str, str]] = {"tools": "tool_choice", "functions": "function_call"}
"""Maps a chat parameter to the one whose value "none" disables it."""
