import pytest
from gpu_recipes import QWEN_7B, case

from build.recipe.drafting import DRAFTING
from build.recipe.verdict import check, judge, refused

MODES = ("medusa", "eagle", "explicit_draft_tokens")


def spec(mode: str, **changes: object) -> dict[str, object]:
    return {"speculative_decoding": {"mode": mode, "max_draft_len": 4} | changes}


def reason(rule: str, **changes: object) -> str | None:
    return DRAFTING[rule].reason(case(**changes))


@pytest.mark.parametrize("mode", MODES)
def test_d1_drafting_excludes_beam_search(mode):
    assert "got 4: TensorRT-LLM's decodingLayer" in reason("D1", max_beam_width=4, **spec(mode))
    assert reason("D1", **spec(mode)) is None and reason("D1", max_beam_width=4) is None
    assert refused(judge(case(max_beam_width=4, **spec(mode))))


def test_d1_beam_search_is_answered_with_one_beam():
    found = {f.rule: f for f in judge(case(max_beam_width=4, **spec("explicit_draft_tokens")))}
    assert found["D1"].instead == "max_beam_width = 1"


def test_d3_eagle_is_for_llama_on_tensor_parallel_ranks():
    assert "Llama checkpoints only; this model is Qwen2ForCausalLM" in reason("D3", model=QWEN_7B, **spec("eagle"))
    assert "pp must be 1 with EAGLE, got 2" in reason("D3", pp=2, **spec("eagle"))
    assert reason("D3", tp=2, **spec("eagle")) is None and reason("D3", model=QWEN_7B, **spec("medusa")) is None


def test_d4_eagle_is_listed_for_16_bit_weights():
    assert "not fp8" in reason("D4", **spec("eagle"))
    assert reason("D4", precision="bf16", kv_cache_precision="auto", **spec("eagle")) is None


def test_d5_medusa_heads_must_be_there(tmp_path):
    assert "got 'no/such-heads'" in reason("D5", **spec("medusa", medusa_model="no/such-heads"))
    assert reason("D5", **spec("medusa", medusa_model=str(tmp_path))) is None and reason("D5", **spec("medusa")) is None


@pytest.mark.parametrize("choices", ["[[0], [0, 0]]", "{0}, {0, x}", "{}", "{0} {1}", "top 4"])
def test_d6_choices_must_parse(choices):
    assert f"got {choices!r}" in reason("D6", **spec("eagle", choices=choices))
    assert "D6" not in {f.rule for f in check(case(**spec("eagle", choices="{0}, {0, 0}, {1}")))}
