"""Folders of transformers and diffusers: each rank reads its part into a module without memory."""

import ctypes
import gc
import json
import re
import shutil
from pathlib import Path

import diffusers
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from lightning_shard import DisagreementError, deferred_parameters, load_weights, parallelize
from lightning_shard.checkpoint.state import full_module_state
from lightning_shard.checkpoint.weights import copy_weights, stored_weights
from tests.pairs import choose
from tests.parity import mesh_of
from tests.training import shared_path, trainer

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
MODELS = {
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=37)
    ),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=37)),
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(**SMALL, intermediate_size=24, vocab_size=37, tie_word_embeddings=True)
    ),
    "bert": lambda: BertModel(BertConfig(**SMALL, intermediate_size=24, vocab_size=37)),
    "vae": lambda: diffusers.AutoencoderKL(
        block_out_channels=(8,), norm_num_groups=4, sample_size=8
    ),
    "transformer": lambda: diffusers.PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, num_layers=1, cross_attention_dim=16,
        sample_size=8, norm_num_groups=1, caption_channels=8,
    ),
}  # fmt: skip


def saved(name: str, **options) -> tuple[nn.Module, Path]:
    """The model of rank 0, and the folder in which it saved it."""
    folder = shared_path(name)
    torch.manual_seed(5)
    model = MODELS[name]().eval()
    if dist.get_rank() == 0:
        model.save_pretrained(folder, **options)
    dist.barrier()
    return model, folder


def deferred(name: str) -> nn.Module:
    torch.manual_seed(6)
    with deferred_parameters():
        module = MODELS[name]().eval()
    assert all(p.is_meta for p in module.parameters())
    assert not any(b.is_meta for b in module.buffers())
    return module


@pytest.mark.quick_rows("llama-True")
@pytest.mark.spmd(2)
@pytest.mark.parametrize(("name", "parts"), choose(MODELS, [True, False]))
def test_what_from_pretrained_reads(name, parts):
    """Ties stay, buffers that no file holds have their values, and dtypes become the module's."""
    wanted, folder = saved(name, **({"max_shard_size": "8KB"} if parts else {}))
    assert parts == any(folder.glob("*.safetensors.index.json"))
    module = deferred(name)
    if name == "llama":
        module.to(torch.bfloat16)
    parallelize(module, mesh_of(2), loaded=[""])
    load_weights(module, folder)
    found = full_module_state(module)
    for key, value in wanted.state_dict().items():
        assert torch.equal(found[key], value.to(found[key].dtype)), key
    for key, buffer in wanted.named_buffers():
        torch.testing.assert_close(
            dict(module.named_buffers())[key].to(buffer.dtype), buffer, rtol=1e-2, atol=1e-3
        )
    assert len([*module.parameters()]) == len([*wanted.parameters()])


class Finetuned(LightningModule):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def configure_model(self) -> None:
        if not hasattr(self, "network"):
            self.network = deferred(self.name)

    def training_step(self, batch, batch_idx):
        return self.network(batch).last_hidden_state.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.spmd(2)
def test_one_option_of_the_strategy():
    wanted, folder = saved("bert")
    module = Finetuned("bert")
    options = {"init_weights_from": {"network": str(folder)}, "shard_dims": {}}
    runner = trainer((1,), strategy=options, max_steps=1)
    runner.fit(module, DataLoader([torch.arange(5)] * 4, 2))
    for key, value in full_module_state(module.network).items():
        assert torch.equal(value, wanted.state_dict()[key]), key


@pytest.mark.spmd(2)
def test_old_names_and_heads():
    """Names of older releases, a base from a model with a head, a head that no file holds."""
    _, folder = saved("bert")
    config = BertConfig(**SMALL, intermediate_size=24, vocab_size=37)
    base = load_file(folder / "model.safetensors")
    other = shared_path("other.safetensors")
    old = {
        f"bert.{k}".replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): v
        for k, v in base.items()
    }
    if dist.get_rank() == 0:
        save_file(old | {"cls.bias": torch.ones(3)}, other)
    dist.barrier()
    module = deferred("bert")
    parallelize(module, mesh_of(2), loaded=[""])
    load_weights(module, other)
    found = full_module_state(module)
    assert all(torch.equal(found[k], v) for k, v in base.items())
    with deferred_parameters():
        headed = BertForSequenceClassification(config)
    parallelize(headed, mesh_of(2), loaded=[""])
    with pytest.raises(RuntimeError, match=r"has no 'classifier\.weight', 'classifier\.bias'\."):
        load_weights(headed, folder)
    with deferred_parameters():  # the way out: the head is made new
        headed = BertForSequenceClassification(config)
    parallelize(headed, mesh_of(2), loaded=["bert"])
    load_weights(headed.bert, folder)
    found = full_module_state(headed)
    assert all(torch.equal(found[f"bert.{k}"], v) for k, v in base.items())
    assert found["classifier.weight"].isfinite().all()


@pytest.mark.spmd(2)
@pytest.mark.parametrize("damage", ["torn", "other", "shape", "missing", "integers", "none"])
def test_one_rank_with_a_bad_folder_ends_all(damage):
    _, folder = saved("gpt2")
    mine = folder
    if dist.get_rank() == 1:
        mine = Path(shutil.copytree(folder, f"{folder}-1"))
        file = mine / "model.safetensors"
        state = load_file(file)
        key = "transformer.wpe.weight"
        if damage == "torn":
            file.write_bytes(file.read_bytes()[:-9])
        elif damage == "none":
            file.unlink()
        else:
            changed = {
                "other": state[key] + 1,
                "shape": state[key][1:].clone(),
                "missing": None,
                "integers": state[key].to(torch.int8),
            }[damage]
            state = {k: v for k, v in (state | {key: changed}).items() if v is not None}
            save_file(state, file)
    module = deferred("gpt2")
    parallelize(module, mesh_of(2), loaded=[""])
    texts = {"torn": "is not whole", "none": "holds none of"}
    error = DisagreementError if damage not in texts else (ValueError, OSError, RuntimeError)
    with pytest.raises(error, match=texts.get(damage, "are others on rank 1 than on rank 0")) as e:
        load_weights(module, mine)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"transformer.wpe.weight": torch.ones(2, 16)}, "has shape (2, 16); the module's has"),
        ({"transformer.wpe.weight": torch.ones(1024, 16, dtype=torch.int8)}, "is torch.int8"),
        ({"more": torch.ones(1)}, "has 'more', which the module has not"),
    ],
)
def test_what_does_not_fit_is_one_sentence(change, text, tmp_path):
    model = MODELS["gpt2"]()
    model.save_pretrained(tmp_path)
    save_file(load_file(tmp_path / "model.safetensors") | change, tmp_path / "model.safetensors")
    with pytest.raises((ValueError, RuntimeError), match=re.escape(text)) as caught:
        load_weights(model, tmp_path)
    assert "\n" not in str(caught.value)


def test_folders_of_another_kind(tmp_path):
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text("{}")
    (tmp_path / "model_index.json").write_text(json.dumps({}))
    with pytest.raises(FileNotFoundError, match=r"a pipeline of several networks.*/vae'"):
        load_weights(nn.Linear(2, 2), tmp_path)
    save_file({"weight": torch.ones(2, 2)}, tmp_path / "vae" / "model.fp16.safetensors")
    with pytest.raises(FileNotFoundError, match=r"name a file.*model\.fp16\.safetensors'"):
        load_weights(nn.Linear(2, 2), tmp_path / "vae")


def kilobytes(path: str, field: str, mapping: str = "") -> int:
    """Sum a field of a file under /proc/self, of mappings of one file or of all."""
    total, counted = 0, not mapping
    for line in Path(path).read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            counted = mapping in line
        elif counted and line.startswith(f"{field}:"):
            total += int(line.split()[1])
    return total


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1024, 8192, bias=False) for _ in range(8)])


@pytest.mark.slow
@pytest.mark.spmd(4)
def test_no_rank_reads_or_holds_the_whole():
    """Of 256 MiB: pages of the file that a rank mapped, and all its memory at the peak."""
    path = shared_path("model.safetensors")
    whole = 8 * 8192 * 1024 * 4 / 1024  # KiB
    if dist.get_rank() == 0:
        save_file(Wide().state_dict(), path)
    dist.barrier()
    gc.collect()  # copies the pages that it looks at, of which a fork has many
    ctypes.CDLL(None).malloc_trim(0)  # else what the heap has kept is taken again, and not counted
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = kilobytes("/proc/self/status", "VmRSS")
    with deferred_parameters():
        module = Wide()
    parallelize(module, mesh_of(4), loaded=[""])
    stored = stored_weights(path.parent)
    copy_weights(module, stored, str(path))
    peak = kilobytes("/proc/self/status", "VmHWM") - before
    read = kilobytes("/proc/self/smaps", "Rss", str(path))
    print(f"of {whole:.0f} KiB: {read} KiB of the file mapped, {peak} KiB at the peak")
    assert read < 0.05 * whole  # what a rank needs is read into its own memory
    assert 0.25 * whole < peak < 0.5 * whole  # a quarter as shards, and the rest
    dist.barrier()
    if dist.get_rank() == 0:
        path.unlink()
