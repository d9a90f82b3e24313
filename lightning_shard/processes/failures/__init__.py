"""Failures of ranks: how one rank learns that another has failed, stopped or left."""
