"""Losses: every reduction, split and plain targets, weights, classes per pixel."""

import pytest
import torch
import torch.nn.functional as F

import lightning_shard
from tests.parity import assert_parity, mesh_of

SHAPE = (2, 3, 7, 3)
LABELS = torch.tensor([0, 2, 1, 1, 0, 2, 1]).repeat(2, 3, 1).transpose(1, 2)
WEIGHT = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)


def labels_with(x: torch.Tensor, ignored: int = -100) -> torch.Tensor:
    """Split as `x` is, if `x` is split: made from it by rules."""
    labels = (x.detach()[:, 0] * 0).long() + LABELS
    return labels.masked_fill(labels == 2, ignored) if ignored != -100 else labels


def every(function):
    return lambda *tensors, **named: tuple(
        function(*tensors, reduction=r, **named) for r in ("none", "mean", "sum")
    )


CASES = {
    "mse": (every(F.mse_loss), [SHAPE, SHAPE]),
    "mse_weight": (lambda x, y: F.mse_loss(x, y, weight=y.detach().abs()), [SHAPE, SHAPE]),
    "l1": (every(F.l1_loss), [SHAPE, SHAPE]),
    "huber": (every(F.huber_loss), [SHAPE, SHAPE]),
    "huber_delta": (lambda x, y: F.huber_loss(x, y, delta=0.3), [SHAPE, SHAPE]),
    "smooth_l1": (lambda x, y: F.smooth_l1_loss(x, y, beta=0.5), [SHAPE, SHAPE]),
    "bce": (lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid().detach()), [SHAPE, SHAPE]),
    "bce_weight": (
        lambda x, y: F.binary_cross_entropy(
            x.sigmoid(), y.sigmoid().detach(), torch.linspace(0, 1, 7).double()[:, None]
        ),
        [SHAPE, SHAPE],
    ),
    "bce_logits": (every(F.binary_cross_entropy_with_logits), [SHAPE, SHAPE]),
    "bce_pos_weight": (
        lambda x, y: F.binary_cross_entropy_with_logits(x, y, pos_weight=WEIGHT[:, None, None]),
        [SHAPE, SHAPE],
    ),
    "kl": (lambda x, y: F.kl_div(x, y.softmax(1), reduction="none"), [SHAPE, SHAPE]),
    "kl_batch": (
        lambda x, y: F.kl_div(
            x.log_softmax(1), y.log_softmax(1), reduction="batchmean", log_target=True
        ),
        [SHAPE, SHAPE],
    ),
    "poisson": (lambda x, y: F.poisson_nll_loss(x, y.abs().detach(), full=True), [SHAPE, SHAPE]),
    "gaussian": (lambda x, y, v: F.gaussian_nll_loss(x, y, v.exp()), [SHAPE, SHAPE, SHAPE]),
    "soft_margin": (lambda x, y: F.soft_margin_loss(x, y.sign().detach()), [SHAPE, SHAPE]),
    "margin": (
        lambda x, y: F.margin_ranking_loss(x, y, torch.ones(1, 1, 7, 1).double(), margin=0.1),
        [SHAPE, SHAPE],
    ),
    "multilabel": (
        lambda x, y: F.multilabel_soft_margin_loss(x, (y > 0).double().detach()),
        [SHAPE, SHAPE],
    ),
    "cosine": (
        lambda x, y: F.cosine_embedding_loss(
            x.flatten(0, 2),
            y.flatten(0, 2),
            (x.flatten(0, 2)[:, 0].detach() > 0) * 2 - 1,
            margin=0.2,
        ),
        [SHAPE, SHAPE],
    ),
    "triplet": (
        lambda x, y, z: every(F.triplet_margin_loss)(x, y, z, swap=True),
        [SHAPE, SHAPE, SHAPE],
    ),
    "triplet_distance": (
        lambda x, y, z: F.triplet_margin_with_distance_loss(x, y, z),
        [SHAPE, SHAPE, SHAPE],
    ),
    "cross_entropy": (lambda x: every(F.cross_entropy)(x, labels_with(x)), [SHAPE]),
    "cross_entropy_plain": (lambda x: F.cross_entropy(x, LABELS), [SHAPE]),
    "cross_entropy_ignore": (
        lambda x: F.cross_entropy(x, labels_with(x, 7), weight=WEIGHT, ignore_index=7),
        [SHAPE],
    ),
    "cross_entropy_smooth": (
        lambda x: F.cross_entropy(
            x, labels_with(x, 7), WEIGHT, ignore_index=7, label_smoothing=0.2
        ),
        [SHAPE],
    ),
    "cross_entropy_soft": (
        lambda x, y: every(F.cross_entropy)(x, y.softmax(1)),
        [SHAPE, SHAPE],
    ),
    "cross_entropy_soft_weight": (
        lambda x, y: F.cross_entropy(x, y.softmax(1), WEIGHT, label_smoothing=0.1),
        [SHAPE, SHAPE],
    ),
    "nll": (lambda x: every(F.nll_loss)(x.log_softmax(1), labels_with(x)), [SHAPE]),
    "nll_weight": (
        lambda x: F.nll_loss(x.log_softmax(1), labels_with(x, -1), weight=WEIGHT, ignore_index=-1),
        [SHAPE],
    ),
}
SMOOTH = ["mse", "huber", "bce_logits", "gaussian", "cross_entropy", "cross_entropy_soft_weight"]


@pytest.mark.spmd(3)
def test_a_split_batch():
    def loss(x):
        return F.cross_entropy(x, torch.tensor([1, 0, 2, 1]), weight=WEIGHT)

    assert_parity(loss, [(4, 3)], {0: [0]}, mesh_of(3))


@pytest.mark.spmd(3)
def test_refusals():
    split = lightning_shard.shard(torch.randn(SHAPE), mesh_of(3), 1)
    with pytest.raises(lightning_shard.UnsupportedOperationError, match="class dim 1 is split"):
        F.cross_entropy(split, LABELS)
    with pytest.raises(lightning_shard.UnsupportedOperationError, match="size_average"):
        F.mse_loss(split, split, size_average=False)
