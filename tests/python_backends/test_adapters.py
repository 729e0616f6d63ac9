"""The id that tells the engine a prompt's adapter is no token's, and gives back token and adapter."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import InvalidArgument
from contract.manifest import Adapter
from python_backends.adapters import BF16, CONFIG_FILE, WEIGHTS_FILE, AdapterIds, adapter_folder, adapter_tensors
from tests.fakes.manifests import DIGEST, manifest

TWO = AdapterIds(("poet", "lawyer"), 100, 7)


@given(
    vocab=st.integers(1, 300),
    count=st.integers(1, 63),
    ids=st.lists(st.integers(0), min_size=1, max_size=5),
    data=st.data(),
)
def test_prompts_of_different_adapters_never_share_their_first_id(vocab, count, ids, data):
    first = data.draw(st.integers(-1, vocab - 1))
    table = AdapterIds(tuple(map(str, range(count))), vocab, first)
    prompt = np.array(ids) % vocab
    marked = [table.mark(prompt, number) for number in range(count + 1)]
    firsts = [int(found[0]) for found in marked]
    assert len(set(firsts)) == count + 1 and firsts[0] == prompt[0] and min(firsts[1:]) >= vocab
    for number, found in enumerate(marked):
        unmarked = table.unmark(found)
        assert (unmarked[0], unmarked[1].tolist()) == (number, prompt.tolist())
    # As the graph reads it.
    rows = np.array(firsts) % (vocab + count)
    numbers = np.maximum(rows - (vocab - 1), 0) + np.array(firsts) // (vocab + count)
    assert numbers.tolist() == list(range(count + 1))


def test_the_usual_first_id_stays_below_the_logits_so_that_penalties_accept_it():
    assert [TWO.mark(np.array([7, 3]), number)[0] for number in (1, 2)] == [100, 101]
    assert TWO.mark(np.array([8, 3]), 1)[0] == 110 and TWO.mark(np.array([8, 3]), 0)[0] == 8


def test_an_unknown_adapter_is_refused_with_those_that_there_are():
    assert TWO.check(2) == 2 and TWO.number("lawyer") == 2 and [TWO.name(n) for n in (0, 1)] == ["", "poet"]
    with pytest.raises(
        InvalidArgument, match=r"lora_task_id: must be 0 \(none\) or one of 1 \(poet\), 2 \(lawyer\), got 3"
    ):
        TWO.check(3)
    with pytest.raises(InvalidArgument, match=r"lora_name: must be left out or one of poet, lawyer, got 'x'"):
        TWO.number("x")
    none = AdapterIds((), 100, 0)
    with pytest.raises(InvalidArgument, match="must be left out or 0: this engine has no LoRA adapters, got 1"):
        none.check(1)


def test_it_is_read_from_the_manifest():
    made = manifest(adapters=(Adapter("poet", DIGEST, 8),), adapter_first_token_id=3)
    assert AdapterIds.from_manifest(made) == AdapterIds(("poet",), 4096, 3)
    assert AdapterIds.from_manifest(manifest()).names == ()


# ---- weights for TensorRT-LLM ----------------------------------------------------------------------------------------


def test_the_tensors_of_an_adapter_are_those_of_its_number(tmp_path):
    for number in (1, 2):
        folder = adapter_folder(tmp_path, number)
        folder.mkdir(parents=True)
        np.save(folder / WEIGHTS_FILE, np.full((1, 3, 4), number, np.uint16).view(BF16))
        np.save(folder / CONFIG_FILE, np.full((1, 3, 3), number, np.int32))
    tensors = adapter_tensors(tmp_path, 2)
    assert tensors["lora_weights"].dtype == BF16 and tensors["lora_weights"].flags.writeable
    assert tensors["lora_weights"].view(np.uint16).tolist() == np.full((1, 3, 4), 2).tolist()
    assert tensors["lora_config"].tolist() == np.full((1, 3, 3), 2).tolist()
    with pytest.raises(FileNotFoundError):
        adapter_tensors(tmp_path, 3)
