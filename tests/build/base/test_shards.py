"""The safetensors reader, on files written by the format's own description."""

import json

import numpy as np
import pytest

from build.base.json_fields import BadField
from build.base.shards import read_header
from tests.fakes import checkpoints


def write(path, header: object, data: bytes = b"") -> None:
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_values_are_exactly_those_stored(tmp_path, dtype):
    values = {"a": np.linspace(-3, 3, 12, dtype=np.float32).reshape(3, 4), "b": np.array([1e-30, 65504.0], np.float32)}
    stored = checkpoints.write_weights(tmp_path, values, dtype=dtype)
    found = read_header(tmp_path / "model.safetensors")
    assert set(found) == {"a", "b"}
    for name in values:
        assert found[name].dtype == dtype and found[name].shape == values[name].shape
        np.testing.assert_array_equal(found[name].f32(), stored[name])


def test_tensors_need_not_be_aligned(tmp_path):
    value = np.arange(6, dtype=np.float32).reshape(2, 3)
    header = {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [1, 25]}}
    for padding in range(4):
        write(tmp_path / "x.safetensors", json.dumps(header).encode() + b" " * padding, b"\0" + value.tobytes())
        np.testing.assert_array_equal(read_header(tmp_path / "x.safetensors")["a"].f32(), value)


def test_raw_bits_are_a_view_of_the_file(tmp_path):
    checkpoints.write_weights(tmp_path, {"a": np.ones((2, 2), np.float32)})
    raw = read_header(tmp_path / "model.safetensors")["a"].raw()
    assert isinstance(raw, np.memmap) and not raw.flags.writeable and raw.tolist() == [[0x3F80] * 2] * 2


@pytest.mark.parametrize("keep", [0, 7, 40, -1])
def test_a_truncated_file_is_named(tmp_path, keep):
    checkpoints.write_weights(tmp_path, {"a": np.ones((4, 4), np.float32)})
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BadField, match=r"model\.safetensors is truncated"):
        read_header(path)


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b"not json", "a header that is not JSON"),
        ([1], "a header that is not a JSON object"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "the header entry of a is malformed"),
        ({"a": 3}, "the header entry of a is malformed"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, r"a is F32 \[2\] but has 4 bytes"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, "truncated: a should end"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, header, says):
    write(tmp_path / "x.safetensors", header, b"\0" * 8)
    with pytest.raises(BadField, match=says):
        read_header(tmp_path / "x.safetensors")
