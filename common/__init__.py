"""What the examples share, in four rooms. Imports go one way: launch <- train <- data <- images.

| room | what it offers |
|---|---|
| `launch` | from a command to ranks: flags, launchers, rendezvous, signals, exit codes |
| `train` | what surrounds a training loop: `Run`, checkpoints, evaluation, precision |
| `data` | the files of MNIST's format, samplers, loaders, a small model |
| `images` | folders of images: found, decoded, cached, drawn |

The rest are programs, in the first table of docs/en/common.md: `doctor`, `memory`, `top`, `who`,
`compare`, `trace`.
"""
