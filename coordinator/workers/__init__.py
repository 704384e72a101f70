"""Connections to workers and the streams of frames on them."""
