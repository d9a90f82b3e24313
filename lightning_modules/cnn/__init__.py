"""The network of PhysicsNeMo's domain-parallel tutorial."""
