"""Random faults: whatever happens, clients see what plain decoding would have given them.

A failing seed says how to replay it; PACELINE_SIM_SEEDS=0:5000 runs thousands.
"""

from __future__ import annotations

import pytest

from tests.sim.scenarios import check_equal, random_world
from tests.sim.world import SimulationError, chosen_seeds


@pytest.mark.parametrize("seed", chosen_seeds(300))
def test_faults_change_no_token(seed: int) -> None:
    world = random_world(seed)
    world.run()
    for client in world.clients:
        try:
            check_equal(client)
        except SimulationError as error:
            trace = "\n".join(world.trace)
            raise SimulationError(f"{error}\nreplay with PACELINE_SIM_SEEDS={seed}\n{trace}") from None
