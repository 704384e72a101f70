"""Queries of the operating system: cores, GPUs, descriptors, ports, files."""
