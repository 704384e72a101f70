"""The coordinator: the ledger of every sequence, its rounds on the workers, and the APIs for clients."""
