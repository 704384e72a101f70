"""What every process shares: types, messages, errors, limits, configuration. Standard library only."""
