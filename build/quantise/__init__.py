"""Quantised checkpoints: written by ModelOpt, read back for the quality gate."""
