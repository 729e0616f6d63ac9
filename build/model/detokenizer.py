"""The engine's vocabulary as the graph from which OpenVINO GenAI reads what each id spells: grammars need it.

Only ``VocabDecoder``'s constants are read. Text is decoded by python_backends/detokenizer, which follows the
tokenizers library exactly and this graph does not.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino as ov
import openvino_tokenizers  # noqa: F401  registers the operations of the extension
from openvino import Type, op
from openvino import opset13 as ops
from openvino_tokenizers import _get_factory

from python_backends.detokenizer.decoding import Decoding
from python_backends.grammar.vocabulary import spelling

FILE_NAME = "openvino_detokenizer.xml"


def write(tokenizer: Path, vocab_size: int, folder: Path) -> None:
    """Write openvino_detokenizer.xml and .bin into ``folder``.

    vocab_size: ids of the model's logits; those without a token spell nothing and no grammar allows them.
    """
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
