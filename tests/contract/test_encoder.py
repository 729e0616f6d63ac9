import dataclasses
import json

from contract.encoder import Encoder


def test_a_manifest_keeps_everything_that_serving_needs():
    encoder = Encoder("mean", True, 384, (64, 128), {"query": "q: "}, "query", ("a", "{query}{document}", "b"), True)
    assert Encoder.from_manifest(json.loads(json.dumps(dataclasses.asdict(encoder)))) == encoder
