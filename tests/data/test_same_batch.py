"""What the ranks of a domain read must lie in memory alike, too."""

import pytest
import torch
import torch.distributed as dist

from lightning_shard import gather, shard
from lightning_shard.data.same_batch import check_same_batch
from tests.parity import mesh_of

FIELD = torch.randn(2, 3, 7, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.spmd(3)
def test_batches_that_lie_otherwise_on_one_rank():
    turned = FIELD.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    batch = {"x": turned if dist.get_rank() == 1 else FIELD}
    with pytest.raises(ValueError, match=r"lies otherwise in memory \(entry \['x'\]\)"):
        check_same_batch(batch, mesh_of(3))
    check_same_batch({"x": batch["x"].contiguous()}, mesh_of(3))


@pytest.mark.spmd(3)
def test_a_tensor_that_ranks_hold_otherwise_is_not_split():
    mesh, here = mesh_of(3), dist.get_rank() == 1
    for other, what in ((FIELD + 1, "values"), (FIELD[:, :, :5], "shapes"), (FIELD.half(), "sh")):
        with pytest.raises(ValueError, match=rf"the ranks \[0, 1, 2\] share .* different {what}"):
            shard(other if here else FIELD, mesh, 2)
    labels = torch.arange(7 * 90).view(7, 90)
    with pytest.raises(ValueError, match="different values"):
        shard(labels + int(here), mesh, 0)
    computed = FIELD * (1 + 1e-6) if here else FIELD  # in another order
    assert shard(computed, mesh, 2).shape == FIELD.shape
    special = [torch.full((4, 3), torch.nan), torch.full((4, 3), torch.inf), FIELD.cfloat()[0]]
    for x in (
        *special,
        torch.zeros(0, 3),
        FIELD[:, :, :1],
        FIELD > 0,
        torch.zeros(3, 2).bfloat16(),
    ):
        assert gather(shard(x, mesh, 0)).shape == x.shape
