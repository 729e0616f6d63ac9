"""The tables by themselves; tests/model_repository/test_config.py holds the configurations to them."""

import pytest

from contract import tensors

TABLES = {name: value for name, value in vars(tensors).items() if name.endswith(("_INPUTS", "_OUTPUTS"))}
DATATYPES = {"BYTES", "BOOL", "INT32", "INT64", "UINT64", "UINT8", "FP32"}


def test_there_are_two_contracts_with_two_sides_each():
    assert set(TABLES) == {"ENSEMBLE_INPUTS", "ENSEMBLE_OUTPUTS", "ENGINE_INPUTS", "ENGINE_OUTPUTS"}


@pytest.mark.parametrize("table", TABLES)
def test_each_tensor_is_there_once_with_a_datatype_and_dims_of_the_protocol(table):
    names = [tensor.name for tensor in TABLES[table]]
    assert len(set(names)) == len(names)
    for tensor in TABLES[table]:
        assert tensor.datatype in DATATYPES, tensor.name
        assert tensor.dims and all(dim == -1 or dim > 0 for dim in tensor.dims), tensor.name


def test_an_ensemble_request_may_leave_out_everything_but_is_told_what_it_needs():
    assert all(tensor.optional for tensor in tensors.ENSEMBLE_INPUTS)


def test_the_engine_insists_on_two_tensors_as_tensorrt_llm_does():
    required = [tensor.name for tensor in tensors.ENGINE_INPUTS if not tensor.optional]
    assert required == ["input_lengths", "request_output_len"]


@pytest.mark.parametrize("side", ["INPUTS", "OUTPUTS"])
def test_a_name_at_both_protocols_means_the_same_kind_of_value(side):
    engine = {tensor.name: tensor.datatype for tensor in TABLES[f"ENGINE_{side}"]}
    for tensor in TABLES[f"ENSEMBLE_{side}"]:
        assert engine.get(tensor.name, tensor.datatype) == tensor.datatype, tensor.name


def test_tensors_cannot_be_changed():
    with pytest.raises(AttributeError):
        tensors.ENSEMBLE_INPUTS[0].name = "x"
