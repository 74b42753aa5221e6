"""Which rank waits for which, and in which call: asked while a run goes on, and when it hangs.

| module | what it offers | imports torch |
|---|---|---|
| `calls` | the last collectives and messages of this process | yes |
| `process` | where this process's main thread is, whether it computes, memory | no |
| `watcher` | a thread of each rank that answers the others | yes |
| `report` | what one rank prints when another is lost, or when asked | yes |
| `ask` | the answers of all ranks, and what is known of those that do not answer | no |
| `verdict`, `loops` | one sentence that says what is wrong | no |
| `table`, `words` | a row per rank | no |
"""
