"""Which sequences run, on which workers, and which of them wait."""
