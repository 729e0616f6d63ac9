"""A PEFT folder is read exactly as PEFT means it, or refused with the file, the key and what is allowed."""

import json
import math

import numpy as np
import pytest

from build.base.checkpoint import open_checkpoint
from build.model import lora_adapter
from contract.errors import InvalidArgument
from tests.fakes import adapters, checkpoints

Q0 = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    return folder, checkpoints.write(folder, checkpoints.CONFIGS["llama_gqa"])


def fused(base, folder):
    opened = lora_adapter.open_adapter("a", str(folder), open_checkpoint(base[0]))
    return opened, {
        name: value + opened.matrices[name].b @ opened.matrices[name].a if name in opened.matrices else value
        for name, value in base[1].items()
    }


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"rank": 7, "alpha": 3},
        {"targets": ("q_proj", "down_proj")},
        {"rank": 5, "use_rslora": True},
        {"rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 9}, "alpha_pattern": {"q_proj": 32}},
        {"init_lora_weights": "gaussian", "modules_to_save": None, "layer_replication": [], "use_dora": False},
    ],
)
def test_the_matrices_make_the_fused_model(base, tmp_path, spec):
    expected = adapters.write(tmp_path / "a", base[1], **spec)
    opened, found = fused(base, tmp_path / "a")
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, atol=1e-5, err_msg=name)
    widest = max(len(matrix.a) for matrix in opened.matrices.values())
    assert opened.record == lora_adapter.record("a", str(tmp_path / "a")) and opened.record.rank == widest


def test_rslora_scales_by_the_root_of_the_rank(base, tmp_path):
    scales = []
    for use_rslora in (False, True):
        folder = tmp_path / str(use_rslora)
        adapters.write(folder, base[1], rank=4, alpha=8, targets=("q_proj",))
        config = json.loads((folder / lora_adapter.CONFIG).read_text())
        (folder / lora_adapter.CONFIG).write_text(json.dumps(config | {"use_rslora": use_rslora}))
        scales.append(fused(base, folder)[0].matrices[f"{Q0}.weight"].b)
    np.testing.assert_allclose(scales[1], scales[0] * math.sqrt(4), rtol=1e-6)


def test_the_digest_is_of_both_files(base, tmp_path):
    adapters.write(tmp_path / "a", base[1])
    before = lora_adapter.record("a", str(tmp_path / "a"))
    config = tmp_path / "a" / lora_adapter.CONFIG
    config.write_text(config.read_text().replace('"lora_alpha": 8', '"lora_alpha": 9'))
    assert lora_adapter.record("a", str(tmp_path / "a")).sha256 != before.sha256


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"use_dora": True}, "use_dora must be null, false or empty"),
        ({"bias": "all"}, "bias must be 'none'"),
        ({"lora_bias": True}, "lora_bias must be null, false or empty"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save must be null, false or empty"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices must be null, false or empty"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights must be True"),
        ({"peft_type": "IA3"}, "peft_type must be 'LORA'"),
        ({"lora_alpha": "8"}, "lora_alpha must be a positive number"),
        ({"rank_pattern": {"q_proj": 3, "(": 1}}, "rank_pattern has '(', which is no regular expression"),
        ({"rank_pattern": {"(": 1}}, "rank_pattern has '(', which is no regular expression"),
        ({"files": {f"base_model.model.{Q0}.lora_magnitude_vector": np.ones(3)}}, "linear layers, got base_model."),
        ({"files": {"base_model.model.lm_head.lora_A.weight": np.ones((4, 64))}}, "must adapt only q_proj"),
        ({"files": {f"base_model.model.{Q0}.lora_A.weight": np.ones((3, 64))}}, "must be [4, 64] and [64, 4]"),
        ({"files": {f"base_model.model.{Q0}.lora_A.weight": np.full((4, 64), np.nan)}}, "holds NaN or infinity"),
        ({"files": {"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": np.ones((4, 64))}}, "layers.9"),
    ],
)
def test_what_is_not_a_plain_adapter_of_this_model_is_refused_by_name(base, tmp_path, spec, says):
    config = {key: spec[key] for key in ("peft_type", "lora_alpha", "rank_pattern") if key in spec and spec[key]}
    adapters.write(tmp_path / "a", base[1], **{key: value for key, value in spec.items() if key not in config})
    path = tmp_path / "a" / lora_adapter.CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    with pytest.raises(InvalidArgument) as caught:
        lora_adapter.open_adapter("a", str(tmp_path / "a"), open_checkpoint(base[0]))
    assert caught.value.field == "adapters.a" and says in caught.value.problem


def test_a_missing_or_damaged_file_is_named(base, tmp_path):
    folder = tmp_path / "a"
    with pytest.raises(InvalidArgument, match=r"adapter_config\.json is missing"):
        lora_adapter.record("a", str(folder))
    with pytest.raises(InvalidArgument, match=r"~nobody-here/a/adapter_config\.json is missing"):
        lora_adapter.record("a", "~nobody-here/a")
    adapters.write(folder, base[1])
    weights = folder / lora_adapter.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(InvalidArgument, match="truncated"):
        lora_adapter.record("a", str(folder))
    weights.unlink()
    with pytest.raises(InvalidArgument, match=r"adapter_model\.bin is not read"):
        lora_adapter.record("a", str(folder))
