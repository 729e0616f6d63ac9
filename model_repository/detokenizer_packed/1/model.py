from python_backends.detokenizer.model import PackedModel as TritonPythonModel  # noqa: F401
