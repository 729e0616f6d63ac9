"""Triton's gRPC protocol: requests and responses as bytes, calls, errors and retries."""
