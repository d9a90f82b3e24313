"""Tables and graphs: torch-geometric."""
# pyright: reportMissingImports=false

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.program_zoo import Parts, fields, numbers, program, supervised


@program("torch-geometric", meshes=("2x1",))
def geometric_dense_convolution() -> Parts:
    from torch_geometric.nn import DenseGCNConv

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = DenseGCNConv(4, 8), DenseGCNConv(8, 2)

        def forward(self, x: Tensor) -> Any:
            ring = x.new_ones(x.shape[1], x.shape[1]).tril(1).triu(-1)
            return self.second(F.relu(self.first(x, ring)), ring)

    data = fields(4, lambda i: (numbers(10, 4, seed=i), numbers(10, 2, seed=i)))
    return Parts(supervised(Net(), F.mse_loss), data)
