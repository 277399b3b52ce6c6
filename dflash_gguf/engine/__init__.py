"""Requests, the scheduler that runs them in batches, and what each brings back."""
