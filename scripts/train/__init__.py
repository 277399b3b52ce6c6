"""Training of drafters and of a tiny target: two scripts, and the modules that they share."""
