"""`python -m common.compare runs/a runs/b ...`: what differs between runs, and their curves.

| module | what it offers |
|---|---|
| `args` | the flags |
| `runs` | what runs have left, and what differs |
| `page` | the table and the curves, in the terminal, as PNG and as HTML |
"""
