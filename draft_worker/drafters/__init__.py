"""Where the scores of draft tokens come from: the `Drafter` protocol, its registry, its implementations."""
