"""Streams of a Python engine, which names each of them in its responses and listens for commands on a socket."""

from __future__ import annotations

from python_backends.ensemble.control import ControlMessage, ControlSender, Verb
from python_backends.ensemble.stream_state import StreamState
from python_backends.ensemble.token_increment import TokenIncrement
from python_backends.triton_io import Inputs, Request


class InBandStreams:
    """Read the engine's responses and stop or cancel its streams; see RequestIdStreams for the C++ backend."""

    def __init__(self, control_socket: str) -> None:
        self._control = ControlSender(control_socket)

    def read(self, request: Request, inputs: Inputs) -> TokenIncrement:
        """Return the increment that the detokenizer's input tensor holds."""
        return TokenIncrement.from_array(inputs.required("stream_state"))

    def stop(self, state: StreamState) -> bool:
        """End a stream in whose text a stop string matched; return whether the engine has the command."""
        return self._control.send(ControlMessage(Verb.STOP, state.epoch, state.key))

    def cancel(self, state: StreamState) -> bool:
        """End a stream whose client has disconnected; return whether the engine has the command."""
        return self._control.send(ControlMessage(Verb.CANCEL, state.epoch, state.key))

    def close(self) -> None:
        self._control.close()
