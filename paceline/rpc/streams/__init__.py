"""Streams of frames between coordinator and workers."""
