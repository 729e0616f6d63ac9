"""Quantise: a Hugging Face checkpoint in, one that TensorRT-LLM reads out, calibrated with ModelOpt on CPU or CUDA.

    python -m build.quantise.quantize --model_dir MODEL --qformat int4_awq --calib_dataset cpython --output_dir OUT

It does what TensorRT-LLM's own ``quantize.py`` does, through the same exporter (``nvidia-modelopt``), without that
script's need of a GPU (rule R19) and of the tensorrt_llm package. Options have that script's names. The output appears
whole or not at all, is read back and checked before it does, and is the same bytes for the same input and seed.
"""

import argparse
import copy
import json
import os
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from build.base import program
from build.base.checkpoint import Checkpoint, open_checkpoint
from build.base.program import Notify
from build.model.calibration import TokenBlocks, read_blocks
from build.quantise import hf_quantised, trtllm_checkpoint
from build.quantise.exporters import export_hf, export_trtllm, link_model, rope_scaling, translated, write_json
from build.recipe import quantization as quantizations
from build.recipe.quantization import AWQ_CALIB_SIZE, HF, QFORMATS, TRTLLM, Quantization
from contract.errors import InvalidArgument

REPORT = "quantization_report.json"


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


def quantize(
    job: Quantization, blocks: TokenBlocks | None = None, *, overwrite: bool = False, notify: Notify | None = None
) -> dict:
    """Runs one job and returns its report, which is also written beside the checkpoint.

    blocks: calibration tokens; read from ``job.calib_dataset`` where not given. Raises InvalidArgument for what the
    caller can change and EngineFailed where ModelOpt gives up; ``output_dir`` is then as it was.
    """
    notify = notify or (lambda line: print(line, file=sys.stderr, flush=True))
    opened = open_checkpoint(Path(job.model_dir))
    quantizations.check(job, opened.architecture)
    output = Path(job.output_dir)
    if output.exists() and not overwrite:
        raise InvalidArgument("output_dir", f"{output} exists; remove it or allow overwriting")
    if job.needs_calibration:
        blocks = _calibration(job, opened, blocks)
        sequences, length = blocks.ids.shape
        notify(f"[1/4] calibrate on {sequences} sequences of {length} tokens from {blocks.texts} texts")
    else:
        notify(f"[1/4] {job.qformat} measures no activations: nothing to calibrate")

    started = time.monotonic()
    model: Any = None
    if job.needs_calibration or job.checkpoint_format == TRTLLM:
        notify(f"[2/4] load {job.model_dir} as {job.dtype}")
        model = load_model(job, opened)
    if blocks is not None and job.needs_calibration:
        notify(f"[3/4] quantise to {job.qformat}, KV cache {job.kv_cache_dtype or job.dtype}, on {model.device}")
        calibrate(model, job, blocks, notify)
    notify(f"[4/4] export {job.tp_size} rank(s)" if job.checkpoint_format == TRTLLM else "[4/4] export for the LLM API")
    partial = output.with_name(f"{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    partial.mkdir(parents=True)
    try:
        report = _report(job, opened, blocks) | _export(model, job, opened, partial)
        write_json(partial / REPORT, report)
        _move_into_place(partial, output)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    notify(f"done in {time.monotonic() - started:.0f} s: {output}, {report['weight_bytes'] / 1e6:.1f} MB")
    return report


def _export(model: Any, job: Quantization, opened: Checkpoint, folder: Path) -> dict:
    """Writes the checkpoint, reads it back, and returns what is in it. Raises BadCheckpoint where it is not sound."""
    vocab_size, quantization = opened.architecture.vocab_size, {"quant_algo": None, "kv_cache_quant_algo": None}
    if job.checkpoint_format == HF and not job.needs_calibration:
        link_model(opened, folder)
        weight_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    elif job.checkpoint_format == HF:
        export_hf(model, opened, folder)
        written = hf_quantised.read(folder)
        trtllm_checkpoint.check_values(written.tensors.values())
        weight_bytes = written.weight_bytes
        quantization = json.loads((folder / hf_quantised.QUANT_CONFIG).read_text(encoding="utf-8"))["quantization"]
    else:
        export_trtllm(model, job, opened, folder)
        checkpoint = trtllm_checkpoint.read(folder)
        trtllm_checkpoint.check_values(checkpoint.stored())
        weight_bytes, vocab_size = checkpoint.weight_bytes, checkpoint.config["vocab_size"]
        quantization = dict(checkpoint.config["quantization"])
    return {
        "quantization": quantization,
        "vocab_size": {"model": opened.architecture.vocab_size, "checkpoint": vocab_size},
        "weight_bytes": weight_bytes,
    }


def _calibration(job: Quantization, opened: Checkpoint, blocks: TokenBlocks | None) -> TokenBlocks:
    arch = opened.architecture
    if blocks is None:
        size = min(job.calib_size, AWQ_CALIB_SIZE) if job.is_awq else job.calib_size
        length = min(job.calib_max_seq_length, arch.max_positions)
        return read_blocks(opened, job.calib_dataset, size=size, max_seq_length=length, seed=job.seed)
    if blocks.ids.max() >= arch.vocab_size or blocks.ids.min() < 0:
        problem = f"token id {blocks.ids.max()} is outside the model's vocabulary of {arch.vocab_size}"
        raise InvalidArgument("calibration", f"{problem}; does the tokenizer belong to this model?")
    return blocks


def load_model(job: Quantization, opened: Checkpoint) -> Any:
    import torch
    import transformers

    if job.device == "cuda" and not torch.cuda.is_available():
        raise InvalidArgument("device", "must be auto or cpu, because torch finds no GPU; got cuda")
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


def calibrate(model, job: Quantization, blocks: TokenBlocks, notify: Notify) -> None:
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
                notify(f"      pass {passes}: {number}/{len(batches)} batches, {spent:.0f} s")

    with translated("calibrate"), torch.inference_mode(False), torch.no_grad():
        config = quant_config(job.qformat, job.kv_cache_dtype, job.awq_block_size)
        mtq.quantize(model, config, forward_loop=forward_loop)


def _report(job: Quantization, opened: Checkpoint, blocks: TokenBlocks | None) -> dict:
    import modelopt
    import torch
    import transformers

    report = {
        "options": {k: str(v) if isinstance(v, Path) else v for k, v in asdict(job).items() if k != "output_dir"},
        "architecture": opened.architecture.name,
        "calibration": None,
        "versions": {module.__name__: module.__version__ for module in (modelopt, torch, transformers)},
        "cuda": torch.cuda.is_available() and job.device != "cpu",
    }
    if blocks is not None and job.needs_calibration:
        report["calibration"] = {
            "dataset": job.calib_dataset,
            "texts": blocks.texts,
            "sequences": blocks.ids.shape[0],
            "tokens_per_sequence": blocks.ids.shape[1],
            "sha256": blocks.sha256,
        }
    return report


def _move_into_place(partial: Path, output: Path) -> None:
    old = output.with_name(f"{output.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if output.exists():
        os.replace(output, old)
    os.replace(partial, output)
    shutil.rmtree(old, ignore_errors=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Quantization.__dataclass_fields__
    parser.add_argument("--model_dir", type=Path, required=True, help="folder of the Hugging Face checkpoint")
    parser.add_argument("--output_dir", type=Path, required=True, help="folder to create")
    choices_of = {
        "qformat": tuple(QFORMATS),
        "kv_cache_dtype": quantizations.KV_CACHE_DTYPES,
        "dtype": quantizations.DTYPES,
        "device": quantizations.DEVICES,
        "checkpoint_format": (TRTLLM, HF),
    }
    for name, choices in choices_of.items():
        parser.add_argument(f"--{name}", choices=choices, help=f"default {default[name].default}")
    for name in ("tp_size", "awq_block_size", "calib_size", "calib_max_seq_length", "batch_size", "seed"):
        parser.add_argument(f"--{name}", type=int, help=f"default {default[name].default}")
    parser.add_argument("--calib_dataset", help="folder or file with texts, cpython, or cnn_dailymail")
    parser.add_argument("--overwrite", action="store_true", help="replace output_dir once the new one is complete")
    options = vars(parser.parse_args(arguments))
    overwrite = options.pop("overwrite")
    job = Quantization(**{key: value for key, value in options.items() if value is not None})
    print(json.dumps(quantize(job, overwrite=overwrite), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(program.run(main, "error"))
