from benchmarks import hops
from benchmarks.efficiency import Batch


def batch(tritonserver_s, detokenizer_s):
    serving = {"tritonserver": tritonserver_s, "detokenizer": detokenizer_s}
    return Batch("x", 8, 1, 1000, 1.0, [0.1], 1.0, serving, 0.05, messages=1000)


def test_the_detokenizers_hop_is_the_ensemble_minus_the_engine():
    found = {(mode, "engine"): [batch(0.02, 0.0)] for mode in hops.MODES}
    found |= {(mode, "ensemble"): [batch(0.05, 0.03)] for mode in hops.MODES}
    lines = hops.described(found, 8).splitlines()
    assert len(lines) == 2 + 3 * len(hops.MODES)
    assert lines[4].split()[-5:] == ["30.0", "0.0", "0.0", "30.0", "60.0"]
