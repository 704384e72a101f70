"""Settings of state machines."""

from __future__ import annotations

from hypothesis import HealthCheck, settings


def machine_settings(max_examples: int, steps: int) -> settings:
    """The same examples in every run."""
    return settings(
        max_examples=max_examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        database=None,
        print_blob=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
