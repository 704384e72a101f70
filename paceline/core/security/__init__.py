"""API keys, the secret of a service, TLS settings."""
