"""Models of transformers: text, sound, images."""

import pytest

from tests.models.check import check


@pytest.mark.quick_rows("llama_lm", "vit_interpolated")
@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    "name",
    [
        "t5",
        "bert_mask",
        "gpt2_lm",
        "llama_lm",
        "whisper",
        "vit_interpolated",
        "swinv2",
        "segformer_loss",
        "dpt",
    ],
)
def test_model(name):
    check("transformers", name, 2)


@pytest.mark.slow
@pytest.mark.spmd(3)
def test_three_ranks():
    check("transformers", "t5_loss", 3)
