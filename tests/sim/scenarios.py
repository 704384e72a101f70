"""Random services: requests, faults and networks drawn from one seed."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from coordinator.proposers.registry import CONTEXT_SOURCES
from paceline.core.errors import InvalidArgumentError
from paceline.core.types import (
    CHAIN,
    AcceptanceMode,
    SamplingParams,
    SequenceParams,
    TokenLogprobs,
    TreeShape,
)
from paceline.core.validation import AUTO
from paceline.rpc.codec import check_choices_remain
from tests.sim.reference import Expected, letter, plain_decoding
from tests.sim.toys import ToyModel
from tests.sim.world import Client, Faults, Request, SimulationError, World

VOCAB = 6
EOS = (5,)
TARGET = ToyModel(VOCAB, seed=3)
DRAFT = TARGET.near(0.8)
DRAFTS = DRAFT, TARGET.near(1.0, seed=2)
MAX_MODEL_LEN = 40

FAULTS = (
    "draft cut",
    "draft restart",
    "draft hang",
    "draft drain",
    "draft evict",
    "draft crash",
    "target cut",
    "target restart",
    "target hang",
    "target drain",
    "target evict",
)


def random_request(rng: random.Random, name: str, *, choosing: bool) -> Request:
    """`choosing`: greedy or coupled, where the tokens do not depend on faults."""
    prompt = tuple(rng.choices(range(VOCAB - 1), k=rng.randint(1, 14)))
    max_tokens = rng.randint(1, 16)
    mode = AcceptanceMode.COUPLED if choosing else rng.choice(list(AcceptanceMode))
    stops = tuple("".join(letter(rng.randrange(VOCAB)) for _ in range(rng.randint(1, 3))) for _ in range(2))
    sampling = SamplingParams(
        temperature=rng.choice((0.0, 0.7, 1.0)),
        seed=rng.getrandbits(64),
        max_tokens=rng.choice((max_tokens, max_tokens, None)),
        min_tokens=rng.choice((0, 0, rng.randint(0, max_tokens))),
        ignore_eos=rng.random() < 0.4,
        stop=stops if rng.random() < 0.3 else (),
        stop_token_ids=(rng.randrange(VOCAB),) if rng.random() < 0.2 else (),
        include_stop_str_in_output=rng.random() < 0.5,
    )
    slow = rng.random() < 0.2
    sampling, bad_words = with_masks_and_reports(sampling)
    return Request(
        name,
        prompt,
        sampling,
        mode,
        bad_words,
        k=rng.choice((0, 1, 2, 3, 5)),
        sources=tuple(CONTEXT_SOURCES) if len(prompt) % 2 == 0 else (),
        arrives=rng.uniform(0, 0.05),
        reads_every=rng.uniform(0.01, 0.05) if slow else 0.001,
        reads_at_once=1 if slow else 100,
        leaves_at=rng.uniform(0, 0.15) if rng.random() < 0.15 else None,
    )


def with_masks_and_reports(sampling: SamplingParams) -> tuple[SamplingParams, tuple[tuple[int, ...], ...]]:
    """Half of all requests forbid or report something; drawn from the request's own seed."""
    rng = random.Random(sampling.seed)
    if rng.random() < 0.5:
        return sampling, ()
    reports = replace(
        sampling, logprobs=rng.choice((None, 0, 3, 20)), prompt_logprobs=rng.choice((None, None, 0, 2))
    )
    allowed = rng.choice((None, tuple(rng.sample(range(VOCAB), rng.randint(3, VOCAB)))))
    words = tuple(tuple(rng.choices(range(VOCAB), k=rng.randint(1, 3))) for _ in range(rng.randint(0, 3)))
    masked = replace(reports, allowed_token_ids=allowed)
    try:
        check_choices_remain(SequenceParams(masked, AcceptanceMode.COUPLED, 0, words), VOCAB, EOS)
    except InvalidArgumentError:
        return reports, ()
    return masked, words


def foreseeing_world(seed: int, num_drafts: int = 1) -> World:
    """Long streams, a slow target and room for branches: most verdicts are foreseen. Up to 3 faults.

    Without a draft all rounds are plain, and most begin by themselves.
    """
    rng = random.Random(f"foreseeing {seed}")
    kinds = [kind for kind in FAULTS if num_drafts or kind.startswith("target")]
    faults = Faults(
        duplicates=rng.choice((0.0, 0.3)),
        slowest=rng.choice((0.0005, 0.002, 0.01)),
        events=[(rng.uniform(0, 0.4), rng.choice(kinds)) for _ in range(rng.randint(0, 3))],
    )
    world = World(
        seed,
        target=TARGET,
        draft=DRAFT,
        num_drafts=num_drafts,
        max_model_len=MAX_MODEL_LEN,
        eos=EOS,
        faults=faults,
    )
    world.target_slowness = 12.0
    for i in range(rng.choice((1, 2))):
        request = random_request(rng, f"s{i}", choosing=True)
        sampling = replace(request.sampling, max_tokens=None, ignore_eos=True, stop=(), stop_token_ids=())
        world.submit(replace(request, sampling=sampling, k=rng.choice((2, 3, 4))))
    return world


def branching_world(seed: int, *, choosing: bool = True) -> World:
    """A random world in which requests draft trees, with up to three drafts of two models, or both."""
    world = random_world(seed, choosing=choosing, drafts=DRAFTS, most_drafts=4, draft_tokens=20)
    rng = random.Random(f"branching {seed}")
    for client in world.clients:
        client.request = replace(
            client.request,
            k=rng.choice((1, 2, 3, 5)),
            tree=rng.choice((CHAIN, TreeShape(2, 5), TreeShape(3, 8), TreeShape(4, 20))),
            drafts=rng.choice((1, 2, 3)),
        )
    return world


PROMPTS = tuple(tuple(random.Random(f"prompt {i}").choices(range(VOCAB - 1), k=16)) for i in range(2))
"""What requests of a crowded world begin with."""


def crowded_world(seed: int) -> World:
    """Clients with prompts that begin alike, under two salts, in pools for a fraction of them."""
    rng = random.Random(f"crowd {seed}")
    num_drafts = rng.choice((0, 1, 1))
    kinds = [kind for kind in FAULTS if num_drafts or kind.startswith("target")]
    faults = Faults(
        duplicates=rng.choice((0.0, 0.0, 0.3)),
        slowest=rng.choice((0.001, 0.004)),
        events=[(rng.uniform(0, 0.3), rng.choice(kinds)) for _ in range(rng.choice((0, 0, 2)))],
    )
    world = World(
        seed,
        target=TARGET,
        draft=DRAFT,
        num_targets=2 if seed % 4 == 3 else 1,
        num_drafts=num_drafts,
        # One sequence of full length has 10 blocks; all together want some hundred.
        target_blocks=rng.choice((10, 14, 25)),
        draft_blocks=rng.choice((4, 12, 40)),
        max_unread=rng.choice((2, 1024, 1024)),
        faults=faults,
        eos=EOS,
        max_model_len=MAX_MODEL_LEN,
    )
    for i in range(rng.randint(4, 12)):
        request = random_request(rng, f"s{i}", choosing=True)
        same = rng.choice(PROMPTS)[: rng.randint(0, 16)]
        long = {"max_tokens": rng.randint(8, 24), "min_tokens": 0, "ignore_eos": True}
        world.submit(
            replace(
                request,
                prompt=(*same, *request.prompt[:6]),
                sampling=replace(request.sampling, **long, stop=(), stop_token_ids=()),
                cache_salt=rng.choice(("", "", "tenant")),
            )
        )
    return world


def random_world(
    seed: int,
    *,
    choosing: bool = True,
    drafts: Sequence[ToyModel] = (DRAFT,),
    most_drafts: int = 2,
    draft_tokens: int = 5,
) -> World:
    """A service with 1 to 5 clients, 1 or 2 workers of each kind and up to 5 faults.

    `draft_tokens` is the most of a round.
    """
    rng = random.Random(f"scenario {seed}")
    num_drafts = rng.choice((0, 1, 1, 2)) if most_drafts == 2 else rng.randint(1, most_drafts)
    kinds = [kind for kind in FAULTS if num_drafts or kind.startswith("target")]
    faults = Faults(
        duplicates=rng.choice((0.0, 0.1, 0.5)),
        slowest=rng.choice((0.001, 0.004, 0.015)),
        events=[(rng.uniform(0, 0.2), rng.choice(kinds)) for _ in range(rng.randint(0, 5))],
    )
    world = World(
        seed,
        target=TARGET,
        draft=drafts,
        num_targets=rng.choice((1, 1, 2)),
        num_drafts=num_drafts,
        # The fewest hold one sequence of full length and its draft tokens, 40 hold three.
        target_blocks=rng.choice((10 + math.ceil(draft_tokens / 4), 20, 40)),
        draft_blocks=rng.choice((3, 12, 40)),
        max_sequences=rng.choice((1, 3, 600)),
        max_running=rng.choice((2, 600)),
        max_unread=rng.choice((2, 1024)),
        faults=faults if rng.random() < 0.9 else Faults(),
        eos=EOS,
        max_model_len=MAX_MODEL_LEN,
        draft_max_len=rng.choice((20, 40)),
    )
    policies = random.Random(f"policy {seed}")
    for i in range(rng.randint(1, 5)):
        request = random_request(rng, f"s{i}", choosing=choosing)
        world.submit(replace(request, k=AUTO) if policies.random() < 0.6 else request)
    return world


def expected(request: Request) -> Expected:
    """What the client of a greedy or coupled request must see, whatever happens."""
    return plain_decoding(
        TARGET,
        request.prompt,
        request.sampling,
        eos=EOS,
        max_model_len=MAX_MODEL_LEN,
        bad_words=request.bad_words,
    )


def check_reports(client: Client) -> None:
    """Log-probabilities are there for every token, once, and are the target's own."""
    sampling, prompt = client.request.sampling, client.request.prompt
    of_tokens = client.token_ids if sampling.logprobs is not None else []
    check_logprobs(prompt, of_tokens, client.logprobs, sampling.logprobs or 0)
    if client.token_ids:
        of_prompt = prompt[1:] if sampling.prompt_logprobs is not None else ()
        check_logprobs(prompt[:1], of_prompt, client.prompt_logprobs, sampling.prompt_logprobs or 0)


def check_logprobs(
    before: Sequence[int], tokens: Sequence[int], told: Sequence[TokenLogprobs], count: int
) -> None:
    """`told` are those of `tokens` after `before`."""
    if [entry.token_id for entry in told] != list(tokens):
        raise SimulationError(f"log-probabilities of {told}, not of {tokens}")
    for i, entry in enumerate(told):
        row = np.log(TARGET.probabilities([*before, *tokens[:i]]))
        best = sorted(range(VOCAB), key=lambda token: -row[token])
        same = list(entry.top_token_ids) == best[:count] and entry.rank == best.index(entry.token_id) + 1
        values = [entry.logprob, *entry.top_logprobs]
        if not same or not np.allclose(values, row[[entry.token_id, *entry.top_token_ids]], atol=1e-5):
            raise SimulationError(f"{entry} of token {i}, where {row} was due")


def check_equal(client: Client) -> None:
    """Invariant 4, for one client; one that left early has a prefix."""
    want = expected(client.request)
    got = tuple(client.token_ids)
    check_reports(client)
    name = client.request.sequence_id
    if client.left:
        if got != want.token_ids[: len(got)]:
            raise SimulationError(f"invariant 4: {name} got {got}, a prefix of {want.token_ids} was due")
        return
    if client.error is not None or client.refused is not None:
        raise SimulationError(f"invariant 6: {name} failed: {client.error or client.refused}")
    if (got, client.text, client.finish.reason) != (want.token_ids, want.text, want.reason):
        raise SimulationError(f"invariant 4: {name} got {got} {client.text!r} {client.finish}, not {want}")
