"""Training of a tiny target, and prompts and answers for the training of our own drafters."""
