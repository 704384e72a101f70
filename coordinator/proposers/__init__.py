"""Sources of proposals."""
