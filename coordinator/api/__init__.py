"""The APIs for clients: gRPC and OpenAI-compatible HTTP."""
