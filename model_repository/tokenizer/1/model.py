from python_backends.tokenizer.model import TritonPythonModel  # noqa: F401
