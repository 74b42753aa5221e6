"""BERT for two classes: made, loaded from a local folder, and saved so that plain `from_pretrained` loads it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import logging
from transformers.models.bert.configuration_bert import BertConfig
from transformers.models.bert.modeling_bert import BertForSequenceClassification
from transformers.models.bert.tokenization_bert import BertTokenizer

from common.checkpoint import write_atomically
from common.distributed import World
from common.errors import UserError
from common.precision import Numerics
from examples.bert_dp.options import TextOptions
from examples.bert_dp.reviews import ID2LABEL
from examples.bert_dp.tokens import PAD, make_tokenizer, read_vocabulary, vocabulary

logging.set_verbosity_error()  # what matters is checked here, and said in a line of ours
logging.disable_progress_bar()
LABEL2ID = {name: label for label, name in ID2LABEL.items()}
HEAD = ("classifier.", "bert.pooler.")  # may be absent from a pretrained model: they are trained here


def prepare(options: TextOptions, texts: Sequence[str]) -> tuple[BertForSequenceClassification, BertTokenizer, str]:
    """The model and tokenizer that the flags name, on the CPU.

    Args:
        options: the flags.
        texts: the training reviews, for their characters.

    Returns:
        Model, tokenizer, and what they are in words.

    Raises:
        UserError: as `load` and `read_vocabulary`.
    """
    if options.model:
        model, tokenizer = load(options.model, options.max_length, new_head=True, dropout=options.dropout)
        return model, tokenizer, f"BERT from {options.model}"
    tokens = read_vocabulary(options.vocab) if options.vocab else vocabulary(texts)
    layers, hidden, dropout = options.layers or 2, options.hidden or 128, options.dropout or 0.0
    config = BertConfig(
        vocab_size=len(tokens),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        intermediate_size=4 * hidden,
        max_position_embeddings=options.max_length,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        pad_token_id=PAD,
        id2label=ID2LABEL,  # before the model is wrapped: DataParallel has no `config`, only its `module` has
        label2id=LABEL2ID,
    )
    name = f"BERT of {layers} layers x {hidden} with {len(tokens):,} tokens, from scratch"
    return BertForSequenceClassification(config), make_tokenizer(tokens, options.max_length), name


def load(
    folder: Path, max_length: int | None = None, new_head: bool = False, dropout: float | None = None
) -> tuple[BertForSequenceClassification, BertTokenizer]:
    """Load a BERT from a local folder: no network, no pickle, no code from the folder.

    Args:
        folder: config.json, model.safetensors, tokenizer.json or vocab.txt.
        max_length: that the model must be able to take, in tokens.
        new_head: whether the classifier may be absent, or of other classes; it is then random.
        dropout: in place of the model's own.

    Raises:
        UserError: something is missing, damaged, no BERT, or does not fit together.
    """
    if not (folder / "config.json").is_file():
        raise UserError(f"--model {folder}: no config.json there; give the local folder of a BERT")
    if not any((folder / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json")):
        raise UserError(f"--model {folder}: no weights there (model.safetensors; files with pickled code are not read)")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.txt")):
        raise UserError(f"--model {folder}: no vocabulary there (tokenizer.json or vocab.txt)")
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    changes: dict[str, Any] = {"id2label": ID2LABEL, "label2id": LABEL2ID} if new_head else {}
    if dropout is not None:
        changes |= {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    try:
        kind = json.loads((folder / "config.json").read_text()).get("model_type")
        if kind != "bert":
            raise UserError(f"--model {folder} is of the type {kind}, not a BERT")
        config = BertConfig.from_pretrained(folder, **local, **changes)
        tokenizer = BertTokenizer.from_pretrained(folder, **local)
        options: dict[str, Any] = local | {
            "use_safetensors": True,
            "dtype": torch.float32,  # not the file's: a model saved in halves would be trained in halves
            "ignore_mismatched_sizes": True,
            "output_loading_info": True,
        }
        loaded: Any = BertForSequenceClassification.from_pretrained(folder, config=config, **options)
    except (OSError, ValueError, RuntimeError, AttributeError, SafetensorError) as error:
        raise UserError(f"--model {folder} cannot be loaded ({str(error).splitlines()[0]})") from None
    model, about = loaded
    if len(tokenizer) != config.vocab_size or {tokenizer.pad_token_id, config.pad_token_id} != {PAD}:
        raise UserError(
            f"--model {folder}: its tokenizer has {len(tokenizer):,} tokens and [PAD] = {tokenizer.pad_token_id}, its "
            f"model {config.vocab_size:,} and {config.pad_token_id}: they are not of one model"
        )
    absent = sorted({*about["missing_keys"], *(entry[0] for entry in about["mismatched_keys"])})
    needed = [name for name in absent if not (new_head and name.startswith(HEAD))]
    if needed:
        raise UserError(
            f"--model {folder}: {len(needed)} tensor(s) of its config.json are not in its weights, or of other shapes "
            f"({needed[0]}, ...)"
        )
    if (max_length or 0) > config.max_position_embeddings:
        most = config.max_position_embeddings
        raise UserError(f"--max-length {max_length}: the model in {folder} takes at most {most} tokens")
    return model.train(), tokenizer


class Classifier(nn.Module):
    """A BERT as training needs it: token numbers in, class scores or their loss out.

    It computes what `BertForSequenceClassification` does, with less arithmetic: the classifier reads the first token
    only, so the last layer needs keys and values of all tokens, but queries and feed-forward of the first alone. Of L
    layers that saves five sixths of one.

    Args:
        bert: the model.
        numerics: device and precision. DataParallel's threads do not know the caller's autocast, so it is here.
    """

    def __init__(self, bert: BertForSequenceClassification, numerics: Numerics) -> None:
        super().__init__()
        self.bert = bert
        self.numerics = numerics

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """Class scores, or the loss.

        Args:
            ids: token numbers [N, L], padded at the end.
            labels: [N]; -100 is left out.

        Returns:
            Logits [N, 2]; with labels the SUM of the cross-entropies, [1].
        """
        with self.numerics.autocast():
            logits = self._logits(ids).float()
        if labels is None:
            return logits
        return nn.functional.cross_entropy(logits, labels, reduction="sum").unsqueeze(0)

    def _logits(self, ids: Tensor) -> Tensor:
        bert, mask = self.bert.bert, (ids != PAD)[:, None, None, :]  # [N, heads, asking, asked]
        assert bert.pooler is not None
        *layers, last = bert.encoder.layer
        hidden = bert.embeddings(input_ids=ids)  # [N, L, D]
        for layer in layers:
            hidden = _layer(layer, hidden, hidden, mask)
        first = _layer(last, hidden[:, :1], hidden, mask)  # [N, 1, D], of [CLS]
        return self.bert.classifier(self.bert.dropout(bert.pooler(first)))  # [N, 2]


def _layer(layer: Any, asking: Tensor, asked: Tensor, mask: Tensor) -> Tensor:
    """One layer of the encoder for the tokens that ask, [N, Q, D]; they attend to those that are asked, [N, L, D]."""
    attention = layer.attention.self
    query, key, value = (
        projected.unflatten(2, (attention.num_attention_heads, -1)).transpose(1, 2)  # [N, heads, ., d]
        for projected in (attention.query(asking), attention.key(asked), attention.value(asked))
    )
    dropout = attention.dropout.p if attention.training else 0.0
    attend = _attend_bf16_cpu if (query.device.type, query.dtype) == ("cpu", torch.bfloat16) else _attend
    mixed = attend(query, key, value, mask, dropout)
    return layer.feed_forward_chunk(layer.attention.output(mixed.transpose(1, 2).flatten(2), asking))


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float) -> Tensor:
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)


def _attend_bf16_cpu(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float) -> Tensor:
    """The same by matrix products: torch's fused attention is five times slower backward in bfloat16 on a CPU.

    It keeps the probabilities, [N, heads, Q, L], 2 bytes each, which the fused one computes again.
    """
    heads = query.shape[1]
    bias = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)  # [N, 1, 1, L]
    queries, keys, values = (each.flatten(0, 1) for each in (query, key, value))  # [N * heads, ., d]
    scores = torch.baddbmm(
        bias.expand(-1, heads, -1, -1).flatten(0, 1), queries, keys.transpose(1, 2), alpha=query.shape[-1] ** -0.5
    )  # [N * heads, Q, L]
    return (nn.functional.dropout(scores.softmax(-1), dropout) @ values).unflatten(0, (-1, heads))


def save(folder: Path, bert: BertForSequenceClassification, tokenizer: BertTokenizer) -> None:
    """Write the folder that `from_pretrained` and `pipeline` load, each file completely or not at all."""
    with tempfile.TemporaryDirectory() as temporary:
        bert.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        for file in sorted(Path(temporary).iterdir()):
            write_atomically(folder / file.name, file.read_bytes())


def local_devices(world: World) -> list[int]:
    """The CUDA devices that DataParallel uses in this process: all visible ones, if it is alone on its node."""
    if world.device.type != "cuda":
        return []
    alone = world.place.local_size == 1 and world.place.flags.gpu is None
    return list(range(torch.cuda.device_count())) if alone else [world.device.index or 0]


def data_parallel(model: Classifier, devices: list[int]) -> nn.Module:
    """DataParallel over CUDA devices; on a CPU, which is one device, the model itself."""
    return nn.DataParallel(model, devices) if devices else model
