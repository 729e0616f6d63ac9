"""What the peers get: the same checkpoint in the form each of them reads. tests/benchmarks/test_peers.py runs them."""

import json
import math
import socket

import numpy as np
import pytest

from benchmarks import checkpoint, machine, peer_servers
from benchmarks.peer_servers import Subject
from build.base import shards
from contract.errors import EngineFailed, InvalidArgument


def test_the_demo_model_is_a_subject_and_an_unknown_name_is_refused():
    demo = peer_servers.subject("demo")
    assert (demo.checkpoint / "model.safetensors").is_file() and demo.precision == "f32"
    with pytest.raises(InvalidArgument, match="model: must be demo, bench-160m, a folder .*, got 'x'"):
        peer_servers.subject("x")
    with pytest.raises(InvalidArgument, match="precision: must be bf16, int8 or int8_sq, got 'int4'"):
        peer_servers.subject("bench-160m", "int4")


def test_an_endless_checkpoint_has_no_end_tokens_and_the_same_weights(monkeypatch, tmp_path):
    monkeypatch.setattr(peer_servers, "FOLDER", tmp_path)
    demo = peer_servers.subject("demo")
    folder = peer_servers.endless(demo)
    assert "eos_token_id" in json.loads((demo.checkpoint / "config.json").read_text())
    assert "eos_token_id" not in json.loads((folder / "config.json").read_text())
    assert (folder / "model.safetensors").samefile(demo.checkpoint / "model.safetensors")
    assert peer_servers.endless(demo) == folder  # again, over the first


def test_checkpoints_of_one_name_in_different_folders_have_their_own_copies(monkeypatch, tmp_path):
    monkeypatch.setattr(peer_servers, "FOLDER", tmp_path / "peers")
    copies = []
    for run, rows in (("a", 4), ("b", 6)):
        folder = tmp_path / run / "final"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        checkpoint.write_weights(folder / "model.safetensors", {"model.layers.0.mlp.up_proj.weight": (rows, 8)})
        copies.append(peer_servers.eight_bits(Subject("final", folder, "final", "int8", 512)) / "model.safetensors")
    assert copies[0].read_bytes() != copies[1].read_bytes()


def test_a_conversion_that_fails_leaves_no_file_to_serve(monkeypatch, tmp_path):
    def write(checkpoint, out, precision):
        out.write_text(text)
        if text == "half":
            raise ValueError("tensor: must be one of a Llama")

    monkeypatch.setattr(peer_servers, "FOLDER", tmp_path / "peers")
    monkeypatch.setattr(peer_servers.gguf_checkpoint, "write", write)
    (tmp_path / "model.safetensors").touch()
    subject = Subject("small", tmp_path, "small", "bf16", 512)
    text = "half"
    with pytest.raises(EngineFailed, match="cannot write the GGUF of small: .*must be one of a Llama"):
        peer_servers.gguf(subject)
    text = "whole"
    assert peer_servers.gguf(subject).read_text() == "whole"


def test_of_a_server_elsewhere_no_process_of_this_machine_is_measured(tmp_path):
    subject = Subject("small", tmp_path, "small", "bf16", 512)
    with socket.create_server(("127.0.0.1", 0)) as ours:
        here, elsewhere = (
            peer_servers.Running(peer_servers.by_hand(f"http://{host}:{ours.getsockname()[1]}"), subject).use()
            for host in ("127.0.0.1", "192.0.2.1")
        )
    assert here.cpu_s > 0 and math.isnan(elsewhere.cpu_s)


@pytest.mark.parametrize("url", ["https://h:1", "http://h:80/", "http://h:80/v1", "http://[::1]:8000", "http://h"])
def test_an_address_of_another_form_is_refused(url):
    with pytest.raises(InvalidArgument, match="also: must be of http://HOST:PORT"):
        peer_servers.by_hand(url)


def test_every_peer_serves_the_subject_at_the_port_it_is_given(tmp_path, monkeypatch):
    monkeypatch.setattr(peer_servers, "gguf", lambda of: tmp_path / "a.gguf")
    subject = Subject("small", tmp_path, "small", "bf16", 512)
    for name in ("trident", "trident-openai", "vllm"):
        assert "17000" in peer_servers.PEERS[name].command(subject, range(17_000, 17_005))
    for precision in peer_servers.EIGHT_BITS:
        eight_bits = Subject("small", tmp_path, "small", precision, 512)
        for flags in ({"avx2"}, {"avx2", "amx_tile"}):  # it crashes with them on AMX alone
            monkeypatch.setattr(machine, "cpu_flags", lambda flags=flags: flags)
            command = peer_servers.PEERS["llama.cpp"].command(eight_bits, range(17_000, 17_005))
            assert ("--no-repack" in command) == ("amx_tile" in flags)
        assert peer_servers.PEERS["vllm"].weights(eight_bits) == "W8A8"
    variables = peer_servers.PEERS["trident-openai"].variables(subject, range(17_000, 17_005))
    assert variables["TRIDENT_GATEWAY_REPLICAS"] == "127.0.0.1:17000"
    assert variables["TRIDENT_GATEWAY_HTTP_PORT"] == "17003"


def test_a_program_that_is_not_there_is_one_sentence(tmp_path):
    peer = peer_servers.Peer("nobody", lambda of, at: ["/nowhere/server"], lambda of, at: None, "")
    with pytest.raises(EngineFailed, match="nobody cannot be started"):
        peer_servers.start(peer, peer_servers.subject("demo"), tmp_path)


def test_projections_are_integers_with_a_scale_for_each_row_and_the_rest_stays(tmp_path):
    shapes = {"model.layers.0.mlp.up_proj.weight": (6, 32), "model.norm.weight": (32,)}
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text('{"model_type": "llama"}')
    checkpoint.write_weights(tmp_path / "a" / "model.safetensors", shapes)
    peer_servers.write_int8(tmp_path / "a", tmp_path / "b")
    before = shards.read_header(tmp_path / "a" / "model.safetensors")
    after = shards.read_header(tmp_path / "b" / "model.safetensors")
    name, norm = shapes
    assert set(after) == {*shapes, f"{name}_scale"} and after[name].dtype == "I8"
    assert np.array_equal(after[norm].f32(), before[norm].f32())
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["model_type"] == "llama" and config["quantization_config"]["quant_method"] == "compressed-tensors"
    weight = before[name].f32()
    integers, scale = peer_servers.quantised(weight)
    assert np.abs(integers * scale - weight).max() <= scale.max() / 2 * 1.001 and np.abs(integers).max() == 127
    assert not peer_servers.quantised(np.zeros((2, 4), np.float32))[0].any()
