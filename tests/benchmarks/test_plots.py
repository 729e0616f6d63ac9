import json
from importlib.util import find_spec

import pytest

from benchmarks import plots
from contract.errors import InvalidArgument

pytestmark = pytest.mark.skipif(find_spec("matplotlib") is None, reason="plots need requirements/bench.txt")


@pytest.mark.parametrize("content", ["", "{}", "[]", json.dumps([{"records": []}])])
def test_a_file_that_is_no_result_is_refused(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(InvalidArgument, match="^result: must "):
        plots.draw(tmp_path / "x.json", tmp_path)
