"""The vocabulary graph: GenAI's tokenizer reads from it what each id spells."""

import json
from pathlib import Path

import openvino as ov
import pytest

from build.model import detokenizer
from python_backends.detokenizer.decoding import Decoding
from python_backends.grammar.vocabulary import SPECIAL_MARK, spelling


@pytest.fixture(scope="module")
def demo_tokenizer():
    return Path(__file__).parents[3] / "build" / "demo_model" / "checkpoint" / "tokenizer.json"


@pytest.fixture(scope="module")
def graph(demo_tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("vocabulary")
    detokenizer.write(demo_tokenizer, 4100, folder)
    return ov.Core().read_model(folder / detokenizer.FILE_NAME)


def test_the_graph_holds_the_bytes_of_every_id_and_nothing_for_ids_without_a_token(graph, demo_tokenizer):
    decoder = next(node for node in graph.get_ops() if node.get_type_name() == "VocabDecoder")
    begins, ends, characters = (decoder.input_value(place).get_node().data for place in (1, 2, 3))
    words = [bytes(characters[begin:end]) for begin, end in zip(begins, ends, strict=True)]
    decoding = Decoding.from_tokenizer(demo_tokenizer)
    assert words == [spelling(decoding, token_id) for token_id in range(4100)]
    assert words[4099] == b""
    added = json.loads(demo_tokenizer.read_text())["added_tokens"]
    for token in added:
        assert words[token["id"]] == ((SPECIAL_MARK if token["special"] else "") + token["content"]).encode()
