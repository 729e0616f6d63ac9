"""Trains the demo model: corpus, tokenizer, network, evaluation, model card."""
