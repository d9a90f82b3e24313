"""In inference mode torch shows functions that may copy: their memory is known, too."""

import pytest
import torch

from lightning_shard.memory.paging.host_memory import Memory
from lightning_shard.memory.paging.pager import Pager
from lightning_shard.processes.torch_private.internals import without_modes

COPIES = {
    "to": lambda x: x.to("cpu", torch.float64),
    "copy": lambda x: x.to("cpu", x.dtype, copy=True),
    "contiguous": lambda x: x.t().contiguous(),
    "reshape": lambda x: x.t().reshape(-1),
    "flatten": lambda x: x.t().flatten(),
    "clone": torch.clone,
}
VIEWS = {
    "to": lambda x: x.to("cpu"),
    "contiguous": torch.Tensor.contiguous,
    "reshape": lambda x: x.reshape(-1),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("copies", [True, False])
def test_copies_are_known_and_views_of_others_are_not(copies, inference):
    pager = Pager(torch.device("cpu"), None, Memory(), small=0)
    before = torch.randn(64, 48)  # as a parameter is
    with torch.inference_mode(inference), torch.no_grad(), pager.seeing():
        for name, function in (COPIES if copies else VIEWS).items():
            made = function(before)
            assert len(pager.pages.known) == copies, name
            with without_modes():
                pager.send_all()
            assert (made.untyped_storage().nbytes() == 0) == copies, name
            assert torch.equal(made, function(before))
            del made
