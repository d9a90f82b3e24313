"""A mesh is said in one way, and a mistyped argument does not reach the Trainer."""

import re

import pytest

from lightning_shard.lab.run import as_mesh, trainer_options


@pytest.mark.parametrize(
    ("mesh", "sizes"),
    [(2, (1, 2)), ("4x2", (4, 2)), ("1x2x3", (1, 2, 3)), ((2, 2), (2, 2)), ([1, 4], (1, 4))],
)
def test_meshes(mesh, sizes):
    assert as_mesh(mesh) == sizes
    assert as_mesh("x".join(map(str, sizes))) == sizes


@pytest.mark.parametrize("mesh", ["4", "2x", "axb", "0x2", "", (4,), (), 0, -1, (2, 1.5)])
def test_what_is_no_mesh(mesh):
    with pytest.raises(ValueError, match=re.escape(f"got {mesh!r}")):
        as_mesh(mesh)


def plan(module, mesh, *, sharding="full", **trainer):
    """Stands for a function of the laboratory."""


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("shardin", "neither plan() nor the Trainer has an argument 'shardin'; did you mean 'sh"),
        ("precison", "has an argument 'precison'; did you mean 'precision'?"),
        ("processes", "plan() has no argument 'processes'; give the ranks as mesh"),
        ("domain_parallel_size", "plan() has no argument 'domain_parallel_size'; give the ranks"),
        ("strategy", "plan() chooses 'strategy' of the Trainer itself"),
        ("xyzzy", "neither plan() nor the Trainer has an argument 'xyzzy'"),
    ],
)
def test_mistyped_arguments(name, sentence):
    with pytest.raises(TypeError, match=re.escape(sentence)):
        trainer_options(plan, {"precision": "bf16-mixed", name: 1})


def test_options_of_the_trainer():
    given = {"precision": "bf16-mixed", "gradient_clip_val": 1.0}
    assert trainer_options(plan, given) == given
