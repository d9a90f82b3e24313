"""Precision: Lightning's values mean what they mean elsewhere, and FSDP's policy beside them."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_shard import ShardingOptions, whole_parameters
from lightning_shard.checkpoint.state import full_module_state
from lightning_shard.fsdp.clip import clip_grad_norm_, clip_grad_value_
from tests.checkpoint.test_resume_inside_epoch import shared_path
from tests.fsdp.network import (
    BATCH,
    Net,
    assert_equal_runs,
    loader,
    net,
    sample,
    train_alone,
)
from tests.fsdp.network import train_sharded as train
from tests.parity import mesh_of
from tests.training import Losses, dense_fno, trainer
from tests.training import loader as loader_of

pytestmark = [
    # single-device runs inside a pool of ranks
    pytest.mark.filterwarnings("ignore:.*srun.*:UserWarning"),
]
TOLERANCES = {
    "32-true": 1e-5,
    "64-true": 1e-5,
    "bf16-mixed": 2e-2,
    "bf16-true": 2e-2,
    "16-true": 5e-3,
}  # fmt: skip  64-true: Lightning leaves complex parameters in single precision


class Plain(Net):
    """Real parameters, and an optimizer whose step is as exact as its gradients."""

    def __init__(self, *, phase: bool = False) -> None:
        torch.manual_seed(3)
        super().__init__(phase=phase)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.seen = {"weight": self.stem.weight.dtype, "output": self(batch[:, :1]).dtype}
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def run_alone(module, precision):
    """Lightning's own strategy of one device."""
    losses = Losses()
    runner = Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[losses], precision=precision,
        strategy=SingleDeviceStrategy("cpu"), accelerator="cpu", devices=1,
        use_distributed_sampler=False,
    )  # fmt: skip
    runner.fit(module, loader(BATCH, torch.float32))
    return losses.values, module.state_dict()


@pytest.mark.quick_rows("64-true")
@pytest.mark.spmd(4)
@pytest.mark.parametrize("precision", TOLERANCES)
def test_values_mean_what_they_mean_in_lightning(precision):
    with_phase = precision in ("32-true", "64-true")
    alone, module = Plain(phase=with_phase), Plain(phase=with_phase)
    wanted = run_alone(alone, precision)
    found = train((2,), {"wrap": ["Block"]}, module, torch.float32, precision=precision)
    assert module.seen == alone.seen
    dtypes = {k: v.dtype for k, v in wanted[1].items()}
    assert {k: v.dtype for k, v in found[1].items()} == dtypes
    wanted = wanted[0], {k: v.to(found[1][k]) for k, v in wanted[1].items()}
    assert_equal_runs(found, wanted, TOLERANCES[precision], least=0.1)


@pytest.mark.spmd(2)
def test_half_precision_of_complex_parameters_is_refused():
    """Lightning would drop the imaginary parts."""
    with pytest.raises(ValueError, match=r"'bf16-true' would drop the imaginary part .*\(phase\)"):
        train((1,), {}, Plain(phase=True), torch.float32, precision="bf16-true")


class Dtypes(Callback):
    """What a block computes in, and what gradients are held in."""

    def on_train_start(self, trainer, module):
        def look(conv, args, output):
            self.inside = conv.weight.dtype, args[0].dtype

        module.blocks[1].conv.register_forward_hook(look)

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.gradient = module.stem.weight.grad.dtype
        self.held = module.stem.weight.dtype

    def on_train_end(self, trainer, module):
        cast = self.inside[0] != torch.float32
        shown = pytest.raises(NotImplementedError, match="would show") if cast else nullcontext()
        with shown, whole_parameters(module):
            assert module.stem.weight.dtype == torch.float32


POLICIES = {
    "parameters": ({"param_dtype": "bfloat16"}, torch.bfloat16),
    "gradients only": ({"reduce_dtype": "bfloat16"}, torch.float32),
    "both": ({"param_dtype": "float16", "reduce_dtype": "float32"}, torch.float16),
}


@pytest.mark.quick_rows("both")
@pytest.mark.spmd(4)
@pytest.mark.parametrize("policy", POLICIES)
def test_policy(policy):
    given, inside = POLICIES[policy]
    look = Dtypes()
    options = {"wrap": ["Block"], "mp_policy": given}
    found = train((2,), options, Plain(), torch.float32, callbacks=[look])
    assert (look.held, look.gradient) == (torch.float32,) * 2
    assert look.inside == (inside, inside)
    plain = Plain()
    losses = []
    optimizer = plain.configure_optimizers()
    for step, batch in enumerate(loader(BATCH, torch.float32)):
        optimizer.zero_grad()
        loss = plain.training_step(batch, step)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    # four roundings of bfloat16, of which kernels make other ones on other processors
    assert_equal_runs(found, (losses, plain.state_dict()), 3e-2, least=0.1)


@pytest.mark.spmd(2)
def test_policy_counts_on_one_process():
    """A mesh of one rank casts as the others do: here each rank has one of its own."""
    from torch.distributed.device_mesh import DeviceMesh

    from lightning_shard import parallelize

    mesh = DeviceMesh("cpu", [[dist.get_rank()]], mesh_dim_names=("data", "domain"))
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    module = Plain()
    parallelize(module, mesh, options=ShardingOptions(mp_policy=policy))
    assert module(sample(0)[None, :1].float()).dtype == torch.bfloat16


@pytest.mark.quick_rows("2x1")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("domain", [(1,), (2,)], ids=["2x1", "1x2"])
def test_spectral_layers_compute_in_their_own_precision(domain):
    """There are no FFTs of bfloat16: such layers take and give it."""

    def run(**strategy):
        torch.manual_seed(7)
        module, losses = dense_fno(), Losses()
        runner = trainer(domain, strategy=strategy, callbacks=[losses], limit_train_batches=3)
        runner.fit(module, loader_of("dense_fno", torch.float32, 2, 8))
        return losses.values

    wanted = run()
    found = run(mp_policy={"param_dtype": "bfloat16"})
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=0)
    assert found != wanted


class InfOnOneRank(Callback):
    """One element of one rank's shard overflows in the second step."""

    def __init__(self) -> None:
        self.weights, self.scales = [], []

    def on_after_backward(self, trainer, module):
        # within a step dist.get_rank() counts replicas
        if trainer.global_step == 1 and not self.weights[2:] and trainer.global_rank == 1:
            module.blocks[0].conv.weight.grad.to_local().view(-1)[0] = float("inf")

    def on_train_batch_end(self, trainer, module, *_):
        self.weights.append(full_module_state(module))
        self.scales.append(trainer.precision_plugin.scaler.get_scale())


@pytest.mark.slow
@pytest.mark.spmd(4)
@pytest.mark.parametrize("domain", [(1,), (4,)], ids=["4x1", "1x4"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(domain):
    look, path = InfOnOneRank(), shared_path("scaler.ckpt")
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))
    module = Plain()
    runner = trainer(domain, strategy={"wrap": ["Block"]}, plugins=[plugin], callbacks=[look],
                     gradient_clip_val=10.0)  # fmt: skip
    runner.fit(module, loader(2 if domain == (1,) else BATCH, torch.float32, steps=4))
    assert look.scales == [64.0, 32.0, 32.0, 32.0]
    first, skipped, third, _ = look.weights
    for key, value in first.items():
        assert torch.equal(skipped[key], value), key
    assert not torch.equal(third["stem.weight"], skipped["stem.weight"])
    runner.save_checkpoint(path)
    dist.barrier()
    assert torch.load(path, weights_only=True)["MixedPrecision"]["scale"] == 32.0
    again = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    runner = trainer(domain, plugins=[again], max_epochs=2, limit_train_batches=1)
    runner.fit(Plain(), loader(BATCH, torch.float32), ckpt_path=path)
    assert again.scaler.get_scale() == 32.0


class CountingScaler(torch.amp.GradScaler):
    """A scaler of the program's own, which it holds and reads."""

    updates = 0

    def update(self, new_scale=None):
        super().update(new_scale)
        self.updates += 1


@pytest.mark.spmd(2)
def test_a_scaler_stays_the_one_that_the_program_holds():
    for enabled, scale in ((True, 1024.0), (False, 1.0)):
        scaler = CountingScaler("cpu", init_scale=256.0, growth_interval=1, enabled=enabled)
        plugin = MixedPrecision("16-mixed", "cpu", scaler)
        train((2,), {}, Plain(), torch.float32, plugins=[plugin])
        assert plugin.scaler is scaler
        assert (scaler.updates, scaler.get_scale()) == (2, scale)


@pytest.mark.spmd(2)
def test_a_scaler_and_a_fused_optimizer_of_shards_and_scalars():
    """No fused kernel runs for both, so none divides the gradients by the scale."""

    class Fused(Plain):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-2, fused=True)

    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    options = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)], "gradient_clip_val": 0.5}
    shards = {"sharding": "full"}
    expected = train((2,), shards, Plain(), torch.float32, **options)
    with pytest.warns(UserWarning, match="fused=True updates parameters of one mesh"):
        found = train((2,), shards, Fused(), torch.float32, **options)
    assert_equal_runs(found, expected, 1e-5)


@pytest.mark.slow
@pytest.mark.spmd(4)
def test_scaled_training_is_the_unscaled_one():
    """A scale of a power of two changes no bit of float16 gradients in range."""
    states = []
    for scale in (1.0, 128.0):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        plugin = MixedPrecision("16-mixed", "cpu", scaler)
        states.append(train((2,), {}, Plain(), torch.float32, plugins=[plugin])[1])
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value, rtol=2e-3, atol=2e-4)


@pytest.mark.quick_rows("inf")
@pytest.mark.spmd(4)
@pytest.mark.parametrize("order", [1.0, 2.0, float("inf")])
def test_norms_of_sharded_and_plain_gradients(order):
    """Within a step of training, against torch's own on whole gradients."""

    class Compare(Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            whole = [
                p.grad.full_tensor() if isinstance(p, DTensor) else p.grad.clone()
                for p in module.parameters()
            ]
            wanted = torch.nn.utils.get_total_norm(whole, order)
            given = module.parameters()
            torch.testing.assert_close(clip_grad_norm_(given, 1e9, order), wanted)
            clip_grad_value_(module.parameters(), 1e-3)
            assert all(p.grad.abs().max() <= 1e-3 for p in module.parameters() if p.ndim == 0)
            if trainer.global_rank == 1:  # dist.get_rank counts replicas here
                module.gain.grad.fill_(float("nan"))
            local = module.stem.weight.grad.to_local()
            local.fill_(float("nan"))  # some ranks hold no row of it
            with pytest.raises(RuntimeError, match=r"the norm of order .* is nan"):
                clip_grad_norm_(module.parameters(), 1.0, order, error_if_nonfinite=True)
            module.gain.grad.zero_()  # the weights of all ranks stay the same
            local.zero_()

    options = {"ignored_parameters": ["*.norm.*"], "sharding": "hybrid", "shard_size": 2}
    train((2,), options, net(), callbacks=[Compare()], limit_train_batches=1)


@pytest.mark.spmd(3)
@pytest.mark.parametrize("bad", [0, 2, 5])
def test_the_largest_gradient_of_shards_is_nan_on_any_rank(bad):
    """The maximum of gloo loses it, and values of ranks before it, too."""
    whole = torch.arange(6.0)
    whole[bad] = torch.nan
    mesh = mesh_of(3)
    shards = torch.nn.Parameter(distribute_tensor(torch.ones(6), mesh, [Shard(0)]))
    shards.grad = distribute_tensor(whole, mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match="is nan"):
        clip_grad_norm_([shards], 1.0, float("inf"), error_if_nonfinite=True)
    assert clip_grad_norm_([shards], 1.0, float("inf")).isnan()
    assert shards.grad.to_local().isnan().all()


@pytest.mark.spmd(2)
def test_optimizers_of_many_tensors_at_once():
    """foreach is the default on GPUs, where plain scalars and shards cannot go together."""

    class Foreach(Net):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2, foreach=True)

    module = net()
    module.__class__ = Foreach
    with pytest.warns(UserWarning, match="foreach=True updates parameters of one mesh"):
        found = train((2,), {"sharding": "full"}, module)
    assert_equal_runs(found, train_alone())


def test_a_policy_can_hold_only_where_the_device_computes_in_bfloat16(monkeypatch):
    """As PyTorch's tutorial of T5 asks before it casts: elsewhere parameters stay float32."""
    policy = {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}
    options = ShardingOptions(mp_policy=policy, mp_policy_where_supported=True)
    for supported, dtype in ((True, torch.bfloat16), (False, None)):
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation, s=supported: s
        )
        assert options.on("cuda").policy.param_dtype == dtype
    assert options.on("cpu").policy.reduce_dtype is None
    assert ShardingOptions(mp_policy=policy).on("cpu").policy.param_dtype == torch.bfloat16


@pytest.mark.spmd(2)
def test_parameters_are_float32_where_bfloat16_is_not_supported():
    """The CPU computes in it slowly; a strategy takes the option as parallelize does."""

    def seen(**more):
        module, policy = Plain(), {"param_dtype": "bfloat16"}
        options = ShardingOptions(mp_policy=policy, **more)
        train((1,), {"sharding": options}, module, torch.float32, limit_train_batches=1)
        return module.seen

    assert seen()["output"] == torch.bfloat16
    assert seen(mp_policy_where_supported=True)["output"] == torch.float32
