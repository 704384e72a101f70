"""Usage of each tenant for `/metrics`, counted by the name of the API key."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from coordinator.requests.observer import RequestRecord
from coordinator.sequence.round_record import RoundRecord
from paceline.core.errors import StaleEpochError
from paceline.rpc.codec.status import code_name

if TYPE_CHECKING:
    from coordinator.scheduling.running_sequence import Running


class TenantMetrics:
    """Counts requests and tokens by tenant. The number of tenants is bounded by the keys ever in use."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()
        """By tenant and gRPC code, including `OK`."""
        self.prompt_tokens: Counter[str] = Counter()
        self.generation_tokens: Counter[str] = Counter()

    def request_began(self, request: RequestRecord) -> None:
        """Nothing: a request is counted at its end."""

    def request_ended(self, request: RequestRecord) -> None:
        """Count a request. A request that another call resumed is counted when that call ends."""
        if not isinstance(request.error, StaleEpochError):
            code = "OK" if request.error is None else code_name(request.error)
            self.requests[request.tenant, code] += 1

    def round_ended(self, running: Running, record: RoundRecord, now: float) -> None:
        """Count a round."""
        if running.last_token_at is None:
            self.prompt_tokens[running.tenant] += running.state.ledger.prompt_length
        self.generation_tokens[running.tenant] += record.num_tokens

    def sequence_ended(self, running: Running, now: float) -> None:
        """Nothing: its rounds are counted."""

    def worker_lost(self, role: str) -> None:
        """Not counted by tenant."""

    def blocks_awaited(self) -> None:
        """Not counted by tenant."""
