"""LoRA adapters of KServe requests: in the model's name, or in lora_name."""

from __future__ import annotations

import struct

import pytest
from tritonclient.grpc import service_pb2

from contract.errors import InvalidArgument, NotFound
from gateway.api import kserve
from tests.fakes.replica import FakeReplica
from tests.gateway.api.test_kserve import counted, ours
from tests.gateway.running import gateway, until

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("inline", [True, False])
def test_an_adapter_has_a_name_and_no_number(inline: bool):
    request = service_pb2.ModelInferRequest(model_name="ensemble")
    request.inputs.add(name="lora_name", datatype="BYTES", shape=[1, 1])
    request.inputs.add(name="lora_task_id", datatype="UINT64", shape=[1, 1])
    number = request.inputs[1].contents.uint64_contents
    if inline:
        request.inputs[0].contents.bytes_contents.append(b"poet")
        number.append(0)
    else:
        request.raw_input_contents.extend([b"\4\0\0\0poet", struct.pack("<Q", 0)])
    assert kserve.read(request, 5.0).adapter == "poet"
    if inline:
        number[0] = 1
    else:
        request.raw_input_contents[1] = struct.pack("<Q", 1)
    with pytest.raises(InvalidArgument, match="lora_task_id: must be 0 or left out: name the adapter by lora_name"):
        kserve.read(request, 5.0)


async def test_an_adapter_costs_and_is_allowed_by_its_name_wherever_it_is_named():
    async with FakeReplica(adapters=("poet",)) as replica, gateway(replica) as running, ours(running) as client:
        await until(lambda: running.service.replicas.adapters("") == ("poet",))
        await client.generate("hello", max_tokens=2, adapter="poet").complete()
        async with ours(running, model="ensemble:poet") as named:
            await named.generate("hello", max_tokens=2).complete()
            with pytest.raises(InvalidArgument, match="lora_name: must be left out beside a model with an adapter"):
                await named.generate("hello", max_tokens=2, adapter="poet").complete()
        with pytest.raises(NotFound, match="the model 'ensemble:pirate' does not exist; there is demo, demo:poet"):
            await client.generate("hello", max_tokens=2, adapter="pirate").complete()
        assert [(seen.model, seen.value("lora_name")) for seen in replica.seen] == [("ensemble", "poet")] * 2
        page = await counted(running, 4)
        ended = {name: value for name, value in page.items() if name.startswith("gen_ai_server_request_duration_sec")}
        assert [value for name, value in ended.items() if "_count{" in name and 'model="demo:poet"' in name] == [2], (
            ended
        )
