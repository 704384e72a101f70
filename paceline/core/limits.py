"""Every bound of the system in one place. Meeting one is a clear error to its sender."""

from __future__ import annotations

from typing import Final

MAX_MESSAGE_BYTES: Final = 32 * 1024 * 1024
"""One message, either direction."""

MAX_SOCKET_PATH_BYTES: Final = 107
"""What the system takes for the path of a Unix socket."""

MAX_METADATA_BYTES: Final = 16 * 1024
"""Headers of one gRPC call."""
MAX_CALLS_PER_CONNECTION: Final = 8192
"""Calls that one gRPC connection carries at a time; one more waits at its sender."""
MAX_CLIENT_MESSAGE_BYTES: Final = 16 * 1024 * 1024
"""One message to the port for clients: the longest prompt, and all that a client sends back to resume a
request, with all lists of a request as long as they may be."""
MAX_TOKEN_BYTES: Final = 5
"""An id in a message."""
MAX_OTHER_LIST_BYTES: Final = 1024 * 1024
"""All of a request's sampling parameters, each as long as it may be."""
MAX_CALLS_PER_CLIENT_CONNECTION: Final = 1024
"""The same of a connection to the port for clients."""
MAX_CLIENT_CONNECTIONS: Final = 4096
"""gRPC connections of clients; one more is closed at once. Fewer where there are fewer file descriptors."""
MAX_WORKER_CONNECTIONS: Final = 256
"""The same of a worker: those of its coordinators, and health checks."""
CONNECTION_SECONDS: Final = 240.0
"""A gRPC connection of a client that is older, give or take a tenth, takes no new calls, and is closed when
it has none."""
HANDSHAKE_SECONDS: Final = 10.0
"""How long a gRPC connection may take to begin, TLS included."""
MAX_HEALTH_WATCHERS: Final = 256
"""Calls of `Health/Watch` at a time; one more is refused with RESOURCE_EXHAUSTED."""
MAX_REQUEST_SECONDS: Final = 86_400.0
"""A request that is older, waiting included, ends with DEADLINE_EXCEEDED."""

MAX_PROMPT_TOKENS: Final = 1_048_576
"""Before the model's own length, which is usually far smaller."""

MAX_PROMPT_CHARACTERS: Final = 4 * 1024 * 1024
"""Of one text. A model takes fewer where its length times its longest token is less."""
MAX_PROMPT_BYTES: Final = 4 * 1024 * 1024
"""The same as UTF-8: a tokenizer takes memory for each byte."""

MAX_TOKENS: Final = 1_048_576
"""`max_tokens` and `min_tokens`."""

MAX_LEDGER_TOKENS: Final = MAX_PROMPT_TOKENS + MAX_TOKENS
"""Prompt and output of one sequence."""

MAX_RECEIVED_TOKENS: Final = 2 * MAX_TOKENS
"""Tokens that a client sends back to resume a request, of all choices together."""

MAX_UNKNOWN_FIELD_BYTES: Final = 64 * 1024
"""A larger message is searched for unknown fields as a whole: to list them one by one takes seconds."""

MAX_SPECULATIVE_TOKENS: Final = 32
"""K of one round."""

MAX_CONTINUATIONS: Final = 256
"""Outcomes of one verification that are drafted for ahead of it."""

MAX_SUPPORT: Final = 1024
"""Tokens in the sparse distribution of one draft token."""

MAX_STOP_STRINGS: Final = 16
MAX_STOP_STRING_CHARACTERS: Final = 256
MAX_STOP_TOKEN_IDS: Final = 128
MAX_LOGIT_BIAS_ENTRIES: Final = 1024
MAX_LOGIT_BIAS: Final = 100.0
MAX_BAD_WORDS: Final = 128
MAX_BAD_WORD_CHARACTERS: Final = 256
MAX_BAD_WORD_TOKENS: Final = 256
"""One bad word, tokenised."""
MAX_ALLOWED_TOKEN_IDS: Final = 32_768

MAX_STRUCTURE_CHARACTERS: Final = 65_536
"""A JSON schema, a regular expression or a grammar; the texts of a choice together."""
MAX_STRUCTURE_CHOICES: Final = 1024
MAX_STRUCTURE_SECONDS: Final = 0.5
"""Processor time for compiling a structure and trying it, and for the masks of one round."""
MAX_MASK_SECONDS: Final = 0.02
"""Processor time for a mask, on the average of a sequence in one worker; beside it MAX_STRUCTURE_SECONDS."""
MAX_FOLLOW_SECONDS: Final = 2.0
"""Processor time for following what a client that resumes has of all choices: of some 500,000 tokens. In a
worker, for following one text that it has not followed yet."""
MAX_STRUCTURE_BYTES: Final = 256 * 1024 * 1024
"""Memory for compiling a structure and trying it, or for following a text of it."""
MAX_STRUCTURE_CHECKS: Final = 256
"""Structures that wait for being compiled at a time; one more is refused with RESOURCE_EXHAUSTED."""
MAX_TENANT_STRUCTURE_CHECKS: Final = 64
"""Those of one tenant among them."""
MAX_COMPILED_STRUCTURES: Final = 256
"""Structures a worker keeps compiled; those of which a server remembers what its check found."""

MAX_N: Final = 128
"""Completions of one request."""
MAX_LOGPROBS: Final = 20
"""Likeliest tokens reported a position, by `logprobs` and `prompt_logprobs`."""
MAX_PROMPT_LOGPROBS: Final = 2**20
"""Log-probabilities of one prompt: its tokens times one more than `prompt_logprobs`. Of one HTTP answer, all
of its prompts and choices together."""

MAX_TEMPERATURE: Final = 100.0
MIN_TEMPERATURE: Final = 1e-4
"""A positive temperature below this is refused: it overflows; 0 is greedy."""

MAX_REPETITION_PENALTY: Final = 100.0
MIN_REPETITION_PENALTY: Final = 0.01
"""A penalty below this is refused: logits are divided by it, and overflow."""

MAX_SEED: Final = 2**64 - 1
MAX_HEALTH_SERVICE_CHARACTERS: Final = 256
"""Of a service's name that somebody asks the health of."""
MAX_REQUEST_ID_CHARACTERS: Final = 128
MAX_SEQUENCE_ID_CHARACTERS: Final = 128
"""The name of a sequence on a worker's stream."""
MAX_CACHE_SALT_CHARACTERS: Final = 256
"""What a client may say; a worker takes as much again, for what the coordinator adds."""

MAX_RUNNING_SEQUENCES: Final = 1024
MAX_WAITING_SEQUENCES: Final = 4096
"""Requests the coordinator holds; one more is refused with RESOURCE_EXHAUSTED."""

MAX_UNREAD_TOKENS: Final = 1024
"""A stream whose client has this many unread tokens pauses until it reads."""

MAX_HELD_REQUESTS: Final = 256
"""Requests held for clients whose connection is lost; one more ends the one that was left first."""
MAX_HELD_LOGPROBS: Final = 2**21
"""Log-probabilities that ended ones among them keep, all together: 75 to 160 bytes each."""

MAX_COMMANDS_PER_FRAME: Final = 4096

MAX_CHOICES: Final = 256
"""Prompts times `n` of one HTTP request."""

MAX_HTTP_BODY_BYTES: Final = 10 * 1024 * 1024
"""One HTTP body: room for the longest prompt as plain ASCII text or as token ids. JSON is parsed in the
event loop: with the two bounds below the longest prompt holds it up for about a tenth of a second, and a
body that is made to for three."""
MAX_JSON_VALUES: Final = 1_200_000
"""Members and items of one HTTP body: a prompt of MAX_PROMPT_TOKENS, and all else."""
MAX_JSON_CONTAINERS: Final = 50_000
"""Objects and lists among them."""

MAX_MESSAGES: Final = 4096
"""Messages of one conversation, and text parts of one message."""

MAX_HTTP_HEAD_BYTES: Final = 64 * 1024
"""Request line and headers."""

MAX_HTTP_CONNECTIONS: Final = 8192
"""Connections to the HTTP port; one more is answered 503 and closed. Fewer where there are fewer file
descriptors."""

MAX_API_KEYS: Final = 1024
MAX_KEY_NAME_CHARACTERS: Final = 64
MAX_REQUESTS_PER_MINUTE: Final = 1_000_000
"""What the limit of an API key may be set to."""
