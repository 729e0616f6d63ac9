"""The textbook ensemble's model ``engine``."""

from benchmarks.textbook.models import Engine as TritonPythonModel  # noqa: F401
