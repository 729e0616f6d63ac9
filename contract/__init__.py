"""What the packages exchange: requests, deltas, tensors, errors, manifests.

Imports the standard library and numpy only.
"""
