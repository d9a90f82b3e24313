"""`python -m lightning_shard fit --config file.yaml`."""

from lightning_shard.cli.main import main

if __name__ == "__main__":
    main()
