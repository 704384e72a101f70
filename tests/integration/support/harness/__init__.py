"""The tools of the tests with real processes: oracle, stacks, recorded histories, the wire by hand."""
