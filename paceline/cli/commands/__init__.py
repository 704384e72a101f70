"""The commands of `paceline`, one file per topic."""
