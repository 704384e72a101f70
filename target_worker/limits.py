"""What a target worker can judge. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core import limits
from paceline.core.errors import InvalidArgumentError
from paceline.core.messages import VerifyRound
from paceline.core.types import Proposal, SequenceParams
from paceline.decoding.sampling import check_sparse
from paceline.rpc.codec import check_token_ids


@dataclass(frozen=True, slots=True)
class RoundLimits:
    """The bounds of the rounds of one worker."""

    vocabulary_size: int
    max_model_len: int
    """Most entries of a sequence."""
    max_batch_tokens: int
    """Most rows of a pass."""

    @property
    def max_tree_nodes(self) -> int:
        """Most nodes of a tree: all rows of a round are in one pass."""
        return min(limits.MAX_TREE_NODES, self.max_batch_tokens - 1)

    def check(self, command: VerifyRound, params: SequenceParams) -> None:
        """Refuse what the model cannot judge, before it costs a pass or touches the session.

        Raises InvalidArgumentError naming the field.
        """
        proposal = command.proposal
        check_token_ids("committed_tail", command.committed_tail, self.vocabulary_size)
        check_token_ids("proposal.token_ids", proposal.token_ids, self.vocabulary_size)
        if proposal.is_tree:
            self._check_tree(proposal, params)
        elif proposal.tries:
            raise InvalidArgumentError("proposal.tries", "have no meaning without proposal.parents")
        if command.base_length + proposal.depth > self.max_model_len:
            raise InvalidArgumentError(
                "proposal.token_ids", f"end beyond the model's length of {self.max_model_len}"
            )
        if proposal.distributions:
            if not params.mode.facts.needs_q:
                raise InvalidArgumentError(
                    "proposal.distributions", f"have no meaning in {params.mode.value} mode"
                )
            drawn = [proposal.token_ids[node] for node in proposal.tries] or proposal.token_ids
            check_sparse(proposal.distributions, self.vocabulary_size, drawn)

    def _check_tree(self, proposal: Proposal, params: SequenceParams) -> None:
        """Refuse a tree that the mode does not take, or that has more rows than a pass."""
        if not params.judged_as.facts.takes_trees:
            raise InvalidArgumentError("proposal.parents", f"{params.mode.value} mode judges chains only")
        if proposal.num_draft_tokens > self.max_tree_nodes:
            raise InvalidArgumentError("proposal.parents", f"has more than {self.max_tree_nodes} nodes")
