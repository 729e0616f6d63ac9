"""The Triton model ``client_watch``, the step behind the engine in ``ensemble_packed`` (cpu_engine/packed_sink.py)."""

from __future__ import annotations

from typing import Any

import numpy as np

from contract import packed_delta
from contract.backend_settings import Settings
from python_backends.ensemble.control import ControlMessage, ControlSender, Verb
from python_backends.heartbeat import Heartbeat
from python_backends.metrics import Metrics
from python_backends.triton_io import Inputs, Request, log_error, metric_family, response, row


class TritonPythonModel:
    """Triton's interface of a Python model."""

    def initialize(self, args: dict[str, str]) -> None:
        settings = Settings.from_env()
        self._control = ControlSender(settings.control_socket)
        self._metrics = Metrics(metric_family)
        self._metrics.gauge(packed_delta.METRIC, "1: the server has the model ensemble_packed")(1)
        self._metrics.flush()
        self._heartbeat = Heartbeat(settings.supervisor_socket)

    def execute(self, requests: list[Request]) -> list[Any]:
        with self._heartbeat:
            return [response(self._outputs(request)) for request in requests]

    def _outputs(self, request: Request) -> dict[str, np.ndarray]:
        """Return the answer, to a look without outputs: clients read a message with outputs as the first token."""
        try:
            epoch, key, _ = Inputs(request).values(packed_delta.WATCH)
            if not epoch:
                return {packed_delta.WATCHED: row([1], np.uint8)}
            if request.is_cancelled():
                self._control.send(ControlMessage(Verb.CANCEL, epoch, key))  # if it is lost, the next look repeats it
        except Exception as exc:  # the outer edge: an error here would leak the whole ensemble request
            log_error(f"client_watch failed: error={exc!r}")
        return {}

    def finalize(self) -> None:
        self._heartbeat.close()
        self._control.close()
