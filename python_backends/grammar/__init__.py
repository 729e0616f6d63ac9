"""Constrained output: guides become grammars, and every grammar is compiled outside the engine first."""
