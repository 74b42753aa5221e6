"""From a command to ranks. Only this room knows launchers, sockets and signals.

| module | what it offers | imports torch |
|---|---|---|
| `errors` | `UserError`, `Stopped`, `Lost` | no |
| `flags` | `Launch` (the flags of every program), `at_least`, `share`, `MAY_CHANGE` | no |
| `place` | `resolve`: flags and environment -> `Place`; `Place.export` | no |
| `args` | `start`, `parse` | no |
| `server` | a quiet garbage collector in the server from which workers are forked | no |
| `cgroup` | cores and memory that this process may use | no |
| `parent`, `console` | end with the parent process; print to a terminal | no |
| `spawn` | `launch`, `wait_for` | yes |
| `members` | `keep`, `join`: processes that go on when one is lost | yes |
| `rendezvous` | `JOB`, for `init_process_group(init_method=JOB)` | yes |
| `attempts` | `go_on`: whether torchrun's restart has checkpoints of its own job | yes |
| `record` | the decorator of a rank's main function | yes |
| `device` | `choose_device` | yes |
| `messages` | `message_device`: gloo sends no CUDA tensors | yes |
| `who` | which rank waits for which, and in which call | partly |
| `collectives` | `print0`, `local_rank0_first`, `broadcast_object`, ... | yes |
"""
