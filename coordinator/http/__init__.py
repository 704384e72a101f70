"""The OpenAI-compatible HTTP face: the same calls as over gRPC, in the words OpenAI's clients know.

body.py, schemas.py, parameters.py    a request, validated; what cannot be honoured is refused by name
completions.py, chat.py, text.py      the endpoints that use the model and its tokenizer
answer.py, encoding.py                an answer, whole or as server-sent events
information.py, metrics.py            models, health, version, metrics
errors.py, openapi.py, app.py         errors in OpenAI's shape, the document, the application
server.py, farewell.py                the application on a port, in the event loop of the gRPC face; its end
"""
