"""A built engine folder, a server of the fixture ensemble, and streams to it."""

import struct
import threading
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from contract import manifest
from server import liveness_probe, running
from tests.fakes import manifests

REPOSITORY = Path(__file__).parent / "fixtures" / "model_repository"


@pytest.fixture(scope="session")
def engines(tmp_path_factory):
    """A folder with one engine, ``demo``, that passes the supervisor's checks."""
    folder = tmp_path_factory.mktemp("engines")
    build_engine(folder / "demo")
    return folder


@pytest.fixture(scope="session")
def serve(engines, tmp_path_factory):
    """``serve(**settings)``: a server of the fixture ensemble as a context manager."""

    def start(**settings):
        defaults = {
            "model_repository": REPOSITORY,
            "engines_dir": engines,
            "state_dir": tmp_path_factory.mktemp("state"),
        }
        return running(**defaults | settings)

    return start


@pytest.fixture
def open_stream():
    """``open_stream(replica, max_tokens, step_ms)``: a stream in flight; all are closed at the end."""
    opened = []

    def start(replica, max_tokens, step_ms=5):
        opened.append(Stream(replica.grpc_url, max_tokens, step_ms))
        return opened[-1]

    yield start
    for stream in opened:
        stream.close()


class Stream:
    """One request on a gRPC stream of its own, read in the background; the client side stays open until closed.

    texts: text_output of every response so far.
    finish_reason, error_message: of the last response.
    failure: gRPC status or Triton error that ended the stream, or "".
    """

    def __init__(self, url, max_tokens, step_ms):
        self.texts, self.finish_reason, self.error_message, self.failure = [], "", "", ""
        self.ended, self.started = threading.Event(), threading.Event()
        self._closing = threading.Event()
        self._channel = grpc.insecure_channel(url, options=[("grpc.use_local_subchannel_pool", 1)])
        request = service_pb2.ModelInferRequest.FromString(liveness_probe.request("a-stream"))
        request.raw_input_contents[1] = struct.pack("<i", max_tokens)
        request.parameters["step_ms"].int64_param = step_ms
        self._call = service_pb2_grpc.GRPCInferenceServiceStub(self._channel).ModelStreamInfer(self._send(request))
        threading.Thread(target=self._read, daemon=True).start()

    def close(self):
        self._closing.set()
        self._call.cancel()
        self._channel.close()

    def _send(self, request):
        yield request
        self._closing.wait()

    def _read(self):
        try:
            for response in self._call:
                self._take(response)
                if self.failure or response.infer_response.parameters["triton_final_response"].bool_param:
                    self._end()
        except grpc.RpcError as error:
            if not self.ended.is_set():
                self.failure = error.code().name
        self._end()

    def _take(self, response: service_pb2.ModelStreamInferResponse):
        self.failure = response.error_message
        outputs = text_outputs(response.infer_response)
        if outputs:
            self.texts.append(outputs["text_output"])
            self.finish_reason, self.error_message = outputs.get("finish_reason", ""), outputs.get("error_message", "")
            self.started.set()

    def _end(self):
        if not self.ended.is_set():
            self.ended.set()


def text_outputs(response: service_pb2.ModelInferResponse):
    """The first element of every non-empty BYTES output, by name."""
    texts = {}
    for output, content in zip(response.outputs, response.raw_output_contents, strict=False):
        if output.datatype == "BYTES" and len(content) >= 4:
            texts[output.name] = content[4 : 4 + struct.unpack_from("<I", content)[0]].decode()
    return texts


def build_engine(folder):
    """A folder that passes manifest.verify. What is in it does not matter to the fixture's models."""
    folder.mkdir()
    (folder / "weights.bin").write_bytes(b"weights")
    (folder / "tokenizer.json").write_text("{}")
    manifests.manifest(
        name=folder.name,
        recipe={},
        precision="f32",
        kv_cache_precision="f32",
        max_batch_size=1,
        max_num_tokens=1,
        max_seq_len=1,
        kv_cache_tokens=None,
        vocab_size=256,
        tokenizer_sha256=manifest.sha256_file(folder / "tokenizer.json"),
        versions={},
        files=manifest.hash_files(folder),
    ).save(folder)
