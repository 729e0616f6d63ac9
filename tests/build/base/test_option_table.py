import json

import pytest
from program_parser import TABLES, parser

from build.base import option_table

COUNTS = {"trtllm_build": 67, "quantize": 30, "convert_checkpoint_llama": 51, "convert_checkpoint_qwen": 22}


@pytest.mark.parametrize("program", COUNTS)
def test_every_option_of_the_table_is_there_with_its_aliases(program):
    raw = json.loads((TABLES / f"{program}_options.json").read_text())
    table = option_table.read(program)
    assert len(raw["options"]) == COUNTS[program]
    assert set(table.options) == {flag.lstrip("-") for option in raw["options"] for flag in option["flags"]}


@pytest.mark.parametrize("program", COUNTS)
def test_what_the_table_lets_pass_the_program_accepts(program):
    table, accepts = option_table.read(program), parser(program)
    required = ["--model_dir", "x"] if program == "convert_checkpoint_qwen" else []
    for name, option in table.options.items():
        if option.type == "flag":
            values = [True]
        elif option.choices:
            values = [int(choice) if option.type == "int" else choice for choice in option.choices]
        else:
            values = [{"int": 3, "float": 0.5, "str": "word", "enum": ""}[option.type]]
        for value in values:
            given = [value] if option.many else value
            assert table.problem(name, given) is None
            accepts.parse_args([*required, *table.arguments({name: given})])


def test_what_is_wrong_with_a_value_is_said():
    table = option_table.read("trtllm_build")
    assert "nearest is 'workers'" in table.problem("worker", 1)
    assert "must be a value of type int" in table.problem("workers", "two")
    assert "must be one of enable, disable, because --reduce_fusion takes a value" in table.problem(
        "reduce_fusion", True
    )
    assert "nearest is 'paged'" in table.problem("kv_cache_type", "page")
    assert table.problem("kv_cache_type", "PAGED") is None
    assert "true or false" in table.problem("fast_build", "yes")
    assert "at least one" in table.problem("lora_dir", "adapter")


def test_a_partial_list_of_choices_refuses_nothing():
    assert option_table.read("trtllm_build").problem("lora_target_modules", ["new_module"]) is None


def test_arguments_keep_their_order_and_leave_out_false_switches():
    table = option_table.read("trtllm_build")
    values = {"workers": 2, "strip_plan": True, "fast_build": False, "lora_dir": ["a", "b"]}
    assert table.arguments(values) == ["--workers", "2", "--strip_plan", "--lora_dir", "a", "b"]


def test_a_negative_number_is_refused_before_the_program_takes_it():
    table = option_table.read("trtllm_build")
    assert table.problem("tokens_per_block", -5) == f"must be an integer from 0 to {option_table.MOST}, got -5"
    assert table.problem("tokens_per_block", 0) is None
