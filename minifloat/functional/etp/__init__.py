"""Extended tensor parallelism: the rows of a weight are sharded, gathered before each product and reduced after it."""
