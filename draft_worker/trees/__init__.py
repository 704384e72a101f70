"""Draft trees of sequences: what has grown, with the drafter's state of every node that was fed."""
