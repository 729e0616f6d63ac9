"""Answers that need no engine: idempotent retries, cached responses, one generation shared by equal requests."""
