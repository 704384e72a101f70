"""How a process tells of itself: log lines, metrics, spans. None of them ever holds a prompt or an output."""
