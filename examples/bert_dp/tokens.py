"""Text to numbers: the vocabulary, and reviews that are tokenised once and padded per batch."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers.models.bert.tokenization_bert import BertTokenizer

from common.data.samplers import GlobalBatchSampler, indices_of
from common.launch.errors import UserError

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
HAN = re.compile("[\u4e00-\u9fff]+")
PAD = 0  # the id of [PAD], in every vocabulary that is accepted here


def vocabulary(texts: Sequence[str]) -> list[str]:
    """A vocabulary of single characters, the most frequent first.

    BERT splits Chinese into characters anyway; of Latin words, `##c` is what follows the first
    letter (WordPiece, Devlin et al., 2018, https://arxiv.org/abs/1810.04805).
    """
    counts = Counter(
        character for text in texts for character in text.lower() if not character.isspace()
    )
    characters = sorted(counts, key=lambda character: (-counts[character], character))
    continued = [f"##{c}" for c in characters if c.isascii() and c.isalnum()]
    return [*SPECIAL, *characters, *continued]


def add_pairs(tokens: list[str], texts: Sequence[str], count: int) -> list[str]:
    """A vocabulary with the `count` most frequent pairs of neighbouring Chinese characters.

    WordPiece reads from left to right and takes the longest token that fits, a pair or a character;
    each is there twice, as the begin of a stretch of Chinese and, with ##, within one.

    Raises:
        UserError: the texts have no such pair.
    """
    if not count:
        return tokens
    pairs = Counter(
        stretch[start : start + 2]
        for text in texts
        for stretch in HAN.findall(text)
        for start in range(len(stretch) - 1)
    )
    if not pairs:
        raise UserError(f"--pairs {count}: the reviews have no Chinese; leave it out")
    frequent = sorted(pairs, key=lambda pair: (-pairs[pair], pair))[:count]
    begin = [*(token for token in tokens if HAN.fullmatch(token)), *frequent]
    return list(dict.fromkeys([*tokens, *begin, *(f"##{token}" for token in begin)]))


def read_vocabulary(path: Path) -> list[str]:
    """The tokens of a `vocab.txt`, one per line.

    Raises:
        UserError: the file cannot be read, or lacks a special token.
    """
    try:
        # Not splitlines: it splits at more than line ends.
        tokens = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--vocab {path} cannot be read ({error})") from None
    tokens = [token.rstrip("\r") for token in (tokens[:-1] if tokens[-1] == "" else tokens)]
    if missing := [token for token in SPECIAL if token not in tokens]:
        raise UserError(
            f"--vocab {path} is not the vocabulary of a BERT: it lacks {', '.join(missing)}"
        )
    if tokens[PAD] != "[PAD]" or len(set(tokens)) < len(tokens):
        raise UserError(
            f"--vocab {path} is not the vocabulary of a BERT: "
            f"[PAD] must be first, and no token twice"
        )
    return tokens


def make_tokenizer(tokens: Sequence[str], max_length: int, pairs: bool = False) -> BertTokenizer:
    """A tokenizer for a vocabulary.

    It lowers the case of its input if the vocabulary has lower-case letters only. With `pairs` it
    does not split Chinese into characters: a stretch of it, of 100 characters at most, is a word of
    pairs and characters, and [UNK] if one of them is not in the vocabulary.
    """
    words = [token for token in tokens if not token.startswith(("[", "<"))]
    cased = any(token != token.lower() for token in words)
    numbers = {token: number for number, token in enumerate(tokens)}
    return BertTokenizer(
        vocab=numbers,
        do_lower_case=not cased,
        model_max_length=max_length,
        tokenize_chinese_chars=not pairs,
    )


@dataclass(frozen=True)
class Encoded(Dataset[Any]):
    """Texts as token numbers in one tensor: a Python list each would take ten times the memory.

    Attributes:
        ids: the tokens of all texts one after the other, [T], int32.
        starts: where each begins, and the end of the last, [N + 1].
        labels: [N], int64.
        cut: texts that were longer than allowed, and lost their ends.
    """

    ids: Tensor
    starts: Tensor
    labels: Tensor
    cut: int

    def __len__(self) -> int:
        """Number of texts."""
        return len(self.labels)

    @property
    def lengths(self) -> Tensor:
        """Tokens of each text, [N]."""
        return self.starts.diff()

    def __getitems__(self, keys: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
        """A batch: ids padded to its longest text [B, L], labels [B], indices [B].

        Args:
            keys: indices, or pairs (epoch, index) as `GlobalBatchSampler` gives them.
        """
        indices = indices_of(keys)
        rows = [self.ids[self.starts[i] : self.starts[i + 1]] for i in indices.tolist()]
        # Padded to the longest of the batch: no column is [PAD] only.
        ids = pad_sequence(rows, batch_first=True, padding_value=PAD).long()
        return ids, self.labels[indices], indices


def encode(
    tokenizer: BertTokenizer, texts: Sequence[str], labels: Sequence[int], max_length: int
) -> Encoded:
    """Tokenise once: the collate function would do the same work again in every epoch.

    Args:
        tokenizer: puts [CLS] before a text and [SEP] behind it.
        texts: N of them.
        labels: one per text.
        max_length: in tokens; a longer text keeps its beginning, and its [SEP].
    """
    rows: list[list[int]] = []
    if texts:
        rows = tokenizer(list(texts), return_attention_mask=False, verbose=False)["input_ids"]
    cut = sum(len(row) > max_length for row in rows)
    rows = [row if len(row) <= max_length else [*row[: max_length - 1], row[-1]] for row in rows]
    lengths = torch.tensor([0, *(len(row) for row in rows)])
    ids = torch.tensor([number for row in rows for number in row], dtype=torch.int32)
    return Encoded(ids, lengths.cumsum(0), torch.tensor(labels, dtype=torch.long), cut)


class LengthSampler(GlobalBatchSampler):
    """Batches of texts of similar length, so that little of a batch is padding.

    The epoch's permutation is cut into windows; each is sorted by length and cut into batches,
    which are then shuffled. A window is an eighth of the epoch, so which texts meet differs from
    epoch to epoch. The last, smaller batch of the epoch is a random one. As in a
    `GlobalBatchSampler`, rank r gets every W-th text of a batch, so that the ranks' parts are
    equally long.

    Args:
        lengths: tokens of each text, [N].
        batch_size: texts in a global batch.
        seed: of the permutations.
        rank: which part of each batch; by default this process's rank.
        world_size: into how many parts W a batch is cut; by default that of the process group.
        most: the most batches in a window.
    """

    def __init__(
        self,
        lengths: Tensor,
        batch_size: int,
        seed: int,
        rank: int | None = None,
        world_size: int | None = None,
        most: int = 50,
    ) -> None:
        super().__init__(len(lengths), batch_size, seed, rank, world_size)
        self.lengths, self.most = lengths, most

    def order(self) -> Tensor:
        """The order of the epoch, [N], the same on all ranks."""
        # The whole order in memory, also of very many reviews: it is sorted window by window.
        order, size = super().order()[torch.arange(self.length)], self.batch_size
        whole = len(order) // size  # batches that are full
        if whole == 0:
            return order
        window = size * max(1, min(self.most, whole // 8))
        windows = order[: whole * size].split(window)
        sorted_windows = [part[self.lengths[part].argsort(stable=True)] for part in windows]
        batches = torch.cat(sorted_windows).view(whole, size)
        generator = torch.Generator().manual_seed(int(order[0]))
        shuffled = batches[torch.randperm(whole, generator=generator)].flatten()
        return torch.cat([shuffled, order[whole * size :]])
