"""OpenAI's files and batches: stored in SQLite, run at a pace that leaves interactive requests alone."""
