"""Communication: process groups, row shards, quantized collectives and their checks."""
