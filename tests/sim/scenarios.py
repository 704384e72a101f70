"""Random services: requests, faults and networks drawn from one seed."""

from __future__ import annotations

import random

from paceline.core.types import AcceptanceMode, SamplingParams
from tests.sim.reference import Expected, letter, plain_decoding
from tests.sim.toys import ToyModel
from tests.sim.world import Client, Faults, Request, SimulationError, World

VOCAB = 6
EOS = (5,)
TARGET = ToyModel(VOCAB, seed=3)
DRAFT = TARGET.near(0.8)
MAX_MODEL_LEN = 40

FAULTS = (
    "draft cut",
    "draft restart",
    "draft hang",
    "draft evict",
    "draft crash",
    "target cut",
    "target restart",
    "target hang",
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
    return Request(
        name,
        prompt,
        sampling,
        mode,
        k=rng.choice((0, 1, 2, 3, 5)),
        arrives=rng.uniform(0, 0.05),
        reads_every=rng.uniform(0.01, 0.05) if slow else 0.001,
        reads_at_once=1 if slow else 100,
        leaves_at=rng.uniform(0, 0.15) if rng.random() < 0.15 else None,
    )


def random_world(seed: int, *, choosing: bool = True) -> World:
    """A service with 1 to 5 clients, 1 or 2 workers of each kind and up to 5 faults."""
    rng = random.Random(f"scenario {seed}")
    num_drafts = rng.choice((0, 1, 1, 2))
    kinds = [kind for kind in FAULTS if num_drafts or kind.startswith("target")]
    faults = Faults(
        duplicates=rng.choice((0.0, 0.1, 0.5)),
        slowest=rng.choice((0.001, 0.004, 0.015)),
        events=[(rng.uniform(0, 0.2), rng.choice(kinds)) for _ in range(rng.randint(0, 5))],
    )
    world = World(
        seed,
        target=TARGET,
        draft=DRAFT,
        num_targets=rng.choice((1, 1, 2)),
        num_drafts=num_drafts,
        # 11 blocks hold one sequence of full length and 5 draft tokens, 40 hold three.
        target_blocks=rng.choice((12, 20, 40)),
        draft_blocks=rng.choice((3, 12, 40)),
        max_sequences=rng.choice((1, 3, 600)),
        max_running=rng.choice((2, 600)),
        max_unread=rng.choice((2, 1024)),
        faults=faults if rng.random() < 0.9 else Faults(),
        eos=EOS,
        max_model_len=MAX_MODEL_LEN,
        draft_max_len=rng.choice((20, 40)),
    )
    for i in range(rng.randint(1, 5)):
        world.submit(random_request(rng, f"s{i}", choosing=choosing))
    return world


def expected(request: Request) -> Expected:
    """What the client of a greedy or coupled request must see, whatever happens."""
    return plain_decoding(TARGET, request.prompt, request.sampling, eos=EOS, max_model_len=MAX_MODEL_LEN)


def check_equal(client: Client) -> None:
    """Invariant 4, for one client; one that left early has a prefix."""
    want = expected(client.request)
    got = tuple(client.token_ids)
    name = client.request.sequence_id
    if client.left:
        if got != want.token_ids[: len(got)]:
            raise SimulationError(f"invariant 4: {name} got {got}, a prefix of {want.token_ids} was due")
        return
    if client.error is not None or client.refused is not None:
        raise SimulationError(f"invariant 6: {name} failed: {client.error or client.refused}")
    assert client.finish is not None
    if (got, client.text, client.finish.reason) != (want.token_ids, want.text, want.reason):
        raise SimulationError(f"invariant 4: {name} got {got} {client.text!r} {client.finish}, not {want}")
