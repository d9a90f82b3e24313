"""What the ranks of a domain read must lie in memory alike, too."""

import pytest
import torch
import torch.distributed as dist

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
