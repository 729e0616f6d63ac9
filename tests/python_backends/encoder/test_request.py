import pytest

from contract.encoder import Encoder
from contract.errors import InvalidArgument
from python_backends.encoder.request import parse
from python_backends.encoder.tokens import Tokens
from python_backends.triton_io import Inputs
from tests.fakes import tiny_encoders as tiny

EMBEDDER = Encoder("mean", True, 32, (8, 16), {"query": "the "})
TYPES = {"input_ids": "INT32", "dimensions": "INT32", "truncate_prompt_tokens": "INT32"}


@pytest.fixture
def read(triton, tmp_path):
    tiny.write_word_pieces(tmp_path)

    def read(kind="embedding", encoder=EMBEDDER, **inputs):
        tensors = {name: (TYPES.get(name, "BYTES"), values) for name, values in inputs.items()}
        return parse(Inputs(triton.incoming(tensors)), kind, encoder, Tokens(tmp_path, encoder, 32, 64))

    return read


def test_texts_ids_and_pairs_become_rows(read):
    assert (len(read(text_input=[["a"], ["b"]]).rows), read(text_input=[["a"]]).scored) == (2, False)
    assert [list(row.ids) for row in read(input_ids=[[5, 6, 8], [7, -1, -1]]).rows] == [[5, 6, 8], [7]]
    pair = read(text_input=[["a"]], text_pair=[["b"]])
    assert (len(pair.rows), pair.count, pair.scored) == (2, 1, True)
    assert len(read("rerank", Encoder("cls", False, 1), text_input=[["a"]], text_pair=[["b"]]).rows) == 1


def test_a_prompt_stands_before_the_text_and_the_models_own_before_a_pair(read):
    plain, prompted = read(text_input=[["man"]]), read(text_input=[["man"]], prompt_name=[["query"]])
    assert list(prompted.rows[0].ids) == list(read(text_input=[["the man"]]).rows[0].ids) != list(plain.rows[0].ids)
    query, document = read(text_input=[["man"]], text_pair=[["man"]]).rows
    assert query == prompted.rows[0] and document == plain.rows[0]


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({}, "text_input: must be sent, or input_ids"),
        ({"text_input": [["a"]], "input_ids": [[1]]}, "text_input: must be sent"),
        ({"text_input": [["a"]], "dimensions": [[9]]}, "dimensions: must be 8 or 16 or 32, got 9"),
        ({"text_input": [["a"]], "prompt_name": [["x"]]}, "prompt_name: must be one of query, got 'x'"),
        (
            {"text_input": [["a"], ["b"]], "dimensions": [[8], [16]]},
            "dimensions: must be the same in every row, got 8, 16",
        ),
        (
            {"text_input": [["a"], ["b"]], "prompt_name": [["query"], [""]]},
            "prompt_name: must be the same in every row, got 'query', ''",
        ),
        (
            {"text_input": [["a"], ["b"]], "truncate_prompt_tokens": [[9], [8]]},
            "truncate_prompt_tokens: must be the same in every row, got 9, 8",
        ),
        ({"text_input": [["a"]], "truncate_prompt_tokens": [[33]]}, "must be -1 or 1 to 32, the model's limit, got 33"),
        (
            {"text_input": [["a"]], "text_pair": [["a"], ["b"]]},
            "text_pair: must have one entry for each",
        ),
        ({"input_ids": [[1]], "text_pair": [["a"]]}, "text_pair: must be left out with input_ids"),
        ({"input_ids": [[5, -1, 6]]}, r"input_ids\[0\]: must hold ids from 0 to 63, got -1"),
        ({"input_ids": [[-1]]}, r"input_ids\[0\]: must hold at least one"),
        ({"text_input": [["a"], [b"\xff"]]}, r"text_input\[1\]: must be UTF-8"),
        ({"text_input": [["a"], ["a"]], "text_pair": [["a"], ["\0"]]}, r"text_pair\[1\]: must hold no NUL"),
    ],
)
def test_what_cannot_be_encoded_is_refused_by_name(read, inputs, words):
    with pytest.raises(InvalidArgument, match=words):
        read(**inputs)


def test_a_reranker_takes_pairs_only(read):
    with pytest.raises(InvalidArgument, match="text_pair: must be sent with text_input: this model scores pairs"):
        read("rerank", Encoder("cls", False, 1), text_input=[["a"]])
