"""The OpenAI-compatible HTTP API: the same calls as gRPC, in OpenAI's terms.

server/     the HTTP server: connections, heads, bodies, authentication, errors, encoding
openai/     the endpoints; openai/schema/ validates requests and refuses unsupported parameters by name
metrics.py  the registry behind /metrics
"""
