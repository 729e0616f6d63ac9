"""The declarations of recipe keys: strict types, and one default for each key."""

import dataclasses

import pytest
from pydantic import ValidationError

from build.recipe import schema
from build.recipe.recipe import Recipe

CPU_TABLE = {
    "kind": "cpu",
    "model": "a/b",
    "precision": "int8",
    "max_batch_size": 8,
    "max_num_tokens": 256,
    "max_seq_len": 512,
    "kv_cache_tokens": 4096,
}


def test_the_kind_chooses_the_class():
    assert isinstance(schema.FILE.validate_python(CPU_TABLE), schema.CpuRecipe)
    table = {key: value for key, value in CPU_TABLE.items() if key != "kv_cache_tokens"}
    made = schema.FILE.validate_python(table | {"kind": "llmapi", "precision": "fp8", "gpu": "h100"})
    assert isinstance(made, schema.LlmapiRecipe)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_batch_size": True},
        {"max_batch_size": 8.0},
        {"max_batch_size": "8"},
        {"group_size": 64.0},
        {"prefix_reuse": 1},
        {"quality": {"kl": "0.1"}},
        {"quality": {"kl": True}},
        {"precision": None},
        {"calibration": {"size": 2.0}},
    ],
)
def test_a_value_of_another_type_is_not_converted(changes):
    with pytest.raises(ValidationError):
        schema.FILE.validate_python(CPU_TABLE | changes)


def test_a_default_is_the_same_in_the_declaration_and_in_the_recipe():
    defaults = {field.name: field.default for field in dataclasses.fields(Recipe)}
    for table in schema.RECIPE_TABLES.values():
        if table is schema.EncoderRecipe:  # used as it is, not as a Recipe
            continue
        for key, field in schema.fields_of(table).items():
            declared = field.get_default(call_default_factory=True)
            own = key in ("kv_cache_precision", "max_seq_len", "name", "quality", "calibration", "sm")
            if field.is_required() or own or isinstance(declared, dict):
                continue
            assert defaults[key] == declared, key


def test_every_key_has_a_description_and_every_value_a_limit():
    for table in (*schema.RECIPE_TABLES.values(), *schema.MODES.values(), schema.Calibration, schema.Quality):
        for key, field in schema.fields_of(table).items():
            assert key in ("kind", "mode") or field.description, key
