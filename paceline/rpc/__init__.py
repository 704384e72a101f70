"""The gRPC layer: codec, server, security, streams."""
