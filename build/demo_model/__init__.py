"""Trains the demo model: corpus, tokenizer, network."""
