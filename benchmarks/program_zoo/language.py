"""Sequences: transformers, x-transformers, litgpt, asteroid, and the demos of Lightning."""
# pyright: reportMissingImports=false

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule

from benchmarks.program_zoo import SPLIT, Parts, classes, fields, numbers, program


class Language(LightningModule):
    """The loss of the next token, clipped gradients, and a schedule."""

    def __init__(self, net: Any, loss: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(self.net, batch)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def tokens(net: Any, loss: Callable[[Any, Any], Any]) -> Parts:
    data = fields(
        8,
        lambda i: {"input_ids": classes(16, of=60, seed=i), "labels": classes(16, of=60, seed=i)},
    )
    return Parts(
        Language(net, loss), data, validates=False,
        trainer={"gradient_clip_val": 1.0, "accumulate_grad_batches": 2},
        strategy={"shard_dims": {"input_ids": 1, "labels": 1}},
    )  # fmt: skip


SPLIT_TOKENS = 'shard_dims={"input_ids": 1, "labels": 1}'


@program("transformers", meshes=SPLIT, changed=SPLIT_TOKENS)
def transformers_gpt2() -> Parts:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return tokens(transformers.GPT2LMHeadModel(config), lambda net, b: net(**b).loss)


@program("transformers", meshes=SPLIT, changed=SPLIT_TOKENS)
def transformers_llama() -> Parts:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    return tokens(transformers.LlamaForCausalLM(config), lambda net, b: net(**b).loss)


@program("litgpt", meshes=SPLIT, changed=SPLIT_TOKENS)
def litgpt_pythia() -> Parts:
    import litgpt

    net = litgpt.GPT.from_name(
        "pythia-14m", n_layer=2, n_embd=32, n_head=2, block_size=32, padded_vocab_size=64,
        intermediate_size=64,
    )  # fmt: skip
    return tokens(
        net,
        lambda net, b: F.cross_entropy(net(b["input_ids"]).flatten(0, 1), b["labels"].flatten()),
    )


@program("x-transformers", changed=SPLIT_TOKENS)
def x_transformers_decoder() -> Parts:
    import x_transformers

    net = x_transformers.TransformerWrapper(
        num_tokens=64, max_seq_len=32, attn_layers=x_transformers.Decoder(dim=32, depth=2, heads=2)
    )
    return tokens(
        net, lambda net, b: F.cross_entropy(net(b["input_ids"]).transpose(1, 2), b["labels"])
    )


@program("lightning", meshes=("1x2", "2x1"))
def lightning_boring_model() -> Parts:
    from lightning.pytorch.demos.boring_classes import BoringModel

    return Parts(BoringModel(), fields(8, lambda i: torch.full((32,), 0.1 * i)), batch=2)


@program("asteroid", float32=True, changed='shard_dims={"0": 1, "1": 2}', host="pytorch_lightning")
def asteroid_convtasnet() -> Parts:
    with patch("torch.version.cuda", None):  # torchaudio refuses torch of another CUDA
        from asteroid.engine.system import System
        from asteroid.losses import PITLossWrapper, pairwise_neg_sisdr
        from asteroid.models import ConvTasNet

    net = ConvTasNet(2, n_blocks=2, n_repeats=1, bn_chan=8, hid_chan=16, skip_chan=8, n_filters=16)
    loss = PITLossWrapper(pairwise_neg_sisdr, pit_from="pw_mtx")
    module = System(net, torch.optim.Adam(net.parameters(), 1e-3), loss, train_loader=None)
    data = fields(4, lambda i: (numbers(1600, seed=i), numbers(2, 1600, seed=i + 9)))
    return Parts(module, data, strategy={"shard_dims": {"0": 1, "1": 2}})
