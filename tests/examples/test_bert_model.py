"""bert_dp's model: the scores of the stock one and of the fast one, and several replicas on a CPU."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.bert.configuration_bert import BertConfig
from transformers.models.bert.modeling_bert import BertForSequenceClassification

from common.train.replicas import Replicas
from examples.bert_dp.classifier import Classifier
from examples.bert_dp.fast_bert import FastClassifier, attend_by_products, attend_fused
from examples.bert_dp.reviews import ID2LABEL
from tests.conftest import Programs
from tests.cpu_replicas import OnCpus
from tests.examples.bert_jobs import (
    FP32,
    TRAIN,
    largest_difference,
    shipped,
    state_of,
)
from tests.runs import losses, mutated, predictions, result


class NothingIsRead(TorchDispatchMode):
    """Fails where the host reads a number (`item`, `bool`): it would wait for a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket is not torch.ops.aten._local_scalar_dense
        return func(*args, **(kwargs or {}))


def odd_batch(seed: int, most: int = 40) -> torch.Tensor:
    random = np.random.default_rng(seed)
    lengths = [*random.integers(2, most, 7).tolist(), 2, most]
    rows = [torch.from_numpy(random.integers(1, 50, length)) for length in lengths]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


@pytest.mark.parametrize("kind", [Classifier, FastClassifier])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_scores_and_gradients_are_the_models_own(kind: type[Classifier], layers: int) -> None:
    """In float64 inside; only the scores are rounded to float32, to 6e-8 of their size, hence the tolerances."""
    torch.manual_seed(layers)
    config = BertConfig(
        vocab_size=50,
        hidden_size=128,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=256,
        max_position_embeddings=40,
    )
    bert = BertForSequenceClassification(config).eval().double()
    classifier = kind(bert).double()
    ids = odd_batch(layers)
    with NothingIsRead():
        found = classifier(ids)
    expected = bert(ids, (ids != 0).long()).logits
    torch.testing.assert_close(found, expected.float(), rtol=1e-6, atol=1e-6)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in bert.named_parameters()}
    bert.zero_grad()
    (classifier(ids) * weights).sum().backward()
    for name, parameter in bert.named_parameters():
        if gradients[name] is None:
            assert parameter.grad is None, name
        else:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", [Classifier, FastClassifier])
def test_word_dropout_hides_some_tokens_in_training_only(
    kind: type[Classifier], monkeypatch: pytest.MonkeyPatch
) -> None:
    bert, tokenizer, _, _ = shipped()
    model, seen = kind(bert, mask=0.3, mask_id=tokenizer.mask_token_id), []
    scores = model.logits
    monkeypatch.setattr(model, "logits", lambda ids: seen.append(ids) or scores(ids))
    ids = torch.randint(5, 40, (50, 60))
    ids[:, 50:] = 0
    for _ in range(2):
        model(ids)
    model.eval()(ids)
    hidden = [each == tokenizer.mask_token_id for each in seen]
    assert 0.25 < hidden[0][:, 1:50].double().mean() < 0.35
    assert not hidden[0][:, 0].any(), "[CLS]"
    assert not hidden[0][:, 50:].any(), "[PAD]"
    assert torch.equal(seen[0].masked_fill(hidden[0], 0), ids.masked_fill(hidden[0], 0))
    assert not torch.equal(hidden[0], hidden[1]), "others each time"
    assert torch.equal(seen[2], ids), "evaluation sees all"


@pytest.mark.parametrize("queries", [1, 9])
def test_attention_by_products_is_torchs_own(queries: int) -> None:
    """In float64 they agree to its rounding; in bfloat16, which has 8 bits, both are as near to that as it goes."""
    generator = torch.Generator().manual_seed(0)
    exact = [torch.randn(3, 2, length, 8, generator=generator, dtype=torch.float64) for length in (queries, 9, 9)]
    mask = (torch.arange(9) < torch.tensor([[9], [4], [1]]))[:, None, None, :]  # [3, 1, 1, 9]

    def results(attend: Callable[..., torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = [each.clone().to(dtype).requires_grad_() for each in exact]
        mixed = attend(*inputs, mask, 0.0)
        mixed.square().sum().backward()
        return [mixed.detach(), *(each.grad for each in inputs if each.grad is not None)]

    right = results(attend_fused, torch.float64)
    assert len(right) == 4
    for ours, theirs in zip(results(attend_by_products, torch.float64), right, strict=True):
        torch.testing.assert_close(ours, theirs)
    for ours, theirs in zip(results(attend_by_products, torch.bfloat16), right, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0.05, atol=0.05)


# ------------------------------------------------------------------------------------------------ several replicas


@pytest.mark.parametrize("kind", [Classifier, FastClassifier])
def test_sums_are_right_for_unequal_chunks_and_means_are_not(kind: type[Classifier]) -> None:
    """DataParallel's chunks of 5 reviews on 4 devices: 2, 2 and 1."""
    model = kind(shipped()[0].eval())
    ids, labels = odd_batch(5)[:5], torch.tensor([0, 1, 1, 0, 1])
    whole = F.cross_entropy(model(ids), labels)
    chunks = list(zip(ids.chunk(4), labels.chunk(4), strict=True))
    assert [len(part) for part, _ in chunks] == [2, 2, 1]
    sums = torch.cat([model(*chunk) for chunk in chunks])
    torch.testing.assert_close(sums.sum() / 5, whole)
    means = torch.stack([F.cross_entropy(model(part), targets) for part, targets in chunks]).mean()
    assert abs(means - whole).item() > 1e-4


@pytest.mark.parametrize("wrap", [OnCpus, Replicas])
@pytest.mark.parametrize("kind", [Classifier, FastClassifier])
@pytest.mark.parametrize("labels", [[0, 1, 1, 0, 1], [0, 1, 1, -100, -100]], ids=["labels", "padding"])
def test_two_replicas_equal_one_device(kind: type[Classifier], labels: list[int], wrap: Any) -> None:
    """5 reviews are 3 and 2: loss and gradients of the model itself, also where a replica has nothing but padding."""
    ids, targets = odd_batch(5)[:5], torch.tensor(labels)
    one, model = shipped()[0], kind(shipped()[0])
    shares = []
    model.register_forward_hook(lambda _, given, __: shares.append(len(given[0])))  # the copies have it, too
    parallel = wrap(model, [0, 1] if wrap is OnCpus else [torch.device("cpu")] * 2)
    for each in (one, model.bert):  # an optimizer's step: the copies have to follow
        each.classifier.weight.data.mul_(2)
    loss = one(ids, (ids != 0).long(), labels=targets).loss
    loss.backward()
    sums = parallel(ids, targets)  # [2]
    assert (sums.shape, sorted(shares)) == ((2,), [2, 3])
    found = sums.sum() / (targets >= 0).sum()
    found.backward()
    torch.testing.assert_close(found, loss)
    gradients = {name: parameter.grad for name, parameter in one.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    torch.testing.assert_close(
        {name: parameter.grad for name, parameter in model.bert.named_parameters()}, gradients, rtol=1e-4, atol=1e-6
    )
    with torch.inference_mode():
        torch.testing.assert_close(parallel(ids.clone()), one(ids, (ids != 0).long()).logits)
        assert parallel(ids[:1]).shape == (1, 2), "fewer reviews than devices"


FIVES = ("--epochs", 1, "-b", 5, "--hidden", 64, "--layers", 2, *FP32)  # 56 batches of 5 reviews and one of 4
MEANS = (
    ('reduction="sum"', 'reduction="mean"', "classifier"),
    ("sums.sum() * world_size / batch_samples", "sums.mean()", "train"),
)


@pytest.fixture(scope="module")
def fives(shared_programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program on one device."""
    out = tmp_path_factory.mktemp("fives")
    shared_programs.run(*TRAIN, *FIVES, "--out", out)
    return out


@pytest.mark.parametrize("flags", [(), ("--fast",)], ids=["stock", "fast"])
@pytest.mark.parametrize("means", [False, True], ids=["sums", "mutation"])
def test_the_program_on_two_replicas(
    programs: Programs, tmp_path: Path, fives: Path, means: bool, flags: tuple[str, ...]
) -> None:
    """Two replicas train as one device does; not so with the mean of the replicas' means."""
    changes = ((f"examples/bert_dp/{file}.py", old, new) for old, new, file in MEANS if means)
    out = tmp_path / "out"
    run = (*TRAIN, *FIVES, "--replicas", 2, *flags, "--out", out)
    done = programs.run(*run, cwd=mutated(tmp_path / "changed", *changes))
    assert re.findall(r"^DataParallel over (.*)$", done.stdout, re.MULTILINE) == ["cpu, cpu: chunks of 3, 2 reviews"]
    found, expected = losses(out), losses(fives)
    if means:
        assert largest_difference(found, expected) > 5e-3
        return
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=0)
    torch.testing.assert_close(state_of(out), state_of(fives), rtol=1e-3, atol=2e-4)
    assert predictions(out) == predictions(fives)
    names = ("metrics", "steps", "train_samples")
    assert [result(out)[name] for name in names] == [result(fives)[name] for name in names]


def test_the_inner_model_is_reached_through_module() -> None:
    wrapped = nn.DataParallel(shipped()[0])
    with pytest.raises(AttributeError, match="config"):
        _ = wrapped.config
    assert wrapped.module.config.id2label == ID2LABEL, "set before wrapping"
