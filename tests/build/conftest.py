"""Tests marked ``build_env`` run where torch and ModelOpt are installed and say why they are skipped elsewhere."""

import importlib.util

import pytest


def pytest_collection_modifyitems(items):
    if importlib.util.find_spec("modelopt") is not None:
        return
    skip = pytest.mark.skip(reason="needs torch and nvidia-modelopt: `make setup-build`, then run with .venv-build")
    for item in items:
        if item.get_closest_marker("build_env"):
            item.add_marker(skip)
