import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract import gate_result
from contract.errors import InvalidArgument

TABLES = st.dictionaries(
    st.text(max_size=5), st.integers() | st.text(max_size=5) | st.lists(st.floats(-1, 1)), max_size=4
)


@given(TABLES)
def test_what_is_sealed_is_read(tmp_path_factory, table):
    path = tmp_path_factory.mktemp("gate") / "gate.json"
    path.write_text(gate_result.sealed({"verdict": "pass", **table}))
    assert gate_result.read(path) == json.loads(json.dumps({"format": 1, "verdict": "pass", **table}))


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", '{"sha256": "x"}', '{"verdict": "pass", "sha256": 3}'])
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "gate.json").write_text(text)
    with pytest.raises(InvalidArgument, match="gate.json: must be"):
        gate_result.read(tmp_path / "gate.json")
    with pytest.raises(InvalidArgument, match="none.json: must be a file that `python -m evals gate --out` wrote"):
        gate_result.read(tmp_path / "none.json")
