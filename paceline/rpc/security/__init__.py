"""Authorisation, certificates and credentials."""
