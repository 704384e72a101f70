"""What clients talk to: gRPC and OpenAI-compatible HTTP."""
