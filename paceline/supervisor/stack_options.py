"""What can be asked of a stack: each of these is an option of `paceline serve`, but for the mappings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.core import limits
from paceline.core.types import AcceptanceMode
from paceline.core.validation import AUTO, DraftTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOptions:
    """One target, at most one draft and their coordinator on this machine.

    Workers listen on 127.0.0.1, the coordinator on `host`. Port 0 takes a free one.
    """

    target_model: str = "embedded:target"
    draft_model: str | None = "embedded:draft"
    """`none` (None from Python): no draft worker; only what a text repeats is proposed."""
    host: str = "127.0.0.1"
    port: int = 0
    model_name: str = ""
    """What clients see; empty takes the target's."""
    http: bool = True
    """Serve the OpenAI-compatible HTTP face."""
    http_port: int = 0
    """Port of the HTTP face, on the same host; 0 takes a free one."""
    chat_template: str = ""
    """A file with a Jinja chat template; empty takes the tokenizer's own."""
    generation_config: str = "auto"
    """Where HTTP requests that do not say take sampling parameters from: `auto` is generation_config.json
    beside the tokenizer, `none` is Paceline's own defaults."""
    target_port: int = 0
    draft_port: int = 0
    num_speculative_tokens: DraftTokens = AUTO
    max_num_speculative_tokens: int = 8
    """The most draft tokens of a round where K is `auto`."""
    num_speculative_tokens_per_batch_size: str = ""
    """K by the number of running sequences where K is `auto`: a JSON list of [lowest, highest, K] such as
    [[1, 4, 5], [5, 16, 3], [17, 64, 0]]; empty chooses K by measured goodput."""
    acceptance: AcceptanceMode = AcceptanceMode.COUPLED
    prompt_lookup: bool = True
    """Copy draft tokens from a sequence's own text where that is worth more than asking the draft."""
    draft_timeout: float = 5.0
    """Seconds after which a round goes on without its proposal."""
    target_timeout: float = 120.0
    """Seconds after which a target that has not judged a round is asked again, or given up if it answers
    nobody."""
    recovery_timeout: float = 60.0
    """Seconds a sequence waits for a target worker to come back."""
    max_running: int = 256
    max_waiting: int = limits.MAX_WAITING_SEQUENCES
    max_request_seconds: float = limits.MAX_REQUEST_SECONDS
    """A request that is older, waiting included, is ended."""
    resume_seconds: float = 30.0
    """How long a request is held for a client whose connection is lost; 0 holds none."""
    unread_timeout: float = 60.0
    """Seconds a sequence may pause for a client that does not read; then its stream is cut."""
    drain_timeout: float = 10.0
    """Seconds that running requests have to end when the coordinator is told to stop; then they are ended."""
    target_device: str = "auto"
    draft_device: str = "auto"
    target_dtype: str = "auto"
    draft_dtype: str = "auto"
    target_threads: int = 0
    """CPU threads; 0 divides the cores by the number of workers, and leaves one where there is one worker."""
    draft_threads: int = 0
    drafter: str = "model"
    """What the draft worker proposes tokens with: `model` is the draft model."""
    lookahead_branches: int | None = None
    """Outcomes of a verification to draft ahead for while it runs; 0 waits for the verdict. If not given,
    as many as a draft worker's default where each model has a core, else 0."""
    lookahead_sequences: int | None = None
    """Sequences up to which that is done. If not given, 1 where both models compute on a CPU with no core
    besides one for each, else a draft worker's default."""
    support_mass: float = 0.995
    """Share of the draft's probability that a proposal's sparse distribution holds."""
    support_bound: int = limits.MAX_SUPPORT
    pre_verify: bool | None = None
    """The target computes the row that judges a sequence's next draft token while it waits for it. If not
    given, unless both models share a core."""
    block_size: int = 16
    num_blocks: int | None = None
    """Blocks of each worker's cache, where not given singly; derived from free memory if not given."""
    target_num_blocks: int | None = None
    """Blocks of the target's cache."""
    draft_num_blocks: int | None = None
    """Blocks of the draft's cache."""
    gpu_memory_utilization: float | None = None
    """Share of each GPU's whole memory for the weights and caches of the workers on it, of both together
    where they are on one. If not given, a cache takes 85 % of what is free; where both are on one GPU,
    weights and caches take 85 % of its memory together."""
    target_gpu_memory_utilization: float | None = None
    """The target's own share of its GPU."""
    draft_gpu_memory_utilization: float | None = None
    """The draft's own share of its GPU."""
    max_model_len: int | None = None
    max_batch_tokens: int = 512
    """Rows of one pass, prefill chunks and verification together."""
    max_mixed_prefill_tokens: int = 0
    """Prompt tokens at most in a pass that running sequences wait for as well; 0 takes 16 on a CPU, else
    what `max_batch_tokens` leaves."""
    max_sequences: int = 256
    lease_seconds: float = 600.0
    """A sequence unused for longer is dropped; the coordinator reopens it when it needs it."""
    deterministic: bool = False
    """Serve only if a token's logits are bitwise the same whatever K is and whoever shares the pass."""
    cuda_graphs: bool = True
    """Record passes of common shapes on a CUDA device and replay them; a model that cannot be recorded is
    served without."""
    prefix_cache: bool = True
    """Keep what ended requests computed, for those that begin with the same tokens."""
    local_sockets: bool | None = None
    """Frames between the processes go through Unix sockets, with less work than through gRPC. If not given,
    where the system has them and there are no certificates."""
    trust_remote_code: bool = False
    certificates: str = ""
    """Folder that `paceline certificates` wrote: TLS on every port but the workers' `/metrics`, between
    the processes with certificates of both ends."""
    tls_certificate: str = ""
    """PEM file with the certificate of the ports for clients; empty takes the folder's coordinator.pem."""
    tls_key: str = ""
    """PEM file with that certificate's private key."""
    tls_ca: str = ""
    """PEM file with the authority of the clients: who shows no certificate of it is refused."""
    api_keys: str = ""
    """File of API keys, as `paceline keys` writes it; none admits everybody."""
    log_format: str = "text"
    """Log lines of all processes as text or as json."""
    otlp_traces_endpoint: str = ""
    """Where all processes send spans with OTLP over gRPC, such as http://localhost:4317; empty makes none."""
    otlp_traces_sampling_ratio: float = 1.0
    """Share of the requests that are traced, of those that do not say so themselves."""
    log_stats_seconds: float = 10.0
    """Seconds between log lines of throughput, which are written while requests run; 0 writes none."""
    tenant_metrics: bool = False
    """Count requests and tokens by API key in `/metrics`, with the key's name as a label."""
    target_metrics_port: int | None = None
    """Port of the target worker's `/metrics`; 0 takes a free one, none given serves none."""
    draft_metrics_port: int | None = None
    """The same for the draft."""
    reflection: bool = False
    """Describe the gRPC services of all processes to whoever asks (server reflection)."""
    start_timeout: float = 900.0
    """Seconds for all processes to become ready; a first download counts."""
    target: Mapping[str, Any] = field(default_factory=dict)
    """More fields of the target's TargetConfig; they win over the ones above."""
    draft: Mapping[str, Any] = field(default_factory=dict)
    """The same for the draft's DraftConfig."""
    coordinator: Mapping[str, Any] = field(default_factory=dict)
    """The same for the coordinator's CoordinatorConfig."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to what the children inherit."""
