"""The coordinator: the ledger of every sequence, the rounds between the workers, and what clients talk to."""
