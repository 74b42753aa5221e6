"""mnist_dataparallel: train on several devices in one process: `nn.DataParallel`, and by hand.

On CUDA devices torch's `nn.DataParallel` does the work; on the CPU, where it would silently use one
replica only, the same steps written out in eight_steps.py, with one thread per replica.

    python -m examples.mnist_dataparallel                                     # all GPUs, or cpu,cpu
    python -m examples.mnist_dataparallel --devices cpu,cpu --explain         # the steps, timed
    python -m examples.mnist_dataparallel --devices 0,2                       # cuda:0 and cuda:2
    CUDA_VISIBLE_DEVICES=0,2 python -m examples.mnist_dataparallel            # the same two
    python -m examples.mnist_dataparallel --devices 0,1 --engine eight-steps  # by hand on GPUs
    torchrun --nnodes 2 --node-rank R --master-addr HOST0 -m examples.mnist_dataparallel
"""

import runpy

import torch
import torch.distributed as dist
from torch.nn import CrossEntropyLoss
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

from common.data.idx import image_data
from common.data.models import DigitNet
from common.data.samplers import GlobalBatchSampler
from common.launch.collectives import all_reduce_mean
from common.launch.device import choose_device
from common.launch.place import Place
from common.launch.record import record
from common.launch.rendezvous import JOB
from common.launch.spawn import launch
from common.train.evaluate import evaluate
from common.train.run import Run
from examples.mnist_dataparallel.args import Args, device_names
from examples.mnist_dataparallel.devices import choose_devices, with_cpu_named
from examples.mnist_dataparallel.eight_steps import Net
from examples.mnist_dataparallel.engines import choose_engine
from examples.mnist_dataparallel.explain import Explanation


def main(place: Place, args: Args) -> None:
    """Train in every process of this node: by convention one, whose replicas are threads."""
    names = device_names(args.devices, args.launch)
    launch(main_worker, with_cpu_named(place, names), args)


@record  # one line per error and job, a clean stop on SIGTERM; torch's own `record` works, too
def main_worker(local_rank: int, place: Place, args: Args) -> None:
    """One process of the job."""
    place.export(local_rank)  # RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, as torchrun
    first, backend = choose_device(place.flags, local_rank)  # cuda and nccl, or cpu and gloo
    names, visible = device_names(args.devices, args.launch), torch.cuda.device_count()
    devices = choose_devices(names, first.type, visible, place.worker(local_rank))
    bound = devices[0] if first.type == "cuda" else None
    if bound:
        torch.cuda.set_device(bound)  # collectives that name no device go there
    dist.init_process_group(backend, init_method=JOB, timeout=args.launch.patience, device_id=bound)
    train(args, devices)
    dist.destroy_process_group()


def train(args: Args, devices: list[torch.device]) -> None:
    """Train and evaluate; every process runs this with its own share of the data and devices."""
    world_size, cuda = dist.get_world_size(), devices[0].type == "cuda"
    torch.manual_seed(args.seed)  # all processes draw the same parameters: nobody sends them
    data = image_data(args.dataset, args.data_dir)
    epochs = args.epochs or (20 if args.dataset == "digits" else 1)
    engine = choose_engine(args.engine, devices, args.explain)
    engine_on = f"{engine.name} on {', '.join(map(str, devices))}"
    chunks = torch.arange(args.batch_size // world_size).chunk(len(devices))
    shares = f"{world_size} process(es) x chunks of {', '.join(str(len(c)) for c in chunks)}"
    what, settings = f"{data}, {engine_on}", {"epochs": epochs}
    with Run(args, devices[0], data, what=what, shares=shares, settings=settings) as run:
        if len(chunks) < len(devices):
            idle = len(devices) - len(chunks)
            run.warn(f"{idle} of {len(devices)} devices get no sample: raise --batch-size")
        sampler = GlobalBatchSampler(len(data.train), args.batch_size, args.seed)
        loader = DataLoader(data.train, batch_sampler=sampler, collate_fn=list, pin_memory=cuda)
        model = run.prepare(DigitNet(data.size, data.classes))
        criterion = CrossEntropyLoss(reduction="sum", label_smoothing=args.label_smoothing)
        explanation = Explanation(devices, 3 if args.explain else 0)
        net = Net(model, criterion, run.amp)
        parallel = engine(net, devices, args.loss == "inside", explanation)
        optimizer = SGD(
            model.parameters(),
            args.lr,
            args.momentum,
            weight_decay=args.weight_decay,
            nesterov=args.momentum > 0,
            fused=cuda,  # one kernel instead of several per parameter
        )
        scheduler = OneCycleLR(optimizer, args.lr, epochs * len(loader), cycle_momentum=False)
        run.resume(model=model, optimizer=optimizer, scheduler=scheduler)
        remember_engine(run, engine_on)

        for epoch in run.epochs(epochs):
            sampler.set_epoch(epoch)  # without this, every epoch has the same order
            for pixels, labels in run.steps(loader):  # [B, 1, H, W] bytes, [B]
                # The sampler pads the last batch with repeated samples, at the end: cut them off,
                # so that the chunks are cut from new samples only. A process may have none left.
                batch_samples, local_samples = run.batch_share()
                pixels, labels = pixels[:local_samples], labels[:local_samples]
                explanation.begin()
                # Bytes go to the first device, a quarter of float32, and become images there.
                images = data.normalise(pixels.to(devices[0], non_blocking=True))
                # Scatter, replicate, forward, gather, loss, backward, reduce: see eight_steps.py.
                # Sums over the chunks, whatever their sizes, are then averaged over the processes:
                # this factor makes that the mean over the global batch.
                loss = parallel.gradients(images, labels, world_size / batch_samples)  # steps 1-7
                all_reduce_mean(parameter.grad for parameter in model.parameters())
                explanation.did(7, f"and averaged over {world_size} process(es)")
                optimizer.step()
                explanation.did(8, "the model is updated on the first device")
                optimizer.zero_grad()
                scheduler.step()
                run.log(loss)
                for line in explanation.lines():
                    run.print0(line)
            run.end_epoch(evaluate(model, data.eval_loader(), data.classes, run.autocast))
        names = [str(device) for device in devices]
        run.finish(engine=parallel.name, devices=names, samples_per_device=parallel.samples)


def remember_engine(run: Run, name: str) -> None:
    """Keep the engine's name in the checkpoints; warn if those resumed from have another one."""
    before = run.state.notes.get("engine", name)
    if before != name:
        run.warn(f"the checkpoint was made by {before}: this run rounds sums differently")
    run.state.notes["engine"] = name


if __name__ == "__main__":  # the same as python -m examples.mnist_dataparallel
    runpy.run_module("examples.mnist_dataparallel", run_name="__main__")
