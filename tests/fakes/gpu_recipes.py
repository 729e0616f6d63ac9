"""GPU recipes for tests: one that is right, changed as a test asks, and a strategy that draws ones the rules accept."""

from __future__ import annotations

from hypothesis import assume
from hypothesis import strategies as st

from build.base import hardware
from build.base import shape as shapes
from build.recipe import recipe as recipes
from build.recipe import schema, verdict
from build.recipe.case import Case
from build.recipe.recipe import Recipe

LLAMA_8B = "meta-llama/Llama-3.1-8B-Instruct"
LLAMA_70B = "meta-llama/Llama-3.3-70B-Instruct"
QWEN_7B = "Qwen/Qwen2.5-7B-Instruct"
QWEN3_8B = "Qwen/Qwen3-8B"
MODELS = (
    LLAMA_8B,
    LLAMA_70B,
    QWEN_7B,
    QWEN3_8B,
    "meta-llama/Llama-3.2-1B",
    "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen/Qwen3-32B",
)
FP8 = {
    "kind": "trtllm",
    "model": LLAMA_8B,
    "precision": "fp8",
    "kv_cache_precision": "fp8",
    "gpu": "h100",
    "max_batch_size": 64,
    "max_num_tokens": 4096,
    "max_seq_len": 4096,
}


def table(**changes: object) -> dict[str, object]:
    """The table of a right recipe with ``changes``; a key set to None is left out."""
    return {key: value for key, value in (FP8 | changes).items() if value is not None}


def make(name: str = "engine-under-test", **changes: object) -> Recipe:
    return recipes.parse(table(**changes), f"{name}.toml")


def case(**changes: object) -> Case:
    """The case of a right recipe with ``changes``."""
    recipe = make(**changes)
    return Case(recipe, shapes.find(recipe.model))


SPECULATIVE = st.one_of(
    st.none(),
    st.fixed_dictionaries(
        {
            "mode": st.just("lookahead_decoding"),
            "window_size": st.integers(1, 8),
            "ngram_size": st.integers(2, 8),
            "verification_set_size": st.integers(1, 8),
        }
    ),
    st.fixed_dictionaries({"mode": st.just("eagle"), "max_draft_len": st.integers(1, 300)}),
    st.fixed_dictionaries({"mode": st.just("explicit_draft_tokens"), "max_draft_len": st.integers(1, 16)}),
    st.fixed_dictionaries(
        {"mode": st.just("medusa"), "max_draft_len": st.integers(1, 63), "num_medusa_heads": st.integers(1, 5)}
    ),
)
BUILD = st.fixed_dictionaries(
    {},
    optional={
        "tokens_per_block": st.sampled_from([32, 64]),
        "gather_generation_logits": st.booleans(),
        "max_input_len": st.integers(1, 4096),
        "log_level": st.sampled_from(["info", "verbose"]),
        "use_fused_mlp": st.sampled_from(["enable", "disable"]),
        "reduce_fusion": st.sampled_from(["enable", "disable"]),
        "strip_plan": st.booleans(),
        "kv_cache_type": st.sampled_from(["paged", "PAGED"]),
        "lora_dir": st.lists(st.sampled_from(["adapters/a", "adapters/b"]), min_size=1, max_size=2),
    },
)


@st.composite
def tables(draw: st.DrawFn) -> dict[str, object]:
    """A recipe's table that loads; the rules may still refuse it."""
    card = draw(st.sampled_from(sorted(hardware.CARDS)))
    given = {
        "kind": "trtllm",
        "model": draw(st.sampled_from(MODELS)),
        "precision": draw(st.sampled_from(schema.PRECISIONS[schema.TRTLLM])),
        "kv_cache_precision": draw(st.sampled_from(schema.KV_CACHE_PRECISIONS[schema.TRTLLM])),
        "gpu": card,
        "tp": draw(st.sampled_from([1, 1, 2, 4, 8])),
        "pp": draw(st.sampled_from([1, 1, 1, 2])),
        "max_batch_size": draw(st.integers(1, 1024)),
        "max_num_tokens": draw(st.integers(1, 40_000)),
        "max_seq_len": draw(st.integers(64, 32_768)),
        "max_beam_width": draw(st.sampled_from([1, 1, 1, 4])),
        "multiple_profiles": draw(st.booleans()),
        "optimize_for": draw(st.sampled_from(schema.OPTIMIZE_FOR)),
        "prefix_reuse": draw(st.booleans()),
        "chunked_context": draw(st.booleans()),
        "group_size": draw(st.sampled_from([64, 128])),
        "calibration": {"size": draw(st.integers(1, 1024)), "batch_size": draw(st.integers(1, 16))},
        "build": draw(BUILD),
    }
    speculative = draw(SPECULATIVE)
    return given | ({"speculative_decoding": speculative} if speculative else {})


@st.composite
def without_idle_keys(draw: st.DrawFn) -> dict[str, object]:
    """As ``tables``, without the keys that would be refused for having no effect or no way to be served."""
    given = draw(tables())
    recipe = recipes.parse(given, "drawn.toml")
    drawn = Case(recipe, shapes.find(recipe.model))
    idle = {"U3": "group_size", "U4": "calibration", "U5": "optimize_for", "D1": "max_beam_width"}
    idle |= {"D2": "speculative_decoding", "D3": "speculative_decoding"}
    given = {key: value for key, value in given.items() if key not in {idle.get(f.rule) for f in verdict.check(drawn)}}
    served = {key: value for key, value in given["build"].items() if key not in ("lora_dir", "strip_plan")}
    return given | {"build": served}


@st.composite
def accepted(draw: st.DrawFn) -> Case:
    """A case nothing refuses."""
    recipe = recipes.parse(draw(without_idle_keys()), "drawn.toml")
    drawn = Case(recipe, shapes.find(recipe.model))
    assume(not verdict.refused(tuple(verdict.check(drawn))))
    return drawn
