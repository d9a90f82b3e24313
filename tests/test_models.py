"""Whole models that know nothing of us, forward and backward against one process."""

import pytest
import torch
import torchvision
from neuralop.models import UNO
from torch import nn
from transformers import T5Config, T5EncoderModel, T5ForConditionalGeneration

from tests.double_fno import to_double
from tests.parity import assert_parity_of_module, mesh_of

T5_TOLERANCE = 1e-5  # its norms and softmax are computed in float32, whatever its weights are
SMALL = {"weights": None, "num_classes": 5}


class UNet(nn.Module):
    """A U-Net with attention at the bottom, as people write it."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down1 = self.block(3, width)
        self.down2 = self.block(width, 2 * width)
        self.attention = nn.MultiheadAttention(2 * width, 2, batch_first=True)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.last = nn.Sequential(self.block(2 * width, width), nn.Conv2d(width, 1, 1))

    @staticmethod
    def block(a: int, b: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(a, b, 3, padding=1),
            nn.GroupNorm(2, b),
            nn.SiLU(),
            nn.Conv2d(b, b, 3, padding=1),
            nn.ReLU(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.down1(x)
        deep = self.down2(nn.functional.max_pool2d(first, 2))
        tokens = deep.flatten(2).transpose(1, 2)
        tokens = tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]
        deep = tokens.transpose(1, 2).reshape(deep.shape)
        return self.last(torch.cat([first, self.up(deep)], 1))


class Output(nn.Module):
    """The tensor of interest of a model that returns more."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.model(x)
        return output[self.name] if isinstance(output, dict) else getattr(output, self.name)


class FromEmbeddings(nn.Module):
    """T5 on embeddings of a split sequence."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(inputs_embeds=x).last_hidden_state


def swin() -> nn.Module:
    from torchvision.models.swin_transformer import SwinTransformer

    return SwinTransformer(
        [2, 2], 8, [2, 2], [2, 2], [3, 3], num_classes=5, stochastic_depth_prob=0.0
    )


def vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=5)


def t5_encoder() -> nn.Module:
    config = T5Config(
        vocab_size=32, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, dropout_rate=0.0
    )
    return FromEmbeddings(T5EncoderModel(config))


def convnext() -> nn.Module:
    return torchvision.models.convnext_tiny(**SMALL, stochastic_depth_prob=0.0)


def fcn() -> nn.Module:
    options = {"weights": None, "weights_backbone": None, "num_classes": 3}
    return Output(torchvision.models.segmentation.fcn_resnet50(**options), "out")


def uno() -> nn.Module:
    net = UNO(
        in_channels=1, out_channels=1, hidden_channels=4, uno_out_channels=[4, 4, 4], n_layers=3,
        uno_n_modes=[[4, 4]] * 3, uno_scalings=[[1, 1], [0.5, 0.5], [2, 2]],
        channel_mlp_skip="linear",
    )  # fmt: skip
    return to_double(net)


MODELS = {
    "resnet50": (lambda: torchvision.models.resnet50(**SMALL), (2, 3, 40, 33), 2),
    "convnext": (convnext, (1, 3, 48, 33), 2),
    "fcn": (fcn, (2, 3, 40, 33), 2),
    "unet": (UNet, (2, 3, 14, 10), 2),
    "vit": (vit, (2, 3, 32, 32), 2),
    "swin": (swin, (2, 3, 32, 40), 2),
    "t5_encoder": (t5_encoder, (2, 11, 16), 1),
    "uno": (uno, (2, 1, 16, 12), 2),
}


@pytest.mark.spmd(2)
@pytest.mark.parametrize("name", MODELS)
def test_model(name):
    make, shape, dim = MODELS[name]
    torch.manual_seed(5)
    model = make().double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    tolerance = T5_TOLERANCE if name.startswith("t5") else None
    assert_parity_of_module(model, shape, [dim], mesh_of(2), tolerance=tolerance)


def t5_loss():
    config = T5Config(
        vocab_size=32, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


class Summarizer(nn.Module):
    """T5 with its loss: the source sequence is split, the target whole."""

    def __init__(self) -> None:
        super().__init__()
        self.model = t5_loss()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(inputs_embeds=x, labels=torch.arange(10).reshape(2, 5)).loss


@pytest.mark.spmd(3)
def test_t5_on_a_split_source():
    torch.manual_seed(5)
    assert_parity_of_module(
        Summarizer().double(), (2, 11, 16), [1], mesh_of(3), tolerance=T5_TOLERANCE
    )
