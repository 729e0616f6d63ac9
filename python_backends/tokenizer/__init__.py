"""The tokenizer model: text or chat in, the engine's input tensors out, after every check."""
