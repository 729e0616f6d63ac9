"""Imported before gRPC, so that what its core says of itself is no part of a command's output.

gRPC's core writes a log to stderr, in the middle of the text, as loud as GRPC_VERBOSITY is when gRPC is imported; its
errors reach us as exceptions. Programs that use the library keep the log.
"""

import os
import sys

from contract import interpreter

interpreter.require("grpc", "clients")
if sys.argv[:1] == ["-m"]:  # so it is while ``python -m clients`` imports the package
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
