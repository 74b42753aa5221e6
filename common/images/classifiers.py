"""What torchvision's classifiers must be told besides their name, to be trained on one loss."""

from typing import Any


def classifier_options(arch: str, size: int) -> dict[str, Any]:
    """Arguments for `torchvision.models.get_model`.

    Args:
        arch: the name of a classifier.
        size: height and width of the images, in pixels: models with positions depend on it.
    """
    if arch.startswith("vit_"):
        return {"image_size": size}
    if arch.startswith("maxvit"):
        return {"input_size": (size, size)}
    if arch in ("googlenet", "inception_v3"):  # without their extra heads for training
        # torchvision's weights need transform_input; always, since those who load a model's
        # weights do not know whether it began with torchvision's
        return {"aux_logits": False, "init_weights": True, "transform_input": True}
    return {}
