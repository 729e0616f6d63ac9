from python_backends.detokenizer.model import TritonPythonModel  # noqa: F401
