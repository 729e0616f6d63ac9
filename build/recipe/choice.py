"""The settings a CPU engine may be built with when its recipe chooses none, fastest first.

The build takes the first that passes the quality gate with a standard error to spare (``quality.judge``). The order
is by measured speed, with the figures in docs/decisions/0018: int8 weights are as fast with the embedding and lm_head
in bf16, and faster than bf16 weights up to about eight streams; f32 keys and values cost most and lose nothing.
"""

from build.recipe import schema
from build.recipe.recipe import DEFAULT_QUALITY, Recipe

EXACT_KV = "f32"  # with it OpenVINO computes in f32 and never quantises activations (compile_cpu.properties)
SETTINGS = (
    {"precision": "int8", "head_precision": "int8", "kv_cache_precision": "u8"},
    {"precision": "int8", "head_precision": "bf16", "kv_cache_precision": "u8"},
    {"precision": "bf16", "head_precision": "int8", "kv_cache_precision": "u8"},
    {"precision": "bf16", "head_precision": "int8", "kv_cache_precision": EXACT_KV},
)


def candidates(recipe: Recipe) -> tuple[Recipe, ...]:
    """The recipes to try, fastest first; a recipe whose precision was given is its only candidate."""
    if not recipe.automatic:
        return (recipe,)
    defaulted, found = "quality" not in recipe.given and recipe.quality in DEFAULT_QUALITY.values(), []
    for setting in SETTINGS:
        budget = DEFAULT_QUALITY[setting["precision"]] if defaulted else recipe.quality
        measured = recipe.kv_cache_measured and setting["kv_cache_precision"] in schema.MEASURED_KV
        found.append(recipe.changed(quality=budget, kv_cache_measured=measured, **setting))
    return tuple(found)


def words(recipe: Recipe) -> str:
    """``int8 weights, bf16 embedding and lm_head, u8 KV``."""
    wide = recipe.precision in ("int8", "int4") and recipe.head_precision == "bf16"
    head = ", bf16 embedding and lm_head" if wide else ""
    kv_cache = " or ".join(schema.MEASURED_KV) if recipe.kv_cache_measured else recipe.kv_cache_precision
    return f"{recipe.precision} weights{head}, {kv_cache} KV"
