"""torch.distributions of split parameters: each point of a field has a distribution of its own."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributions as d

from tests.parity import assert_parity, mesh_of

SHAPE = (2, 3, 7, 4)
# of a positive field, and a value that lies in its support
FIELDS: dict[str, tuple[Callable[[Tensor], d.Distribution], Callable[[Tensor], Tensor]]] = {
    "Bernoulli": (lambda p: d.Bernoulli(logits=p), lambda y: (y > 1).double()),
    "Beta": (lambda p: d.Beta(p, p + 1), torch.sigmoid),
    "Binomial": (lambda p: d.Binomial(5, logits=p), lambda y: (y > 1) * 2.0),
    "Cauchy": (lambda p: d.Cauchy(p, p), torch.log),
    "Chi2": (d.Chi2, torch.abs),
    "ContinuousBernoulli": (lambda p: d.ContinuousBernoulli(logits=p), torch.sigmoid),
    "Exponential": (d.Exponential, torch.abs),
    "FisherSnedecor": (lambda p: d.FisherSnedecor(p, p + 5), torch.abs),
    "Gamma": (lambda p: d.Gamma(p, p + 1), torch.abs),
    "Geometric": (lambda p: d.Geometric(logits=p), lambda y: (y > 1).double()),
    "Gumbel": (lambda p: d.Gumbel(p, p), torch.log),
    "HalfCauchy": (d.HalfCauchy, torch.abs),
    "HalfNormal": (d.HalfNormal, torch.abs),
    "InverseGamma": (lambda p: d.InverseGamma(p + 3, p), torch.abs),
    "Kumaraswamy": (lambda p: d.Kumaraswamy(p, p + 1), torch.sigmoid),
    "Laplace": (lambda p: d.Laplace(p, p), torch.log),
    "LogNormal": (lambda p: d.LogNormal(p, p), torch.abs),
    "NegativeBinomial": (lambda p: d.NegativeBinomial(3, logits=-p), lambda y: (y > 1) * 2.0),
    "Normal": (lambda p: d.Normal(p, p), torch.log),
    "Pareto": (lambda p: d.Pareto(0.01, p + 3), torch.abs),
    "Poisson": (d.Poisson, lambda y: (y > 1) * 2.0),
    "RelaxedBernoulli": (lambda p: d.RelaxedBernoulli(torch.tensor(0.5), logits=p), torch.sigmoid),
    "StudentT": (lambda p: d.StudentT(p + 3, p, p), torch.log),
    "Uniform": (lambda p: d.Uniform(-p, p + 5), torch.sigmoid),
    "VonMises": (lambda p: d.VonMises(p, p), torch.log),
    "Weibull": (lambda p: d.Weibull(p + 1, p + 1), torch.abs),
    "several channels": (
        lambda p: d.Independent(d.Normal(p.movedim(1, -1), 1.0), 1),
        lambda y: y.movedim(1, -1),
    ),
    "Categorical": (
        lambda p: d.Categorical(logits=p.movedim(1, -1)), lambda y: y.argmax(1),
    ),
    "OneHotCategorical": (
        lambda p: d.OneHotCategorical(logits=p.movedim(1, -1)),
        lambda y: (y == y.amax(1, keepdim=True)).movedim(1, -1).double(),
    ),
    "Dirichlet": (
        lambda p: d.Dirichlet(p.movedim(1, -1)), lambda y: y.movedim(1, -1).softmax(-1),
    ),
    "MultivariateNormal": (
        lambda p: d.MultivariateNormal(
            p.movedim(1, -1), p.movedim(1, -1)[..., None] * torch.eye(3)
        ),
        lambda y: y.movedim(1, -1),
    ),
    "MixtureSameFamily": (
        lambda p: d.MixtureSameFamily(
            d.Categorical(logits=p.movedim(1, -1)),
            d.Normal(p.movedim(1, -1), p.movedim(1, -1)),
        ),
        lambda y: y[:, 0].log(),
    ),
    "TransformedDistribution": (
        lambda p: d.TransformedDistribution(
            d.Normal(p, p), [d.SigmoidTransform(), d.AffineTransform(1.0, 2.0)]
        ),
        lambda y: 1 + 2 * y.sigmoid(),
    ),
}  # fmt: skip
FEW = ["Normal", "Beta", "Categorical", "MultivariateNormal", "MixtureSameFamily"]
KINDS = ["mean", "variance", "stddev", "mode"]


def numbers_of(name: str, raw: Tensor, value: Tensor) -> Iterator[Tensor]:
    """Densities, moments, entropies and divergences of a distribution."""
    make, support = FIELDS[name]
    positive = torch.nn.functional.softplus(raw) + 0.1
    found = make(positive)
    other = make(positive + 0.5)
    value = support(torch.nn.functional.softplus(value) + 0.1)
    yield found.log_prob(value)
    for quantity in (
        *(lambda kind=kind: getattr(found, kind) for kind in KINDS),
        found.entropy,
        lambda: make(positive.detach()).cdf(value.detach()),  # torch cannot derive all
        lambda: d.kl_divergence(found, other),
    ):
        try:
            number = quantity()
        except NotImplementedError:  # torch has no formula
            continue
        if number.isfinite().all():  # else there is no such moment
            yield number


def check(name: str, dims: list[int], sizes: tuple[int, ...]) -> None:
    def function(raw: Tensor, value: Tensor) -> Any:
        return tuple(numbers_of(name, raw, value))

    assert_parity(function, [SHAPE, SHAPE], {0: dims, 1: dims}, mesh_of(*sizes))


@pytest.mark.slow
def test_some(run_each: Callable[..., None]) -> None:
    run_each(3, check, {name: {"name": name, "dims": [2], "sizes": (3,)} for name in FEW})


@pytest.mark.slow
def test_all(run_each: Callable[..., None]) -> None:
    run_each(3, check, {name: {"name": name, "dims": [2], "sizes": (3,)} for name in FIELDS})
    cases = {name: {"name": name, "dims": [2, 3], "sizes": (2, 2)} for name in FIELDS}
    run_each(4, check, cases)
