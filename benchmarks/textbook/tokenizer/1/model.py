"""The textbook ensemble's model ``tokenizer``."""

from benchmarks.textbook.models import Tokenizer as TritonPythonModel  # noqa: F401
