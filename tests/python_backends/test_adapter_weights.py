import numpy as np
import pytest

from python_backends.adapter_weights import BF16, CONFIG_FILE, WEIGHTS_FILE, adapter_folder, adapter_tensors


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
