"""Replicas under Ray Serve."""
