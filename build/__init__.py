"""Builds what is served: from a checkpoint and a recipe to an engine, its Triton configuration and its manifest."""

from contract import interpreter

interpreter.end_quietly()
