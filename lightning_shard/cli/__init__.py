"""The command line: LightningCLI, with errors of one sentence."""
