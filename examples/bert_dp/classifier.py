"""BERT as training needs it: token numbers in, class scores or the sum of their losses out."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.bert.modeling_bert import BertForSequenceClassification

from common.launch.errors import UserError
from common.launch.flags import Launch
from common.launch.place import current
from examples.bert_dp.tokens import PAD


class Classifier(nn.Module):
    """A BERT with the loss that DataParallel needs: a sum per device.

    Args:
        bert: the model of transformers.
        autocast: makes the context of mixed precision. It is entered in `forward` because
            DataParallel runs its replicas in threads, to which torch does not pass on the type of
            the caller's autocast.
        mask: share of the tokens that training hides: word dropout, as in Iyyer et al., 2015,
            https://aclanthology.org/P15-1162
        mask_id: the number of [MASK].
    """

    def __init__(
        self,
        bert: BertForSequenceClassification,
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
        mask: float = 0.0,
        mask_id: int = PAD,
    ) -> None:
        super().__init__()
        self.bert = bert
        self.autocast = autocast
        self.mask, self.mask_id = mask, mask_id

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """Compute class scores, or their loss.

        Args:
            ids: token numbers [N, L], padded at the end.
            labels: [N]; -100 marks padding, which is left out.

        Returns:
            Logits [N, 2]; with labels the SUM of the cross-entropies, [1].
        """
        if self.training and self.mask:
            chosen = torch.rand(ids.shape, device=ids.device) < self.mask
            chosen[:, 0] = False  # [CLS], which the classifier reads
            ids = ids.masked_fill(chosen & (ids != PAD), self.mask_id)
        with self.autocast():
            logits = self.logits(ids).float()
        if labels is None:
            return logits
        return F.cross_entropy(logits, labels, reduction="sum").unsqueeze(0)

    def logits(self, ids: Tensor) -> Tensor:
        """The model's scores, [N, 2], for token numbers [N, L]."""
        # Broadcasts over [N, heads, query, key]. Given [N, L], transformers would ask the device
        # whether anything is hidden, and the host would wait. The cost: no flash kernel for
        # batches without padding.
        mask = (ids != PAD)[:, None, None, :]
        scores: Tensor = self.bert(input_ids=ids, attention_mask=mask).logits
        return scores


def local_devices(flags: Launch, device: torch.device, replicas: int = 1) -> list[torch.device]:
    """The devices of this process: all visible CUDA devices, if it is alone on its node.

    Args:
        flags: `--gpu`.
        device: of this rank.
        replicas: on a CPU.

    Returns:
        The CPU as often as there are replicas of the model; none if there is one.

    Raises:
        UserError: several replicas are for a CPU.
    """
    if device.type != "cuda":
        return [device] * replicas if replicas > 1 else []
    if replicas > 1:
        raise UserError(
            f"--replicas {replicas} is for a CPU: on CUDA devices there is one replica on each; "
            f"CUDA_VISIBLE_DEVICES chooses them, --device cpu leaves them"
        )
    if current().local_world_size == 1 and flags.gpu is None:
        return [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    return [device]


def in_words(devices: Sequence[torch.device], batch_size: int) -> str:
    """Which devices share a process's part of a batch, and in which chunks."""
    if not devices:
        return "no DataParallel: one device"
    chunks = ", ".join(str(len(chunk)) for chunk in torch.arange(batch_size).chunk(len(devices)))
    used = f"DataParallel over {', '.join(map(str, devices))}"
    return used if len(devices) == 1 else f"{used}: chunks of {chunks} reviews"
