"""Predicting the next tokens of a text from the text alone: copies of what followed earlier, n-gram counts.

The coordinator's context sources and the draft worker's sub-drafters predict with these.
"""
