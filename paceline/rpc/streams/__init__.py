"""The streams of frames between coordinator and workers."""
