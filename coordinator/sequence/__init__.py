"""One sequence as plain data: ledger, messages of its round machine, views of its workers, counts. Pure."""
