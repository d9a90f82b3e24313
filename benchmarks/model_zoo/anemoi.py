"""anemoi-models: the processors of its graph and transformer models, over the nodes of a mesh."""

from anemoi.models.distributed import graph
from anemoi.models.distributed.shapes import GraphShardInfo
from anemoi.models.layers.processor import PointWiseMLPProcessor, TransformerProcessor
from anemoi.utils.config import DotDict

import lightning_shard
from benchmarks.model_zoo import row

# its own exchange of heads, which does nothing without a process group of its own
lightning_shard.allow_function(graph._AllToAllParallelSection)

SIZES = {
    "num_layers": 2, "num_channels": 16, "num_chunks": 1, "mlp_hidden_ratio": 2,
    "layer_kernels": DotDict(),
}  # fmt: skip
HEADS = SIZES | {"num_heads": 2, "attention_implementation": "scaled_dot_product_attention"}


def over_nodes(model, x):
    return model(x, 1, GraphShardInfo())


CASES = {
    "mlp_processor": row(PointWiseMLPProcessor, **SIZES, on=(37, 16), split=(0,), run=over_nodes),
    "transformer_processor": row(TransformerProcessor, **HEADS, on=(37, 16), split=(0,),
        run=over_nodes),
    "transformer_qk_norm": row(TransformerProcessor, **HEADS, qk_norm=True,
        mlp_implementation="swiglu", on=(37, 16), split=(0,), run=over_nodes),
    "transformer_window": row(TransformerProcessor, **HEADS, window_size=5, on=(37, 16), split=(0,),
        run=over_nodes),
}  # fmt: skip
