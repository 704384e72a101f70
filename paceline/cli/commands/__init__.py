"""The commands of `paceline`, one file a topic."""
