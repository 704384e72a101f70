"""Strategies for values of the wire layer."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from paceline.core import errors, limits, messages
from paceline.core.types import (
    CHAIN,
    AcceptanceMode,
    Outcome,
    Proposal,
    SamplingParams,
    SequenceParams,
    SparseDistribution,
    SpeculationParams,
    StructuredOutputs,
    Timings,
    TokenLogprobs,
    TreeShape,
    Verdict,
)
from paceline.rpc import codec
from paceline.telemetry.traceparent import TraceParent

texts = st.text(st.characters(codec="utf-8"), max_size=20)
uint32 = st.integers(0, 2**32 - 1)
ids = st.lists(uint32, max_size=12).map(tuple)
float32s = st.floats(width=32, allow_nan=False)
penalties = st.floats(-2, 2)
modes = st.sampled_from(AcceptanceMode)

structures = st.one_of(
    st.builds(
        StructuredOutputs,
        json=st.dictionaries(texts, st.none() | st.booleans() | st.integers() | texts, max_size=3),
        disable_any_whitespace=st.booleans(),
    ),
    st.builds(StructuredOutputs, json_object=st.just(True), disable_any_whitespace=st.booleans()),
    st.builds(StructuredOutputs, regex=texts.filter(bool)),
    st.builds(StructuredOutputs, grammar=texts.filter(bool)),
    st.builds(StructuredOutputs, choice=st.lists(texts.filter(bool), min_size=1, max_size=4)),
)


@st.composite
def samplings(draw: Any, **fixed: Any) -> SamplingParams:
    max_tokens = draw(st.none() | st.integers(1, limits.MAX_TOKENS))
    some_texts, logprobs = (
        st.lists(texts.filter(bool), max_size=4).map(tuple),
        st.integers(0, limits.MAX_LOGPROBS),
    )
    values = {
        "temperature": draw(st.just(0.0) | st.floats(limits.MIN_TEMPERATURE, limits.MAX_TEMPERATURE)),
        "top_p": draw(st.floats(0, 1, exclude_min=True)),
        "top_k": draw(st.integers(0, 2**31 - 1)),
        "min_p": draw(st.floats(0, 1)),
        "repetition_penalty": draw(st.floats(limits.MIN_REPETITION_PENALTY, limits.MAX_REPETITION_PENALTY)),
        "presence_penalty": draw(penalties),
        "frequency_penalty": draw(penalties),
        "logit_bias": draw(st.dictionaries(uint32, st.floats(-100, 100), max_size=5)),
        "seed": draw(st.none() | st.integers(0, limits.MAX_SEED)),
        "max_tokens": max_tokens,
        "min_tokens": draw(st.integers(0, max_tokens or limits.MAX_TOKENS)),
        "stop": draw(some_texts),
        "stop_token_ids": draw(ids),
        "ignore_eos": draw(st.booleans()),
        "include_stop_str_in_output": draw(st.booleans()),
        "bad_words": draw(some_texts),
        "allowed_token_ids": draw(st.none() | ids.filter(bool)),
        "n": draw(st.integers(1, limits.MAX_N)),
        "logprobs": draw(st.none() | logprobs),
        "prompt_logprobs": draw(st.none() | logprobs),
        "echo": draw(st.booleans()),
        "structured_outputs": draw(st.none() | structures),
    }
    if values["structured_outputs"] is not None:
        values |= {"ignore_eos": False, "bad_words": (), "allowed_token_ids": None}
    return SamplingParams(**(values | fixed))


speculations = st.builds(
    SpeculationParams,
    num_speculative_tokens=st.none() | st.just("auto") | st.integers(0, limits.MAX_SPECULATIVE_TOKENS),
    acceptance=st.none() | modes,
    prompt_lookup=st.none() | st.booleans(),
    tree_width=st.none() | st.just("auto") | st.integers(1, limits.MAX_TREE_WIDTH),
    max_tree_nodes=st.none() | st.integers(1, limits.MAX_TREE_NODES),
    drafts_per_sequence=st.none() | st.integers(1, limits.MAX_DRAFTS),
)
salts = st.text(st.characters(codec="utf-8"), max_size=limits.MAX_CACHE_SALT_CHARACTERS)
names = st.text(st.characters(codec="utf-8"), max_size=limits.MAX_REQUEST_ID_CHARACTERS)


@st.composite
def resumptions(draw: Any, choices: int) -> codec.Resumption:
    received = (draw(ids), *((),) * (choices - 2), *((draw(ids),) if choices > 1 else ()))
    told = received if draw(st.booleans()) else ()
    return codec.Resumption(tuple(map(len, received)), told)


@st.composite
def generate_calls(draw: Any) -> codec.GenerateCall:
    sampling, name = draw(samplings()), draw(names)
    return codec.GenerateCall(
        request_id=name,
        prompt=draw(texts | ids.filter(bool)),
        sampling=sampling,
        speculation=draw(speculations),
        cache_salt=draw(salts),
        resumable=bool(name) and draw(st.booleans()),
        resumption=draw(st.none() | resumptions(sampling.n)) if name else None,
    )


calls = generate_calls()


@st.composite
def sequence_params(draw: Any) -> SequenceParams:
    return SequenceParams(
        sampling=draw(samplings(seed=draw(st.integers(0, limits.MAX_SEED)))),
        mode=draw(modes),
        prompt_length=draw(uint32),
        bad_words_token_ids=draw(st.lists(ids.filter(bool), max_size=4).map(tuple)),
        cache_salt=draw(salts),
        traceparent=draw(st.sampled_from(["", str(TraceParent(5, 7, True))])),
        draft_index=draw(st.integers(0, limits.MAX_DRAFTS - 1)),
    )


@st.composite
def distributions(draw: Any) -> SparseDistribution:
    size = 4 * draw(st.integers(0, 6))
    if size == 0:
        return SparseDistribution(uniform_over=draw(uint32.filter(bool)))
    return SparseDistribution(*(draw(st.binary(min_size=size, max_size=size)) for _ in range(2)))


@st.composite
def proposals(draw: Any) -> Proposal:
    k = draw(st.integers(0, 8))
    shaped = draw(st.booleans())
    tries = tuple(draw(st.permutations([*range(k), *range(k // 2)]))) if draw(st.booleans()) else ()
    sent = tuple(draw(distributions()) for _ in tries or range(k))
    return Proposal(
        # No two children of a node may have the same token.
        token_ids=draw(st.lists(uint32, min_size=k, max_size=k, unique=shaped).map(tuple)),
        parents=tuple(draw(st.integers(-1, index - 1)) for index in range(k)) if shaped else (),
        distributions=sent if draw(st.booleans()) else (),
        tries=tries,
    )


seconds = uint32.map(lambda microseconds: microseconds / 1e6)
timings = st.builds(
    Timings,
    queue=seconds,
    compute=seconds,
    rows=uint32,
    sequences=uint32,
    prefill=seconds,
    prefill_rows=uint32,
    prefill_rows_before=uint32,
)


@st.composite
def token_logprobs(draw: Any, token_id: int | None = None) -> TokenLogprobs:
    top = draw(st.lists(st.tuples(uint32, float32s), max_size=4))
    return TokenLogprobs(
        draw(uint32) if token_id is None else token_id,
        draw(float32s),
        draw(uint32),
        tuple(token for token, _ in top),
        tuple(value for _, value in top),
    )


@st.composite
def verdicts(draw: Any) -> Verdict:
    token_ids = draw(st.lists(uint32, min_size=1, max_size=9).map(tuple))
    reports = tuple(draw(token_logprobs(token_id)) for token_id in token_ids)
    accepted = len(token_ids) - 1
    nodes = draw(st.lists(uint32, min_size=accepted, max_size=accepted).map(tuple))
    return Verdict(
        len(token_ids) - 1,
        token_ids,
        draw(uint32),
        draw(timings),
        logprobs=reports if draw(st.booleans()) else (),
        went_on_with=draw(st.none() | uint32),
        accepted_nodes=nodes if draw(st.booleans()) else (),
    )


addresses = {"sequence_id": texts, "epoch": uint32, "round": uint32}
opens = st.builds(
    messages.OpenSequence, sequence_id=texts, epoch=uint32, token_ids=ids, params=sequence_params()
)
closes = st.builds(messages.CloseSequence, sequence_id=texts, epoch=uint32)
verify_rounds = st.builds(
    messages.VerifyRound, **addresses, base_length=uint32, committed_tail=ids, proposal=proposals()
)
outcomes = st.builds(Outcome, uint32, uint32, st.none() | uint32)
by_outcome = st.dictionaries(outcomes, proposals(), max_size=3)
verify_aheads = st.builds(
    messages.VerifyAhead, **addresses, base_length=uint32, proposals=by_outcome, plain_otherwise=st.booleans()
)
draft_rounds = st.builds(
    messages.DraftRound,
    **addresses,
    base_length=uint32,
    committed_tail=ids,
    num_draft_tokens=st.integers(1, limits.MAX_SPECULATIVE_TOKENS),
    num_lookahead_tokens=st.integers(0, limits.MAX_SPECULATIVE_TOKENS),
    proposal_known=st.booleans(),
    no_lookahead=st.booleans(),
    shape=st.just(CHAIN)
    | st.builds(TreeShape, st.integers(2, limits.MAX_TREE_WIDTH), st.integers(1, limits.MAX_TREE_NODES)),
)
prompt_logprobs = st.builds(
    messages.PromptLogprobs,
    **addresses,
    start=uint32,
    logprobs=st.lists(token_logprobs(), max_size=4).map(tuple),
)
round_verdicts = st.builds(messages.RoundVerdict, **addresses, verdict=verdicts())
draft_proposals = st.builds(
    messages.DraftProposal,
    **addresses,
    base_length=uint32,
    proposal=proposals(),
    num_computed_tokens=uint32,
    timings=timings,
)
continuations = st.builds(messages.Continuations, **addresses, base_length=uint32, proposals=by_outcome)
paceline_errors = st.one_of(
    *(
        st.builds(kind, texts.filter(bool), texts.filter(bool))
        for kind in (errors.InvalidArgumentError, errors.TokenizerMismatchError)
    ),
    *(
        st.builds(kind, texts)
        for kind in (
            errors.NotFoundError,
            errors.StaleEpochError,
            errors.ResourceExhaustedError,
            errors.DeadlineExceededError,
            errors.CancelledError,
            errors.InternalError,
        )
    ),
    st.builds(errors.FailedPreconditionError, texts, uint32),
    st.builds(errors.UnavailableError, texts, st.none() | st.integers(0, 2**40)),
)
failures = st.builds(messages.SequenceFailed, **addresses, error=paceline_errors)


def same_error(a: errors.PacelineError, b: errors.PacelineError) -> bool:
    """Equal in class, message and every attribute a caller may read."""
    return type(a) is type(b) and vars(a) == vars(b) and a.args == b.args


target_commands = st.lists(opens | verify_rounds | verify_aheads | closes, max_size=4)
draft_commands = st.lists(opens | draft_rounds | closes, max_size=4)
target_events = st.lists(round_verdicts | prompt_logprobs | failures, max_size=4)
draft_events = st.lists(draft_proposals | continuations | failures, max_size=4)
