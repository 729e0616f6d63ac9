"""Measure what the gateway adds to a replica, and its limits, against a scripted replica."""
