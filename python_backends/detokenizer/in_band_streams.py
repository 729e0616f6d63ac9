"""Streams of a Python engine, which names each of them in its responses and listens for commands on a socket."""

from __future__ import annotations

import json

from python_backends.ensemble.control import ControlMessage, ControlSender, Verb
from python_backends.ensemble.stream_state import StreamState
from python_backends.ensemble.token_increment import TokenIncrement, TopLogProbs
from python_backends.triton_io import Inputs, Request


class InBandStreams:
    """Read the engine's responses and stop or cancel its streams; see RequestIdStreams for the C++ backend."""

    def __init__(self, control_socket: str) -> None:
        self._control = ControlSender(control_socket)

    def read(self, request: Request, inputs: Inputs) -> TokenIncrement:
        """Return the increment that the detokenizer's input tensors hold."""
        note = json.loads(inputs.text("stream_note") or "{}")
        return TokenIncrement(
            StreamState.from_array(inputs.required("stream_state")),
            inputs.integers("output_ids"),
            inputs.floats("output_log_probs"),
            _top_log_probs(inputs),
            sum(inputs.floats("cum_log_probs")),
            options=note.get("options", ""),
            error=note.get("error", ""),
        )

    def stop(self, state: StreamState) -> bool:
        """End a stream in whose text a stop string matched; return whether the engine has the command."""
        return self._control.send(ControlMessage(Verb.STOP, state.epoch, state.key))

    def cancel(self, state: StreamState) -> bool:
        """End a stream whose client has disconnected; return whether the engine has the command."""
        return self._control.send(ControlMessage(Verb.CANCEL, state.epoch, state.key))

    def close(self) -> None:
        self._control.close()


def _top_log_probs(inputs: Inputs) -> list[TopLogProbs]:
    ids, log_probs = inputs.array("top_log_probs_ids"), inputs.array("top_log_probs")
    if ids is None or log_probs is None:
        return []
    return [TopLogProbs(*entry) for entry in zip(ids[0].tolist(), log_probs[0].tolist(), strict=True)]
