"""Proposers of candidate tokens, one a file, and their table in registry.py."""
