"""Models that DDP trains: `warm_up_buckets` and `Run` change nothing in them, and they resume.

Two processes train all models: first with plain DDP, then as `your_model/train.py` does. Then they
are killed in the middle, and two others resume. A model trains on rows [B, 30] and gives logits.
"""

import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from common.checkpoint import load_model
from tests import ranks

EPOCHS, CUT = 2, 8  # 6 steps in an epoch


class Model(nn.Module):
    """A network whose hidden layer, 30 to 30, is peculiar."""

    ddp: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(30, 30), nn.Linear(30, 2)
        self.prepare()

    def prepare(self) -> None:
        """Change layers."""

    def hidden(self, rows: Tensor) -> Tensor:
        return self.body(rows)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.hidden(rows).tanh())


class Tied(Model):
    def prepare(self) -> None:
        self.other = nn.Linear(30, 30)
        self.other.weight = self.body.weight

    def hidden(self, rows: Tensor) -> Tensor:
        return self.other(self.body(rows))


class Frozen(Model):
    def prepare(self) -> None:
        self.body.requires_grad_(False)
        self.extra = nn.Linear(30, 30)

    def hidden(self, rows: Tensor) -> Tensor:
        return self.extra(self.body(rows))


class Unused(Model):
    ddp: ClassVar = {"find_unused_parameters": True}

    def prepare(self) -> None:
        self.never, self.sometimes, self.calls = nn.Linear(2, 2), nn.Linear(30, 30), 0

    def hidden(self, rows: Tensor) -> Tensor:
        return self.body(rows) if rows[0, 0] > 0 else self.sometimes(rows)


class Complex(Model):
    def prepare(self) -> None:
        self.spectrum = nn.Parameter(torch.randn(16, dtype=torch.complex64))

    def hidden(self, rows: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(self.body(rows)) * self.spectrum, n=30)


class Sparse(Model):
    def prepare(self) -> None:
        self.table = nn.Embedding(100, 30, sparse=True)

    def hidden(self, rows: Tensor) -> Tensor:
        return self.body(rows) + self.table((rows[:, 0] * 10).long() % 100)


class SpectralNorm(Model):
    def prepare(self) -> None:
        self.body = parametrizations.spectral_norm(nn.Linear(30, 30))


class Recurrent(Model):
    def prepare(self) -> None:
        self.lstm = nn.LSTM(5, 15, num_layers=2, dropout=0.5, batch_first=True, bidirectional=True)

    def hidden(self, rows: Tensor) -> Tensor:
        return self.lstm(self.body(rows).view(-1, 6, 5))[0][:, -1]


class MixedPrecision(Model):
    def prepare(self) -> None:
        self.body.to(torch.float64)

    def hidden(self, rows: Tensor) -> Tensor:
        return self.body(rows.double()).float()


class Buffers(Model):
    number: Tensor
    sliced: Tensor
    phase: Tensor

    def prepare(self) -> None:
        self.norm = nn.BatchNorm1d(30)
        self.register_buffer("sliced", torch.arange(60.0)[::2])
        self.register_buffer("transposed", torch.arange(6.0).view(2, 3).t())
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("number", torch.tensor(0))
        self.register_buffer("flags", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("phase", torch.zeros(3, dtype=torch.complex64))
        self.register_buffer("temporary", torch.zeros(2), persistent=False)
        self.register_buffer("nothing", None)

    def hidden(self, rows: Tensor) -> Tensor:
        if self.training:
            self.number += 1
            self.sliced += dist.get_rank() + 1
            self.phase += 1j
        return self.norm(self.body(rows)) + self.number / 100


class ExpandedBuffer(Model):
    ddp: ClassVar = {"broadcast_buffers": False}  # DDP refuses to write to it

    def prepare(self) -> None:
        self.register_buffer("rank", None, persistent=False)

    def hidden(self, rows: Tensor) -> Tensor:
        self.rank = torch.tensor([dist.get_rank()]).expand(30)
        return self.body(rows)


class NotContiguous(Model):
    def prepare(self) -> None:
        self.body.weight = nn.Parameter(torch.randn(30, 30).t() / 10)
        self.conv = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)
        self.scale, self.none = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.empty(0, 3))

    def hidden(self, rows: Tensor) -> Tensor:
        images = self.conv(self.body(rows).view(-1, 2, 3, 5)).reshape(-1, 30)
        return images * self.scale + self.none.sum()


class Hooks(Model):
    def prepare(self) -> None:
        self.body.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2,))
        self.body.register_full_backward_hook(lambda *_: None)
        self.head.register_forward_hook(lambda _, __, logits: logits / 2)
        self.register_forward_pre_hook(lambda _, inputs: (inputs[0].clamp(-3, 3),))
        self.seen = 0
        self.body.weight.register_hook(self.count)

    def count(self, gradient: Tensor) -> Tensor:
        self.seen += 1
        return gradient * (1 + self.seen / 10)

    def get_extra_state(self) -> int:
        return self.seen

    def set_extra_state(self, state: int) -> None:
        self.seen = state


class StepInBackward(Model):
    def prepare(self) -> None:
        self.body.weight.register_post_accumulate_grad_hook(self.step)

    @torch.no_grad()
    def step(self, weight: Tensor) -> None:
        weight -= 0.01 * weight.sign()


class GrowingCache(Model):
    def prepare(self) -> None:
        self.cache = torch.empty(0)

    def hidden(self, rows: Tensor) -> Tensor:
        if len(self.cache) < len(rows):  # the whole test set is larger than a batch
            self.cache = torch.linspace(0, 1, len(rows))[:, None] * torch.ones(30)
        return self.body(rows * self.cache[-1])


class ExtraState(Model):
    def prepare(self) -> None:
        self.steps = 0

    def hidden(self, rows: Tensor) -> Tensor:
        self.steps += self.training
        return self.body(rows) / self.steps

    def get_extra_state(self) -> dict[str, int]:
        return {"steps": self.steps}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


class CheckpointedTwice(Model):
    ddp: ClassVar = {"static_graph": True}

    def hidden(self, rows: Tensor) -> Tensor:
        rows = rows.requires_grad_()
        once: Any = checkpoint(self.body, rows, use_reentrant=True)
        twice: Any = checkpoint(self.body, once, use_reentrant=True)
        return twice


class Orthogonal(Model):
    def prepare(self) -> None:
        self.body = parametrizations.orthogonal(nn.Linear(30, 30))
        self.head = parametrizations.weight_norm(self.head)


MODELS = {model.__name__: model for model in Model.__subclasses__()}


def built(name: str) -> tuple[DDP, torch.optim.Optimizer, Any, DataLoader[Any]]:
    """Return DDP, optimizer, sampler and loader."""
    torch.manual_seed(3 + dist.get_rank())
    rows = torch.randn(99, 30, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(rows, (rows.sum(1) > 0).long())
    sampler = DistributedSampler(data, seed=1, drop_last=True)
    model = DDP(MODELS[name](), **MODELS[name].ddp)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    # A loader without a generator draws a number that dropout would have drawn.
    generator = torch.Generator()
    loader = DataLoader(data, 8, sampler=sampler, drop_last=True, generator=generator)
    return model, optimizer, sampler, loader


def step(model: DDP, optimizer: torch.optim.Optimizer, batch: list[Tensor]) -> Tensor:
    loss = F.cross_entropy(model(batch[0]).float(), batch[1])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()  # after the step: no gradient may be left of the warm-up
    return loss


def plain(name: str) -> tuple[list[float], str]:
    """Train without this project; return the mean losses and the hash of rank 0."""
    from common.ddp import parameter_hash

    model, optimizer, sampler, loader = built(name)
    losses = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            loss = step(model, optimizer, batch).detach().double()
            dist.all_reduce(loss)
            losses.append(loss.item() / 2)
    return losses, parameter_hash(model)


def template(name: str, out: Path, cut: int = 0) -> None:
    """Train as the template does, up to step `cut`."""
    from common.ddp import warm_up_buckets
    from common.evaluate import evaluate
    from common.launch import RunArgs
    from common.run import Run

    model, optimizer, sampler, loader = built(name)
    test_set = TensorDataset(*(x[:41] for x in vars(loader.dataset)["tensors"]))
    shard = DistributedSampler(test_set, shuffle=False)
    test_loader = DataLoader(test_set, 64, sampler=shard, generator=torch.Generator())
    args = RunArgs(EPOCHS, 16, resume="auto", out=out, checkpoint_every=3, precision="fp32")
    run = Run(args, torch.device("cpu"), name, model=model, optimizer=optimizer)
    warm_up_buckets(model)
    for epoch in run.epochs(EPOCHS):
        sampler.set_epoch(epoch)
        for batch in run.steps(loader):
            run.log(step(model, optimizer, batch))
            if run.step + 1 == cut:
                return
        evaluation = evaluate(model, test_loader, len(test_set), run.autocast)
        run.end_epoch(evaluation.metrics, score=evaluation.metrics["accuracy"])
    run.finish(model)


def train_all(folder: Path, rank: int, phase: str) -> None:
    from common import log

    pytest.MonkeyPatch().setattr(log, "draw_curves", lambda *_: None)  # takes half a second
    method = f"file://{folder}/rendezvous-{phase}"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2)
    torch.use_deterministic_algorithms(True)
    results = {}
    for name in MODELS:
        try:
            if phase == "whole":
                results[name] = plain(name)
            template(name, folder / phase.replace("resumed", "cut") / name, CUT * (phase == "cut"))
        except Exception as error:  # the other rank meets the same error
            results[name] = repr(error)
    (folder / f"{phase}-{rank}.pickle").write_bytes(pickle.dumps(results))
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Any]:
    folder = tmp_path_factory.mktemp("peculiar")
    for phase in ("whole", "cut", "resumed"):
        codes, texts = ranks._forked([(train_all, folder, rank, phase) for rank in (0, 1)], folder)
        assert codes == [-9, -9], "\n".join(texts)

    def result(phase: str, name: str) -> Any:
        found = pickle.loads((folder / f"{phase}-0.pickle").read_bytes()).get(name)
        assert not isinstance(found, str), f"{phase}: {found}"
        return found, ranks.Training(folder / phase.replace("resumed", "cut") / name, [], [])

    return result


@pytest.mark.parametrize("name", MODELS)
def test_a_peculiar_model_trains_as_with_plain_ddp(name: str, trained: Any) -> None:
    (losses, parameters), whole = trained("whole", name)
    assert whole.losses == losses
    assert whole.result["parameter_hash"] == parameters
    trained("cut", name)
    _, resumed = trained("resumed", name)
    assert resumed.losses == losses
    assert resumed.result["parameter_hash"] == parameters
    load_model(whole.out / "best.safetensors", MODELS[name](), {})
