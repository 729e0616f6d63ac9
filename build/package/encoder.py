"""Builds engines of kind embedding and rerank: an encoder's checkpoint becomes a folder that the encoder model loads.

    openvino_model.xml/.bin    the graph of ``encoder_graph.py`` with weights as ``weights.py`` stores them
    tokenizer.json             as it is, with config.json and the tokenizer's other files
    manifest.json              with ``encoder``: pooling, dimensions, prompts

Neither torch nor sentence-transformers is needed. Before the engine is published its vectors are compared with those of
the checkpoint in f32, one text at a time.
"""

import dataclasses
import shutil
import tempfile
import time
from importlib import metadata
from pathlib import Path

import numpy as np

from build.base import digest, layout, wheel
from build.base.checkpoint import TOKENIZER_FILES
from build.base.encoder_checkpoint import EncoderCheckpoint, kind_of, open_encoder
from build.base.fetch import fetch, local_path
from build.base.json_fields import CheckpointError
from build.base.program import Notify
from build.package import engine_folder
from build.recipe import provenance
from build.recipe import recipe as recipes
from build.recipe.schema import EncoderRecipe
from contract.encoder import KINDS, RERANK
from contract.errors import EngineFailed, InvalidArgument, TridentError
from contract.manifest import EngineManifest, hash_files, load, verify
from python_backends.encoder.tokens import Tokens

# Sources that shape the files; tests/build/package/test_encoder.py says which imports are left out.
_BUILDER = """
    base/architecture.py base/checkpoint.py base/encoder_checkpoint.py base/gguf_file.py base/numerics.py base/rope.py
    base/shards.py model/encoder_graph.py model/graph.py model/openvino_engine.py model/weights.py package/encoder.py
""".split()
EXACT = "fp32"  # the precision that others are compared with
LONGEST = 8192  # tokens of a text where neither recipe nor sentence-transformers' files set a limit
PROCESS_BYTES = 350 * 1024**2  # resident size of the encoder's process before any weight (measured)
LEAST_COSINE = {"fp32": 0.99999, "bf16": 0.999, "fp16": 0.999, "int8": 0.99}  # of any text with its reference
MOST_SCORE_ERROR = {"fp32": 1e-4, "bf16": 0.05, "fp16": 0.05, "int8": 0.1}
TEXTS = (
    "ping",
    "A man is eating food.",
    "def read_json(path):\n    return json.loads(path.read_text())",
    "Die Straße führt über den Fluß; 東京は日本の首都です。 \U0001f680",
    "Payments above 1,000.00 EUR need a second signature, in words and in figures. " * 6,
)


def recipe_for(
    engine: str | None, model: str | None, precision: str | None, *, download: bool = True
) -> EncoderRecipe | None:
    """The recipe of an encoder named ``engine``, or made for ``model``; None where either is a generating model.

    download: whether a model that is not here may be fetched to learn what it is.
    """
    if model is None:
        path = layout.RECIPES / f"{engine or 'demo'}.toml"
        try:
            table = recipes.read(path) if path.exists() else dict(load(layout.ENGINES / path.stem).recipe)
        except TridentError:
            return None  # the generating models' own reader says what is wrong
    else:
        there = local_path(model)
        folder = fetch(model) if there is None and download else there
        kind = kind_of(folder) if folder is not None and (folder / "config.json").is_file() else None
        path = layout.RECIPES / f"{engine or recipes.name_for(model)}.toml"
        table = {"kind": kind, "model": named(model, there)}
    if table.get("kind") not in KINDS:
        return None
    if precision is not None:
        table = table | {"precision": precision if precision not in ("exact", "auto") else EXACT}
    return recipes.encoder({key: value for key, value in table.items() if value not in (None, "")}, path)


def named(model: str, there: Path | None) -> str:
    """What a recipe calls a model that was given: a path from the repository's root, any other name as it is."""
    return model if there is None or model.startswith(wheel.PREFIX) else str(layout.relative(there))


def build(recipe: EncoderRecipe, into: Path, notify: Notify, accept: str | None = None) -> Path:
    """The folder ``into/<recipe.name>`` holding the engine, built now or found unchanged.

    accept: why an engine whose vectors differ from the checkpoint's by more than its bound is published all the same.
    Raises TridentError with one sentence; then the engine that was there before (or none) is there.
    """
    checkpoint = _opened(recipe)
    folder = into / str(recipe.name)
    engine_folder.make(into)
    with engine_folder.only_builder(folder, notify):
        requested = _manifest(recipe, checkpoint)
        if _is_there(folder, requested):
            notify(f"{layout.relative(folder)} is up to date ({recipe.precision} from {recipe.model})")
            return folder
        started_s = time.monotonic()
        arch = checkpoint.architecture
        size = f"{arch.name}, {arch.num_parameters() / 1e6:,.1f} M parameters"
        notify(f"building {layout.relative(folder)}: {size}, weights to {recipe.precision}, from {recipe.model}")
        engine_folder.require_room(into, 4 * arch.num_parameters())
        with engine_folder.replacement(folder) as partial:
            scores = _write(recipe, checkpoint, _tokens(checkpoint), partial)
            _judge(recipe, scores, accept)
            files = hash_files(partial)
            dataclasses.replace(requested, created=provenance.now(), files=files, evaluation=scores).save(partial)
        megabytes = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
        took = f"{megabytes:,.1f} MB in {time.monotonic() - started_s:.1f} s"
        notify(f"{layout.relative(folder)} is ready: {took}; {_words(scores)}")
    return folder


def plan(recipe: EncoderRecipe) -> str:
    """What ``build`` would do, in one line."""
    checkpoint = _opened(recipe)
    arch, size = checkpoint.architecture, _memory_bytes(recipe, checkpoint) / 1e6
    limits = f"{recipe.precision} weights, texts of up to {checkpoint.max_seq_len} tokens"
    return f"{recipe.name}: kind {recipe.kind}, {arch.name}, {limits}, about {size:,.0f} MB of memory; one stage, here"


def _opened(recipe: EncoderRecipe) -> EncoderCheckpoint:
    folder = fetch(recipe.model, recipe.revision)
    checkpoint = open_encoder(folder, recipe.kind, recipe.instruction)
    if recipe.instruction is not None and not checkpoint.encoder.template:
        raise InvalidArgument("instruction", f"has no effect on {checkpoint.architecture.name}; leave it out")
    given = recipe.model_dump(include={"pooling", "normalize", "matryoshka_dimensions"}, exclude_none=True)
    if recipe.kind == RERANK and given:
        raise InvalidArgument(next(iter(given)), "has no effect on a reranker; leave it out")
    if "matryoshka_dimensions" in given:
        given["matryoshka_dimensions"] = tuple(given["matryoshka_dimensions"])
    encoder = dataclasses.replace(checkpoint.encoder, **given)
    if encoder.matryoshka_dimensions and max(encoder.matryoshka_dimensions) > encoder.dimensions:
        allowed = f"must be at most the model's dimensions, {encoder.dimensions}"
        raise InvalidArgument("matryoshka_dimensions", f"{allowed}, got {max(encoder.matryoshka_dimensions)}")
    longest = checkpoint.architecture.max_positions
    if recipe.max_seq_len is not None and recipe.max_seq_len > longest:
        raise InvalidArgument("max_seq_len", f"must be 2 to {longest} for this model, got {recipe.max_seq_len}")
    length = recipe.max_seq_len or min(checkpoint.max_seq_len, LONGEST)
    return dataclasses.replace(checkpoint, encoder=encoder, max_seq_len=length)


def _tokens(checkpoint: EncoderCheckpoint) -> Tokens:
    arch = checkpoint.architecture
    try:
        return Tokens(checkpoint.folder, checkpoint.encoder, checkpoint.max_seq_len, arch.vocab_size)
    except Exception as exc:  # the library raises nothing narrower
        path = checkpoint.folder / "tokenizer.json"
        raise CheckpointError(f"{path} is not a tokenizer that the tokenizers library reads: {exc}") from exc


def _manifest(recipe: EncoderRecipe, checkpoint: EncoderCheckpoint) -> EngineManifest:
    """What recipe, checkpoint and code decide: without ``files``, ``evaluation`` and ``created``."""
    return provenance.common(
        recipe,
        checkpoint,
        recipe.model_dump(),
        provenance.versions(_BUILDER) | {"openvino": metadata.version("openvino")},
        kv_cache_precision="none",
        max_seq_len=checkpoint.max_seq_len,
        properties=_properties(recipe.precision),
        memory_bytes=_memory_bytes(recipe, checkpoint),
        encoder=dataclasses.asdict(checkpoint.encoder),
    )


def _properties(precision: str) -> dict[str, str]:
    """fp32 weights: f32 arithmetic, so that a text's vector hardly depends on its batch. Else the plugin's choice."""
    return {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"} if precision == EXACT else {}


def _memory_bytes(recipe: EncoderRecipe, checkpoint: EncoderCheckpoint) -> int:
    arch = checkpoint.architecture
    weights = arch.num_parameters() * {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1}[recipe.precision]
    tokens = max(recipe.max_num_tokens, checkpoint.max_seq_len)
    per_token = 4 * (2 * arch.intermediate_size + 8 * arch.hidden_size + arch.num_heads * checkpoint.max_seq_len)
    return weights + tokens * per_token + PROCESS_BYTES


def _is_there(folder: Path, requested: EngineManifest) -> bool:
    try:
        built = verify(folder, digest.sha256_file)
    except TridentError:
        return False  # absent, half-built, damaged or older: build it
    there = dataclasses.asdict(dataclasses.replace(built, files={}, evaluation=None, created=""))
    return digest.sha256_json(there) == digest.sha256_json(dataclasses.asdict(requested))  # a tuple is a list in JSON


def _write(recipe: EncoderRecipe, checkpoint: EncoderCheckpoint, tokens: Tokens, folder: Path) -> dict[str, object]:
    """Fills ``folder``, which is empty; how far the engine's vectors are from the checkpoint's."""
    from build.model import encoder_graph, openvino_engine  # OpenVINO is slow to import
    from build.model.weights import Weights

    answers = tokens.answers() if checkpoint.encoder.template else None

    def save(precision: str, into: Path) -> None:
        weights = Weights(checkpoint, precision, 128)  # whose arrays the graph shares until it is saved
        openvino_engine.save(encoder_graph.encoder(checkpoint, weights, answers), into)

    save(recipe.precision, folder)
    for name in ("config.json", *TOKENIZER_FILES):
        if (checkpoint.folder / name).is_file():
            shutil.copyfile(checkpoint.folder / name, folder / name)
    if recipe.precision == EXACT:
        return _compared(recipe, checkpoint, tokens, folder, folder)
    with tempfile.TemporaryDirectory(dir=folder) as exact:
        save(EXACT, Path(exact))
        return _compared(recipe, checkpoint, tokens, folder, Path(exact))


def _compared(
    recipe: EncoderRecipe, checkpoint: EncoderCheckpoint, tokens: Tokens, folder: Path, exact_folder: Path
) -> dict[str, object]:
    """How far the engine's vectors, made in batches, are from those of the f32 graph, made one at a time."""
    from python_backends.encoder.forward import Forward  # which imports OpenVINO

    length = tokens.max_seq_len
    forward = Forward(folder, _properties(recipe.precision), recipe.max_batch_size, recipe.max_num_tokens, length)
    rows = (
        tokens.pairs("text", [(TEXTS[1], text) for text in TEXTS], length)
        if recipe.kind == RERANK
        else tokens.texts("text", TEXTS, length)
    )
    if any(max(row.ids) >= checkpoint.architecture.vocab_size for row in rows):
        raise CheckpointError("tokenizer.json gives ids that are beyond the model's vocab_size")
    exact = Forward(exact_folder, _properties(EXACT), 1, recipe.max_num_tokens, length).run(rows)
    made = forward.run(rows)
    if not np.isfinite(made).all():
        raise EngineFailed("the engine's vectors hold NaN or infinity")
    scores: dict[str, object] = {"texts": len(rows), "largest_error": float(np.abs(exact - made).max())}
    if recipe.kind != RERANK:
        lengths = np.linalg.norm(exact, axis=1) * np.linalg.norm(made, axis=1)
        scores["least_cosine"] = float(((exact * made).sum(axis=1) / np.maximum(lengths, 1e-12)).min())
    return scores


def _judge(recipe: EncoderRecipe, scores: dict[str, object], accept: str | None) -> None:
    """Raises EngineFailed for an engine that is further from its checkpoint than its precision may be."""
    rerank = recipe.kind == RERANK
    bound = (MOST_SCORE_ERROR if rerank else LEAST_COSINE)[recipe.precision]
    measured = float(str(scores["largest_error" if rerank else "least_cosine"]))
    passed = measured <= bound if rerank else measured >= bound
    scores |= {"bound": bound, "passed": passed}
    if passed:
        return
    if accept is None:
        kind = "at most" if rerank else "at least"
        raise EngineFailed(f"{recipe.name}: {_words(scores)}; must be {kind} {bound} with {recipe.precision} weights")
    scores["accepted"] = accept


def _words(scores: dict[str, object]) -> str:
    if "least_cosine" in scores:
        return f"least cosine with the checkpoint in f32 {scores['least_cosine']:.6f}"
    return f"largest difference from the checkpoint's scores in f32 {scores['largest_error']:.6f}"
