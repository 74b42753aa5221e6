"""Weights of `--init`: this project's, torchvision's, pytorch/examples'; another model's are refused in one line."""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torchvision.models import resnet18, resnet34

from common.launch.errors import UserError
from common.train.checkpoint_files import file_name
from common.train.weights import init_model, load_model, read_weights, save_model

pytestmark = pytest.mark.usefixtures("alone")


def net(classes: int = 3, width: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.Flatten(), nn.Linear(width, classes))


def same(one: nn.Module, other: nn.Module, but: tuple[str, ...] = ()) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) != (name in but) for (name, a), b in pairs)


def test_every_kind_of_file_is_read(tmp_path: Path) -> None:
    trained = net()
    state = trained.state_dict()
    wrapped = {f"module.{name}": value for name, value in state.items()}
    save_model(tmp_path / "best.safetensors", trained, {"class_names": '["a"]'})
    torch.save(state, tmp_path / "resnet18-f37072fd.pth")
    optimizer = torch.optim.SGD(trained.parameters(), 0.1, 0.9)
    theirs = {"epoch": 7, "arch": "resnet18", "state_dict": wrapped, "best_acc1": torch.tensor(71.0)}
    torch.save(theirs | {"optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pth.tar")
    compiled = {f"module._orig_mod.{name}": value for name, value in state.items()}
    torch.save({"model": compiled}, tmp_path / "compiled.pt")
    for ema, name in ((False, "own"), (True, "averaged")):
        average = {"n_averaged": torch.tensor(3)} | wrapped
        content = {"model": state} if not ema else {"model": net().state_dict(), "ema": average}
        torch.save(content, tmp_path / name)
        digest = hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
        (tmp_path / name).rename(tmp_path / file_name(7 + ema, digest))
    for file in tmp_path.iterdir():
        model = net()
        assert not same(model, trained)
        init_model(file, model)
        assert same(model, trained), file


def test_a_last_layer_for_other_classes_stays_random(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs, ours = resnet18(), resnet18(num_classes=7)
    torch.save(theirs.state_dict(), tmp_path / "imagenet.pth")
    before = ours.fc.weight.clone()
    init_model(tmp_path / "imagenet.pth", ours)
    assert torch.equal(ours.fc.weight, before)
    assert torch.equal(ours.layer4[1].conv2.weight, theirs.layer4[1].conv2.weight)
    assert capsys.readouterr().out == (
        f"weights of {tmp_path}/imagenet.pth loaded, but for fc.bias, fc.weight: another number of outputs\n"
    )


class Harmful:
    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (Path("harmed"),)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, r"cannot be read as weights \(.*No such file"),
        (b"\x80\x02garbage", r"cannot be read as weights \("),
        (Harmful(), r"cannot be read as weights \(Weights only load failed"),
        ({"epoch": 7}, "holds no weights: expected tensors by name, or `state_dict`"),
        (net(width=5), r"is of another model: 0.bias is \[5\] there and \[4\] here \(and 6 more such tensors\)"),
        (resnet34(), r"is of another model: no 0.bias in the file \(and \d+ more such tensors\)"),
        (nn.Sequential(*net(), nn.Linear(3, 3)), r"is of another model: no 4.bias in this model \(and 1 more"),
        (nn.Sequential(*net(), nn.Linear(3, 3, bias=False)), r"is of another model: no 4.weight in this model$"),
    ],
)
def test_other_files_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: object, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "weights.pth"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        torch.save(content.state_dict() if isinstance(content, nn.Module) else content, file)
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UserError, match=rf"{file} .*{words}") as error:
        init_model(file, model)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "harmed").exists(), "no code of the file was run"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_wrong_file_of_34_layers_is_not_taken_for_18(tmp_path: Path) -> None:
    torch.save(resnet34().state_dict(), tmp_path / "34.pth")
    with pytest.raises(UserError, match=r"another model: no layer1\.2\.bn1\.bias in this model"):
        init_model(tmp_path / "34.pth", resnet18())


def test_weights_tell_what_they_are_for(tmp_path: Path) -> None:
    save_model(tmp_path / "best.safetensors", net(), {"class_names": '["cat"]'})
    assert load_file(tmp_path / "best.safetensors").keys() == read_weights(tmp_path / "best.safetensors").keys()


def test_tied_weights_are_saved(tmp_path: Path) -> None:
    """As an embedding and the last layer of a language model: safetensors refuses what shares memory."""
    embedding, last = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
    last.weight = embedding.weight
    save_model(tmp_path / "best.safetensors", nn.Sequential(embedding, last), {})
    saved = read_weights(tmp_path / "best.safetensors")
    assert all(torch.equal(saved[name], last.weight) for name in ("0.weight", "1.weight"))


def test_heads_for_training_only_are_not_evaluated(tmp_path: Path) -> None:
    """As googlenet's and inception_v3's files have them; --init takes the same files."""
    trained, file = net(), tmp_path / "googlenet.pth"
    torch.save(trained.state_dict() | {"aux1.fc.weight": torch.ones(2), "AuxLogits.fc.weight": torch.ones(2)}, file)
    for load in (init_model, lambda path, model: load_model(str(path), tmp_path, model)):
        model = net()
        load(file, model)
        assert same(model, trained)
    torch.save(trained.state_dict() | {"other.weight": torch.ones(2)}, file)
    with pytest.raises(UserError, match=r"holds the weights of another model: .*other\.weight"):
        load_model(str(file), tmp_path, net())
