"""The OpenAI-compatible HTTP API: the same calls as over gRPC, in the words OpenAI's clients know.

server/     HTTP on a port: connections, heads, bodies, authentication, errors, bytes of answers
openai/     the endpoints; openai/schema/ validates requests and refuses by name what cannot be honoured
metrics.py  the registry behind /metrics
"""
