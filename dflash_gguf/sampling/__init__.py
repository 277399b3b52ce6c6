"""Sampling that does not depend on speculation: the Gumbel noise, and the core's sampler."""
