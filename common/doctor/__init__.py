"""Preflight of a machine, a container or a whole job: `python -m common.doctor`.

| module | what it offers |
|---|---|
| `preflight` | the program: runs the checks, and shows what they found |
| `machine` | checks that each process makes alone |
| `gpu` | those about CUDA devices |
| `devices` | what torch and nvidia-smi say about these |
| `job` | checks that all processes make together |
| `findings` | `Finding`, and what a check may ask about its process |
| `args` | the flags |
"""
