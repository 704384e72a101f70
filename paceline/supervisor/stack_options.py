"""Options of a stack: all fields except the mappings are options of `paceline serve`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.core import limits
from paceline.core.config import MODEL_DRAFTER, NO_SUB_DRAFTER
from paceline.core.types import AcceptanceMode
from paceline.core.validation import AUTO, DraftTokens, TreeWidth


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOptions:
    """One target, its drafts, if any, and their coordinator on this machine.

    Workers listen on 127.0.0.1, the coordinator on `host`. Port 0 takes a free port.
    """

    target_model: str = "embedded:target"
    draft_model: tuple[str, ...] | str | None = "embedded:draft"
    """`none` (None in Python) runs no draft worker; only prompt lookup proposes tokens. Each of several
    models has a worker, and all propose for every sequence."""
    host: str = "127.0.0.1"
    port: int = 0
    model_name: str = ""
    """Name that clients see; empty takes the target's."""
    http: bool = True
    """Serve the OpenAI-compatible HTTP API."""
    http_port: int = 0
    """Port of the HTTP API on the same host; 0 takes a free port."""
    chat_template: str = ""
    """A file with a Jinja chat template; empty takes the tokenizer's own."""
    generation_config: str = "auto"
    """Default sampling parameters of HTTP requests: `auto` reads generation_config.json beside the tokenizer,
    `none` uses Paceline's own defaults."""
    target_port: int = 0
    draft_port: int = 0
    """Port of the first draft worker; further ones take the ports after it."""
    num_speculative_tokens: DraftTokens = AUTO
    max_num_speculative_tokens: int = 8
    """Most draft tokens of a round if K is `auto`."""
    num_speculative_tokens_per_batch_size: str = ""
    """K by number of running sequences, if K is `auto`: a JSON list of [lowest, highest, K] such as
    [[1, 4, 5], [5, 16, 3], [17, 64, 0]]; empty chooses K by measured goodput."""
    tree_width: TreeWidth = 1
    max_tree_nodes: int = 16
    drafts_per_sequence: int | None = None
    """Most draft workers that propose for one round; their proposals are merged into one tree. The default is
    the number of draft models."""
    acceptance: AcceptanceMode = AcceptanceMode.COUPLED
    prompt_lookup: bool = True
    """Guess draft tokens from texts, without the draft; `--no-prompt-lookup` stands for `--sources none`."""
    sources: str = "prompt-lookup,grammar"
    """Context sources that may propose draft tokens in place of the draft where that pays more, with commas:
    `prompt-lookup`, `ngram`, `suffix`, `grammar`; `none` for no such source."""
    prompt_lookup_min: int = limits.PROMPT_LOOKUP_MIN
    """Shortest match in tokens after which prompt lookup copies."""
    prompt_lookup_max: int = limits.PROMPT_LOOKUP_MAX
    """Longest match in tokens that prompt lookup compares."""
    suffix_max_tree_depth: int = 24
    """Longest match in tokens that suffix drafting compares."""
    suffix_max_spec_factor: float = 1.0
    """Most draft tokens of suffix drafting for each token of its match."""
    suffix_min_token_prob: float = 0.1
    """Suffix drafting ends a guess where its estimated probability falls below this."""
    suffix_cached_requests: int = 10_000
    """Finished answers of one tenant from which suffix drafting copies; 0 uses each request's own text."""
    draft_timeout: float = 5.0
    """Seconds after which a round continues without its proposal."""
    target_timeout: float = 120.0
    """Seconds without a verdict after which the target is asked again, or given up if it answers no
    sequence."""
    recovery_timeout: float = 60.0
    """Seconds a sequence waits for a target worker to come back."""
    max_running: int = 256
    max_waiting: int = limits.MAX_WAITING_SEQUENCES
    max_request_seconds: float = limits.MAX_REQUEST_SECONDS
    """Age, waiting included, at which a request is ended."""
    resume_seconds: float = 30.0
    """Seconds for which a request is held after its client's connection is lost; 0 holds none."""
    unread_timeout: float = 60.0
    """Seconds for which a sequence pauses for a client that does not read, before its stream is cut."""
    drain_timeout: float = 10.0
    """Seconds that running requests have to finish on shutdown before they are ended."""
    target_device: str = "auto"
    draft_device: str = "auto"
    target_dtype: str = "auto"
    draft_dtype: str = "auto"
    target_threads: int = 0
    """CPU threads; 0 divides the cores by the number of workers; a single worker leaves one core free."""
    draft_threads: int = 0
    drafter: str = MODEL_DRAFTER
    """How the draft worker proposes tokens: `model` uses the draft model; `unigram`, `bigram`, `ngram`,
    `random` and `stacked:a+b` need no model."""
    corpus: str = ""
    """A text file that the drafters unigram and bigram count; empty takes an embedded text."""
    sub_drafter: str = NO_SUB_DRAFTER
    """What guesses the draft's tokens from the text, for the draft to check in one pass: `ngram`,
    `prompt-lookup`, or `none`."""
    lookahead_branches: int | None = None
    """Outcomes to draft for while a verification runs; 0 waits for the verdict. The default is the draft
    worker's if each model has a core, else 0."""
    lookahead_sequences: int | None = None
    """Most running sequences with drafting ahead. The default is 1 if both models compute on a CPU with only
    one core each, else the draft worker's."""
    support_mass: float = 0.995
    """Share of the draft's probability that a proposal's sparse distribution holds."""
    support_bound: int = limits.MAX_SUPPORT
    pre_verify: bool | None = None
    """The target computes the row that verifies a sequence's next draft token while it waits for that token.
    The default is true unless both models share a core."""
    block_size: int | None = None
    num_blocks: int | None = None
    """Blocks of each worker's cache, unless set per worker; the default is derived from free memory."""
    target_num_blocks: int | None = None
    """Blocks of the target's cache."""
    draft_num_blocks: int | None = None
    """Blocks of the draft's cache."""
    gpu_memory_utilization: float | None = None
    """Share of each GPU's total memory for the workers on it; two workers on one GPU
    divide it. By default, all but the weights takes 85 % of the free memory; on a shared GPU, both workers
    take 85 % of the total memory."""
    target_gpu_memory_utilization: float | None = None
    """The target's own share of its GPU."""
    draft_gpu_memory_utilization: float | None = None
    """The draft's own share of its GPU."""
    max_model_len: int | None = None
    max_batch_tokens: int = 512
    """Most rows of one pass, prefill chunks and verification together."""
    max_mixed_prefill_tokens: int = 0
    """Most prompt tokens in a pass that also serves running sequences; 0 means 16 on a CPU, elsewhere
    whatever `max_batch_tokens` leaves."""
    max_sequences: int = 256
    lease_seconds: float = 600.0
    """Idle time after which a sequence is dropped; the coordinator reopens it when needed."""
    deterministic: bool = False
    """Serve only if a token's logits are bitwise equal for every K and every batch."""
    cuda_graphs: bool = True
    """Record passes of common shapes on a CUDA device and replay them; a model that cannot be recorded runs
    without graphs."""
    attention_backend: str = "auto"
    """How attention reads the cache: `varlen` in place, on CUDA; `gathered` from copies, anywhere; `auto` in
    place where the device passes a trial."""
    prefix_cache: bool = True
    """Keep the cache of ended sequences for new sequences with the same prefix."""
    local_sockets: bool | None = None
    """Use Unix sockets between the processes, which are faster than gRPC. The default is true if the system
    supports them and there are no certificates."""
    trust_remote_code: bool = False
    certificates: str = ""
    """Folder written by `paceline certificates`: enables TLS on every port but the workers' `/metrics`, with
    mutual authentication between the processes."""
    tls_certificate: str = ""
    """PEM file with the certificate of the client ports; empty takes the folder's coordinator.pem."""
    tls_key: str = ""
    """PEM file with that certificate's private key."""
    tls_ca: str = ""
    """PEM file with the certificate authority of the clients; clients without a certificate from it are
    refused."""
    api_keys: str = ""
    """File of API keys, written by `paceline keys`; empty admits every caller."""
    log_format: str = "text"
    """Log lines of all processes as text or as json."""
    otlp_traces_endpoint: str = ""
    """Endpoint for spans of all processes (OTLP over gRPC), such as http://localhost:4317; empty disables
    tracing."""
    otlp_traces_sampling_ratio: float = 1.0
    """Share of requests to trace, among those without a trace decision of their own."""
    log_stats_seconds: float = 10.0
    """Seconds between log lines of throughput while requests run; 0 writes none."""
    tenant_metrics: bool = False
    """Count requests and tokens per API key in `/metrics`, labelled with the key's name."""
    target_metrics_port: int | None = None
    """Port of the target worker's `/metrics`; 0 takes a free port. Not served by default."""
    draft_metrics_port: int | None = None
    """Port of the first draft worker's `/metrics`; further ones take the ports after it. 0 takes free ports.
    Not served by default."""
    reflection: bool = False
    """Enable gRPC server reflection in all processes."""
    start_timeout: float = 900.0
    """Seconds for all processes to become ready, including a first download."""
    target: Mapping[str, Any] = field(default_factory=dict)
    """Additional fields of TargetConfig, which override the fields above."""
    draft: Mapping[str, Any] = field(default_factory=dict)
    """Additional fields of DraftConfig, which override the fields above."""
    coordinator: Mapping[str, Any] = field(default_factory=dict)
    """Additional fields of CoordinatorConfig, which override the fields above."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Additional environment variables of the children."""
