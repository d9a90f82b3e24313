"""Networks on point clouds: neighbours by distance, sets of samples, tokens of slices."""

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.model_zoo import Case


def nearest(points, queries, count):
    """The `count` points that are nearest to each query."""
    return torch.cdist(queries, points).topk(count, dim=-1, largest=False).indices


class SetAbstraction(nn.Module):
    """PointNet++ (Qi et al. 2017) as it is written in plain torch: sample, group, pool."""

    def __init__(self, inputs, outputs, samples, radius, neighbours):
        super().__init__()
        self.samples, self.radius, self.neighbours = samples, radius, neighbours
        layers, width = [], inputs + 3
        for n in outputs:
            layers += [nn.Conv2d(width, n, 1), nn.BatchNorm2d(n), nn.ReLU()]
            width = n
        self.net = nn.Sequential(*layers)

    def forward(self, xyz, features):
        chosen = farthest_point_sample(xyz, self.samples)
        centres = index_points(xyz, chosen)
        group = query_ball_point(self.radius, self.neighbours, xyz, centres)
        offsets = index_points(xyz, group) - centres[:, :, None]
        grouped = torch.cat([offsets, index_points(features, group)], -1)
        return centres, self.net(grouped.permute(0, 3, 2, 1)).amax(2).transpose(1, 2)


def square_distance(src, dst):
    """Squared distances (B, N, M), from products: as the code that most people copy has it."""
    dist = -2 * torch.matmul(src, dst.permute(0, 2, 1))
    dist += torch.sum(src**2, -1)[:, :, None]
    dist += torch.sum(dst**2, -1)[:, None]
    return dist


def index_points(points, idx):
    view = [len(points)] + [1] * (idx.ndim - 1)
    batch = torch.arange(len(points)).view(view).expand(idx.shape)
    return points[batch, idx, :]


def farthest_point_sample(xyz, count):
    b, n, _ = xyz.shape
    centroids = torch.zeros(b, count, dtype=torch.long)
    distance = torch.ones(b, n).to(xyz) * 1e10
    farthest = torch.zeros(b, dtype=torch.long)
    batch = torch.arange(b, dtype=torch.long)
    for i in range(count):
        centroids[:, i] = farthest
        centroid = xyz[batch, farthest, :].view(b, 1, 3)
        dist = torch.sum((xyz - centroid) ** 2, -1)
        mask = dist < distance
        distance[mask] = dist[mask]
        farthest = torch.max(distance, -1)[1]
    return centroids


def query_ball_point(radius, nsample, xyz, new_xyz):
    b, n, _ = xyz.shape
    s = new_xyz.shape[1]
    group_idx = torch.arange(n).view(1, 1, n).repeat([b, s, 1])
    sqrdists = square_distance(new_xyz, xyz)
    group_idx[sqrdists > radius**2] = n
    group_idx = group_idx.sort(dim=-1)[0][:, :, :nsample]
    group_first = group_idx[:, :, 0].view(b, s, 1).repeat([1, 1, nsample])
    mask = group_idx == n
    group_idx[mask] = group_first[mask]
    return group_idx


class FeaturePropagation(nn.Module):
    """Features of the three nearest samples, weighted by their distances."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(inputs, outputs, 1), nn.BatchNorm1d(outputs), nn.ReLU())

    def forward(self, xyz, samples, features, sampled):
        dists, idx = square_distance(xyz, samples).sort(dim=-1)
        dists, idx = dists[:, :, :3], idx[:, :, :3]
        weight = 1.0 / (dists + 1e-8)
        weight = weight / torch.sum(weight, dim=2, keepdim=True)
        found = torch.sum(index_points(sampled, idx) * weight[..., None], dim=2)
        return self.net(torch.cat([features, found], -1).permute(0, 2, 1)).permute(0, 2, 1)


class PointNetPlusPlus(nn.Module):
    """Segmentation of points: two levels down, two up."""

    def __init__(self):
        super().__init__()
        self.down1 = SetAbstraction(2, [8, 8], 11, 1.2, 6)
        self.down2 = SetAbstraction(8, [8, 16], 5, 2.4, 4)
        self.up2, self.up1 = FeaturePropagation(24, 8), FeaturePropagation(10, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, xyz, features):
        xyz1, f1 = self.down1(xyz, features)
        xyz2, f2 = self.down2(xyz1, f1)
        f1 = self.up2(xyz1, xyz2, f1, f2)
        return F.log_softmax(self.head(self.up1(xyz, xyz1, features, f1)), -1)


class EdgeConvolution(nn.Module):
    """Dynamic graph network (Wang et al. 2019): the graph of the nearest points in every layer."""

    def __init__(self):
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(2 * n, 8), nn.LeakyReLU(0.2)) for n in (3, 8)
        )
        self.head = nn.Linear(19, 4)

    def forward(self, x):
        found = [x]
        for net in self.nets:
            index = nearest(x, x, 5)
            near = x[index]
            x = net(torch.cat([near - x[:, None], x[:, None].expand_as(near)], -1)).amax(1)
            found.append(x)
        return self.head(torch.cat(found, -1))


class PhysicsAttention(nn.Module):
    """Transolver (Wu et al. 2024): points are weighed into slices, which attend to each other."""

    def __init__(self, dim=8, heads=2, slices=4):
        super().__init__()
        self.heads = heads
        head = dim // heads
        self.x, self.fx = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.slice = nn.Linear(head, slices)
        self.temperature = nn.Parameter(torch.ones(1, heads, 1, 1) * 0.5)
        self.q, self.k, self.v = (nn.Linear(head, head, bias=False) for _ in range(3))
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, _ = x.shape
        fx = self.fx(x).reshape(b, n, self.heads, -1).permute(0, 2, 1, 3)
        xm = self.x(x).reshape(b, n, self.heads, -1).permute(0, 2, 1, 3)
        weights = (self.slice(xm) / self.temperature).softmax(-1)
        norm = weights.sum(2)
        token = torch.einsum("bhnc,bhng->bhgc", fx, weights) / (norm + 1e-5)[..., None]
        token = F.scaled_dot_product_attention(self.q(token), self.k(token), self.v(token))
        out = torch.einsum("bhgc,bhng->bhnc", token, weights)
        return self.out(out.transpose(1, 2).reshape(b, n, -1))


class TransolverBlocks(nn.Module):
    def __init__(self, dim=8, depth=2):
        super().__init__()
        self.pre = nn.Linear(5, dim)
        self.attention = nn.ModuleList(PhysicsAttention(dim) for _ in range(depth))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(),
                          nn.Linear(2 * dim, dim)) for _ in range(depth)
        )  # fmt: skip
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth))
        self.head = nn.Linear(dim, 2)

    def forward(self, points, fields):
        x = self.pre(torch.cat([points, fields], -1))
        for attention, mlp, norm in zip(self.attention, self.mlp, self.norms, strict=True):
            x = x + attention(norm(x))
            x = x + mlp(x)
        return self.head(x)


class RadiusSum(nn.Module):
    """Smoothed particles: pairs within a radius, by `nonzero` of distances; forces are added up."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x):
        i, j = (torch.cdist(x, x) < 1.0).nonzero(as_tuple=True)
        apart = i != j
        i, j = i[apart], j[apart]
        offset = x[j] - x[i]
        distance = offset.norm(dim=-1, keepdim=True)
        force = self.net(torch.cat([offset, distance], -1)) * (1 - distance) ** 2
        return torch.zeros_like(x).index_add_(0, i, force), torch.bincount(i, minlength=len(x))


POINTS = (2, 37, 3)
CASES = {
    "point_net_plus_plus": Case(PointNetPlusPlus, [POINTS, (2, 37, 2)], each=[(1, 1), (1, 1)]),
    "edge_convolution": Case(EdgeConvolution, [(37, 3)], each=[(0, 0)]),
    "transolver": Case(TransolverBlocks, [POINTS, (2, 37, 2)], each=[(1, 1), (1, 1)]),
    "radius_sum": Case(RadiusSum, [(41, 2)], each=[(0, 0)]),
}
