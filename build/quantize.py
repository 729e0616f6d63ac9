"""Quantise: a Hugging Face checkpoint in, a TensorRT-LLM checkpoint out, calibrated with ModelOpt on CPU or CUDA.

    python build/quantize.py --engine llama-3.1-8b-fp8 --model_dir MODEL --output_dir OUT
    python build/quantize.py --model_dir MODEL --qformat int4_awq --calib_dataset cpython --output_dir OUT

It does what TensorRT-LLM's own ``quantize.py`` does, through the same exporter (``nvidia-modelopt``), without that
script's need of a GPU (rule R19) and of the tensorrt_llm package. Options have that script's names. The output appears
whole or not at all, is read back and checked before it does, and is the same bytes for the same input and seed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.util
import json
import os
import shutil
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import layout
import recipe as recipes
import trtllm_checkpoint
from architecture import Architecture
from calibration import TokenBlocks, open_tokenizer, read_texts, token_blocks
from checkpoint import Checkpoint, open_checkpoint
from contract.errors import EngineFailed, InvalidArgument, TridentError
from shape import local_folder

# qformat -> (ModelOpt's configuration, quant_algo in config.json). Weight-only formats store whole weights; the
# builder quantises them when it loads (rule R22).
QFORMATS: dict[str, tuple[str | None, str | None]] = {
    "full_prec": (None, None),
    "fp8": ("FP8_DEFAULT_CFG", "FP8"),
    "fp8_pc_pt": ("FP8_PER_CHANNEL_PER_TOKEN_CFG", "FP8_PER_CHANNEL_PER_TOKEN"),
    "int8_sq": ("INT8_SMOOTHQUANT_CFG", "W8A8_SQ_PER_CHANNEL"),
    "int4_awq": ("INT4_AWQ_CFG", "W4A16_AWQ"),
    "w4a8_awq": ("W4A8_AWQ_BETA_CFG", "W4A8_AWQ"),
    "int8_wo": (None, "W8A16"),
    "int4_wo": (None, "W4A16"),
}
KV_CACHE_DTYPES = ("fp8", "int8")
DTYPES = ("bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
DECODER_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen",
    "Qwen3ForCausalLM": "qwen",
}
AWQ_CALIB_SIZE = 32  # quantize.py clamps to it without a word (rule R20); the search runs the set twenty times
AWQ_VOCAB_MULTIPLE = 64
REPORT = "quantization_report.json"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Quantization:
    """One run. Names and meanings are those of ``quantize.py``; ``device`` is auto, cpu or cuda.

    awq_block_size: input columns that share a scale (AWQ formats only). batch_size: sequences per forward pass.
    calib_max_seq_length: tokens per sequence.
    """

    model_dir: Path
    output_dir: Path
    qformat: str = "fp8"
    kv_cache_dtype: str | None = None
    tp_size: int = 1
    dtype: str = "bfloat16"
    awq_block_size: int = 128
    calib_dataset: str = "cpython"
    calib_size: int = 512
    calib_max_seq_length: int = 512
    batch_size: int = 1
    seed: int = 1234
    device: str = "auto"

    @property
    def is_awq(self) -> bool:
        return self.qformat in ("int4_awq", "w4a8_awq")

    @property
    def needs_calibration(self) -> bool:
        return QFORMATS[self.qformat][0] is not None


def check(job: Quantization, arch: Architecture) -> list[str]:
    """What the caller should know about a run that will work.

    Raises InvalidArgument, naming the option and a way out, for one that would not: unknown formats, head, vocabulary
    or block sizes that cannot be split over the ranks (rule R36), formats that cannot share KV heads.
    """
    _require("qformat", job.qformat, QFORMATS)
    _require("kv_cache_dtype", job.kv_cache_dtype, (None, *KV_CACHE_DTYPES))
    _require("dtype", job.dtype, DTYPES)
    _require("device", job.device, DEVICES)
    for field in ("tp_size", "awq_block_size", "calib_size", "calib_max_seq_length", "batch_size"):
        if getattr(job, field) < 1:
            raise InvalidArgument(field, f"got {getattr(job, field)}; allowed are positive integers")
    if job.kv_cache_dtype and not job.needs_calibration:
        raise InvalidArgument(
            "kv_cache_dtype", f"{job.kv_cache_dtype} needs a calibrated format; {job.qformat} measures no activations"
        )
    _check_split(job, arch)
    if job.is_awq:
        _check_blocks(job, arch)
    return _notes(job, arch)


def _require(field: str, value: object, allowed: Any) -> None:
    if value not in allowed:
        raise InvalidArgument(field, f"got {value!r}; allowed are {', '.join(str(a).lower() for a in allowed)}")


def _check_split(job: Quantization, arch: Architecture) -> None:
    tp, kv_heads = job.tp_size, arch.num_kv_heads
    sizes = {
        "num_attention_heads": arch.num_heads,
        "hidden_size": arch.hidden_size,
        "intermediate_size": arch.intermediate_size,
    }
    for name, size in sizes.items():
        if size % tp:
            raise InvalidArgument("tp_size", f"{tp} ranks cannot share the model's {name} {size} evenly")
    if max(tp, kv_heads) % min(tp, kv_heads):
        raise InvalidArgument("tp_size", f"{tp} ranks and {kv_heads} KV heads: one must be a multiple of the other")
    if tp > kv_heads and job.qformat in ("int8_sq", "fp8_pc_pt"):
        raise InvalidArgument(
            "tp_size",
            f"{tp} ranks would share {kv_heads} KV head(s), which ModelOpt cannot do with one scale per output row "
            f"({job.qformat}); use at most tp_size {kv_heads}, or fp8, int4_awq or w4a8_awq",
        )


def _check_blocks(job: Quantization, arch: Architecture) -> None:
    inputs = {
        "attention.qkv, mlp.fc and mlp.gate": arch.hidden_size,
        "attention.dense": arch.num_heads * arch.head_dim // job.tp_size,
        "mlp.proj": arch.intermediate_size // job.tp_size,
    }
    for module, columns in inputs.items():
        if columns % job.awq_block_size:
            fitting = [b for b in (128, 64) if all(c % b == 0 for c in inputs.values())]
            instead = f"awq_block_size {fitting[0]}, " if fitting else ""
            fewer = "a smaller tp_size, " if job.tp_size > 1 else ""
            raise InvalidArgument(
                "awq_block_size",
                f"{module} has {columns} inputs on each of {job.tp_size} rank(s), not a multiple of the block of "
                f"{job.awq_block_size} columns that share a scale (rule R36); use {instead}{fewer}fp8 or int8_sq",
            )


def _notes(job: Quantization, arch: Architecture) -> list[str]:
    notes = []
    if job.is_awq and job.calib_size > AWQ_CALIB_SIZE:
        notes.append(f"AWQ calibrates on {AWQ_CALIB_SIZE} sequences, not on {job.calib_size} (rule R20)")
    if job.is_awq and arch.vocab_size % AWQ_VOCAB_MULTIPLE:
        padded = -(-arch.vocab_size // AWQ_VOCAB_MULTIPLE) * AWQ_VOCAB_MULTIPLE
        notes.append(
            f"AWQ pads the vocabulary from {arch.vocab_size} to {padded}, also in config.json; ids from "
            f"{arch.vocab_size} on must never be sampled or biased (rule R37)"
        )
    if job.kv_cache_dtype == "int8" or (job.kv_cache_dtype == "fp8" and job.qformat not in ("fp8", "w4a8_awq")):
        notes.append(
            f"{job.qformat} with an {job.kv_cache_dtype} KV cache switches paged context attention off: "
            "no prefix reuse and no chunked context at run time (rule R1)"
        )
    if job.qformat in ("int8_wo", "int4_wo"):
        notes.append("weight-only formats store whole weights; trtllm-build quantises them when it loads (rule R22)")
    if job.needs_calibration and job.calib_max_seq_length > arch.max_positions:
        notes.append(f"sequences are cut to the model's {arch.max_positions} positions")
    return notes


def quant_config(qformat: str, kv_cache_dtype: str | None, awq_block_size: int) -> dict:
    """ModelOpt's configuration, as ``quantize.py`` puts it together."""
    import modelopt.torch.quantization as mtq

    config = copy.deepcopy(getattr(mtq, QFORMATS[qformat][0] or ""))
    if "awq" in qformat:
        weights = config["quant_cfg"]["*weight_quantizer"]
        weights = weights[0] if isinstance(weights, list) else weights  # W4A8: INT4 first, then FP8
        weights["block_sizes"][-1] = awq_block_size
    if kv_cache_dtype is not None:
        kv_cache = copy.deepcopy(mtq.FP8_KV_CFG["quant_cfg"])
        if kv_cache_dtype == "int8":
            kv_cache["*[kv]_bmm_quantizer"]["num_bits"] = 8
        config["quant_cfg"].update(kv_cache)
    return config


@contextlib.contextmanager
def exporter_modules(hf_architecture: str) -> Iterator[None]:
    """Lets ModelOpt's exporter write a family that its own table lacks (Qwen), where tensorrt_llm is not installed.

    The exporter asks ``tensorrt_llm.models.MODEL_MAP`` for a configuration class. Three small modules answer in its
    place and are taken away afterwards; ``complete_config`` adds what the real class would have known.
    """
    if DECODER_TYPES[hf_architecture] == "llama" or importlib.util.find_spec("tensorrt_llm") is not None:
        yield
        return

    class Given:
        """Stands for Mapping, QuantConfig and the family's configuration: keeps what it is given."""

        def __init__(self, values: Mapping[str, object]) -> None:
            self.values = dict(values)

        @classmethod
        def from_dict(cls, values: Mapping[str, object]) -> Given:
            return cls(values)

        @classmethod
        def from_hugging_face(cls, dtype: str, mapping: Given, quant_config: Given, **_: object) -> Given:
            return cls({"dtype": dtype, "mapping": mapping.values, "quantization": quant_config.values})

        def to_dict(self) -> dict[str, object]:
            return self.values

    root, models, modeling_utils = (
        types.ModuleType(name) for name in ("tensorrt_llm", "tensorrt_llm.models", "tensorrt_llm.models.modeling_utils")
    )
    root.__version__ = "0"  # the exporter only asks whether it is 0.8 or 0.9
    root.models, models.modeling_utils = models, modeling_utils
    models.MODEL_MAP = {hf_architecture: types.SimpleNamespace(config_class=Given)}
    modeling_utils.Mapping = modeling_utils.QuantConfig = Given
    ours = {module.__name__: module for module in (root, models, modeling_utils)}
    before = {name: sys.modules[name] for name in ours if name in sys.modules}
    sys.modules.update(ours)
    try:
        yield
    finally:
        for name in ours:
            sys.modules.pop(name, None)
        sys.modules.update(before)


def complete_config(exported: Mapping, job: Quantization, hf_config: Mapping, arch: Architecture) -> dict:
    """config.json with what the exporter leaves out when the real tensorrt_llm is not there to fill it in.

    Without ``attn_bias`` and ``mlp_bias`` the builder makes a network without biases and merely warns that their
    tensors are unused.
    """
    config = dict(exported)
    config["architecture"] = hf_config["architectures"][0]
    config["model_type"] = hf_config.get("model_type")
    config["norm_epsilon"] = arch.rms_norm_eps
    config["intermediate_size"] = arch.intermediate_size
    config["rotary_base"] = arch.rope.theta
    config["rotary_scaling"] = rope_scaling(hf_config)
    config["attn_bias"] = arch.qkv_bias
    config["mlp_bias"] = arch.mlp_bias
    if DECODER_TYPES[arch.name] == "qwen":
        config["qwen_type"] = hf_config["model_type"]
    quantization = dict(config["quantization"])
    quantization["quant_algo"] = QFORMATS[job.qformat][1]
    if job.kv_cache_dtype is None:
        quantization["kv_cache_quant_algo"] = None
    config["quantization"] = quantization
    return config


def rope_scaling(hf_config: Mapping) -> dict | None:
    """The scaling block in the spelling of transformers 4, which TensorRT-LLM 1.2 reads; None without scaling."""
    block = dict(hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {})
    block.pop("rope_theta", None)
    kind = block.get("rope_type") or block.get("type") or "default"
    return None if kind == "default" else {**block, "rope_type": kind}


def quantize(
    job: Quantization, blocks: TokenBlocks | None = None, *, overwrite: bool = False, say: Say | None = None
) -> dict:
    """Runs one job and returns its report, which is also written beside the checkpoint.

    blocks: calibration tokens; read from ``job.calib_dataset`` where not given. Raises InvalidArgument for what the
    caller can change and EngineFailed where ModelOpt gives up; ``output_dir`` is then as it was.
    """
    say = say or (lambda line: print(line, file=sys.stderr, flush=True))
    opened = open_checkpoint(Path(job.model_dir))
    arch = opened.architecture
    notes = check(job, arch)
    output = Path(job.output_dir)
    if output.exists() and not overwrite:
        raise InvalidArgument("output_dir", f"{output} exists; remove it or allow overwriting")
    for note in notes:
        say(f"note: {note}")
    if job.needs_calibration:
        blocks = _calibration(job, opened, blocks)
        sequences, length = blocks.ids.shape
        say(f"[1/4] calibrate on {sequences} sequences of {length} tokens from {blocks.texts} texts")
    else:
        say(f"[1/4] {job.qformat} measures no activations: nothing to calibrate")

    started = time.monotonic()
    say(f"[2/4] load {job.model_dir} as {job.dtype}")
    model = load_model(job, opened)
    if blocks is not None and job.needs_calibration:
        say(f"[3/4] quantise to {job.qformat}, KV cache {job.kv_cache_dtype or job.dtype}, on {model.device}")
        calibrate(model, job, blocks, say)
    say(f"[4/4] export {job.tp_size} rank(s)")
    partial = output.with_name(f"{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    partial.mkdir(parents=True)
    try:
        _export(model, job, arch, partial)
        exported = json.loads((partial / "config.json").read_text())
        _write_json(partial / "config.json", complete_config(exported, job, opened.config, arch))
        checkpoint = trtllm_checkpoint.read(partial)
        trtllm_checkpoint.check_values(checkpoint)
        report = _report(job, arch, blocks if job.needs_calibration else None, checkpoint, notes)
        _write_json(partial / REPORT, report)
        _move_into_place(partial, output)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    say(f"done in {time.monotonic() - started:.0f} s: {output}, {report['weight_bytes'] / 1e6:.1f} MB")
    return report


def _calibration(job: Quantization, opened: Checkpoint, blocks: TokenBlocks | None) -> TokenBlocks:
    arch = opened.architecture
    if blocks is None:
        texts = read_texts(job.calib_dataset)
        encode, _, separator_id = open_tokenizer(opened)
        size = min(job.calib_size, AWQ_CALIB_SIZE) if job.is_awq else job.calib_size
        length = min(job.calib_max_seq_length, arch.max_positions)
        blocks = token_blocks(texts, encode, size=size, max_seq_length=length, separator_id=separator_id, seed=job.seed)
    if blocks.ids.max() >= arch.vocab_size or blocks.ids.min() < 0:
        raise InvalidArgument(
            "calibration", f"token id {blocks.ids.max()} is outside the model's vocabulary of {arch.vocab_size}; "
            "does the tokenizer belong to this model?"
        )  # fmt: skip
    return blocks


def load_model(job: Quantization, opened: Checkpoint) -> Any:
    import torch
    import transformers

    if job.device == "cuda" and not torch.cuda.is_available():
        raise InvalidArgument("device", "cuda was asked for and torch sees no GPU; use auto or cpu")
    on_gpu = job.device == "cuda" or (job.device == "auto" and torch.cuda.is_available())
    torch.manual_seed(job.seed)
    config = transformers.AutoConfig.from_pretrained(job.model_dir, local_files_only=True)
    # transformers 4 does not know transformers 5's rope_parameters and would silently take the default base.
    config.rope_theta, config.rope_scaling = opened.architecture.rope.theta, rope_scaling(opened.config)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            job.model_dir,
            config=config,
            dtype=getattr(torch, job.dtype),
            device_map="auto" if on_gpu else None,
            local_files_only=True,
        )
    except (OSError, ValueError, RuntimeError) as exc:
        raise InvalidArgument("model_dir", f"{job.model_dir} cannot be loaded: {exc}") from exc
    return model.eval()


def calibrate(model, job: Quantization, blocks: TokenBlocks, say: Say) -> None:
    import modelopt.torch.quantization as mtq
    import torch

    passes = 0

    def forward_loop(model) -> None:
        """All blocks through the model once; AWQ asks for it twice, to measure and to search."""
        nonlocal passes
        passes += 1
        started = time.monotonic()
        batches = torch.from_numpy(blocks.ids).split(job.batch_size)
        for number, batch in enumerate(batches, 1):
            model(batch.to(model.device), use_cache=False)
            if number == len(batches) or number % max(1, len(batches) // 10) == 0:
                spent = time.monotonic() - started
                say(f"      pass {passes}: {number}/{len(batches)} batches, {spent:.0f} s")

    with _translated("calibrate"), torch.inference_mode(False), torch.no_grad():
        config = quant_config(job.qformat, job.kv_cache_dtype, job.awq_block_size)
        mtq.quantize(model, config, forward_loop=forward_loop)


def _export(model, job: Quantization, arch: Architecture, folder: Path) -> None:
    import torch
    from modelopt.torch.export import export_tensorrt_llm_checkpoint

    with _translated("export"), exporter_modules(arch.name):
        export_tensorrt_llm_checkpoint(
            model,
            DECODER_TYPES[arch.name],
            getattr(torch, job.dtype),
            export_dir=folder,
            inference_tensor_parallel=job.tp_size,
            inference_pipeline_parallel=1,
        )


@contextlib.contextmanager
def _translated(step: str) -> Iterator[None]:
    """ModelOpt's errors, whatever their class, as one sentence; its chatter goes to stderr."""
    try:
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("default")  # never errors, whatever the caller asked for (rule R35)
            # Both are wrong here: lm_head is left alone, and complete_config stands in for tensorrt_llm.
            warnings.filterwarnings("ignore", "Enable lm_head quantization")
            warnings.filterwarnings("ignore", "Cannot export tensorrt_llm checkpoint config")
            yield
    except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as exc:
        raise EngineFailed(f"ModelOpt could not {step} this model: {type(exc).__name__}: {exc}") from exc


def _report(job: Quantization, arch: Architecture, blocks: TokenBlocks | None, checkpoint, notes: list[str]) -> dict:
    import modelopt
    import torch
    import transformers

    return {
        "options": {k: str(v) if isinstance(v, Path) else v for k, v in asdict(job).items() if k != "output_dir"},
        "calibration": blocks and {
            "dataset": job.calib_dataset,
            "texts": blocks.texts,
            "sequences": blocks.ids.shape[0],
            "tokens_per_sequence": blocks.ids.shape[1],
            "sha256": blocks.sha256,
        },
        "architecture": arch.name,
        "quantization": dict(checkpoint.config["quantization"]),
        "vocab_size": {"model": arch.vocab_size, "checkpoint": checkpoint.config["vocab_size"]},
        "weight_bytes": checkpoint.weight_bytes,
        "versions": {module.__name__: module.__version__ for module in (modelopt, torch, transformers)},
        "cuda": torch.cuda.is_available() and job.device != "cpu",
        "notes": notes,
    }  # fmt: skip


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _move_into_place(partial: Path, output: Path) -> None:
    old = output.with_name(f"{output.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if output.exists():
        os.replace(output, old)
    os.replace(partial, output)
    shutil.rmtree(old, ignore_errors=True)


def from_recipe(name: str, model_dir: Path | None = None, output_dir: Path | None = None) -> Quantization:
    """The job of ``build/recipes/<name>.toml``. Raises RecipeError or InvalidArgument."""
    recipe = recipes.load(layout.RECIPES / f"{name}.toml")
    if recipe.kind != recipes.TRTLLM:
        problem = f"{name} is of kind {recipe.kind!r}; this stage makes checkpoints for {recipes.TRTLLM!r}"
        raise InvalidArgument("engine", problem)
    if recipe.pp > 1:
        raise InvalidArgument("pp", f"{name} asks for {recipe.pp} pipeline ranks; this stage splits by tensor only")
    if recipe.convert:
        keys = ", ".join(sorted(recipe.convert))
        raise InvalidArgument("convert", f"{name} sets {keys}, which only convert_checkpoint.py in the container knows")
    qformat = "full_prec" if recipe.precision == "bf16" else recipe.precision
    if qformat not in QFORMATS:
        raise InvalidArgument("precision", f"{qformat} needs CUDA kernels; here are {', '.join(QFORMATS)}")
    known = set(Quantization.__dataclass_fields__)
    for key in recipe.quantize:
        if key not in known:
            problem = f"{name}: only NVIDIA's quantize.py in the container knows this option"
            raise InvalidArgument(f"quantize.{key}", problem)
    return Quantization(
        **{
            "model_dir": model_dir or local_folder(recipe.model) or layout.fetched_model(recipe.model),
            "output_dir": output_dir or layout.checkpoint(name),
            "qformat": qformat,
            "kv_cache_dtype": None if recipe.kv_cache_precision == "auto" else recipe.kv_cache_precision,
            "tp_size": recipe.tp,
            "awq_block_size": recipe.group_size,
            "calib_dataset": recipe.calibration.dataset,
            "calib_size": recipe.calibration.size,
            "calib_max_seq_length": recipe.calibration.max_seq_length,
            "batch_size": recipe.calibration.batch_size,
            **recipe.quantize,
        }
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Quantization.__dataclass_fields__
    parser.add_argument("--engine", help="take everything from build/recipes/ENGINE.toml; paths may still be given")
    parser.add_argument("--model_dir", type=Path, help="folder of the Hugging Face checkpoint")
    parser.add_argument("--output_dir", type=Path, help="folder to create")
    choices_of = {"qformat": list(QFORMATS), "kv_cache_dtype": KV_CACHE_DTYPES, "dtype": DTYPES, "device": DEVICES}
    for name, choices in choices_of.items():
        parser.add_argument(f"--{name}", choices=choices, help=f"default {default[name].default}")
    for name in ("tp_size", "awq_block_size", "calib_size", "calib_max_seq_length", "batch_size", "seed"):
        parser.add_argument(f"--{name}", type=int, help=f"default {default[name].default}")
    parser.add_argument("--calib_dataset", help="folder or file with texts, cpython, or cnn_dailymail")
    parser.add_argument("--overwrite", action="store_true", help="replace output_dir once the new one is complete")
    options = vars(parser.parse_args(arguments))
    engine, overwrite = options.pop("engine"), options.pop("overwrite")
    given = {key: value for key, value in options.items() if value is not None}
    try:
        if engine:
            extra = sorted(given.keys() - {"model_dir", "output_dir", "device"})
            if extra:
                raise InvalidArgument("engine", f"the recipe decides {', '.join(extra)}; give either --engine or these")
            job = from_recipe(engine, given.get("model_dir"), given.get("output_dir"))
            job = Quantization(**{**vars(job), "device": given.get("device", job.device)})
        elif missing := [f"--{name}" for name in ("model_dir", "output_dir") if name not in given]:
            raise InvalidArgument("", f"{' and '.join(missing)} must be given, or --engine")
        else:
            job = Quantization(**given)
        report = quantize(job, overwrite=overwrite)
    except TridentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
