"""Training of drafters and of a tiny target: two scripts and their common modules."""
