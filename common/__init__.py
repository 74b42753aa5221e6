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

import importlib.util
import sys

if importlib.util.find_spec("tyro") is None:  # the usual first mistake: another Python than .venv's
    sys.stderr.write(
        f"error: {sys.executable} has none of the packages that are needed: make setup installs "
        f"them, and in each new terminal '. .venv/bin/activate' chooses the Python that has them\n"
    )
    sys.exit(2)
