"""`--evaluate`: the metrics of weights that are there already."""

from dataclasses import replace

import torch
import torch.distributed as dist

from common.images.loader import eval_loader, warn_of_broken
from common.images.sets import load_images
from common.train.checks import check_replicas
from common.train.evaluate import evaluate
from common.train.run import Run
from common.train.summary import show_evaluation, write_predictions
from common.train.weights import load_model
from examples.imagenet_ddp.args import Args
from examples.imagenet_ddp.recipe import build_model


def evaluate_only(args: Args, device: torch.device) -> None:
    """Evaluate the weights of --resume or --pretrained; the results go to --out/evaluation.

    Every rank calls this, and evaluates its own shard.
    """
    data = load_images(args.images, args.seed, args.out)
    what = f"{args.recipe.arch} on {data}"
    apart = replace(args, out=args.out / "evaluation")  # what the training has written stays
    # What training has in memory at once; as nothing is trained, the ranks need not divide it.
    world_size = dist.get_world_size()
    micro_batch = max(1, args.global_batch // (world_size * args.accumulate))
    options = args.options | {"batch_size": world_size * micro_batch}
    with Run(apart, device, data, what=what, **options) as run:
        # no gradients: twice as many images fit
        loader = eval_loader(data.val, 2 * micro_batch, run.amp, args.images.workers)
        if ignored := _ignored(args):
            run.warn(f"--evaluate does not use {', '.join(ignored)}")
        # A run that began with --pretrained has its weights in the checkpoint of --resume.
        pretrained = args.recipe.pretrained and args.resume == "no"
        recipe = replace(args.recipe, pretrained=pretrained)
        network = build_model(recipe, len(data.classes), data.size, device, training=False)
        model = run.amp.move(network)
        weights = load_model(args.resume, args.out, model)
        evaluation = evaluate(model, loader, len(data.classes), run.autocast)
        show_evaluation(run, f"evaluation of {weights}", evaluation)
        if dist.get_rank() == 0:
            write_predictions(run, evaluation)
        run.finish(parameter_hash=check_replicas(model), skipped_images=warn_of_broken(run, loader))


def _ignored(args: Args) -> list[str]:
    """The flags that are given and change nothing here."""
    flags = {
        "--compile": args.amp.compile,
        "--profile": args.watch.profile != 0,
        "--track": args.watch.track != "no",
    }
    return [flag for flag, given in flags.items() if given]
