import sys
sys.path.insert(0, "/tmp/scratch/muon")
import torch, torch.distributed as dist
import pytest
from tests.ranks.pool import Ranks
from probe import train, plain
def go():
    return train(dist.get_rank(), dist.get_world_size())
@pytest.mark.parametrize("w",[1,2,3])
def test_it(ranks: Ranks, w):
    out = ranks.run(w, go)
    want = plain()
    for k, v in want.items():
        d = (out[0][k]-v.detach()).abs().max()
        print(w, k, float(d), float(v.abs().max()))
    assert 0
