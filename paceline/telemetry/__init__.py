"""Log lines, metrics and spans. None of them ever contains a prompt or an output."""
