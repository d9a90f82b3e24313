"""Networks of fields as people of scientific computing write them."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from benchmarks.model_zoo import Apply, Case, row

FIELD = (2, 3, 13, 11)


class Coordinates(nn.Module):
    """CoordConv and Fourier features of the grid."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3 + 2 + 8, 4, 3, padding=1)
        self.register_buffer("b", torch.randn(2, 4))

    def forward(self, x):
        b, _, h, w = x.shape
        ys = torch.linspace(0, 1, h, dtype=x.dtype, device=x.device)
        xs = torch.linspace(0, 1, w, dtype=x.dtype, device=x.device)
        grid = torch.stack(torch.meshgrid(ys, xs, indexing="ij"), -1)
        features = 2 * math.pi * grid @ self.b
        features = torch.cat([grid, features.sin(), features.cos()], -1)
        features = features.permute(2, 0, 1).unsqueeze(0).repeat(b, 1, 1, 1)
        return self.conv(torch.cat([x, features], 1))


class OddUNet(nn.Module):
    """Skips on odd extents: padded or cropped by shape, as in the common repositories."""

    def __init__(self, mode="pad"):
        super().__init__()
        self.mode = mode
        self.inc = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        )
        self.d1 = nn.Sequential(
            nn.MaxPool2d(2), nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        )
        self.d2 = nn.Sequential(
            nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        )
        self.up2 = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.c2 = nn.Conv2d(16, 4, 3, padding=1)
        self.up1 = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.c1 = nn.Conv2d(8, 2, 1)

    def join(self, up, skip):
        dy, dx = skip.size()[2] - up.size()[2], skip.size()[3] - up.size()[3]
        if self.mode == "pad":
            up = F.pad(up, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        elif self.mode == "crop":
            h, w = up.shape[-2:]
            skip = skip[:, :, (dy // 2) : (dy // 2) + h, (dx // 2) : (dx // 2) + w]
        else:
            up = F.interpolate(up, size=skip.shape[2:], mode="nearest")
        return torch.cat([skip, up], dim=1)

    def forward(self, x):
        a = self.inc(x)
        b = self.d1(a)
        c = self.d2(b)
        return self.c1(self.join(self.up1(self.c2(self.join(self.up2(c), b))), a))


def discriminator(norm):
    def conv(a, b, s):
        c = nn.Conv2d(a, b, 4, s, 1)
        return norm(c)

    return nn.Sequential(
        conv(3, 8, 2), nn.LeakyReLU(0.2, True), conv(8, 8, 2), nn.InstanceNorm2d(8, affine=True),
        nn.LeakyReLU(0.2, True), conv(8, 1, 1),
    )  # fmt: skip


def group_equivariant(conv, x):
    ys = [torch.rot90(conv(torch.rot90(x, i, (2, 3))), -i, (2, 3)) for i in range(4)]
    ys.append(conv(x.flip(-1)).flip(-1))
    ys.append(conv(x.transpose(2, 3)).transpose(2, 3))
    return torch.stack(ys).mean(0), torch.stack(ys, 1).amax(1)


class FNOBlock(nn.Module):
    """As in the first code of Li et al. 2020."""

    def __init__(self, modes=3):
        super().__init__()
        self.modes = modes
        self.w1 = nn.Parameter(torch.rand(3, 3, modes, modes, dtype=torch.cdouble) / 9)
        self.w2 = nn.Parameter(torch.rand(3, 3, modes, modes, dtype=torch.cdouble) / 9)
        self.skip = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        m = self.modes
        f = torch.fft.rfft2(x)
        out = torch.zeros(
            x.shape[0], 3, x.size(-2), x.size(-1) // 2 + 1, dtype=torch.cdouble, device=x.device
        )
        out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", f[:, :, :m, :m], self.w1)
        out[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", f[:, :, -m:, :m], self.w2)
        return F.gelu(torch.fft.irfft2(out, s=(x.size(-2), x.size(-1))) + self.skip(x))


class AFNO(nn.Module):
    """The mixer of FourCastNet."""

    def __init__(self, dim=4, blocks=2):
        super().__init__()
        self.blocks, self.size = blocks, dim // blocks
        self.w1 = nn.Parameter(0.02 * torch.randn(2, blocks, self.size, self.size))
        self.b1 = nn.Parameter(0.02 * torch.randn(2, blocks, self.size))

    def forward(self, x):
        bias = x
        b, h, w, c = x.shape
        x = torch.fft.rfft2(x, dim=(1, 2), norm="ortho").reshape(
            b, h, w // 2 + 1, self.blocks, self.size
        )
        o_r = torch.zeros(
            b, h, w // 2 + 1, self.blocks, self.size, dtype=bias.dtype, device=x.device
        )
        o_i = torch.zeros_like(o_r)
        total = h // 2 + 1
        kept = int(total * 0.75)
        s = (slice(None), slice(total - kept, total + kept), slice(None, kept))
        o_r[s] = F.relu(
            torch.einsum("...bi,bio->...bo", x[s].real, self.w1[0])
            - torch.einsum("...bi,bio->...bo", x[s].imag, self.w1[1])
            + self.b1[0]
        )
        o_i[s] = F.relu(
            torch.einsum("...bi,bio->...bo", x[s].imag, self.w1[0])
            + torch.einsum("...bi,bio->...bo", x[s].real, self.w1[1])
            + self.b1[1]
        )
        x = F.softshrink(torch.stack([o_r, o_i], dim=-1), lambd=0.01)
        x = torch.view_as_complex(x).reshape(b, h, w // 2 + 1, c)
        return torch.fft.irfft2(x, s=(h, w), dim=(1, 2), norm="ortho") + bias


class PixelShuffleSR(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 12, 5, padding=2, padding_mode="reflect"), nn.PReLU(), nn.PixelShuffle(2),
            nn.Conv2d(3, 3, 3, padding="same", padding_mode="replicate"),
        )  # fmt: skip

    def forward(self, x):
        return self.net(x) + F.interpolate(x, scale_factor=2, mode="bicubic", align_corners=False)


class Normalizer(nn.Module):
    """Unit Gaussian and range scaling by statistics of the batch."""

    def forward(self, x):
        m, s = torch.mean(x, 0), torch.std(x, 0)
        a = (x - m) / (s + 1e-5)
        low, high = x.amin(dim=(2, 3), keepdim=True), x.amax(dim=(2, 3), keepdim=True)
        b = (x - low) / (high - low)
        c = (x - x.mean(dim=(0, 2, 3), keepdim=True)) / x.std(
            dim=(0, 2, 3), keepdim=True, unbiased=False
        )
        d = F.normalize(x, dim=1) + F.normalize(x, dim=2)
        return a, b, c, d, torch.var_mean(x, dim=(1, 2))[0]


class AttentionUNet(nn.Module):
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
            nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(2, b), nn.SiLU(),
            nn.Conv2d(b, b, 3, padding=1), nn.ReLU(),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.down1(x)
        deep = self.down2(nn.functional.max_pool2d(first, 2))
        tokens = deep.flatten(2).transpose(1, 2)
        tokens = tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]
        deep = tokens.transpose(1, 2).reshape(deep.shape)
        return self.last(torch.cat([first, self.up(deep)], 1))


CASES = {
    "attention_unet": Case(AttentionUNet, [(2, 3, 14, 10)]),
    "periodic_cnn": Case(
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 5, padding=2, padding_mode="circular"),
            nn.GELU(),
            nn.Conv2d(6, 3, 3, dilation=2, padding=2, padding_mode="circular"),
        ),
        [FIELD],
        (2, 3),
    ),
    "dilated_1d": Case(lambda: nn.Sequential(nn.Conv1d(2, 4, 3, dilation=1, padding=1), nn.SiLU(),
        nn.Conv1d(4, 4, 3, dilation=4, padding=4), nn.BatchNorm1d(4), nn.Conv1d(4, 1, 3, stride=2)),
        [(2, 2, 29)], (2,)),
    "causal_wavenet": Case(lambda: Apply(lambda a, b,
        x: b(F.pad(torch.tanh(a(F.pad(x, (2, 0)))) * torch.sigmoid(x[:, :1]), (4, 0))),
        nn.Conv1d(2, 4, 3), nn.Conv1d(4, 1, 3, dilation=2)), [(2, 2, 29)], (2,)),
    "coordinates": Case(Coordinates, [FIELD]),
    "odd_unet_pad": row(OddUNet, "pad", on=(2, 3, 29, 23)),
    "odd_unet_crop": row(OddUNet, "crop", on=(2, 3, 29, 23)),
    "odd_unet_resize": row(OddUNet, "resize", on=(2, 3, 29, 23)),
    "spectral_norm_gan": row(discriminator, parametrizations.spectral_norm, on=(2, 3, 33, 30)),
    "weight_norm_gan": row(discriminator, parametrizations.weight_norm, on=(2, 3, 33, 30)),
    "group_equivariant": row(nn.Conv2d, 3, 2, 3, padding=1, on=(2, 3, 11, 11),
        run=group_equivariant),
    "group_equivariant_uneven": row(nn.Conv2d, 3, 2, 3, padding=1, on=(2, 3, 13, 11),
        run=group_equivariant),
    "fno_block": Case(FNOBlock, [FIELD]),
    "afno": Case(AFNO, [(2, 12, 10, 4)], (1, 2)),
    "pixel_shuffle_sr": Case(PixelShuffleSR, [FIELD]),
    "normalizer": Case(Normalizer, [FIELD]),
    "deformable": row(nn.Conv2d, 3, 18, 3, padding=1, on=FIELD, run=lambda o, x:
        __import__("torchvision").ops.deform_conv2d( x, o(x), torch.ones(3, 3, 3, 3, dtype=x.dtype),
        padding=1 )),
}  # fmt: skip
