"""Draws draft tokens from scores: noise, supports, grammars, and what a drafter may draw by itself."""
