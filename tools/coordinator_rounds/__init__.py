"""How many rounds a second one coordinator carries, beside workers that answer at once."""
