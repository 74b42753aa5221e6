"""Programs beside the template: a language model, and a model sharded with FSDP2."""
