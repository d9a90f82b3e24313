"""Attention, mixers and recurrences as people write them, also with einops."""

import torch
import torch.nn.functional as F
from einops import rearrange, reduce, repeat
from einops.layers.torch import Rearrange, Reduce
from torch import nn

from benchmarks.model_zoo import Apply, Case, row

FIELD = (2, 3, 13, 11)


def function(f):
    return lambda: Apply(f)


class VQ(nn.Module):
    """A straight-through codebook."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Embedding(6, 3)

    def forward(self, x):
        z = x.permute(0, 2, 3, 1).contiguous()
        flat = z.view(-1, 3)
        d = (
            flat.pow(2).sum(1, keepdim=True)
            + self.codes.weight.pow(2).sum(1)
            - 2 * flat @ self.codes.weight.t()
        )
        index = d.argmin(1)
        q = self.codes(index).view(z.shape)
        loss = F.mse_loss(q.detach(), z) + 0.25 * F.mse_loss(q, z.detach())
        q = z + (q - z).detach()
        onehot = F.one_hot(index, 6).to(z.dtype).mean(0)
        perplexity = torch.exp(-(onehot * (onehot + 1e-10).log()).sum())
        return q.permute(0, 3, 1, 2), loss, perplexity


class CBAM(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Flatten(), nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 3))
        self.conv = nn.Conv2d(2, 1, 7, padding=3)

    def forward(self, x):
        a = self.mlp(F.avg_pool2d(x, (x.size(2), x.size(3)), stride=(x.size(2), x.size(3))))
        m = self.mlp(F.max_pool2d(x, (x.size(2), x.size(3))))
        lse = torch.logsumexp(x.view(x.size(0), x.size(1), -1), dim=2)
        x = x * torch.sigmoid(a + m + lse).unsqueeze(2).unsqueeze(3).expand_as(x)
        s = torch.cat((torch.max(x, 1)[0].unsqueeze(1), torch.mean(x, 1).unsqueeze(1)), dim=1)
        return x * torch.sigmoid(self.conv(s))


class SqueezeExcite(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Sequential(
            nn.Linear(3, 2), nn.ReLU(inplace=True), nn.Linear(2, 3), nn.Sigmoid()
        )

    def forward(self, x):
        b, c, _, _ = x.size()
        y = self.fc(F.adaptive_avg_pool2d(x, 1).view(b, c)).view(b, c, 1, 1)
        return x * y.expand_as(x)


class NonLocal(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Conv2d(3, c, 1) for c in (2, 2, 3))
        self.gamma = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        b, c, h, w = x.size()
        q = self.q(x).view(b, -1, h * w).permute(0, 2, 1)
        k = self.k(x).view(b, -1, h * w)
        attention = F.softmax(torch.bmm(q, k), dim=-1)
        out = torch.bmm(self.v(x).view(b, -1, h * w), attention.permute(0, 2, 1)).view(b, c, h, w)
        return self.gamma * out + x


class LinearAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Conv2d(3, 24, 1, bias=False), nn.Conv2d(8, 3, 1)

    def forward(self, x):
        *_, h, w = x.shape
        q, k, v = (
            rearrange(t, "b (h c) x y -> b h c (x y)", h=2) for t in self.qkv(x).chunk(3, dim=1)
        )
        q, k = q.softmax(dim=-2), k.softmax(dim=-1)
        context = torch.einsum("b h d n, b h e n -> b h d e", k, v)
        out = torch.einsum("b h d e, b h d n -> b h e n", context, q)
        return self.out(rearrange(out, "b h c (x y) -> b (h c) x y", h=2, x=h, y=w))


class AxialAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        b, c, h, w = x.shape
        r = x.permute(0, 2, 3, 1).reshape(b * h, w, c)
        r = self.norm(r + self.rows(r, r, r)[0])
        k = r.view(b, h, w, c).permute(0, 2, 1, 3).reshape(b * w, h, c)
        k = k + self.rows(k, k, k, need_weights=False)[0]
        return k.view(b, w, h, c).permute(0, 3, 2, 1)


class MixtureOfExperts(nn.Module):
    def __init__(self, dense=True):
        super().__init__()
        self.dense = dense
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            if self.dense:
                out = out + expert(x) * (weights * (chosen == i)).sum(-1, keepdim=True)
            else:
                rows, place = torch.where(chosen == i)
                out[rows] += expert(x[rows]) * weights[rows, place, None]
        return out


class WindowAttention(nn.Module):
    """Windows by view and permute, with a cyclic shift and its mask."""

    def __init__(self, window=4, shift=2):
        super().__init__()
        self.window, self.shift = window, shift
        self.qkv = nn.Linear(4, 12)
        self.table = nn.Parameter(torch.randn((2 * window - 1) ** 2, 2))
        c = torch.stack(
            torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")
        ).flatten(1)
        r = (c[:, :, None] - c[:, None]).permute(1, 2, 0) + window - 1
        self.register_buffer("index", r[..., 0] * (2 * window - 1) + r[..., 1])

    def forward(self, x):
        b, h, w, c = x.shape
        n = self.window
        x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        x = (
            x.view(b, h // n, n, w // n, n, c)
            .permute(0, 1, 3, 2, 4, 5)
            .contiguous()
            .view(-1, n * n, c)
        )
        q, k, v = self.qkv(x).reshape(-1, n * n, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        attention = q @ k.transpose(-2, -1) + self.table[self.index.view(-1)].view(
            n * n, n * n, -1
        ).permute(2, 0, 1)
        mask = torch.zeros(1, h, w, 1, dtype=x.dtype)
        for i, a in enumerate((slice(0, -n), slice(-n, -self.shift), slice(-self.shift, None))):
            for j, e in enumerate((slice(0, -n), slice(-n, -self.shift), slice(-self.shift, None))):
                mask[:, a, e] = 3 * i + j
        mask = mask.view(1, h // n, n, w // n, n, 1).permute(0, 1, 3, 2, 4, 5).reshape(-1, n * n)
        mask = (mask[:, None] != mask[:, :, None]).to(x.dtype) * -100
        attention = (
            (attention.view(b, -1, 2, n * n, n * n) + mask[:, None])
            .view(-1, 2, n * n, n * n)
            .softmax(-1)
        )
        x = (attention @ v).transpose(1, 2).reshape(-1, n * n, c)
        x = x.view(b, h // n, w // n, n, n, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        return torch.roll(x, (self.shift, self.shift), (1, 2))


class UnfoldAttention(nn.Module):
    """Neighbourhood attention by F.unfold."""

    def forward(self, x):
        b, c, h, w = x.shape
        k = F.unfold(x, 3, padding=1).view(b, c, 9, h, w)
        weights = (x.unsqueeze(2) * k).sum(1, keepdim=True).softmax(2)
        patches = x.unfold(2, 3, 2).unfold(3, 3, 2)
        return (weights * k).sum(2), patches.contiguous().view(b, c, -1, 9).mean(-1)


def einops_forms(x):
    h = x.shape[2] // 2 * 2
    x = x[:, :, :h]
    return (
        rearrange(x, "b c (h p) w -> b (c p) h w", p=2), rearrange(x, "b c h w -> (b h) w c"),
        rearrange(x, "b c h w -> h (b w) c"), rearrange(x, "b c (p h) w -> b (h p) (c w)", p=2),
        reduce(x, "b c (h 2) w -> b c h w", "max"), reduce(x, "b c h w -> b c", "mean"),
        reduce(x, "b c h w -> b c () w", "sum"), repeat(x, "b c h w -> b c (h 2) (w 3)"),
        repeat(x, "b c h w -> b r c h w", r=2), rearrange([x, x], "n b c h w -> b (n c) h w"),
    )  # fmt: skip


def patches():
    return nn.Sequential(
        Rearrange("b c (h p) (w q) -> b (h w) (p q c)", p=4, q=4), nn.Linear(48, 8),
        nn.LayerNorm(8), nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True),
        Reduce("b n c -> b c", "mean"), nn.Linear(8, 2),
    )  # fmt: skip


class SequenceModel(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.rnn = kind(4, 5, batch_first=True)

    def forward(self, x):
        return self.rnn(x)[0]


CASES = {
    "vq": Case(VQ, [FIELD]),
    "cbam": Case(CBAM, [FIELD]),
    "squeeze_excite": Case(SqueezeExcite, [FIELD]),
    "non_local": Case(NonLocal, [FIELD]),
    "linear_attention": Case(LinearAttention, [FIELD]),
    "axial_attention": Case(AxialAttention, [(2, 4, 9, 7)]),
    "experts_dense": row(MixtureOfExperts, True, on=(11, 4), split=(0,)),
    "experts_routed": row(MixtureOfExperts, False, on=(11, 4), split=(0,)),
    "window_attention": Case(WindowAttention, [(2, 12, 16, 4)], (1, 2)),
    "unfold_attention": Case(UnfoldAttention, [FIELD]),
    "einops": Case(function(einops_forms), [(2, 3, 14, 9)]),
    "patches": Case(patches, [(2, 3, 20, 12)]),
    "transformer_encoder": Case(
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True),
            2,
            enable_nested_tensor=False,
        ),
        [(2, 11, 8)],
        (1,),
    ),
    "transformer": row(nn.Transformer, 8, 2, 1, 1, 16, 0.0, on=(11, 2, 8), split=(0,),
        run=lambda m, x: m(x, x[:5], tgt_mask=m.generate_square_subsequent_mask(5))),
    "gru_batch_split": row(SequenceModel, nn.GRU, on=(5, 7, 4), split=(0,)),
    "lstm": row(SequenceModel, nn.LSTM, on=(5, 7, 4), split=(1, 0)),
    "mlp_mixer": Case(lambda: Apply(lambda a, b, x: b(x + a(x.transpose(1, 2)).transpose(1, 2)),
        nn.Sequential(nn.Linear(11, 6), nn.GELU(), nn.Linear(6, 11)),
        nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))), [(2, 11, 4)], (1,)),
}  # fmt: skip
