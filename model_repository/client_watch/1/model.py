from python_backends.client_watch.model import TritonPythonModel  # noqa: F401
