"""`python -m lightning_shard fit --config file.yaml`."""

from lightning_shard.cli import main

if __name__ == "__main__":
    main()
