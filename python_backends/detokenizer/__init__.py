"""How ids become text again, in order, piece by piece, whatever the tokenizer and wherever a stream is cut."""
