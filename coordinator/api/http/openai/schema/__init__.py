"""Bodies and parameters of requests: documented, validated, honoured or refused by name."""
