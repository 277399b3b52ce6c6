"""Sampling whose result does not depend on speculation: the noise, and the sampler of the core."""
