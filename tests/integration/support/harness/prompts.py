"""Prompts of every length, cut from one text that suits a model of code and a random one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.oracle import Ids, Oracle

SOURCE = '''
"""Ride in a line: the one in front breaks the wind, the others save their strength."""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass, field


@dataclass
class Rider:
    """A rider with a name, a mass in kilograms and the power that is left."""

    name: str
    mass: float = 75.0
    power: float = 300.0
    turns: list[int] = field(default_factory=list)

    def pull(self, seconds: int) -> float:
        """Ride in front for some seconds; return the energy it took, in joules."""
        if seconds < 0:
            raise ValueError(f"seconds must not be negative, got {seconds}")
        self.turns.append(seconds)
        energy = self.power * seconds
        self.power = max(0.0, self.power - 0.1 * seconds)
        return energy

    def rest(self, seconds: int) -> None:
        for _ in range(seconds):
            self.power = min(400.0, self.power + 0.05)


class Line:
    def __init__(self, riders: list[Rider], seed: int = 0) -> None:
        self.riders = list(riders)
        self.random = random.Random(seed)
        self.distance = 0.0

    def rotate(self) -> Rider:
        """The first one goes to the end of the line."""
        first = self.riders.pop(0)
        self.riders.append(first)
        return first

    def ride(self, minutes: int) -> dict[str, float]:
        energy = {rider.name: 0.0 for rider in self.riders}
        for minute in range(minutes):
            leader = self.rotate()
            energy[leader.name] += leader.pull(60)
            for rider in self.riders:
                if rider is not leader:
                    rider.rest(60)
            self.distance += 0.7 + 0.01 * self.random.random()
        return energy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--riders", type=int, default=4)
    parser.add_argument("--minutes", type=int, default=60)
    parser.add_argument("--output", default="ride.json")
    arguments = parser.parse_args()
    line = Line([Rider(f"rider {i}") for i in range(arguments.riders)])
    energy = line.ride(arguments.minutes)
    with open(arguments.output, "w", encoding="utf-8") as file:
        json.dump({"distance": line.distance, "energy": energy}, file, indent=2)
    for name, joules in sorted(energy.items()):
        print(f"{name:>12}: {joules / 1000:.1f} kJ")


if __name__ == "__main__":
    main()
'''

LENGTHS = (1, 2, 3, 5, 8, 13, 15, 16, 17, 31, 32, 33, 47, 64, 65, 100, 128, 200, 300, 450)
"""Tokens; around the borders of cache blocks of 16 as well."""

TEXTS = (
    "def main(",
    "import os\nimport sys\n\n\ndef ",
    "class Line:\n    def __init__(self",
    "x",
    "    for name, value in sorted(",
    "äöü ☃ 𝄞 ",
)


def id_prompts(oracle: Oracle) -> list[Ids]:
    """One prompt of each length; each starts at another place of the text."""
    ids = oracle.encode(SOURCE)
    prompts = []
    for number, length in enumerate(LENGTHS):
        start = (37 * number) % max(1, len(ids) - length)
        prompts.append(ids[start : start + length])
    return prompts
