"""Request bodies and parameters: documented, validated, followed or refused by name."""
