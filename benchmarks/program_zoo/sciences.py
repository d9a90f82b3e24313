"""Fields of other sciences: seismics, tomography, flow, MRI, restoration, and equations."""
# pyright: reportMissingImports=false

import importlib
from typing import Any

import torch
from torch import nn

from benchmarks.program_zoo import (
    SPLIT,
    Parts,
    classes,
    fields,
    folder,
    numbers,
    pictures,
    program,
    supervised,
)

OLDER = "pytorch_lightning"
OF_MINERVA = {
    "unet": ("UNet", {"n_channels": 1}),
    "wisenet": ("WiseNet", {}),
}  # fmt: skip
OF_MEDVISION = {
    "unet": {"features": [4, 8, 16]},
    "unet3d": {"base_channels": 4},
    "u2net": {},
}  # fmt: skip


def pairs(*shape: int) -> list[Any]:
    return fields(4, lambda i: (numbers(*shape, seed=i), numbers(*shape, seed=9 + i)))


def of_minerva(name: str) -> Parts:
    kind, options = OF_MINERVA[name]
    module = importlib.import_module(f"minerva.models.nets.image.{name}")
    data = pairs(1, 16, 16, 16) if name == "wisenet" else pairs(1, 32, 32)
    return Parts(getattr(module, kind)(**options), data)


def of_medvision(name: str) -> Parts:
    from medvision.models.model_factory import SegmentationModel

    shape = (16, 16, 16) if name == "unet3d" else (64, 64)
    network = {"network": {"name": name}, "in_channels": 1, "out_channels": 2}
    metrics = {"dice": {"type": "dice"}, "iou": {"type": "iou"}}
    config = {**network, "loss": {"type": "dice"}, "metrics": metrics, **OF_MEDVISION[name]}
    data = fields(4, lambda i: (numbers(1, *shape, seed=i), classes(*shape, seed=i)))
    return Parts(SegmentationModel(config), data)


for each in OF_MINERVA:
    program("minerva-ml", "minerva", name=f"minerva_{each}")(lambda name=each: of_minerva(name))


@program("minerva-ml", "minerva", changed="its forward pass without x.float(); SGD")
def minerva_deeplab() -> Parts:
    from minerva.models.nets.image.deeplabv3 import DeepLabV3

    class InFloat64(DeepLabV3):
        def forward(self, x: Any) -> Any:
            z = self.fc(self.backbone(x))
            return nn.functional.interpolate(z, x.shape[-2:], mode="bilinear")

    data = fields(4, lambda i: (numbers(3, 64, 64, seed=i), classes(1, 64, 64, of=3, seed=i)))
    return Parts(InFloat64(num_classes=3, optimizer=torch.optim.SGD), data)


for each in OF_MEDVISION:
    program("medvision-segmentation", "medvision", name=f"medvision_{each}", host=OLDER)(
        lambda name=each: of_medvision(name)
    )


@program(
    "membrain-seg", "membrain_seg", host=OLDER, float32=True, refused="cannot be of the class monai"
)
def membrain_tomograms() -> Parts:
    from membrain_seg.segmentation.networks.unet import SemanticSegmentationUnet

    net = SemanticSegmentationUnet(
        channels=(4, 4, 8, 8, 8, 8), use_deep_supervision=True, max_epochs=1, batch_size=2
    )

    def sample(i: int) -> Any:
        label = classes(1, 64, 64, 64, of=3, seed=i).float()
        return {"image": numbers(1, 64, 64, 64, seed=i), "dataset": "tomograms",
                "label": [label, label[:, ::2, ::2, ::2], label[:, ::4, ::4, ::4]]}  # fmt: skip

    return Parts(net, fields(4, sample))


@program("ptlflow", "ptlflow", meshes=("1x2", "2x2"))
def ptlflow_raft() -> Parts:
    from ptlflow.models.raft.raft import raft_small

    def sample(i: int) -> Any:
        return {
            "images": numbers(2, 3, 128, 128, seed=i).sigmoid(),
            "flows": numbers(1, 2, 128, 128, seed=i),
            "valids": torch.ones(1, 1, 128, 128),
            "meta": {"dataset_name": "sintel"},
        }

    return Parts(
        raft_small(iters=2), fields(2, sample), trainer={"max_steps": 1}, validates=False,
        strategy={"shard_dims": {"images": 3, "flows": 3, "valids": 3}},
    )  # fmt: skip


@program("opensr-srgan", "opensr_srgan", host=OLDER, changed="no perceptual loss, no pictures")
def opensr_srgan() -> Parts:
    from opensr_srgan.model.SRGAN import SRGAN_model

    ema = {"enabled": True, "decay": 0.9, "update_after_step": 0, "use_num_updates": True}
    losses = {"adv_loss_beta": 1e-3, "adv_loss_schedule": "cosine", "l1_weight": 1.0,
              "sam_weight": 0.1, "perceptual_weight": 0.0, "tv_weight": 0.1, "max_val": 1.0,
              "ssim_win": 11}  # fmt: skip
    config = {
        "Data": {"normalization": "none"}, "Model": {"in_bands": 3, "continue_training": False},
        "Training": {"pretrain_g_only": False, "adv_loss_ramp_steps": 4, "EMA": ema,
                     "Losses": losses},
        "Generator": {"model_type": "SRResNet", "block_type": "rcab", "n_channels": 16,
                      "n_blocks": 2, "large_kernel_size": 9, "small_kernel_size": 3,
                      "scaling_factor": 4},
        "Discriminator": {"model_type": "patchgan", "n_blocks": 2},
        "Optimizers": {"optim_g_lr": 1e-4, "optim_d_lr": 1e-4},
        "Schedulers": {"metric": "val_metrics/l1", "patience_g": 1, "patience_d": 1,
                       "factor_g": 0.5, "factor_d": 0.5},
        "Logging": {"num_val_images": 0, "wandb": {"enabled": False}},
    }  # fmt: skip
    data = fields(
        4, lambda i: (numbers(3, 16, 16, seed=i).sigmoid(), numbers(3, 64, 64, seed=i).sigmoid())
    )
    return Parts(SRGAN_model(config), data)


@program("pina-mathlab", "pina", float32=True, refused="read different batches")
def pina_fourier_operator() -> Parts:
    from pina import Trainer
    from pina.model import FNO
    from pina.problem.zoo import SupervisedProblem
    from pina.solver import SupervisedSolver

    net = FNO(nn.Linear(1, 8), nn.Linear(8, 1), n_modes=4, dimensions=2, inner_size=8, padding=2)
    problem = SupervisedProblem(numbers(4, 16, 16, 1, seed=1), numbers(4, 16, 16, 1, seed=2))
    solver = SupervisedSolver(problem, net, use_lt=False)

    class Engine:
        def __init__(self, **settings: Any) -> None:
            self.trainer = Trainer(solver=solver, batch_size=2, shuffle=False, **settings)

        def fit(self, *_: Any) -> None:
            self.trainer.train()

    return Parts(solver, lambda size: None, engine=Engine, validates=False)


class Unrolled(nn.Module):
    """Calls a network of several inputs with those that stay alike."""

    def __init__(self, net: nn.Module, *others: Any) -> None:
        super().__init__()
        self.net, self.others = net, others

    def forward(self, x: Any) -> Any:
        return self.net(x, *self.others)


WRAPPED = "its network in a LightningModule"


@program("fastmri", "fastmri", changed=WRAPPED, meshes=SPLIT)
def fastmri_varnet() -> Parts:
    from fastmri.models import VarNet

    net = VarNet(num_cascades=2, sens_chans=2, sens_pools=2, chans=4, pools=2)
    mask = torch.zeros(1, 1, 1, 32, 1, dtype=torch.bool)
    mask[..., ::2, :] = mask[..., 12:20, :] = True
    data = fields(
        4, lambda i: (numbers(2, 32, 32, 2, seed=i) * mask[0].double(), numbers(32, 32, seed=i))
    )
    return Parts(
        supervised(Unrolled(net, mask, 4), nn.functional.l1_loss),
        data,
        strategy={"shard_dims": {"0": 2, "1": 1}},
    )


@program("deepinv", "deepinv", changed=WRAPPED, meshes=SPLIT)
def deepinv_unfolded() -> Parts:
    import deepinv

    blur = deepinv.physics.BlurFFT((1, 32, 32), deepinv.physics.blur.gaussian_blur(sigma=(1, 1)))
    prior = deepinv.optim.PnP(deepinv.models.DnCNN(1, 1, depth=3, nf=8, pretrained=None))
    net = deepinv.unfolded.unfolded_builder(
        "HQS", params_algo={"stepsize": [0.5, 0.5], "g_param": [0.1, 0.1]},
        trainable_params=["stepsize"], data_fidelity=deepinv.optim.L2(), max_iter=2, prior=prior,
    )  # fmt: skip
    return Parts(supervised(Unrolled(net, blur), nn.functional.mse_loss), pairs(1, 32, 32))


@program("denoising-diffusion-pytorch", changed=WRAPPED)
def denoising_diffusion() -> Parts:
    from denoising_diffusion_pytorch import GaussianDiffusion, Unet

    unet = Unet(8, dim_mults=(1, 2), channels=1, attn_heads=2, attn_dim_head=8)
    net = GaussianDiffusion(unet, image_size=16, timesteps=10)
    return Parts(supervised(net, lambda loss, _: loss), pairs(1, 16, 16))


@program("torchseg", changed=WRAPPED)
def torchseg_unet() -> Parts:
    import torchseg

    net = torchseg.Unet("resnet18", encoder_weights=None, in_channels=3, classes=3)
    return Parts(supervised(net, nn.functional.cross_entropy), pictures())


@program(
    "finetuning-scheduler", "finetuning_scheduler", changed="allow_untested=True", meshes=SPLIT
)
def finetuning_schedule() -> Parts:
    from finetuning_scheduler import FinetuningScheduler

    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 1, 3, padding=1))
    kept = {"max_epochs": 3, "enable_checkpointing": True, "default_root_dir": folder("fts")}
    phases = {0: ["net.2.weight", "net.2.bias"], 1: ["net.0.weight", "net.0.bias"]}
    phases = {k: {"params": names, "max_transition_epoch": k + 1} for k, names in phases.items()}
    schedule = FinetuningScheduler(
        epoch_transitions_only=True, ft_schedule=phases, allow_untested=True
    )
    return Parts(
        supervised(net, nn.functional.mse_loss), pairs(1, 16, 16), trainer=kept,
        callbacks=(schedule,),
    )  # fmt: skip


@program("torchphysics", "torchphysics", host=OLDER, refused="read different batches")
def torchphysics_poisson() -> Parts:
    import torchphysics as tp

    x, u = tp.spaces.R2("x"), tp.spaces.R1("u")
    square = tp.domains.Parallelogram(x, [0, 0], [1, 0], [0, 1])
    net = tp.models.FCN(x, u, hidden=(8, 8))
    inside = tp.samplers.GridSampler(square, 16)
    edge = tp.samplers.GridSampler(square.boundary, 16)
    conditions = [
        tp.conditions.PINNCondition(net, inside, lambda u, x: tp.utils.laplacian(u, x) + 1.0),
        tp.conditions.PINNCondition(net, edge, lambda u: u),
    ]
    return Parts(
        tp.solver.Solver(conditions), lambda size: None, trainer={"max_steps": 3}, validates=False
    )
