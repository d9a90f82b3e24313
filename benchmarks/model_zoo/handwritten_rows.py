"""Models whose shapes and rows the values decide: masks, points, graphs, departure points."""

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.model_zoo import Case

FIELD = (2, 3, 13, 11)


class MaskedSegmentation(nn.Module):
    """Cross entropy of the pixels that have a label, as segmentation codes write it."""

    def __init__(self):
        super().__init__()
        self.net = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x):
        labels = (x[:, 0].detach() * 3).round().long().clamp(-1, 3)
        labelled = labels >= 0
        logits = self.net(x).permute(0, 2, 3, 1)[labelled]
        return F.cross_entropy(logits, labels[labelled]), logits.softmax(-1).amax(-1).mean()


class FocalByIndex(nn.Module):
    """Positive and negative pixels apart, by boolean index; the hardest negatives only."""

    def __init__(self):
        super().__init__()
        self.net = nn.Conv2d(3, 1, 3, padding=1)

    def forward(self, x):
        p = torch.sigmoid(self.net(x)).squeeze(1)
        hit = x[:, 1].detach() > 0.5
        pos, neg = p[hit], p[~hit]
        loss = -((1 - pos) ** 2 * pos.log()).sum() - (neg**2 * (1 - neg).log()).sum()
        return loss / hit.sum().clamp(min=1), neg[neg > 0.5].mean()


class AdvectionByIndex(nn.Module):
    """Semi-Lagrangian advection: periodic, the four neighbours of each departure point by index."""

    def forward(self, x):
        _, _, h, w = x.shape
        ys = torch.arange(h).to(x)[:, None] - 2 * x[0, 0]
        xs = torch.arange(w).to(x) - 2 * x[0, 1]
        y, z = ys.detach().floor(), xs.detach().floor()
        i, j, a, b = y.long() % h, z.long() % w, ys - y, xs - z
        below = x[:, :, i, j] * (1 - b) + x[:, :, i, (j + 1) % w] * b
        above = x[:, :, (i + 1) % h, j] * (1 - b) + x[:, :, (i + 1) % h, (j + 1) % w] * b
        return below * (1 - a) + above * a


class RadialSpectrum(nn.Module):
    """Energy by wave number, added up by index into a plain tensor, and counted."""

    def forward(self, x):
        h, w = x.shape[-2:]
        energy = (torch.fft.fft2(x).abs() ** 2).mean((0, 1))
        ky, kx = torch.fft.fftfreq(h, 1 / h)[:, None], torch.fft.fftfreq(w, 1 / w)[None]
        shell = ((ky**2 + kx**2).sqrt().to(x) + 0 * x[0, 0].detach()).round().long()
        total = torch.zeros(12, dtype=x.dtype).index_add(0, shell.flatten(), energy.flatten())
        return total, total / torch.bincount(shell.flatten(), minlength=12).clamp(min=1)


class MessagePassing(nn.Module):
    """Graph network on nodes and edges: gather at both ends, scatter to the receivers."""

    def __init__(self):
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 4))
        self.node = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 4))

    def forward(self, nodes, edges):
        n = nodes.shape[0]
        ends = (edges.detach()[:, :2] * 1000).long().abs() % n
        sender, receiver = ends[:, 0], ends[:, 1]
        for _ in range(2):
            both = torch.cat([nodes[sender], nodes.index_select(0, receiver)], -1)
            message = self.edge(both)
            total = torch.zeros_like(nodes).index_add_(0, receiver, message)
            degree = torch.zeros_like(nodes[:, 0]).scatter_add_(
                0, receiver, torch.ones_like(message[:, 0])
            )
            mean = total / degree.clamp(min=1)[:, None]
            nodes = nodes + self.node(torch.cat([nodes, mean], -1))
        return nodes, total.amax(0)


class PointsInCells(nn.Module):
    """Points that are inside, averaged in the cell of a grid, and read back at the points."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 4)

    def forward(self, x):
        inside = x[(x.abs() < 1.5).all(-1)]
        cell = ((inside.detach() + 1.5) / 3 * 4).long().clamp(0, 3)
        flat = cell[:, 0] * 4 + cell[:, 1]
        rows = self.net(inside)
        grid = torch.zeros(16, 4, dtype=x.dtype).index_add(0, flat, rows)
        count = torch.bincount(flat, minlength=16).clamp(min=1)
        return rows - (grid / count[:, None])[flat], grid


CASES = {
    "masked_segmentation": Case(MaskedSegmentation, [FIELD]),
    "focal_by_index": Case(FocalByIndex, [FIELD]),
    "advection_by_index": Case(AdvectionByIndex, [FIELD]),
    "radial_spectrum": Case(RadialSpectrum, [FIELD]),
    "message_passing": Case(MessagePassing, [(17, 4), (41, 4)], (0,)),
    "points_in_cells": Case(PointsInCells, [(37, 2)], (0,)),
}
