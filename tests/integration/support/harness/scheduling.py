"""Units of tests that xdist's workers get at a time: tests that share processes, the longest first.

xdist's own groups are of no use here: `loadgroup` of 3.8 writes them into the ids of tests, where pytest 9.2
no longer reads them, and deals the tests of one file to all workers. Each of them then starts the file's
stack, which often takes longer than the tests themselves.
"""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadScopeScheduling

UNITS: dict[str, tuple[str, ...]] = {
    "the shared stack": (
        # Asks for a stack on which nothing has been preempted yet.
        "integration/test_prefix_cache.py",
        "integration/test_long_prompt.py",
        "integration/test_sampling_distribution.py",
        "integration/test_resuming.py",
        "integration/test_http.py",
        "integration/test_http_failures.py",
        "integration/test_http_fuzzing.py",
        "integration/test_structured_outputs.py",
        "integration/test_bad_input.py",
        "integration/test_cancellation.py",
        "integration/test_context_sources.py",
        "integration/test_tree_requests.py",
        "integration/test_trees.py",
        "integration/test_with_trees.py",
        "integration/test_hierarchical.py",
        "integration/test_history.py",
        "integration/test_invariance.py",
        "integration/test_parity.py",
        "integration/test_probes.py",
        "integration/test_profile.py",
        "integration/test_prompt_lookup.py",
        "integration/test_reports.py",
        "integration/test_rollback.py",
        "integration/test_sampling_parameters.py",
        "integration/test_several_coordinators.py",
        "integration/test_speculation.py",
        "integration/test_stopping.py",
        "integration/test_text_drafters.py",
        "integration/test_versions.py",
        "integration/test_worker_protocol.py",
    ),
    # What is compiled on first use one process compiles, while all others that need it would wait.
    "choice of K": ("sim/test_goodput.py",),
    "faults": (
        "fault/test_worker_faults.py",
        "fault/test_coordinator_faults.py",
        "fault/test_broken_model.py",
        "fault/test_draining.py",
        "fault/test_hung_draft.py",
        "fault/test_structure_bombs.py",
        "fault/test_edge_bombs.py",
        "fault/test_frame_bombs.py",
        "fault/test_text_bombs.py",
    ),
    "the command line": ("integration/test_cli.py", "integration/test_bench.py"),
    "the deterministic stack": ("integration/test_deterministic.py", "integration/test_soak.py"),
    "observability": ("integration/test_observability.py",),
    "supervised stacks": ("integration/test_stack.py", "integration/test_local_sockets.py"),
    "a small pool": ("integration/test_pool_pressure.py",),
    "certificates": ("integration/test_secure_stack.py",),
    "compose": ("integration/test_compose.py",),
}
"""Files of `tests/` by what they share, in the order in which they begin. Every other file under
`integration/`, `fault/`, `gpu/` and `cuda/` is a unit of its own; every other test is one."""

_PLACES = {
    f"tests/{file}": (name, (i, j))
    for i, (name, files) in enumerate(UNITS.items())
    for j, file in enumerate(files)
}
_ALONE = ("tests/integration/", "tests/fault/", "tests/gpu/", "tests/cuda/")


def unit_of(node_id: str) -> str:
    """Tests with the same answer run in one process."""
    file = node_id.partition("::")[0]
    if file in _PLACES:
        return _PLACES[file][0]
    return file if file.startswith(_ALONE) else node_id


def place_of(node_id: str) -> tuple[int, int]:
    """What to sort tests by: what is in no unit comes last, as it was collected."""
    file = node_id.partition("::")[0]
    if file in _PLACES:
        return _PLACES[file][1]
    return (len(UNITS), 0 if file.startswith(_ALONE) else 1)


class UnitScheduling(LoadScopeScheduling):
    """Hands out units in the order of the collected tests."""

    def __init__(self, config: Any, log: Any = None) -> None:
        # Else those with most tests come first, which are not the longest.
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)
