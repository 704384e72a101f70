"""Who may call, and the certificates and credentials that show it."""
