from python_backends.cpu_engine.model import TritonPythonModel  # noqa: F401
