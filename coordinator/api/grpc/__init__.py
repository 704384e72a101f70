"""The gRPC services for clients."""
