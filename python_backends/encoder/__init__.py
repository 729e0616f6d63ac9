"""Texts to vectors, and pairs of texts to scores: one batch of a compiled OpenVINO model at a time."""
