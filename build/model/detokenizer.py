"""The engine's vocabulary as the graph from which OpenVINO GenAI reads what each id spells: grammars need it.

Only ``VocabDecoder``'s constants are read. Text is decoded by python_backends/detokenizer, which follows the
tokenizers library exactly and this graph does not.
"""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_tokenizers  # noqa: F401  registers the operations of the extension
from openvino import Type, op
from openvino import opset13 as ops
from openvino_tokenizers import _get_factory

from build.base.architecture import Architecture
from build.model import graph
from python_backends.detokenizer.decoding import Decoding
from python_backends.grammar.vocabulary import spelling

FILE_NAME = "openvino_detokenizer.xml"
CHECKER = "grammar_checker"


def write(tokenizer: Path, vocab_size: int, folder: Path) -> None:
    """Writes openvino_detokenizer.xml and .bin. vocab_size: ids of the logits; those without a token spell nothing."""
    decoding = Decoding.from_tokenizer(tokenizer)
    words = [spelling(decoding, token_id) for token_id in range(vocab_size)]
    lengths = np.array([len(word) for word in words], dtype=np.int32)
    ends = np.cumsum(lengths, dtype=np.int32)
    vocabulary = (ends - lengths, ends, np.frombuffer(b"".join(words), dtype=np.uint8))
    ids = ops.parameter([-1, -1], Type.i64, name="ids")
    inputs = [ops.convert(ids, "i32").output(0), *(op.Constant(array).output(0) for array in vocabulary)]
    *ragged, characters = _get_factory().create("VocabDecoder", inputs).outputs()
    fused = _get_factory().create("FuzeRagged", ragged).outputs()
    text = _get_factory().create("StringTensorPack", [*fused, characters]).outputs()
    model = ov.Model(text, [ids], "detokenizer")
    model.outputs[0].get_tensor().add_names({"string_output"})
    ov.save_model(model, str(folder / FILE_NAME), compress_to_fp16=False)


def write_checker(arch: Architecture, folder: Path) -> None:
    """Writes ``folder/CHECKER``, a model of one layer and no weights with the engine's vocabulary: a process of its own
    compiles every grammar with it before the engine may (python_backends/grammar/compiler.py)."""
    inside = folder / CHECKER
    inside.mkdir()
    tiny = dataclasses.replace(
        arch, num_layers=1, hidden_size=8, intermediate_size=8, num_heads=1, num_kv_heads=1, tied=True
    )
    shapes = tiny.expected_tensors()

    def zeros(name: str) -> ov.Node:
        return ops.broadcast(ops.constant(np.float32(0)), ops.constant(np.array(shapes[name], np.int64)))

    ov.save_model(graph.decoder(tiny, zeros, zeros), str(inside / "openvino_model.xml"), compress_to_fp16=False)
    for path in folder.glob("openvino_detokenizer.*"):
        shutil.copy(path, inside)
