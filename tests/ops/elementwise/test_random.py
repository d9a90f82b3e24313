"""Random numbers: independent on the parts, alike on replicas of a part, generators in step."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import lightning_shard
from tests.pairs import choose
from tests.parity import mesh_of

SHAPE = (4, 8, 16, 12)
MAKERS = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "alpha": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "channels": lambda x: F.dropout2d(x, 0.4),
    "alpha_channels": lambda x: F.feature_alpha_dropout(x, 0.4, training=True),
    "module": nn.Dropout(0.4),
    "rand": torch.rand_like,
    "randn": lambda x: torch.randn_like(x, dtype=torch.float32),
    "randint": lambda x: torch.randint_like(x, 3, 9),
    "bernoulli": lambda x: torch.bernoulli(x.abs().clamp(max=1)),
    "normal_": lambda x: x.clone().normal_(1, 2),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 1),
    "exponential_": lambda x: x.clone().exponential_(),
    "bernoulli_": lambda x: x.clone().bernoulli_(0.3),
    "normal": lambda x: torch.normal(x, 0.1),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel": lambda x: F.gumbel_softmax(x, dim=1, hard=True),
}


def everywhere(x: torch.Tensor) -> list[torch.Tensor]:
    parts: list[torch.Tensor] = [torch.empty(0)] * dist.get_world_size()
    dist.all_gather_object(parts, x)
    return parts


@pytest.mark.spmd(4)
@pytest.mark.parametrize(("maker", "dims"), choose(MAKERS, [[2], [2, 3]]), ids=str)
def test_reproducible_independent_and_in_step(maker, dims):
    mesh = mesh_of(4) if len(dims) == 1 else mesh_of(2, 2)
    x = lightning_shard.shard(torch.ones(SHAPE), mesh, dims)
    results = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        made = MAKERS[maker](x)
        assert made.shape == SHAPE
        results.append(lightning_shard.gather(made))
        states = everywhere(torch.get_rng_state())
        assert all(torch.equal(s, states[0]) for s in states)
    assert torch.equal(results[0], results[2])
    if maker != "bernoulli" and maker != "rrelu":  # of ones: nothing random
        assert not torch.equal(results[0], results[1])
        if "channels" not in maker:
            top, bottom = results[0].chunk(2, 2)
            assert not torch.equal(top, bottom)
    if maker == "channels":
        assert torch.equal(results[0], results[0][..., :1, :1].expand(SHAPE))


@pytest.mark.spmd(4)
def test_replicas_of_a_part_are_alike():
    x = lightning_shard.shard(torch.randn(SHAPE), mesh_of(2, 2), [2, 3])
    parts = everywhere(F.dropout(x.mean(3)).to_local())
    assert torch.equal(parts[0], parts[1])
    assert torch.equal(parts[2], parts[3])
    assert not torch.equal(parts[0] == 0, parts[2] == 0)


@pytest.mark.spmd(3)
def test_moments():
    torch.manual_seed(0)
    x = lightning_shard.shard(torch.ones(8, 8, 33, 32), mesh_of(3), 2)
    assert F.dropout(x, 0.3).mean().item() == pytest.approx(1, abs=0.02)
    assert F.dropout(x, 0.3).eq(0).float().mean().item() == pytest.approx(0.3, abs=0.02)
    noise = torch.randn_like(x)
    assert noise.mean().item() == pytest.approx(0, abs=0.02)
    assert noise.std().item() == pytest.approx(1, abs=0.02)
    dropped = F.alpha_dropout(noise, 0.2, training=True)
    assert dropped.mean().item() == pytest.approx(0, abs=0.03)
    assert dropped.std().item() == pytest.approx(1, abs=0.03)


@pytest.mark.spmd(3)
def test_modes_and_gradient():
    x = lightning_shard.shard(torch.rand(SHAPE) + 1, mesh_of(3), 2).requires_grad_()
    assert torch.equal(F.dropout(x, 0.5, training=False), x)
    assert F.dropout(x, 1.0).abs().sum().item() == 0
    y = F.dropout(x, 0.25)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    expected = (lightning_shard.gather(y) != 0) / 0.75
    torch.testing.assert_close(lightning_shard.gather(gradient), expected)
    z = x.detach().clone()
    assert F.dropout(z, 0.5, inplace=True) is z
    assert z.eq(0).any()
    with pytest.raises(ValueError, match="between 0 and 1"):
        F.dropout(x, 1.5)


@pytest.mark.spmd(3)
def test_a_generator_of_the_user():
    x = lightning_shard.shard(torch.ones(SHAPE), mesh_of(3), 2)
    first = x.clone().normal_(generator=torch.Generator().manual_seed(5))
    second = x.clone().normal_(generator=torch.Generator().manual_seed(5))
    assert torch.equal(first, second)
