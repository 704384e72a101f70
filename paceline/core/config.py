"""Configuration of the three processes: frozen, validated when built, built once in `main`."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core import limits
from paceline.core.checks import AUTO, DraftTokens, draft_tokens
from paceline.core.errors import InvalidArgumentError
from paceline.core.types import AcceptanceMode

DTYPES = ("auto", "float32", "bfloat16", "float16")


def _check(condition: bool, name: str, message: str) -> None:
    if not condition:
        raise InvalidArgumentError(name, message)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """One draft or target worker."""

    model: str
    """A directory, a hub id, or `embedded:target` / `embedded:draft`."""
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one; the announcement on standard output says which."""
    device: str = "auto"
    dtype: str = "auto"
    threads: int = 0
    """CPU threads of the model; 0 leaves torch's choice."""
    block_size: int = 16
    """Positions per cache block."""
    num_blocks: int | None = None
    """Blocks of the cache; None derives it from free memory."""
    max_model_len: int | None = None
    """At most the model's own length, which None takes."""
    max_batch_tokens: int = 512
    """Rows of one pass, prefill chunks and verification together."""
    max_sequences: int = 256
    lease_seconds: float = 600.0
    """A sequence unused for longer is dropped; the coordinator reopens it when it needs it."""
    support_mass: float = 0.995
    """Share of the draft's probability that a proposal's sparse distribution holds (draft only)."""
    support_bound: int = limits.MAX_SUPPORT
    lookahead_branches: int = 8
    """Outcomes of a verification to draft ahead for while it runs; 0 waits for the verdict (draft only)."""
    trust_remote_code: bool = False
    reflection: bool = False
    """Describe the gRPC services to whoever asks (server reflection)."""
    exit_with_parent: bool = False
    """Stop when standard input closes: a child never outlives its supervisor."""

    def __post_init__(self) -> None:
        """Raises InvalidArgumentError naming the field."""
        _check(bool(self.model), "model", "is required")
        _check(0 <= self.port < 65536, "port", f"must be in [0, 65535], got {self.port}")
        _check(self.dtype in DTYPES, "dtype", f"must be one of {', '.join(DTYPES)}, got {self.dtype}")
        _check(self.threads >= 0, "threads", "must not be negative")
        _check(self.block_size >= 1, "block_size", "must be at least 1")
        _check(self.num_blocks is None or self.num_blocks >= 1, "num_blocks", "must be at least 1")
        _check(self.max_model_len is None or self.max_model_len >= 2, "max_model_len", "must be at least 2")
        _check(
            self.max_batch_tokens > limits.MAX_SPECULATIVE_TOKENS,
            "max_batch_tokens",
            f"must be greater than {limits.MAX_SPECULATIVE_TOKENS}, the most draft tokens of a round",
        )
        _check(self.max_sequences >= 1, "max_sequences", "must be at least 1")
        _check(self.lease_seconds > 0, "lease_seconds", "must be positive")
        _check(
            0 <= self.lookahead_branches <= limits.MAX_CONTINUATIONS,
            "lookahead_branches",
            f"must be between 0 and {limits.MAX_CONTINUATIONS}",
        )
        _check(0 < self.support_mass <= 1, "support_mass", "must be in (0, 1]")
        _check(
            1 <= self.support_bound <= limits.MAX_SUPPORT,
            "support_bound",
            f"must be between 1 and {limits.MAX_SUPPORT}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """The coordinator: where its workers are and how it speculates by default."""

    targets: tuple[str, ...]
    """host:port of every target worker."""
    drafts: tuple[str, ...] = ()
    """host:port of every draft worker; none means plain decoding."""
    tokenizer: str
    """A directory with tokenizer.json, such a file, a hub id, or `embedded:target`."""
    model_name: str = ""
    """What clients see; empty takes the target's."""
    host: str = "127.0.0.1"
    port: int = 0
    http: bool = True
    """Serve the OpenAI-compatible HTTP face."""
    http_port: int = 0
    """Port of the HTTP face, on the same host; 0 takes a free one."""
    chat_template: str = ""
    """A file with a Jinja chat template; empty takes the tokenizer's own."""
    num_speculative_tokens: DraftTokens = AUTO
    max_num_speculative_tokens: int = 8
    """The most draft tokens of a round where K is `auto`."""
    acceptance: AcceptanceMode = AcceptanceMode.COUPLED
    draft_timeout: float = 5.0
    """Seconds after which a round goes on without its proposal."""
    target_timeout: float = 120.0
    """Seconds a target may take for one round before it counts as lost."""
    recovery_timeout: float = 60.0
    """Seconds a sequence waits for a target worker to come back."""
    max_running: int = 256
    max_waiting: int = limits.MAX_WAITING_SEQUENCES
    resume_seconds: float = 30.0
    """How long a request is held for a client whose connection is lost; 0 holds none."""
    unread_timeout: float = 60.0
    """Seconds a sequence may pause for a client that does not read; then its stream is cut."""
    reflection: bool = False
    """Describe the gRPC services to whoever asks (server reflection)."""
    exit_with_parent: bool = False

    def __post_init__(self) -> None:
        """Raises InvalidArgumentError naming the field."""
        _check(bool(self.targets), "targets", "at least one target worker is required")
        for name in ("port", "http_port"):
            value = getattr(self, name)
            _check(0 <= value < 65536, name, f"must be in [0, 65535], got {value}")
        draft_tokens("num_speculative_tokens", self.num_speculative_tokens)
        _check(
            1 <= self.max_num_speculative_tokens <= limits.MAX_SPECULATIVE_TOKENS,
            "max_num_speculative_tokens",
            f"must be between 1 and {limits.MAX_SPECULATIVE_TOKENS}",
        )
        for name in ("draft_timeout", "target_timeout", "recovery_timeout", "unread_timeout"):
            _check(getattr(self, name) > 0, name, "must be positive")
        _check(self.resume_seconds >= 0, "resume_seconds", "must not be negative")
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
