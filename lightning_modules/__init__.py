"""Lightning modules and data modules that train unchanged under `lightning_shard`."""
