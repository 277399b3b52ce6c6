"""Proposers of candidate tokens: one in each file, listed in registry.py."""
