"""How the embedded pair was made: `python -m paceline.assets.training --help`."""
