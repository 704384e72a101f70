"""One sequence as plain data: ledger, messages of its round machine, worker views, counts. Pure."""
