"""A Triton model with the C++ ``tensorrtllm`` backend's manners: bare ids, deltas, stop by request id.

What it generates is the prompt over and over, one id per ``PACE_S``; that is enough to hold everything around it to
account. It says nothing of keys, ends or errors, because the backend cannot.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

PACE_S = 0.005
FINAL = 1


def _value(request, name: str, default=None):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return default if tensor is None else tensor.as_numpy().reshape(-1)[0].item()


class TritonPythonModel:
    def initialize(self, args: dict) -> None:
        self._stopped: dict[str, threading.Event] = {}

    def execute(self, requests: list) -> None:
        for request in requests:
            sender, request_id = request.get_response_sender(), request.request_id()
            if _value(request, "stop", False):
                if request_id in self._stopped:
                    self._stopped[request_id].set()
                sender.send(self._response([]), flags=FINAL)
                continue
            self._stopped[request_id] = threading.Event()
            threading.Thread(target=self._generate, args=(request, sender, request_id), daemon=True).start()

    def _generate(self, request, sender, request_id: str) -> None:
        prompt = pb_utils.get_input_tensor_by_name(request, "input_ids").as_numpy().reshape(-1).tolist()
        budget, end_id = _value(request, "request_output_len"), _value(request, "end_id", -1)
        stopped, how = self._stopped[request_id], "ended"
        named = [pb_utils.get_input_tensor_by_name(request, f"guided_decoding_guide{end}") for end in ("_type", "")]
        if named[0] is not None:
            guide = [tensor.as_numpy().reshape(-1)[0].decode() for tensor in named]
            pb_utils.Logger.log_info(f"request id engine: {request_id} guide {guide[0]} {guide[1].encode().hex()}")
        for index in range(budget):
            token = prompt[index % len(prompt)]
            last = token == end_id or index == budget - 1
            if stopped.is_set():
                how = "stopped"
                sender.send(self._response([]), flags=FINAL)
                break
            sender.send(self._response([token]), flags=FINAL if last else 0)
            if last:
                break
            time.sleep(PACE_S)
        del self._stopped[request_id]
        pb_utils.Logger.log_info(f"request id engine: {request_id} {how} after {index} of {budget}")

    @staticmethod
    def _response(ids: list[int]):
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("output_ids", np.array([[ids]], dtype=np.int32).reshape(1, 1, len(ids))),
                pb_utils.Tensor("sequence_length", np.array([[len(ids)]], dtype=np.int32)),
            ]
        )
