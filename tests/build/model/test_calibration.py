"""Texts in, token blocks out."""

import json
from collections import Counter

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from build.base import checkpoint
from build.model import calibration
from build.model.calibration import read_texts, token_blocks
from contract.errors import InvalidArgument
from tests.fakes import checkpoints

texts_of_letters = st.lists(st.text("abcdefgh", max_size=30), min_size=1, max_size=12).filter(any)


def letters(text):
    """A tokenizer with a token per letter; 0 is kept for the separator."""
    return [1 + ord(letter) - ord("a") for letter in text]


def pieces(text, length):
    """A text as it is packed: at most ``length`` tokens at a time."""
    tokens = "".join(map(chr, letters(text)))
    return [tokens[start : start + length] for start in range(0, len(tokens), length)]


@given(texts_of_letters, st.integers(1, 9), st.integers(1, 12), st.integers(0, 5))
def test_blocks_hold_tokens_of_the_texts_in_order_without_padding(texts, size, length, seed):
    blocks = token_blocks(texts, letters, size=size, max_seq_length=length, separator_id=0, seed=seed)
    assert blocks.ids.dtype == np.int64 and 1 <= len(blocks.ids) <= size and 1 <= blocks.ids.shape[1] <= length
    found = "".join(map(chr, blocks.ids.ravel())).split("\0")[1:]  # the separator is before each piece
    known = Counter(piece for text in texts for piece in pieces(text, length))
    assert not Counter(found[:-1]) - known
    assert any(piece.startswith(found[-1]) for piece in known)  # the last one may be cut by the end of the set


def test_every_text_has_begun_before_any_is_continued():
    texts = ["a" * 50, "b" * 50, "c" * 3]
    blocks = token_blocks(texts, letters, size=2, max_seq_length=10)
    assert blocks.texts == 3 and {1, 2, 3} == set(blocks.ids.ravel().tolist())


@given(texts_of_letters, st.integers(1, 9), st.integers(1, 12))
def test_as_many_whole_sequences_are_made_as_the_tokens_allow(texts, size, length):
    blocks = token_blocks(texts, letters, size=size, max_seq_length=length, separator_id=0)
    available = sum(1 + len(piece) for text in texts for piece in pieces(text, length))
    assert blocks.ids.shape == ((min(size, available // length), length) if available >= length else (1, available))


@given(texts_of_letters, st.integers(0, 3))
def test_the_seed_decides_the_blocks_and_their_hash(texts, seed):
    def draw(seed):
        return token_blocks(texts, letters, size=4, max_seq_length=8, separator_id=0, seed=seed)

    assert np.array_equal(draw(seed).ids, draw(seed).ids) and draw(seed).sha256 == draw(seed).sha256
    other = draw(seed + 1)
    assert (draw(seed).sha256 == other.sha256) == np.array_equal(draw(seed).ids, other.ids)


def test_a_long_text_is_not_copied_for_every_piece():
    class Counted(list):
        copied = 0

        def __getitem__(self, at):
            piece = Counted(super().__getitem__(at))
            Counted.copied += len(piece)
            return piece

    blocks = token_blocks(["x"], lambda text: Counted(range(10_000)), size=50, max_seq_length=100)
    assert blocks.ids.ravel().tolist() == list(range(5_000)) and Counted.copied == 5_000


def test_texts_without_tokens_are_refused():
    for separator_id in (None, 0):
        with pytest.raises(InvalidArgument, match="calibration.dataset: its texts have no tokens"):
            token_blocks(["", ""], letters, size=2, max_seq_length=4, separator_id=separator_id)


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")
    return str(folder)


ROWS = [{"text": "one", "id": 1}, {"text": "zwei – drei", "id": 2}]
AS_JSONL = "\n".join(json.dumps(row) for row in ROWS) + "\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"train.jsonl": AS_JSONL}, ["one", "zwei – drei"]),
        ({"data.json": json.dumps(ROWS)}, ["one", "zwei – drei"]),
        ({"data.csv": 'id,text\n1,one\n2,"two, with\na line"\n'}, ["one", "two, with\na line"]),
        ({"b.txt": "whole\nfile", "a.txt": "first"}, ["first", "whole\nfile"]),
        ({"train.jsonl": AS_JSONL, "test.jsonl": '{"text": "never"}'}, ["one", "zwei – drei"]),
        ({"train/a.txt": "yes", "validation/a.txt": "no", "README.md": "no"}, ["yes"]),
        ({"my-train-00000-of-00001.jsonl": AS_JSONL, "my-test-0.jsonl": '{"text": "no"}'}, ["one", "zwei – drei"]),
        ({"a.jsonl": '{"text": "kept"}\n\n{"text": "  "}\n'}, ["kept"]),
    ],
)
def test_a_folder_is_read_as_the_train_split_with_a_text_column(tmp_path, files, expected):
    assert read_texts(write(tmp_path, files)) == expected


def test_a_single_file_is_taken_whole_for_every_split(tmp_path):
    write(tmp_path, {"train.jsonl": AS_JSONL})
    assert read_texts(str(tmp_path / "train.jsonl"), "test") == ["one", "zwei – drei"]


def test_the_test_split_is_its_files_alone(tmp_path):
    folder = write(tmp_path, {"train.txt": "seen", "valid.txt": "held out", "x_test.txt": "too"})
    assert read_texts(folder, "test") == ["held out", "too"]


def test_a_path_named_cnn_dailymail_is_read_by_its_article_column(tmp_path):
    folder = write(tmp_path / "cnn_dailymail", {"train.jsonl": '{"article": "news", "highlights": "n"}'})
    assert read_texts(folder) == ["news"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"train.jsonl": '{"content": "x", "id": 3}'},
            r"row 1: no text in column 'text'; its columns are content, id \(rule R21\)",
        ),
        ({"train.jsonl": '{"text": "x"}\n{"text": 3}'}, "row 2: no text in column 'text'"),
        ({"train.jsonl": '"x"'}, "it is a str"),
        ({"train.jsonl": "{"}, "is not valid jsonl in UTF-8"),
        ({"train.json": "3"}, "is not valid json in UTF-8"),
        ({"train.json": "[" * 100_000}, "is not valid json in UTF-8"),
        ({"test.txt": "x", "dev.txt": "y"}, r"has no split 'train'; it has test \(rule R21\)"),
        ({"notes.md": "x"}, "holds no .jsonl, .json, .csv, .txt file"),
        ({"train.txt": "  \n"}, "holds no text in split 'train'"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, files, message):
    with pytest.raises(InvalidArgument, match=f"^calibration.dataset: .*{message}"):
        read_texts(write(tmp_path, files))


def test_a_binary_file_and_an_unknown_name_are_refused(tmp_path):
    (tmp_path / "train.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidArgument, match="not valid txt in UTF-8"):
        read_texts(str(tmp_path))
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(InvalidArgument, match="must be a .jsonl, .json, .csv, .txt file"):
        read_texts(str(tmp_path / "x.parquet"))
    with pytest.raises(InvalidArgument, match="'wikitext' is neither a local file or folder nor 'cpython'"):
        read_texts("wikitext")
    with pytest.raises(InvalidArgument, match="'~nobody-here/texts' is neither a local file or folder"):
        read_texts("~nobody-here/texts")


def test_cnn_dailymail_without_the_datasets_package_says_what_to_give_instead(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)  # the import fails as if it were not installed
    with pytest.raises(InvalidArgument, match="the package `datasets` is missing here; give a local folder"):
        read_texts("cnn_dailymail")


@pytest.mark.slow
def test_no_text_of_cpython_is_on_both_sides():
    train, held_out = read_texts("cpython"), read_texts("cpython", "test")
    assert len(train) > 100 and len(held_out) > 10
    assert not set(train) & set(held_out)


def test_the_separator_is_the_begin_of_text_token_else_the_end_of_text_token(tmp_path):
    config = checkpoints.CONFIGS["llama_gqa"]
    checkpoints.write(tmp_path, config)
    encode, decode, separator = calibration.open_tokenizer(checkpoint.open_checkpoint(tmp_path))
    assert separator == checkpoints.BOS
    assert decode(encode("größe")) == "größe"
    for name in ("config.json", "generation_config.json"):
        values = json.loads((tmp_path / name).read_text())
        (tmp_path / name).write_text(json.dumps({k: v for k, v in values.items() if k != "bos_token_id"}))
    assert calibration.open_tokenizer(checkpoint.open_checkpoint(tmp_path))[2] == checkpoints.EOS


def test_what_a_tokenizer_cuts_off_or_pads_is_left_out(tmp_path):
    checkpoints.write(tmp_path, checkpoints.CONFIGS["llama_gqa"])
    plain = calibration.open_tokenizer(checkpoint.open_checkpoint(tmp_path))[0]("a text")
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=64, direction="left")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert calibration.open_tokenizer(checkpoint.open_checkpoint(tmp_path))[0]("a text") == plain


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.json", "a.txt"])
def test_a_byte_order_mark_is_no_text(tmp_path, name):
    content = {"a.csv": "text\none\n", "a.jsonl": '{"text": "one"}\n', "a.json": '[{"text": "one"}]', "a.txt": "one"}
    (tmp_path / name).write_bytes(f"\ufeff{content[name]}".encode())
    assert calibration.read_texts(str(tmp_path)) == ["one"]


def test_a_text_of_a_csv_may_be_long(tmp_path):
    (tmp_path / "a.csv").write_text(f"text\n{'x' * 200_000}\n")
    assert calibration.read_texts(str(tmp_path)) == ["x" * 200_000]


def test_what_the_csv_module_does_not_read_is_said(tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text("text\none\n")
    monkeypatch.setattr(
        calibration.csv, "DictReader", lambda table: (_ for _ in ()).throw(calibration.csv.Error("NUL"))
    )
    with pytest.raises(InvalidArgument, match="calibration.dataset: .*a.csv is not valid csv in UTF-8: NUL"):
        calibration.read_texts(str(tmp_path))
