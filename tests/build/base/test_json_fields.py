"""The reader of foreign JSON: what it accepts, and the sentence for everything else."""

import pytest

from build.base.json_fields import BadField, Fields, read_object


def reading(value: object) -> Fields:
    return Fields({"x": value}, "config.json")


def test_null_and_absent_fields_take_the_default():
    for fields in (Fields({}, "f"), Fields({"x": None}, "f")):
        assert fields.integer("x", 3) == 3 and fields.number("x", 0.5) == 0.5 and fields.boolean("x", True) is True
        assert fields.text("x") is None and fields.texts("x") == () and fields.table("x").values == {}


@pytest.mark.parametrize("value", [True, "3", 3.0, [], {}, 0, -1, 2**31, 10**30, float("nan")])
def test_an_integer_is_a_positive_one_in_range(value):
    with pytest.raises(BadField, match="config.json: x must be a"):
        reading(value).integer("x")


@pytest.mark.parametrize("value", [True, "3", [], {}, 0, -1.0, float("nan"), float("inf"), 10**400])
def test_a_number_is_finite_and_positive(value):
    with pytest.raises(BadField, match="config.json: x must be a positive number"):
        reading(value).number("x")


def test_a_long_value_is_shortened_in_the_message():
    with pytest.raises(BadField) as caught:
        reading(["layer"] * 10_000).boolean("x", False)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is not valid JSON"),
        (b"\xff\xfe{}", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"[]", "is not a JSON object, but a list"),
        (b"null", "is not a JSON object, but a NoneType"),
    ],
)
def test_a_file_that_holds_no_object_is_named(tmp_path, content, says):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(BadField, match=f"config.json {says}"):
        read_object(tmp_path / "config.json")


def test_a_folder_in_place_of_a_file_is_named(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(BadField, match=r"config.json cannot be read: Is a directory"):
        read_object(tmp_path / "config.json")
