"""Tables, series and graphs: torch-geometric, chemprop, pytorch-forecasting."""
# pyright: reportMissingImports=false

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.program_zoo import SPLIT, Parts, fields, numbers, program, supervised


@program("torch-geometric", meshes=SPLIT)
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


@program("chemprop", meshes=SPLIT, float32=True)
def chemprop_mpnn() -> Parts:
    from chemprop import data, models, nn

    molecules = ["CCO", "CCN", "c1ccccc1O", "CC(=O)O", "CCCC", "C1CCOC1", "CCS", "CC#N"]
    points = [data.MoleculeDatapoint.from_smi(s, [float(len(s))]) for s in molecules]
    module = models.MPNN(
        nn.BondMessagePassing(d_h=32), nn.MeanAggregation(), nn.RegressionFFN(input_dim=32)
    )

    def loader(size: int) -> Any:
        return data.build_dataloader(data.MoleculeDataset(points), size, shuffle=False)

    return Parts(module, loader, batch=4)


@program("pytorch-forecasting", meshes=("1x2", "2x1"), float32=True)
def pytorch_forecasting_nhits() -> Parts:
    from pytorch_forecasting import NHiTS, TimeSeriesDataSet
    from pytorch_forecasting.data.examples import generate_ar_data
    from pytorch_forecasting.metrics import MAE

    series = TimeSeriesDataSet(
        generate_ar_data(timesteps=24, n_series=2), "time_idx", "value", ["series"],
        max_encoder_length=12, max_prediction_length=4, time_varying_unknown_reals=["value"],
    )  # fmt: skip
    module = NHiTS.from_dataset(series, hidden_size=16, loss=MAE(), backcast_loss_ratio=0.1)
    return Parts(
        module, lambda size: series.to_dataloader(train=False, batch_size=size), batch=4,
        trainer={"limit_train_batches": 3, "limit_val_batches": 1, "gradient_clip_val": 0.1},
    )  # fmt: skip
