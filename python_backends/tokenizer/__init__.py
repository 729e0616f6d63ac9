"""How a prompt becomes token ids: text or chat in, the engine's input tensors out, everything checked first."""
