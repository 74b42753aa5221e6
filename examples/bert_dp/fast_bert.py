"""The same scores as transformers' BERT with less arithmetic (`--fast`); tested equal to it.

Two changes, each measured by `benchmarks/bert_throughput.py`:

- The classifier reads the first token only. So the last layer needs the keys and values of all
  tokens, but queries and feed-forward of the first one alone. Of L layers that saves five sixths of
  one.
- In bfloat16 on a CPU, attention is two matrix products: the backward of torch's fused attention
  takes five times as long there. This keeps the probabilities, [N, heads, Q, L], 2 bytes each,
  which the fused one computes again.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from examples.bert_dp.classifier import Classifier
from examples.bert_dp.tokens import PAD


class FastClassifier(Classifier):
    """A `Classifier` whose last layer computes what the first token needs."""

    def logits(self, ids: Tensor) -> Tensor:
        """The model's scores, [N, 2], for token numbers [N, L]."""
        bert, mask = self.bert.bert, (ids != PAD)[:, None, None, :]  # [N, heads, query, key]
        assert bert.pooler is not None
        *layers, last = bert.encoder.layer
        hidden = bert.embeddings(input_ids=ids)  # [N, L, D]
        for layer in layers:
            hidden = encoder_layer(layer, hidden, hidden, mask)
        first = encoder_layer(last, hidden[:, :1], hidden, mask)  # [N, 1, D], of [CLS]
        return self.bert.classifier(self.bert.dropout(bert.pooler(first)))  # [N, 2]


def encoder_layer(layer: Any, queries: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
    """One layer of the encoder, for some of the tokens.

    Args:
        layer: a `BertLayer`.
        queries: the tokens whose outputs are wanted, [N, Q, D].
        keys: the tokens that they attend to, [N, L, D].
        mask: which of those are not padding, [N, 1, 1, L].

    Returns:
        The outputs, [N, Q, D].
    """
    attention = layer.attention.self
    query, key, value = (
        projected.unflatten(2, (attention.num_attention_heads, -1)).transpose(1, 2)
        for projected in (attention.query(queries), attention.key(keys), attention.value(keys))
    )  # [N, heads, Q or L, d]
    dropout = attention.dropout.p if attention.training else 0.0
    bf16_cpu = (query.device.type, query.dtype) == ("cpu", torch.bfloat16)
    attend = attend_by_products if bf16_cpu else attend_fused
    mixed = attend(query, key, value, mask, dropout)
    return layer.feed_forward_chunk(
        layer.attention.output(mixed.transpose(1, 2).flatten(2), queries)
    )


def attend_fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float) -> Tensor:
    """Attend by torch's fused kernel.

    Args:
        query: [N, heads, Q, d].
        key: [N, heads, L, d].
        value: [N, heads, L, d].
        mask: [N, 1, 1, L].
        dropout: of the attention's probabilities.

    Returns:
        The mixed values, [N, heads, Q, d].
    """
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)


def attend_by_products(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float
) -> Tensor:
    """Attend by matrix products; arguments and result as in `attend_fused`."""
    heads = query.shape[1]
    bias = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)  # [N, 1, 1, L]
    queries, keys, values = (
        each.flatten(0, 1) for each in (query, key, value)
    )  # [N * heads, ., d]
    scores = torch.baddbmm(
        bias.expand(-1, heads, -1, -1).flatten(0, 1),
        queries,
        keys.transpose(1, 2),
        alpha=query.shape[-1] ** -0.5,
    )  # [N * heads, Q, L]
    return (F.dropout(scores.softmax(-1), dropout) @ values).unflatten(0, (-1, heads))
