"""Checks a Triton model repository without a server: configurations, the ensemble, Python programs."""
