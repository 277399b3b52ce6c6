"""Requests, the scheduler that runs them in batches, and the processing of their output."""
