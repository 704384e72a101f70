"""Side-by-side measurements; each file is one command."""
