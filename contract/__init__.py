"""What the packages exchange: requests, deltas, tensors, errors, loads, manifests.

Imports the standard library and numpy only.
"""
