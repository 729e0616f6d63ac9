"""A Triton model with the C++ ``tensorrtllm`` backend's manners: bare ids, deltas, stop by request id.

What it generates is the prompt over and over, one id per ``PACE_S``; that is enough to hold everything around it to
account. It says nothing of keys, ends or errors, because the backend cannot.

Its cache of LoRA adapters holds ``lora_cache`` of them (a parameter of its configuration) and has the backend's rules
and words: an adapter whose request runs stays, of the others the one that ended longest ago goes.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

PACE_S = 0.005
FINAL = 1


def _value(request, name: str, default=None):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return default if tensor is None else tensor.as_numpy().reshape(-1)[0].item()


def _bytes(request, name: str) -> bytes | None:
    """The tensor's bytes; BF16, which numpy lacks, comes by DLPack under the name of int16."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return None
    capsule = tensor.to_dlpack()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    code = ctypes.c_uint8.from_address(pointer(capsule, b"dltensor") + 20)
    if code.value == 4:
        code.value = 0
    return np.from_dlpack(_Capsule(capsule)).tobytes()


class _Capsule:
    def __init__(self, capsule) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_options):
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


class AdapterCache:
    def __init__(self, capacity: int) -> None:
        self._lock = threading.Lock()
        self._capacity = capacity
        self._running: dict[int, int] = {}
        self._done: dict[int, None] = {}  # the one that ended longest ago first

    def use(self, task: int, has_weights: bool) -> None:
        with self._lock:
            if task not in self._running and task not in self._done:
                if not has_weights:
                    text = f"LoRA task {task} not found in cache. Please send LoRA weights with request"
                    raise RuntimeError(text)
                if len(self._running) + len(self._done) >= self._capacity:
                    if not self._done:
                        raise RuntimeError(f"PEFT Cache is full. Could not store taskId={task}")
                    del self._done[next(iter(self._done))]
            self._done.pop(task, None)
            self._running[task] = self._running.get(task, 0) + 1

    def forget(self) -> None:
        with self._lock:
            self._done.clear()

    def end(self, task: int) -> None:
        with self._lock:
            self._running[task] -= 1
            if not self._running[task]:
                del self._running[task]
                self._done[task] = None


class TritonPythonModel:
    def initialize(self, args: dict) -> None:
        parameters = json.loads(args["model_config"]).get("parameters", {})
        self._adapters = AdapterCache(int(parameters.get("lora_cache", {}).get("string_value", 0)))
        self._stopped: dict[str, threading.Event] = {}

    def execute(self, requests: list) -> None:
        for request in requests:
            sender, request_id = request.get_response_sender(), request.request_id()
            if _value(request, "stop", False):
                if request_id == "forget adapters":
                    self._adapters.forget()
                if request_id in self._stopped:
                    self._stopped[request_id].set()
                sender.send(self._response([]), flags=FINAL)
                continue
            task = _value(request, "lora_task_id", 0)
            try:
                if task:
                    self._adopt(request, task)
            except RuntimeError as exc:
                text = f"Executor failed process requestId 7 due to the following error: {exc}"
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(text)), flags=FINAL)
                continue
            self._stopped[request_id] = threading.Event()
            threading.Thread(target=self._generate, args=(request, sender, request_id), daemon=True).start()

    def _adopt(self, request, task: int) -> None:
        sent = [_bytes(request, name) for name in ("lora_weights", "lora_config")]
        digests = "-".join(hashlib.sha256(data).hexdigest() for data in sent if data is not None)
        self._adapters.use(task, None not in sent)
        pb_utils.Logger.log_info(f"request id engine: {request.request_id()} lora {task} {digests or 'cached'}")

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
                self._ended(request)
                sender.send(self._response([]), flags=FINAL)
                break
            if last:
                self._ended(request)
            sender.send(self._response([token]), flags=FINAL if last else 0)
            if last:
                break
            time.sleep(PACE_S)
        del self._stopped[request_id]
        pb_utils.Logger.log_info(f"request id engine: {request_id} {how} after {index} of {budget}")

    def _ended(self, request) -> None:
        if task := _value(request, "lora_task_id", 0):
            self._adapters.end(task)

    @staticmethod
    def _response(ids: list[int]):
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("output_ids", np.array([[ids]], dtype=np.int32).reshape(1, 1, len(ids))),
                pb_utils.Tensor("sequence_length", np.array([[len(ids)]], dtype=np.int32)),
            ]
        )
