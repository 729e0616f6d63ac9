"""The draft model of an engine: checked against the engine's own, built into its folder ``draft/``, and measured.

No text depends on the draft model, only speed does. So it has no quality budget of its own: it is refused where so few
of its tokens would be accepted that drafting with it takes longer than not drafting.
"""

import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import openvino as ov
import tokenizers
from openvino import Type, op
from openvino import opset13 as ops

from build.base.checkpoint import Checkpoint
from build.base.program import Notify
from build.model import detokenizer
from build.model.openvino_engine import OpenVinoEngine
from build.package import compile_cpu
from build.quality import comparison
from build.quality.evaluation import ReferenceRun
from build.recipe.recipe import Recipe
from contract.errors import InvalidArgument
from contract.manifest import DRAFT

KEY = "speculative_decoding.draft"
STEPS = 24


def own_recipe(recipe: Recipe) -> Recipe:
    """The recipe by which the draft model itself is built."""
    spec = recipe.speculative_decoding
    assert spec is not None and spec.draft is not None and spec.draft_precision is not None
    return recipe.changed(
        model=spec.draft,
        precision=spec.draft_precision,
        head_precision="int8",
        adapters=(),
        calibration=None,
        speculative_decoding=None,
    )


def check(checkpoint: Checkpoint, draft: Checkpoint) -> None:
    """Raises InvalidArgument where the ids of the two models do not mean the same."""
    sizes = [each.architecture.vocab_size for each in (checkpoint, draft)]
    if sizes[0] != sizes[1]:
        raise InvalidArgument(KEY, f"must have the vocabulary of the model, {sizes[0]} ids, got {sizes[1]}")
    own, other = (
        tokenizers.Tokenizer.from_file(str(each.folder / "tokenizer.json")).get_vocab(with_added_tokens=True)
        for each in (checkpoint, draft)
    )
    if own != other:
        id, token = min((id, token) for token, id in own.items() ^ other.items())
        raise InvalidArgument(KEY, f"must have the vocabulary of the model, got another token at id {id}: {token!r}")


def build(checkpoint: Checkpoint, draft: Checkpoint, recipe: Recipe, folder: Path, notify: Notify) -> None:
    """Write ``folder/draft``. Both folders get what lets OpenVINO GenAI see that the tokenizers are equal."""
    inside = folder / DRAFT
    inside.mkdir()
    compile_cpu.compile_cpu(draft, own_recipe(recipe), inside, notify)
    shutil.rmtree(inside / detokenizer.CHECKER)
    checkpoint.copy_side_files(inside)  # the special ids that it compares are read from these
    for each in (folder, inside):
        _write_encoder(each)


def _write_encoder(folder: Path) -> None:
    """Write an encoder that makes every text the id 0: the pipeline wants one, and is only ever given ids."""
    text = ops.parameter([-1], Type.string, name="text")
    text.output(0).get_tensor().add_names({"string_input"})
    shape = ops.concat([ops.shape_of(text, "i64"), op.Constant(np.array([1], np.int64))], 0)
    outputs = [ops.broadcast(op.Constant(np.array(value, np.int64)), shape) for value in (0, 1)]
    for node, name in zip(outputs, ("input_ids", "attention_mask"), strict=True):
        node.output(0).get_tensor().add_names({name})
    ov.save_model(ov.Model(outputs, [text], "tokenizer"), str(folder / "openvino_tokenizer.xml"))


def gain(agreement: float, cost: float, length: int) -> float:
    """Tokens in the time of one without drafts, of which a step has ``length``. agreement: probability that a draft
    token is accepted, if those before it were. cost: of a draft token, in steps of the main model."""
    return sum(agreement**i for i in range(length + 1)) / (1 + length * cost)


def measure(
    engine: OpenVinoEngine,
    draft: Checkpoint,
    properties: Mapping[str, str],
    recipe: Recipe,
    folder: Path,
    against: ReferenceRun,
    accept: str | None,
) -> dict[str, object]:
    """The draft model's scores for the manifest: agreement on held-out text, and the time of a token.

    properties: of both. folder: of ``engine``, with the draft model in it.
    Raises InvalidArgument where drafting takes longer than not drafting and ``accept`` does not say why it is used.
    """
    spec, inside = recipe.speculative_decoding, folder / DRAFT
    assert spec is not None
    small = OpenVinoEngine(inside, properties, draft.architecture.vocab_size)
    pairs = comparison.compare(engine.logits(against.blocks), {DRAFT: small.logits(against.blocks)}, against.blocks)
    agreement = pairs[DRAFT].top1_agreement
    cost = _step_s(small, against.blocks[0]) / _step_s(engine, against.blocks[0])
    expected = gain(agreement, cost, spec.max_draft_len)
    words = f"agrees with the engine on {agreement:.1%} of {against.blocks.size} tokens and takes {cost:.2f} of its "
    words += f"time: {spec.max_draft_len} drafts a step make at most {expected:.2f} times the tokens"
    against.notify(f"verify: the draft model {words}")
    if expected <= 1 and not accept:
        raise InvalidArgument(KEY, f"must be a model whose drafts gain; {spec.draft} {words}")
    override = accept if expected <= 1 else None
    return {"top1_agreement": agreement, "cost": cost, "expected_gain": expected, "override": override}


def _step_s(engine: OpenVinoEngine, ids: np.ndarray) -> float:
    """CPU time of reading one token, the median of STEPS, after as many to warm up."""
    taken = []
    for end in range(1, min(2 * STEPS, len(ids)) + 1):
        started_s = time.process_time()
        engine.next_logits(ids[:end].tolist())
        taken.append(time.process_time() - started_s)
    return float(np.median(taken[len(taken) // 2 :]))
