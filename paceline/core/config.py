"""Configuration of the three processes: frozen, validated on construction, built once in `main`."""

from __future__ import annotations

import math
import socket
from dataclasses import dataclass

from paceline.core import limits
from paceline.core.errors import InvalidArgumentError
from paceline.core.security.tls import Tls
from paceline.core.types import AcceptanceMode
from paceline.core.validation import (
    AUTO,
    DraftTokens,
    TreeWidth,
    device,
    draft_token_table,
    draft_tokens,
    host_and_port,
    number_of_drafts,
    prompt_lookup_range,
    tree_nodes,
    tree_width,
    worker_address,
)

DTYPES = ("auto", "float32", "bfloat16", "float16")
ATTENTION_BACKENDS = ("auto", "varlen", "gathered")
LOG_FORMATS = ("text", "json")
MODEL_DRAFTER = "model"
"""The drafter that is the model; all others need its tokenizer only."""
NO_SUB_DRAFTER = "none"
NO_GENERATION_CONFIG = "none"
GENERATION_CONFIGS = ("auto", NO_GENERATION_CONFIG)
HAS_LOCAL_SOCKETS = hasattr(socket, "AF_UNIX")
NO_LOCAL_SOCKETS = "is not supported on this system"


def _check(condition: bool, name: str, message: str) -> None:
    if not condition:
        raise InvalidArgumentError(name, message)


def check_dtype(name: str, value: str) -> None:
    """Raises InvalidArgumentError naming the field unless the number format is known."""
    _check(value in DTYPES, name, f"must be one of {', '.join(DTYPES)}, got {value}")


def _check_addresses(name: str, addresses: tuple[str, ...]) -> None:
    for address in addresses:
        worker_address(name, address)
        _check(addresses.count(address) == 1, name, f"{address} is given twice")


def _check_stop(name: str, seconds: float) -> None:
    most = limits.MAX_REQUEST_SECONDS
    _check(0 <= seconds <= most, name, f"must be in [0, {most:g}]")


def _check_telemetry(log_format: str, endpoint: str) -> None:
    _check(
        log_format in LOG_FORMATS, "log_format", f"must be one of {', '.join(LOG_FORMATS)}, got {log_format}"
    )
    _check(
        not endpoint or endpoint.startswith(("http://", "https://")),
        "otlp_traces_endpoint",
        f"must begin with http:// or https://, got {endpoint}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Settings common to draft and target workers."""

    model: str
    """A directory, a hub id, or `embedded:target` / `embedded:draft`. For benchmarks, `embedded:target@N`
    has N times the parameters and generates the same tokens."""
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free port, which is announced on standard output."""
    device: str = "auto"
    dtype: str = "auto"
    threads: int = 0
    """CPU threads of the model; 0 lets torch choose, within the CPU quota."""
    block_size: int | None = None
    """Positions per cache block; None takes 16, or 256 where attention reads the cache in place."""
    num_blocks: int | None = None
    """Blocks of the cache; None derives the number from free memory."""
    gpu_memory_utilization: float | None = None
    """Share of the GPU's total memory for this worker; None gives all but the weights 85 % of the memory that
    is free after loading them."""
    max_model_len: int | None = None
    """Longest sequence; None takes the model's own length. A target refuses a greater value, a draft falls
    back to its own length."""
    max_batch_tokens: int = 512
    """Most rows of one pass, prefill chunks and verification together."""
    max_mixed_prefill_tokens: int = 0
    """Most prompt tokens in a pass that also serves running sequences; 0 means 16 on a CPU, elsewhere
    whatever `max_batch_tokens` leaves."""
    prefix_cache: bool = True
    """Keep the cache of ended sequences for new sequences with the same prefix."""
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
    trust_remote_code: bool = False
    local_socket: str = ""
    """Path of an additional Unix socket for coordinators on this machine, faster than gRPC; only processes of
    the same user may open it."""
    tls_certificate: str = ""
    """PEM file with this process's certificate; empty means plain text."""
    tls_key: str = ""
    """PEM file with the certificate's private key."""
    tls_ca: str = ""
    """PEM file with the certificate authority of the coordinators; callers without a certificate from it are
    refused."""
    worker_secret_file: str = ""
    """File with the secret that coordinators must present on every method except health checks. The default
    is the environment variable PACELINE_WORKER_SECRET, if set."""
    log_format: str = "text"
    """Log lines as text or as json."""
    otlp_traces_endpoint: str = ""
    """Endpoint for spans (OTLP over gRPC), such as http://localhost:4317; empty disables tracing."""
    metrics_port: int | None = None
    """Port of `/metrics` on the same host; 0 takes a free port. Not served by default."""
    reflection: bool = False
    """Enable gRPC server reflection."""
    join: tuple[str, ...] = ()
    """host:port of a coordinator's join port, or `dns:HOST:PORT` for every coordinator behind a name;
    may be repeated."""
    advertise: str = ""
    """host:port at which coordinators reach a worker that joins; empty takes its port, on the host that it
    listens on, or that it connects from if it listens on all."""
    handover_timeout: float = 5.0
    """Seconds that coordinators have on shutdown to move this worker's sequences to other workers; those that
    are still here then are opened again elsewhere, or at this worker's successor."""
    exit_with_parent: bool = False
    """Stop when standard input closes, so that a child never outlives its supervisor."""

    def __post_init__(self) -> None:
        """Raises InvalidArgumentError naming the field."""
        _check(bool(self.model), "model", "is required")
        _check(0 <= self.port < 65536, "port", f"must be in [0, 65535], got {self.port}")
        _check(
            self.metrics_port is None or 0 <= self.metrics_port < 65536,
            "metrics_port",
            f"must be in [0, 65535], got {self.metrics_port}",
        )
        _check_telemetry(self.log_format, self.otlp_traces_endpoint)
        device("device", self.device)
        check_dtype("dtype", self.dtype)
        _check(self.threads >= 0, "threads", "must not be negative")
        _check(self.block_size is None or self.block_size >= 1, "block_size", "must be at least 1")
        _check(
            self.attention_backend in ATTENTION_BACKENDS,
            "attention_backend",
            f"must be one of {', '.join(ATTENTION_BACKENDS)}, got {self.attention_backend}",
        )
        _check(self.num_blocks is None or self.num_blocks >= 1, "num_blocks", "must be at least 1")
        share = self.gpu_memory_utilization
        if share is not None:
            _check(0 < share <= 1, "gpu_memory_utilization", f"must be in (0, 1], got {share:g}")
            _check(self.num_blocks is None, "gpu_memory_utilization", "cannot be used with num_blocks")
            _check(self.device != "cpu", "gpu_memory_utilization", "requires a GPU, but device is cpu")
        _check(self.max_model_len is None or self.max_model_len >= 2, "max_model_len", "must be at least 2")
        _check(
            self.max_batch_tokens > limits.MAX_SPECULATIVE_TOKENS,
            "max_batch_tokens",
            f"must be greater than {limits.MAX_SPECULATIVE_TOKENS}, the most draft tokens of a round",
        )
        _check(self.max_mixed_prefill_tokens >= 0, "max_mixed_prefill_tokens", "must not be negative")
        _check(self.max_sequences >= 1, "max_sequences", "must be at least 1")
        _check(self.lease_seconds > 0, "lease_seconds", "must be positive")
        _check_stop("handover_timeout", self.handover_timeout)
        _check_addresses("join", self.join)
        for place in self.join:
            host_and_port("join", place.removeprefix("dns:"))
        if self.advertise:
            _check(bool(self.join), "advertise", "requires join")
            host_and_port("advertise", self.advertise)
        without_authority = self.tls is not None and not self.tls_ca
        _check(
            not without_authority,
            "tls_ca",
            "is required with tls_certificate: it identifies coordinators",
        )
        _check(not self.local_socket or HAS_LOCAL_SOCKETS, "local_socket", NO_LOCAL_SOCKETS)
        _check(
            not (self.local_socket and self.tls is not None),
            "local_socket",
            "has no TLS, so it cannot be used with tls_certificate",
        )

    @property
    def tls(self) -> Tls | None:
        """TLS of this worker's port; None means plain text."""
        return Tls.of("tls", self.tls_certificate, self.tls_key, self.tls_ca)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig(WorkerConfig):
    """A draft worker."""

    drafter: str = MODEL_DRAFTER
    """How tokens are proposed: `model` uses the model itself, other drafters only its tokenizer."""
    corpus: str = ""
    """A text file that the drafters unigram and bigram count; empty takes an embedded text."""
    sub_drafter: str = NO_SUB_DRAFTER
    """What guesses the draft's tokens from the text, for the draft to check in one pass: `ngram`,
    `prompt-lookup`, or `none`."""
    support_mass: float = 0.995
    """Share of the draft's probability that a proposal's sparse distribution holds."""
    support_bound: int = limits.MAX_SUPPORT
    lookahead_branches: int = 8
    """Outcomes to draft for while a verification runs; 0 waits for the verdict."""
    lookahead_sequences: int = 256
    """Most running sequences with drafting ahead. On shared cores, more sequences leave no idle time."""

    def __post_init__(self) -> None:
        """Raises InvalidArgumentError naming the field."""
        WorkerConfig.__post_init__(self)
        _check(
            0 <= self.lookahead_branches <= limits.MAX_CONTINUATIONS,
            "lookahead_branches",
            f"must be between 0 and {limits.MAX_CONTINUATIONS}",
        )
        _check(
            1 <= self.lookahead_sequences <= limits.MAX_RUNNING_SEQUENCES,
            "lookahead_sequences",
            f"must be between 1 and {limits.MAX_RUNNING_SEQUENCES}",
        )
        _check(0 < self.support_mass <= 1, "support_mass", "must be in (0, 1]")
        _check(
            1 <= self.support_bound <= limits.MAX_SUPPORT,
            "support_bound",
            f"must be between 1 and {limits.MAX_SUPPORT}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConfig(WorkerConfig):
    """A target worker."""

    pre_verify: bool = True
    """While sequences wait for draft tokens, compute in advance the rows that verify their first token. Only
    done where a command can cancel the pass, which requires compiled passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """The coordinator: its workers and the defaults of speculation."""

    targets: tuple[str, ...] = ()
    """host:port of a target worker; may be repeated."""
    drafts: tuple[str, ...] = ()
    """host:port of a draft worker; may be repeated. Without one, only prompt lookup proposes tokens."""
    join_port: int | None = None
    """Port on the same host for workers that join by themselves; 0 takes a free port. Not served by default.
    It has the TLS and the secret of the connections to workers; without both, `host` must be this machine."""
    tokenizer: str
    """A tokenizer.json, a directory with one, a hub id, or `embedded:target`."""
    model_name: str = ""
    """Name that clients see; empty takes the target's."""
    host: str = "127.0.0.1"
    port: int = 0
    http: bool = True
    """Serve the OpenAI-compatible HTTP API."""
    http_port: int = 0
    """Port of the HTTP API on the same host; 0 takes a free port."""
    chat_template: str = ""
    """A file with a Jinja chat template; empty takes the tokenizer's own."""
    generation_config: str = GENERATION_CONFIGS[0]
    """Default sampling parameters of HTTP requests: `auto` reads generation_config.json beside the tokenizer,
    `none` uses Paceline's own defaults."""
    num_speculative_tokens: DraftTokens = AUTO
    max_num_speculative_tokens: int = 8
    """Most draft tokens of a round if K is `auto`."""
    num_speculative_tokens_per_batch_size: str = ""
    """K by number of running sequences, if K is `auto`: a JSON list of [lowest, highest, K] such as
    [[1, 4, 5], [5, 16, 3], [17, 64, 0]]; empty chooses K by measured goodput."""
    tree_width: TreeWidth = 1
    max_tree_nodes: int = 16
    drafts_per_sequence: int = 1
    """Most draft workers that propose for one round; their proposals are merged into one tree."""
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
    api_keys: str = ""
    """File of API keys, written by `paceline keys`; empty admits every caller."""
    tls_certificate: str = ""
    """PEM file with this process's certificate; empty means plain text."""
    tls_key: str = ""
    """PEM file with the certificate's private key."""
    tls_ca: str = ""
    """PEM file with the certificate authority of the clients; clients without a certificate from it are
    refused."""
    local_sockets: bool = True
    """Use the Unix socket that a worker offers if it is on this machine."""
    worker_tls_certificate: str = ""
    """PEM file with the certificate presented to the workers; empty means plain text."""
    worker_tls_key: str = ""
    """PEM file with that certificate's private key."""
    worker_tls_ca: str = ""
    """PEM file with the certificate authority of the workers."""
    worker_secret_file: str = ""
    """File with the secret presented to the workers. The default is the environment variable
    PACELINE_WORKER_SECRET, if set."""
    log_format: str = "text"
    """Log lines as text or as json."""
    otlp_traces_endpoint: str = ""
    """Endpoint for spans (OTLP over gRPC), such as http://localhost:4317; empty disables tracing."""
    otlp_traces_sampling_ratio: float = 1.0
    """Share of requests to trace, among those without a trace decision of their own."""
    log_stats_seconds: float = 10.0
    """Seconds between log lines of throughput while requests run; 0 writes none."""
    tenant_metrics: bool = False
    """Count requests and tokens per API key in `/metrics`, labelled with the key's name."""
    resume_seconds: float = 30.0
    """Seconds for which a request is held after its client's connection is lost; 0 holds none."""
    unread_timeout: float = 60.0
    """Seconds for which a sequence pauses for a client that does not read, before its stream is cut."""
    drain_timeout: float = 10.0
    """Seconds that running requests have to finish on shutdown before they are ended."""
    reflection: bool = False
    """Enable gRPC server reflection."""
    exit_with_parent: bool = False

    def __post_init__(self) -> None:
        """Raises InvalidArgumentError naming the field."""
        joins = self.join_port is not None
        _check(bool(self.targets) or joins, "targets", "at least one target worker is required, or join_port")
        _check_addresses("targets", self.targets)
        _check_addresses("drafts", self.drafts)
        join_port = self.join_port or 0
        _check(0 <= join_port < 65536, "join_port", f"must be in [0, 65535], got {join_port}")
        for name in ("port", "http_port"):
            value = getattr(self, name)
            _check(0 <= value < 65536, name, f"must be in [0, 65535], got {value}")
        _check_telemetry(self.log_format, self.otlp_traces_endpoint)
        _check(
            0 <= self.otlp_traces_sampling_ratio <= 1,
            "otlp_traces_sampling_ratio",
            f"must be in [0, 1], got {self.otlp_traces_sampling_ratio}",
        )
        _check(
            self.generation_config in GENERATION_CONFIGS,
            "generation_config",
            f"must be one of {', '.join(GENERATION_CONFIGS)}, got {self.generation_config}",
        )
        draft_tokens("num_speculative_tokens", self.num_speculative_tokens)
        _check(
            1 <= self.max_num_speculative_tokens <= limits.MAX_SPECULATIVE_TOKENS,
            "max_num_speculative_tokens",
            f"must be between 1 and {limits.MAX_SPECULATIVE_TOKENS}",
        )
        self._check_trees()
        prompt_lookup_range(self.prompt_lookup_min, self.prompt_lookup_max)
        for name, least, most in (
            ("suffix_max_tree_depth", 2, limits.MAX_PROMPT_LOOKUP),
            ("suffix_max_spec_factor", 0.1, limits.MAX_SPECULATIVE_TOKENS),
            ("suffix_min_token_prob", 0, 1),
            ("suffix_cached_requests", 0, limits.MAX_SUFFIX_CACHED_REQUESTS),
        ):
            _check(least <= getattr(self, name) <= most, name, f"must be between {least} and {most}")
        if self.num_speculative_tokens_per_batch_size:
            name = "num_speculative_tokens_per_batch_size"
            _check(self.num_speculative_tokens == AUTO, name, f"needs num_speculative_tokens {AUTO!r}")
            _ = self.speculation_table
        for name in ("draft_timeout", "target_timeout", "recovery_timeout", "unread_timeout"):
            _check(getattr(self, name) > 0, name, "must be positive")
        _check(self.resume_seconds >= 0, "resume_seconds", "must not be negative")
        _check(0 <= self.log_stats_seconds < math.inf, "log_stats_seconds", "must not be negative")
        _check_stop("drain_timeout", self.drain_timeout)
        _check(
            1 <= self.max_running <= limits.MAX_RUNNING_SEQUENCES,
            "max_running",
            f"must be between 1 and {limits.MAX_RUNNING_SEQUENCES}",
        )
        _check(
            0 <= self.max_waiting <= limits.MAX_WAITING_SEQUENCES,
            "max_waiting",
            f"must be between 0 and {limits.MAX_WAITING_SEQUENCES}",
        )
        _check(
            0 < self.max_request_seconds <= limits.MAX_REQUEST_SECONDS,
            "max_request_seconds",
            f"must be in (0, {limits.MAX_REQUEST_SECONDS:g}]",
        )
        _ = self.tls
        without_authority = self.worker_tls is not None and not self.worker_tls_ca
        _check(not without_authority, "worker_tls_ca", "is required with worker_tls_certificate")

    def _check_trees(self) -> None:
        tree_width("tree_width", self.tree_width)
        tree_nodes("max_tree_nodes", self.max_tree_nodes)
        number_of_drafts("drafts_per_sequence", self.drafts_per_sequence)
        for name in ("tree_width", "drafts_per_sequence") if self.acceptance.facts.whole_chain else ():
            chain = getattr(self, name) in (1, AUTO)
            _check(chain, name, f"must be 1 with acceptance {self.acceptance.value}, which takes no trees")

    @property
    def source_names(self) -> tuple[str, ...]:
        """`sources` as names; none with `--no-prompt-lookup`."""
        names = () if self.sources == "none" else tuple(name.strip() for name in self.sources.split(","))
        return names if self.prompt_lookup else ()

    @property
    def speculation_table(self) -> tuple[tuple[int, int, int], ...]:
        """`num_speculative_tokens_per_batch_size` as rows."""
        return draft_token_table(
            "num_speculative_tokens_per_batch_size", self.num_speculative_tokens_per_batch_size
        )

    @property
    def tls(self) -> Tls | None:
        """TLS of both client ports; None means plain text."""
        return Tls.of("tls", self.tls_certificate, self.tls_key, self.tls_ca)

    @property
    def worker_tls(self) -> Tls | None:
        """TLS of the connections to workers; None means plain text."""
        return Tls.of("worker_tls", self.worker_tls_certificate, self.worker_tls_key, self.worker_tls_ca)
