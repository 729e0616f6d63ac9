"""The three Python models of the textbook ensemble, as tutorials write them."""

import os
import threading

import numpy as np
import tokenizers
import triton_python_backend_utils as pb_utils

from benchmarks.mock_engine import steps

FINAL = 1


class Tokenizer:
    def initialize(self, args: dict) -> None:
        path = os.path.join(os.environ["TRIDENT_ENGINE_DIR"], "tokenizer.json")
        self._tokenizer = tokenizers.Tokenizer.from_file(path)

    def execute(self, requests: list) -> list:
        return [pb_utils.InferenceResponse([self._run(request)]) for request in requests]

    def _run(self, request: object) -> object:
        text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0, 0].decode()
        return pb_utils.Tensor("input_ids", np.array([self._tokenizer.encode(text).ids], dtype=np.int32))


class Detokenizer(Tokenizer):
    def _run(self, request: object) -> object:
        ids = pb_utils.get_input_tensor_by_name(request, "output_ids").as_numpy()[0].tolist()
        return pb_utils.Tensor("text_output", np.array([[self._tokenizer.decode(ids).encode()]], dtype=np.object_))


class Engine:
    def initialize(self, args: dict) -> None:
        self._streams: list = []
        threading.Thread(target=self._run, daemon=True).start()

    def execute(self, requests: list) -> None:
        for request in requests:
            inputs = [pb_utils.get_input_tensor_by_name(request, name) for name in ("input_ids", "max_tokens")]
            ids, count = (tensor.as_numpy()[0].tolist() for tensor in inputs)
            self._streams.append([request.get_response_sender(), ids, *count])

    def _run(self) -> None:
        for _ in steps(lambda: bool(self._streams)):
            for stream in self._streams[:]:
                sender, ids, left = stream
                stream[2] = left = left - 1
                tensor = pb_utils.Tensor("output_ids", np.array([[ids[left % len(ids)]]], dtype=np.int32))
                sender.send(pb_utils.InferenceResponse([tensor]), flags=0 if left else FINAL)
                if not left:
                    self._streams.remove(stream)
