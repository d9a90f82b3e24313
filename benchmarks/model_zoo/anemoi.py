"""anemoi-models: the processors of its graph and transformer models, over the nodes of a mesh."""

from anemoi.models.distributed import graph
from anemoi.models.distributed.shapes import GraphShardInfo
from anemoi.models.layers.processor import PointWiseMLPProcessor, TransformerProcessor
from anemoi.utils.config import DotDict

import lightning_shard
from benchmarks.model_zoo import Apply, Case

# its own exchange of heads, which does nothing without a process group of its own
lightning_shard.allow_function(graph._AllToAllParallelSection)

SIZES = {
    "num_layers": 2, "num_channels": 16, "num_chunks": 1, "mlp_hidden_ratio": 2,
    "layer_kernels": DotDict(),
}  # fmt: skip
HEADS = SIZES | {"num_heads": 2, "attention_implementation": "scaled_dot_product_attention"}


def over_nodes(make):
    return lambda: Apply(lambda m, x: m(x, 1, GraphShardInfo()), make())


CASES = {
    "mlp_processor": Case(over_nodes(lambda: PointWiseMLPProcessor(**SIZES)), [(37, 16)], (0,)),
    "transformer_processor": Case(over_nodes(lambda: TransformerProcessor(**HEADS)), [(37, 16)],
        (0,)),
    "transformer_qk_norm": Case(
        over_nodes(
            lambda: TransformerProcessor(**HEADS, qk_norm=True, mlp_implementation="swiglu")
        ),
        [(37, 16)], (0,),
    ),
    "transformer_window": Case(over_nodes(lambda: TransformerProcessor(**HEADS, window_size=5)),
        [(37, 16)], (0,)),
}  # fmt: skip
