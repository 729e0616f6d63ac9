"""The public API ``server.running``: what does not need a server; test_supervisor.py uses it with real ones."""

import re
from pathlib import Path

import pytest

import server
from contract.errors import EngineFailed, InvalidArgument


def test_a_server_that_cannot_start_is_an_error_with_the_supervisors_output(tmp_path):
    with pytest.raises(EngineFailed, match=r"(?s)not ready:.*make build-engine ENGINE=missing"):
        with server.running("missing", engines_dir=tmp_path, state_dir=tmp_path):
            raise AssertionError("the block must not run")


def test_a_bad_setting_is_refused_before_a_process_starts(tmp_path):
    with pytest.raises(InvalidArgument, match="TRIDENT_DRAIN_S"):
        with server.running(state_dir=tmp_path, drain_s=-1):
            raise AssertionError("the block must not run")
    assert list(tmp_path.iterdir()) == []


def test_the_package_docstring_names_every_module():
    for path in Path(server.__file__).parent.glob("*.py"):
        if not path.stem.startswith("__") and path.stem not in ("replica", "python_version"):
            assert re.search(rf"\b{path.stem}\b", server.__doc__), path.stem
