"""Every bound of the system. A sender that exceeds one gets an error that names it."""

from __future__ import annotations

from typing import Final

MAX_MESSAGE_BYTES: Final = 32 * 1024 * 1024
"""Size of one message in either direction."""

MAX_SOCKET_PATH_BYTES: Final = 107
"""Longest path of a Unix socket that the operating system accepts."""

MAX_METADATA_BYTES: Final = 16 * 1024
"""Headers of one gRPC call."""
MAX_CALLS_PER_CONNECTION: Final = 8192
"""Concurrent calls on one gRPC connection; further calls wait at the sender."""
MAX_CLIENT_MESSAGE_BYTES: Final = 16 * 1024 * 1024
"""Size of one message on the client port: the longest prompt, everything a client sends back to resume a
request, and every list of a request at its limit."""
MAX_TOKEN_BYTES: Final = 5
"""Size of one token id in a message."""
MAX_OTHER_LIST_BYTES: Final = 1024 * 1024
"""Size of a request's sampling parameters, each at its limit."""
MAX_CALLS_PER_CLIENT_CONNECTION: Final = 1024
"""Concurrent calls on one connection to the client port."""
MAX_CLIENT_CONNECTIONS: Final = 4096
"""gRPC connections of clients; further ones are closed at once. The bound is lower if there are fewer file
descriptors."""
MAX_WORKER_CONNECTIONS: Final = 256
"""gRPC connections to a worker, from coordinators and health checks."""
CONNECTION_SECONDS: Final = 240.0
"""Age, ±10 %, after which a client's gRPC connection takes no new calls; it closes once it has no calls."""
HANDSHAKE_SECONDS: Final = 10.0
"""Longest setup of a gRPC connection, TLS included."""
MAX_HEALTH_WATCHERS: Final = 256
"""Concurrent `Health/Watch` calls; further ones are refused with RESOURCE_EXHAUSTED."""
MAX_REQUEST_SECONDS: Final = 86_400.0
"""Age, waiting included, at which a request ends with DEADLINE_EXCEEDED."""

MAX_PROFILE_SECONDS: Final = 10.0
"""Duration of a profile. Gathering its events afterwards holds the worker up about as long on a GPU."""
MAX_PROFILE_BYTES: Final = 64 * 1024 * 1024
"""Size of a profile's gzipped trace."""
MAX_WORKER_NAME_CHARACTERS: Final = 256
"""Length of a worker's role or address in a request for a profile."""

MAX_PROMPT_TOKENS: Final = 1_048_576
"""Checked before the model's own length, which is usually far smaller."""

MAX_PROMPT_CHARACTERS: Final = 4 * 1024 * 1024
"""Length of one text. A model whose length times its longest token is smaller has that bound instead."""
MAX_PROMPT_BYTES: Final = 4 * 1024 * 1024
"""Length of one text in UTF-8; a tokenizer's memory grows with the bytes."""

MAX_TOKENS: Final = 1_048_576
"""Bound of `max_tokens` and `min_tokens`."""

MAX_LEDGER_TOKENS: Final = MAX_PROMPT_TOKENS + MAX_TOKENS
"""Prompt and output tokens of one sequence."""

MAX_RECEIVED_TOKENS: Final = 2 * MAX_TOKENS
"""Tokens that a client sends back to resume a request, for all choices together."""

MAX_UNKNOWN_FIELD_BYTES: Final = 64 * 1024
"""Above this size, a message's unknown fields are not listed one by one, which would take seconds."""

MAX_SPECULATIVE_TOKENS: Final = 32
"""Draft tokens of one round (K)."""

MAX_TREE_NODES: Final = 64
"""Nodes of a draft tree, and tries before those of one node are merged."""

MAX_TREE_WIDTH: Final = 16
"""Children of a node of a draft tree that one drafter proposes."""

MAX_DRAFTS: Final = 4
"""Draft workers that propose for one sequence."""

MAX_CONTINUATIONS: Final = 256
"""Outcomes of one verification for which tokens are drafted ahead."""

MAX_NAME_CHARACTERS: Final = 64
"""Length of the name of a source of draft tokens."""
PROMPT_LOOKUP_MIN: Final = 2
PROMPT_LOOKUP_MAX: Final = 16
"""Shortest match that prompt lookup copies after, and longest that it compares, by default. Longer matches
than 16 tokens add no information."""
MAX_PROMPT_LOOKUP: Final = 64
"""Bound of both settings."""
MAX_SUFFIX_CACHED_REQUESTS: Final = 1_000_000
"""Bound of `suffix_cached_requests`; their tokens have a bound of their own."""
MAX_NGRAM_ENTRIES: Final = 16_384
"""Pairs of a context and its continuation that n-gram drafting counts for one sequence: about 4 MB."""
MAX_SHARED_DRAFT_TOKENS: Final = 524_288
"""Tokens of finished answers that suffix drafting keeps for later requests, of all tenants together: about
100 MB."""

MAX_SUPPORT: Final = 1024
"""Tokens in the sparse distribution q of one draft token."""

MAX_NGRAM_TOKENS: Final = 4096
"""Last tokens of a sequence that an n-gram drafter counts, at up to 1 KB each."""

MAX_STOP_STRINGS: Final = 16
MAX_STOP_STRING_CHARACTERS: Final = 256
MAX_STOP_TOKEN_IDS: Final = 128
MAX_LOGIT_BIAS_ENTRIES: Final = 1024
MAX_LOGIT_BIAS: Final = 100.0
MAX_BAD_WORDS: Final = 128
MAX_BAD_WORD_CHARACTERS: Final = 256
MAX_BAD_WORD_TOKENS: Final = 256
"""Tokens of one bad word."""
MAX_ALLOWED_TOKEN_IDS: Final = 32_768

MAX_STRUCTURE_CHARACTERS: Final = 65_536
"""Length of a JSON schema, a regular expression, a grammar, or all texts of a choice together."""
MAX_STRUCTURE_CHOICES: Final = 1024
MAX_STRUCTURE_SECONDS: Final = 0.5
"""Processor time to compile and try a structure, and for the masks of one round."""
MAX_MASK_SECONDS: Final = 0.02
"""Average processor time per mask of one sequence in one worker, in addition to MAX_STRUCTURE_SECONDS."""
MAX_FOLLOW_SECONDS: Final = 2.0
"""Processor time to advance a structure over the received tokens of all choices of a resumed request, about
500,000 tokens; in a worker, over one text."""
MAX_STRUCTURE_BYTES: Final = 256 * 1024 * 1024
"""Memory to compile and try a structure, or to advance it over a text."""
MAX_STRUCTURE_CHECKS: Final = 256
"""Structures waiting to be compiled; further ones are refused with RESOURCE_EXHAUSTED."""
MAX_TENANT_STRUCTURE_CHECKS: Final = 64
"""Structures of one tenant waiting to be compiled."""
MAX_COMPILED_STRUCTURES: Final = 256
"""Compiled structures that a worker keeps, and check results that a coordinator keeps."""

MAX_N: Final = 128
"""Completions of one prompt (`n`)."""
MAX_LOGPROBS: Final = 20
"""Most likely tokens reported per position by `logprobs` and `prompt_logprobs`."""
MAX_PROMPT_LOGPROBS: Final = 2**20
"""Log-probabilities of one prompt, or of one HTTP response with all its prompts and choices: tokens times
(`prompt_logprobs` + 1)."""

MAX_TEMPERATURE: Final = 100.0
MIN_TEMPERATURE: Final = 1e-4
"""A positive temperature below this is refused because logits would overflow; 0 is greedy."""

MAX_REPETITION_PENALTY: Final = 100.0
MIN_REPETITION_PENALTY: Final = 0.01
"""Logits are divided by the penalty and would overflow below this."""

MAX_SEED: Final = 2**64 - 1
MAX_HEALTH_SERVICE_CHARACTERS: Final = 256
"""Length of the service name in a health check."""
MAX_REQUEST_ID_CHARACTERS: Final = 128
MAX_SEQUENCE_ID_CHARACTERS: Final = 128
"""Length of a sequence's name on a worker's stream."""
MAX_CACHE_SALT_CHARACTERS: Final = 256
"""Length of a client's salt. A worker accepts twice as much, for the coordinator's prefix."""

MAX_RUNNING_SEQUENCES: Final = 1024
MAX_WAITING_SEQUENCES: Final = 4096
"""Requests waiting in the coordinator; further ones are refused with RESOURCE_EXHAUSTED."""

MAX_UNREAD_TOKENS: Final = 1024
"""Unread tokens at which a sequence pauses until its client reads."""

MAX_HELD_REQUESTS: Final = 256
"""Requests held for disconnected clients; a further one ends the request that was held longest."""
MAX_HELD_LOGPROBS: Final = 2**21
"""Log-probabilities kept by all ended held requests together, at 75 to 160 bytes each."""

MAX_COMMANDS_PER_FRAME: Final = 4096

MAX_CHOICES: Final = 256
"""Prompts times `n` of one HTTP request."""

MAX_HTTP_BODY_BYTES: Final = 10 * 1024 * 1024
"""Size of one HTTP body: the longest prompt fits as ASCII text or as token ids. JSON is parsed in the event
loop. With the two bounds below, the longest prompt blocks the loop for about 0.1 s and a malicious body for
up to 3 s."""
MAX_JSON_VALUES: Final = 1_200_000
"""Members and items in the JSON of one HTTP body: a prompt of MAX_PROMPT_TOKENS and all else."""
MAX_JSON_CONTAINERS: Final = 50_000
"""Objects and lists in the JSON of one HTTP body."""

MAX_MESSAGES: Final = 4096
"""Messages of one conversation, or text parts of one message."""

MAX_HTTP_HEAD_BYTES: Final = 64 * 1024
"""Size of the request line and headers."""

MAX_HTTP_CONNECTIONS: Final = 8192
"""Connections to the HTTP port; further ones get 503 and are closed. The bound is lower if there are fewer
file descriptors."""

MAX_API_KEYS: Final = 1024
MAX_KEY_NAME_CHARACTERS: Final = 64
MAX_REQUESTS_PER_MINUTE: Final = 1_000_000
"""Highest `requests_per_minute` of an API key."""
