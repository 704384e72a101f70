"""The HTTP server: connections, heads, bodies, authentication, errors, encoding."""
