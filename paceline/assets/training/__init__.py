"""Training of the embedded pair: `python -m paceline.assets.training --help`."""
