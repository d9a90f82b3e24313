"""A mesh is said in one way, and a mistyped argument does not reach the Trainer."""

import re

import pytest

from lightning_shard.lab.arguments import check_trainer_options, read_mesh, shown


@pytest.mark.parametrize(
    ("mesh", "sizes"),
    [(2, (1, 2)), ("4x2", (4, 2)), ("1X2x3", (1, 2, 3)), ((2, 2), (2, 2)), ([1, 4], (1, 4))],
)
def test_meshes(mesh, sizes):
    assert read_mesh(mesh) == sizes
    assert read_mesh(shown(sizes)) == sizes


@pytest.mark.parametrize("mesh", ["4", "2x", "axb", "0x2", "", (4,), (), 0, -1, (2, 1.5), None])
def test_what_is_no_mesh(mesh):
    with pytest.raises(ValueError, match=re.escape(f"got {mesh!r}")):
        read_mesh(mesh)


def plan(module, mesh, *, sharding="full", **trainer):
    """Stands for a function of the laboratory."""


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("shardin", "plan takes no argument 'shardin': did you mean 'sharding'?"),
        ("precison", "plan takes no argument 'precison': did you mean 'precision'?"),
        ("processes", "plan takes no argument 'processes': say it by the mesh"),
        ("domain_parallel_size", 'such as mesh="4x2" for 4 data replicas x 2 ranks of each'),
        ("strategy", "plan takes no argument 'strategy': plan decides it"),
        ("xyzzy", "plan takes no argument 'xyzzy': the Trainer has none, either"),
    ],
)
def test_mistyped_arguments(name, sentence):
    with pytest.raises(TypeError, match=re.escape(sentence)):
        check_trainer_options(plan, {"precision": "bf16-mixed", name: 1})


def test_options_of_the_trainer():
    check_trainer_options(plan, {"precision": "bf16-mixed", "gradient_clip_val": 1.0})
