"""The detokenizer model: token ids to text, increment by increment, with stop strings."""
