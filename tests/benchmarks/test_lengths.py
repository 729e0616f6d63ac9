import random
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import lengths
from benchmarks.lengths import Fixed, Histogram, LogNormal
from contract.errors import InvalidArgument


@given(seed=st.integers(), median=st.floats(1, 1e4), sigma=st.floats(0, 3), most=st.integers(1, 5000))
def test_log_normal_lengths_stay_within_one_and_the_most(seed, median, sigma, most):
    assert 1 <= LogNormal(median, sigma, most).draw(random.Random(seed)) <= most


def test_log_normal_lengths_have_the_median_asked_for():
    rng = random.Random(0)
    drawn = [LogNormal(200, 0.6).draw(rng) for _ in range(4000)]
    assert 185 < statistics.median(drawn) < 215 and statistics.mean(drawn) > 220


def test_a_histogram_is_drawn_from_as_often_as_it_counts():
    rng = random.Random(0)
    drawn = [Histogram((10, 20, 30), (3, 0, 1)).draw(rng) for _ in range(4000)]
    assert set(drawn) == {10, 30} and 0.7 < drawn.count(10) / 4000 < 0.8


def test_every_form_is_understood(tmp_path: Path):
    (tmp_path / "h.json").write_text('{"lengths": [5, 9], "counts": [1, 2]}')
    (tmp_path / "h.csv").write_text("tokens,count\n5,1\n9,2\n")
    assert lengths.parse("128", "input") == Fixed(128)
    assert lengths.parse("lognormal:200,0.6", "input") == LogNormal(200, 0.6)
    assert lengths.parse("lognormal:200,0.6,800", "input") == LogNormal(200, 0.6, 800)
    assert lengths.parse(f"histogram:{tmp_path}/h.json", "input") == Histogram((5, 9), (1.0, 2.0))
    assert lengths.parse(f"histogram:{tmp_path}/h.csv", "input") == Histogram((5, 9), (1.0, 2.0))


@pytest.mark.parametrize(
    "text",
    ["", "0", "-5", "1.5", "lognormal:", "lognormal:5", "lognormal:5,-1", "lognormal:nan,1", "normal:3,4"]
    + [
        "1000001",
        "9" * 5000,
        "lognormal:5,1e9",
        "lognormal:1e9,1",
        "lognormal:5,1,1e9",
        "lognormal:10,1,0.5",
        "lognormal:10,1,-1",
        "lognormal:10,1,20,5",
    ],
)
def test_what_is_no_length_is_refused_by_the_field_s_name(text):
    with pytest.raises(InvalidArgument, match="^output: must be N, lognormal:"):
        lengths.parse(text, "output")


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        '{"lengths": [1], "counts": []}',
        '{"lengths": [0], "counts": [1]}',
        '{"lengths": [1], "counts": [0]}',
        '{"lengths": [1, 2], "counts": [1, Infinity]}',
        '{"lengths": [1, 2], "counts": [1, NaN]}',
        '{"lengths": [1], "counts": [1' + "0" * 400 + "]}",
        "[" * 100_000,
    ],
    ids=lambda text: text[:40],
)
def test_a_file_that_is_no_histogram_is_refused(tmp_path: Path, text):
    (tmp_path / "h.json").write_text(text)
    with pytest.raises(InvalidArgument, match=r"^input: must have JSON .*, got .*/h\.json: "):
        lengths.parse(f"histogram:{tmp_path}/h.json", "input")


@pytest.mark.parametrize("line", ["4.5,1", "-3,1", "x4,1", "4", "4,many"])
def test_no_line_of_a_histogram_is_passed_over(tmp_path: Path, line):
    (tmp_path / "h.csv").write_text(f"tokens,count\n5,1\n{line}\n")
    with pytest.raises(InvalidArgument, match=r"^input: must have JSON .*, got .*/h\.csv: "):
        lengths.parse(f"histogram:{tmp_path}/h.csv", "input")


def test_a_file_that_is_not_text_is_refused(tmp_path: Path):
    (tmp_path / "h.csv").write_bytes(b"5,1\n\xff\xfe\n")
    with pytest.raises(InvalidArgument, match="^input: must name a file of UTF-8 text, got .*/h.csv: "):
        lengths.parse(f"histogram:{tmp_path}/h.csv", "input")


def test_a_histogram_that_is_not_there_is_refused():
    with pytest.raises(InvalidArgument, match="can be read, got /nowhere"):
        lengths.parse("histogram:/nowhere", "input")
