"""What protoc made has no types: mypy takes all of it for Any."""

from typing import Any

def __getattr__(name: str) -> Any: ...
