from python_backends.llmapi_engine.model import TritonPythonModel  # noqa: F401
