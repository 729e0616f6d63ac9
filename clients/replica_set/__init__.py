"""Several replicas: found, probed, picked by load."""
