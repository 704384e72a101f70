"""Stubs generated from proto/paceline/v1."""
