from python_backends.encoder.model import TritonPythonModel  # noqa: F401
