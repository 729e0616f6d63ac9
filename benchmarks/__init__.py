"""How fast, and at what cost: measured from outside, through the clients. ``python -m benchmarks --help``."""

from contract import interpreter

interpreter.require("benchmarks")
