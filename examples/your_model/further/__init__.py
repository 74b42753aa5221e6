"""Additional programs: a language model, and a model sharded with FSDP2."""
