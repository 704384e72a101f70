"""gRPC and what travels over it: codec, server, security, streams."""
