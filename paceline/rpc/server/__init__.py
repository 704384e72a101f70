"""A gRPC server: start, health, bounds, errors, shutdown."""
