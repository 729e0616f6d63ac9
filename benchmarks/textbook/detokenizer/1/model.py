"""The textbook ensemble's model ``detokenizer``."""

from benchmarks.textbook.models import Detokenizer as TritonPythonModel  # noqa: F401
