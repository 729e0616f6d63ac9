"""What passes between rooms: requests, deltas, tensors, errors, loads, manifests.

Imports nothing of ours; the standard library and numpy only.
"""
