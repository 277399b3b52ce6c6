"""Constraints of answers: schemas, grammars and regular expressions, compiled by llguidance."""
