"""HTTP on a port: connections, heads, bodies, authentication, errors, bytes of answers."""
