"""BERT for two classes: built, loaded from a local folder, saved for `from_pretrained`."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import logging
from transformers.models.bert.configuration_bert import BertConfig
from transformers.models.bert.modeling_bert import BertForSequenceClassification
from transformers.models.bert.tokenization_bert import BertTokenizer

from common.launch.errors import UserError
from common.train.files import write_atomically
from examples.bert_dp.args import TextArgs
from examples.bert_dp.reviews import ID2LABEL
from examples.bert_dp.tokens import PAD, add_pairs, make_tokenizer, read_vocabulary, vocabulary

LABEL2ID = {name: label for label, name in ID2LABEL.items()}
# A pretrained model may lack these: they are trained here.
HEAD = ("classifier.", "bert.pooler.")
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
# The copies: tensors that share memory cannot be written.
CONVERT = (
    'python -c "import torch; from safetensors.torch import save_file; '
    "weights = torch.load('pytorch_model.bin', weights_only=True); "
    "save_file({name: value.clone() for name, value in weights.items()}, "
    "'model.safetensors', {'format': 'pt'})\" in this folder"
)
VOCABULARY = ("tokenizer.json", "vocab.txt")
# Nothing asks the network, and no code of the folder runs.
LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def prepare(
    args: TextArgs, texts: Sequence[str]
) -> tuple[BertForSequenceClassification, BertTokenizer, str]:
    """Build or load the model and tokenizer that the flags name, on the CPU.

    Args:
        args: the flags.
        texts: the training reviews, for their characters and pairs.

    Returns:
        Model, tokenizer, and a description of the model.

    Raises:
        UserError: as `load` and `read_vocabulary`.
    """
    if args.model:
        model, tokenizer = load(args.model, args.max_length, new_head=True, dropout=args.dropout)
        return model, tokenizer, f"BERT from {args.model}"
    tokens = read_vocabulary(args.vocab) if args.vocab else vocabulary(texts)
    tokens = add_pairs(tokens, texts, args.pairs)
    layers, hidden, dropout = (args.chosen[name] for name in ("layers", "hidden", "dropout"))
    config = BertConfig(
        vocab_size=len(tokens),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        intermediate_size=4 * hidden,
        max_position_embeddings=args.max_length,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        pad_token_id=PAD,
        # Before the model is wrapped: DataParallel has no `config`, only its `module` has one.
        id2label=ID2LABEL,
        label2id=LABEL2ID,
    )
    name = f"BERT of {layers} layers x {hidden} with {len(tokens):,} tokens, from scratch"
    tokenizer = make_tokenizer(tokens, args.max_length, pairs=args.pairs > 0)
    return BertForSequenceClassification(config), tokenizer, name


def load(
    folder: Path,
    max_length: int | None = None,
    new_head: bool = False,
    dropout: float | None = None,
) -> tuple[BertForSequenceClassification, BertTokenizer]:
    """Load a BERT from a local folder: no network, no pickle, no code from the folder.

    Args:
        folder: with config.json, model.safetensors, and tokenizer.json or vocab.txt.
        max_length: tokens that the model must be able to take.
        new_head: whether the classifier may be absent, or of other classes; it is then random.
        dropout: instead of the model's own.

    Raises:
        UserError: a file is missing or damaged, the model is not a BERT, or the files do not fit
            together.
    """
    _check_files(folder)
    logging.set_verbosity_error()  # what matters is checked below, and reported in one line
    logging.disable_progress_bar()
    changes: dict[str, Any] = {"id2label": ID2LABEL, "label2id": LABEL2ID} if new_head else {}
    if dropout is not None:
        changes |= {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    try:
        kind = json.loads((folder / "config.json").read_text()).get("model_type")
        if kind != "bert":
            raise UserError(f"--model {folder} is of the type {kind}, not a BERT")
        config = BertConfig.from_pretrained(folder, **LOCAL, **changes)
        tokenizer = BertTokenizer.from_pretrained(folder, **LOCAL)
        loaded: Any = BertForSequenceClassification.from_pretrained(
            folder,
            config=config,
            use_safetensors=True,
            attn_implementation="sdpa",  # eager would add the Boolean mask as numbers
            dtype=torch.float32,  # not the file's: a model saved in float16 would train in float16
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **LOCAL,
        )
    except (OSError, ValueError, RuntimeError, AttributeError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--model {folder} cannot be loaded ({reason})") from None
    model, about = loaded
    # Without this save_pretrained writes the names that the file had, as LayerNorm.gamma, and the
    # Trainer, which reads by today's names, passes over them when it takes the best model.
    model._weight_conversions = None
    absent = sorted({*about["missing_keys"], *(entry[0] for entry in about["mismatched_keys"])})
    _check_parts(folder, config, tokenizer, max_length)
    _check_tensors(folder, [name for name in absent if not (new_head and name.startswith(HEAD))])
    return model.train(), tokenizer


def _check_files(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise UserError(f"--model {folder}: no config.json there; give the local folder of a BERT")
    if not any((folder / name).is_file() for name in WEIGHTS):
        pickled = (folder / "pytorch_model.bin").is_file()
        raise UserError(
            f"--model {folder}: no model.safetensors there"
            + (f"; pickled weights are not read, convert them by {CONVERT}" if pickled else "")
        )
    if not any((folder / name).is_file() for name in VOCABULARY):
        raise UserError(f"--model {folder}: no vocabulary there ({' or '.join(VOCABULARY)})")


def _check_parts(
    folder: Path, config: BertConfig, tokenizer: BertTokenizer, max_length: int | None
) -> None:
    """Check that tokenizer and model belong together, and that the model takes long texts."""
    pads = {tokenizer.pad_token_id, config.pad_token_id}
    if len(tokenizer) != config.vocab_size or pads != {PAD}:
        raise UserError(
            f"--model {folder}: its tokenizer has {len(tokenizer):,} tokens and [PAD] = "
            f"{tokenizer.pad_token_id}, its model {config.vocab_size:,} and "
            f"{config.pad_token_id}: they are not of one model"
        )
    if (max_length or 0) > config.max_position_embeddings:
        most = config.max_position_embeddings
        raise UserError(
            f"--max-length {max_length}: the model in {folder} takes at most {most} tokens"
        )


def _check_tensors(folder: Path, missing: list[str]) -> None:
    if missing:
        raise UserError(
            f"--model {folder}: {len(missing)} tensor(s) of its config.json are not in its "
            f"weights, or of other shapes ({missing[0]}, ...)"
        )


def save(folder: Path, bert: BertForSequenceClassification, tokenizer: BertTokenizer) -> None:
    """Write the folder that `from_pretrained` and `pipeline` load, each file atomically.

    Raises:
        UserError: a file cannot be written; the one before stays as it was.
    """
    logging.disable_progress_bar()  # of one file
    with tempfile.TemporaryDirectory() as temporary:
        bert.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        for file in sorted(Path(temporary).iterdir()):
            write_atomically(folder / file.name, file.read_bytes())
