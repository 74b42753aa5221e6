"""What surrounds a training loop. Nothing here calls the loss, backward or the optimizer.

| module | what it offers |
|---|---|
| `run` | `Run`: position, checkpoints, common stop, log, result; `TrainState` |
| `checkpoint`, `files` | `Checkpoints`, `load_model`; files that are written whole or not at all |
| `log`, `summary` | console, metrics.jsonl, TensorBoard; result.json, curves.png |
| `stop` | `Stop`: a common last step after a signal |
| `ddp` | `warm_up_buckets`, `check_smallest_batch`, `bare` |
| `checks` | `check_replicas`, `check_seen_once`, `parameter_hash` |
| `membership` | `Membership`: who takes part, when ranks are lost and join |
| `seen` | `seen`: a rank's notes of its samples, exact counts or sums |
| `evaluate` | `evaluate`: exact, in dataset order |
| `precision`, `amp` | the flags about numbers (no torch), `MixedPrecision` |
| `compiler` | what `--compile` needs of a machine |
| `seed` | random states |
"""
