"""An engine that names its streams in band, as ours in Python do: state beside the ids, a socket for the way back."""

from __future__ import annotations

import json

from python_backends.detokenizer.streams import EngineChunk, TopEntry
from python_backends.ensemble.control import ControlMessage, ControlSender, Verb
from python_backends.ensemble.stream_state import StreamState
from python_backends.triton_io import Inputs


class InBandStreams:
    """The engine as the detokenizer sees it; see RequestIdStreams for the other kind."""

    def __init__(self, control_socket: str) -> None:
        self._control = ControlSender(control_socket)

    def chunk(self, request, inputs: Inputs) -> EngineChunk:
        note = json.loads(inputs.text("stream_note", "{}"))
        return EngineChunk(
            StreamState.from_array(inputs.array("stream_state")),
            inputs.integers("output_ids"),
            inputs.floats("output_log_probs"),
            _top(inputs),
            note.get("options", ""),
            note.get("error", ""),
        )

    def stop(self, state: StreamState) -> bool:
        """A stop string matched. False when the engine could not be told."""
        return self._control.send(ControlMessage(Verb.STOP, state.epoch, state.key))

    def cancel(self, state: StreamState) -> bool:
        """The client has gone. False when the engine could not be told."""
        return self._control.send(ControlMessage(Verb.CANCEL, state.epoch, state.key))

    def close(self) -> None:
        self._control.close()


def _top(inputs: Inputs) -> list[TopEntry]:
    ids, log_probs = inputs.array("top_log_probs_ids"), inputs.array("top_log_probs")
    return [] if ids is None else list(zip(ids[0].tolist(), log_probs[0].tolist(), strict=True))
