"""transformers: state-space and recurrent models, and caches of keys and values."""

import torch
import transformers as tf
from torch import Tensor
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import SqrtBoundDerivative

import lightning_shard
from benchmarks.model_zoo import Apply, Case
from benchmarks.model_zoo.transformers_sequence import FLOAT32, conf, gpt2, of_ids, rope

lightning_shard.allow_function(SqrtBoundDerivative)  # without it recurrent_gemma is refused

CACHED = [(2, 11, 16), (2, 3, 16)]  # what is read at first, and what comes after it


def continued(model, x: Tensor, y: Tensor) -> list[Tensor]:
    """Both parts, the second one with the keys and values of the first one."""
    first = model(inputs_embeds=x, use_cache=True)
    cache = first.past_key_values
    second = model(inputs_embeds=y, past_key_values=cache, use_cache=True)
    return [first.last_hidden_state, second.last_hidden_state]


def one_by_one(model, x: Tensor, y: Tensor) -> list[Tensor]:
    """A prompt, and then single steps, which no rank splits."""
    cache = model(inputs_embeds=x, use_cache=True).past_key_values
    found = []
    for step in range(2):
        token = torch.full((2, 1, 16), 0.1 * step + 0.05, dtype=x.dtype) + y.mean(1, keepdim=True)
        found.append(model(inputs_embeds=token, past_key_values=cache, use_cache=True)[0])
    return found


def cached(model, config, run=continued, tolerance=FLOAT32):
    return Case(lambda: Apply(run, model(config())), CACHED, (1,), tolerance)


SSM = {"expand": 2, "n_groups": 1, "state_size": 4, "chunk_size": 4}

CASES = {
    "mamba2": of_ids(tf.Mamba2Model, lambda: tf.Mamba2Config(num_heads=4, head_dim=8, vocab_size=32,
        hidden_size=16, num_hidden_layers=2, **SSM), FLOAT32),
    "falcon_mamba": of_ids(tf.FalconMambaModel, lambda: tf.FalconMambaConfig(vocab_size=32,
        hidden_size=16, num_hidden_layers=2, state_size=4), FLOAT32),
    "rwkv": of_ids(tf.RwkvModel, lambda: tf.RwkvConfig(vocab_size=32, hidden_size=16,
        num_hidden_layers=2, context_length=32), FLOAT32),
    "recurrent_gemma": of_ids(tf.RecurrentGemmaModel, conf(tf.RecurrentGemmaConfig,
        num_hidden_layers=3, lru_width=16, attention_window_size=6, head_dim=8), FLOAT32,
        use_cache=False),
    "lfm2": of_ids(tf.Lfm2Model, rope(tf.Lfm2Config, layer_types=["conv", "full_attention"]),
        FLOAT32, use_cache=False),
    "gpt2_cache": cached(tf.GPT2Model, gpt2, tolerance=1e-10),
    "gpt2_steps": cached(tf.GPT2Model, gpt2, one_by_one, 1e-10),
    "llama_cache": cached(tf.LlamaModel, rope(tf.LlamaConfig)),
    "llama_steps": cached(tf.LlamaModel, rope(tf.LlamaConfig), one_by_one),
    "mistral_window_cache": cached(tf.MistralModel, rope(tf.MistralConfig, sliding_window=4)),
    "qwen3_cache": cached(tf.Qwen3Model, rope(tf.Qwen3Config, head_dim=8)),
}  # fmt: skip
