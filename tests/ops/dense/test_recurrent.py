"""Recurrent layers over a split batch."""

import pytest
import torch
from torch import nn

import lightning_shard
from lightning_shard import UnsupportedOperationError
from tests.parity import assert_parity, assert_parity_of_module, mesh_of

LAYERS = {
    "lstm": (lambda: nn.LSTM(4, 3, 2), 1),
    "lstm_both_ways": (lambda: nn.LSTM(4, 3, bidirectional=True, batch_first=True), 0),
    "gru": (lambda: nn.GRU(4, 3, 2, batch_first=True), 0),
    "rnn": (lambda: nn.RNN(4, 3, bias=False), 1),
}


@pytest.mark.quick_rows("lstm_both_ways", "gru")
@pytest.mark.spmd(3)
@pytest.mark.parametrize("name", LAYERS)
def test_split_batch(name):
    make, dim = LAYERS[name]
    module = make().double()
    assert_parity_of_module(Flat(module), (5, 7, 4), [dim], mesh_of(3))
    assert_parity_of_module(Flat(module), (2, 2, 4), [dim], mesh_of(3))


class Flat(nn.Module):
    """The outputs and states as one tuple."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        out, states = self.layer(x)
        return out, *(states if isinstance(states, tuple) else (states,))


class RowsOfImage(nn.Module):
    """Every row of an image is a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(3, 3, batch_first=True)

    def forward(self, x):
        b, c, h, w = x.shape
        rows = x.permute(0, 2, 3, 1).reshape(b * h, w, c)
        start = x.mean(3).transpose(1, 2).reshape(1, b * h, c)
        return self.layer(rows, start)[0].reshape(b, h, w, c).permute(0, 3, 1, 2)


@pytest.mark.spmd(4)
def test_rows_of_an_image():
    assert_parity_of_module(RowsOfImage().double(), (2, 3, 7, 5), [2], mesh_of(4))
    assert_parity_of_module(RowsOfImage().double(), (2, 3, 3, 5), [0, 2], mesh_of(2, 2))


@pytest.mark.spmd(3)
def test_cells():
    def lstm(x, c, wi, wh, b):
        return torch.lstm_cell(x, (x[:, :3], c), wi, wh, b, b)

    def others(x, h, wi, wh, b):
        return torch.rnn_tanh_cell(x, h, wi, wh, b, b), torch.rnn_relu_cell(x, h, wi, wh)

    def gru(x, h, wi, wh, b):
        return torch.gru_cell(x, h, wi, wh, b, b)

    for rows in (5, 2):
        for function, n in ((lstm, 12), (gru, 9), (others, 3)):
            shapes = [(rows, 4), (rows, 3), (n, 4), (n, 3), (n,)]
            assert_parity(function, shapes, {0: [0]}, mesh_of(3))
            assert_parity(function, shapes, {0: [0], 1: [0]}, mesh_of(3))
            assert_parity(function, shapes, {0: [1]}, mesh_of(3))
            assert_parity(function, shapes, {0: [0], 1: [1]}, mesh_of(3))


@pytest.mark.spmd(2)
def test_refusals():
    layer = nn.LSTM(4, 3, 2, dropout=0.5)
    steps = "a recurrence needs all steps"
    for dim, reason in ((0, steps), (2, steps), (1, "dropout between")):
        x = lightning_shard.shard(torch.randn(5, 7, 4), mesh_of(2), dim)
        with pytest.raises(UnsupportedOperationError, match=reason):
            layer(x)
