"""Record the `parameter_hash` of every example under every launcher, and compare it with an earlier record.

    python -m tests.hashes --out before.json                     # before a change that must not change a bit
    python -m tests.hashes --out after.json --against before.json

A refactoring proves itself by an equal table.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROGRAMS = {
    "mnist_ddp_spawn": "--epochs 2",
    "mnist_dataparallel": "--epochs 2",
    "imagenet_ddp": "--epochs 1 --image-size 32",
    "bert_dp": "--epochs 2 -b 24",
    "manual_allreduce_sgd": "--epochs 2",
    "resnet_pipeline": "--epochs 1 --images 96",
    "gan_ddp": "--epochs 2",
    "your_model": "--epochs 2",
}
LAUNCHERS = ("plain", "spawn", "torchrun", "pods", "slurm")


def commands(module: str, launcher: str, ranks: int) -> list[tuple[list[str], dict[str, str]]]:
    """The processes to start, each with the variables that its launcher sets; none where it makes no sense."""
    plain = [sys.executable, "-m", module]
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    if launcher == "plain":
        return [(plain, {})] if ranks == 1 else []
    if launcher == "spawn":
        return [([*plain, "--nproc", str(ranks)], {})]
    if launcher == "torchrun":
        return [([*torchrun, "--standalone", "--nproc-per-node", str(ranks), "-m", module], {})]
    if launcher == "pods":
        pod = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": str(ranks), "PET_NODE_RANK": "0"}
        pod |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": "29611"}
        return [([*torchrun, "-m", module], pod)]
    if ranks == 1:  # a step of one task is a plain start
        return []
    step = {"SLURM_NTASKS": str(ranks), "SLURM_STEP_ID": "0", "SLURM_NNODES": "1", "SLURM_JOB_ID": "77"}
    tasks = ({"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(ranks))
    return [(plain, step | task) for task in tasks]


def parameter_hash(example: str, suffix: str, launcher: str, ranks: int) -> str:
    """Train, and read the hash from the result; of a run that failed, its last line."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"{PROGRAMS[example]} --device cpu --out {folder}/out".split()
        if example == "mnist_dataparallel" and ranks > 1:
            flags += ["--devices", "cpu"]
        running = [
            subprocess.Popen(
                [*command, *flags], env={**os.environ, **env}, text=True, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, cwd=Path.cwd(), start_new_session=True,
            )
            for command, env in commands(f"examples.{example}{suffix}", launcher, ranks)
        ]  # fmt: skip
        said = [process.communicate(timeout=600)[0] for process in running]
        file = Path(folder) / "out" / "result.json"
        if any(process.returncode for process in running) or not file.exists():
            return f"failed: {' | '.join(text.strip().splitlines()[-1] for text in said if text.strip())}"
        return str(json.loads(file.read_text())["parameter_hash"])


def main() -> int:
    """Print a line per run; exit code 1 where one differs from the earlier record."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--out", type=Path, required=True)
    flags.add_argument("--against", type=Path)
    flags.add_argument("--suffix", default="", help="of the module to start: .train")
    flags.add_argument("--only", nargs="*", default=list(PROGRAMS))
    flags.add_argument("--launchers", nargs="*", default=list(LAUNCHERS))
    flags.add_argument("--ranks", nargs="*", type=int, default=[1, 2, 3, 4])
    args = flags.parse_args()
    known = json.loads(args.out.read_text()) if args.out.exists() else {}
    before = json.loads(args.against.read_text()) if args.against else {}
    different = 0
    with ThreadPoolExecutor(1) as pool:
        wanted = [(e, r, n) for e in args.only for n in args.ranks for r in args.launchers if commands(e, r, n)]
        futures = {f"{e} {n} {r}": pool.submit(parameter_hash, e, args.suffix, r, n) for e, r, n in wanted}
        for name, future in futures.items():
            known[name] = future.result()
            expected = before.get(name, known[name])
            different += known[name] != expected
            verdict = "" if known[name] == expected else f" (before: {expected[:12]})"
            print(f"{name}: {known[name][:60]}{verdict}", flush=True)
            args.out.write_text(json.dumps(known, indent=1) + "\n")
    print(f"{len(futures)} runs, {different} different")
    return different > 0


if __name__ == "__main__":
    sys.exit(main())
