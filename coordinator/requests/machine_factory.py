"""Turns a request's choices into round machines, each with its ledger and its policy."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

from coordinator.proposers.finished_texts import FinishedTexts
from coordinator.proposers.registry import SourceSetting, check_sources, make_sources
from coordinator.proposers.suffix import SuffixSettings
from coordinator.requests.tree_setting import TreeSetting, tree_setting
from coordinator.round.machine import RoundMachine
from coordinator.round.state import RoundState
from coordinator.sequence.ledger import Ledger
from coordinator.sequence.messages import Deadlines, Phase
from coordinator.sequence.round_record import DRAFT, PROMPT_LOOKUP
from coordinator.speculation.controller import Controller, RequestKind, kind_of
from coordinator.speculation.policy import FixedLength, GoodputPolicy, Policy, TablePolicy
from coordinator.text.vocabulary import Vocabulary
from paceline.core.config import CoordinatorConfig
from paceline.core.types import SequenceParams, SpeculationParams
from paceline.core.validation import AUTO, DraftTokens, prompt_lookup_range
from paceline.rpc.codec import GenerateCall
from paceline.v1 import common_pb2


class Machines:
    """Makes round machines from server and request settings. All machines share one controller."""

    def __init__(self, config: CoordinatorConfig, vocabulary: Vocabulary) -> None:
        self._config = config
        self._vocabulary = vocabulary
        self._table = config.speculation_table
        longest = max((k for _, _, k in self._table), default=config.max_num_speculative_tokens)
        self._controller = Controller(longest, config.max_tree_nodes)
        check_sources("sources", config.source_names)
        self._finished = FinishedTexts(config.suffix_cached_requests)

    def make(
        self, call: GenerateCall, params: SequenceParams, ledger: Ledger, info: common_pb2.WorkerInfo
    ) -> RoundMachine:
        """The machine of one choice, with its own parameters and ledger."""
        config, sampling, asked = self._config, params.sampling, call.speculation
        wanted = asked.num_speculative_tokens
        k = config.num_speculative_tokens if wanted is None else wanted
        sources = self._sources(asked, k, params)
        trees = tree_setting(asked, config, k, params)
        state = RoundState(
            # Never reused, unlike the request id, which the client chooses.
            sequence_id=secrets.token_hex(12),
            ledger=ledger,
            params=params,
            num_speculative_tokens=self._controller.max_draft if k == AUTO else k,
            policy=self._policy(k, trees, kind_of(params.mode, sampling.temperature)),
            deadlines=Deadlines(config.draft_timeout, config.target_timeout, config.recovery_timeout),
            vocabulary_size=info.vocabulary_size,
            target_max_len=info.max_model_len,
            sources=make_sources(sources, self._setting(asked, params)),
            asks_draft=asked.drafter in (None, DRAFT),
            num_drafts=trees.drafts,
            max_tree_nodes=trees.nodes,
            draft_params=replace(params, sampling=asked.draft_sampling(sampling)),
            phase=Phase.DONE if ledger.ended else Phase.NEW,
        )
        return RoundMachine(state)

    def _policy(self, k: DraftTokens, trees: TreeSetting, kind: RequestKind) -> Policy:
        controller = self._controller
        if k != AUTO:
            return FixedLength(controller, k, kind, trees.shape)
        if self._table:
            return TablePolicy(controller, controller.max_draft, kind, trees.shape, table=self._table)
        return GoodputPolicy(
            controller, controller.max_draft, kind, trees.chosen_within, draws_chains=trees.width in (1, AUTO)
        )

    def _sources(self, asked: SpeculationParams, k: DraftTokens, params: SequenceParams) -> Sequence[str]:
        """Names of the context sources that may propose; none without draft tokens.

        The choice of a source depends on measured times. In a mode whose tokens depend on the rounds, a fixed
        K keeps a seed's tokens the same, so the server uses no source there unless asked.

        Raises InvalidArgumentError naming `drafter`.
        """
        if not k or asked.drafter == DRAFT or asked.prompt_lookup is False:
            return ()
        if asked.drafter is not None:
            check_sources("drafter", [asked.drafter])
            return (asked.drafter,)
        repeats = params.target_decides or k == AUTO
        names = self._config.source_names if repeats else ()
        return (*names, PROMPT_LOOKUP) if asked.prompt_lookup else names

    def _setting(self, asked: SpeculationParams, params: SequenceParams) -> SourceSetting:
        """Raises InvalidArgumentError naming a setting that does not fit the server's."""
        config = self._config
        shortest = asked.prompt_lookup_min or config.prompt_lookup_min
        longest = asked.prompt_lookup_max or config.prompt_lookup_max
        if asked.prompt_lookup_min or asked.prompt_lookup_max:
            prompt_lookup_range(shortest, longest)
        return SourceSetting(
            prompt_lookup_min=shortest,
            prompt_lookup_max=longest,
            suffix=SuffixSettings(
                max_tree_depth=config.suffix_max_tree_depth,
                max_spec_factor=config.suffix_max_spec_factor,
                min_token_prob=config.suffix_min_token_prob,
            ),
            finished=self._finished,
            salt=params.cache_salt,
            prompt_length=params.prompt_length,
            structured=params.sampling.structure is not None,
        )

    @staticmethod
    def of_choice(request: SequenceParams, choice: int, received: Sequence[int]) -> SequenceParams:
        """The parameters of one choice, whose client already has the `received` tokens."""
        sampling = request.sampling.of_choice(choice)
        if received:
            # The prompt's report was sent before the first token.
            sampling = sampling.without_prompt_report()
        return replace(request, sampling=sampling)

    def ledger(
        self, prompt: Sequence[int], params: SequenceParams, choice: int, info: common_pb2.WorkerInfo
    ) -> Ledger:
        """An empty ledger behind the prompt."""
        return Ledger(
            prompt,
            params.sampling,
            detokenizer=self._vocabulary.detokenizer(
                prompt, skip_special_tokens=params.sampling.skip_special_tokens
            ),
            eos_token_ids=frozenset(info.eos_token_ids),
            max_model_len=info.max_model_len,
            choice=choice,
        )
