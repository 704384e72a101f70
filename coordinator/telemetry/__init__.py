"""Metrics, traces and log lines, made of what observers are told."""
