"""Metrics, traces and log lines, made by observers."""
