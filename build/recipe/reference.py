"""Prints docs/recipes.md, the reference of every recipe key, from the declarations in ``schema.py``.

python -m build.recipe.reference > docs/recipes.md
"""

import inspect

from pydantic.fields import FieldInfo

from build.recipe import schema
from build.recipe.recipe import DEFAULT_QUALITY

OPENING = """# Recipes

Generated from `build/recipe/schema.py` by `.venv/bin/python -m build.recipe.reference > docs/recipes.md`.

A recipe is a TOML file, `build/recipes/<engine>.toml`, that describes one engine. `make build-engine ENGINE=<engine>`
builds it, `make plan-engine ENGINE=<engine>` prints the stages of the build and runs none. A key that is unknown,
misspelt, of the wrong type or without effect is refused by name. Whether a combination works on the GPU is checked by
rules when the plan is made.

`kind` chooses the runtime: `cpu` (OpenVINO), `trtllm` (a compiled TensorRT-LLM engine) or `llmapi` (TensorRT-LLM's
LLM API) for models that generate, `embedding` or `rerank` (OpenVINO) for encoders. It decides which other keys there
are. `precision = "auto"` chooses `precision`, `kv_cache_precision` and `head_precision` by measuring
(docs/decisions/0018).
"""
SECTIONS = (
    ("Keys of every kind", schema.NamedRecipe),
    ('`kind = "embedding"` and `kind = "rerank"`', schema.EncoderRecipe),
    ("Keys of the kinds that generate", schema.AnyRecipe),
    ('`kind = "cpu"`', schema.CpuRecipe),
    ('`kind = "trtllm"` and `kind = "llmapi"`', schema.GpuRecipe),
    ('`kind = "trtllm"`', schema.TrtllmRecipe),
    ('`kind = "llmapi"`', schema.LlmapiRecipe),
    ("`[[adapters]]`", schema.AdapterFolder),
    ("`[quality]`", schema.Quality),
    ("`[calibration]` of the GPU kinds", schema.Calibration),
    ('`[calibration]` of `kind = "cpu"`', schema.CpuCalibration),
    *((f'`[speculative_decoding]`, `mode = "{mode}"`', table) for mode, table in schema.MODES.items()),
)  # fmt: skip


def page() -> str:
    """The whole document."""
    parts = [OPENING]
    for title, table in SECTIONS:
        known = {name: field for name, field in schema.fields_of(table).items() if name not in ("kind", "mode")}
        rows = [_row(name, known[name]) for name in table.__annotations__ if name in known]
        about = (inspect.getdoc(table) or "").replace("``", "`").split(": ", 1)[-1]
        head = ["| key | must be | default | meaning |", "|---|---|---|---|"]
        parts.append("\n".join([f"## {title}", "", about[:1].upper() + about[1:], "", *head, *rows, ""]))
    head = ["| precision | perplexity_ratio | top1_agreement | kl |", "|---|--:|--:|--:|"]
    rows = [f"| {p} | {b.perplexity_ratio:g} | {b.top1_agreement:g} | {b.kl:g} |" for p, b in DEFAULT_QUALITY.items()]
    return "\n".join([*parts, "## Defaults of `[quality]`, by precision of the weights", "", *head, *rows, ""])


def _row(name: str, field: FieldInfo) -> str:
    limit = schema.limit(field)
    must_be = limit.must_be if limit else "tables, `[[adapters]]`" if name == "adapters" else f"a table, `[{name}]`"
    default = field.get_default(call_default_factory=True)
    shown = f"`{str(default).lower() if isinstance(default, bool) else default}`"
    if field.is_required() or limit is None or default in (None, "", {}):
        shown = "required" if field.is_required() else ""
    return f"| `{name}` | {must_be} | {shown} | {field.description} |"


if __name__ == "__main__":
    print(page(), end="")
