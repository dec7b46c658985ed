"""Changes to whole models: parallelize, FSDP2, DDP and their state dicts."""
