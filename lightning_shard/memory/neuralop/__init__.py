"""Splits the weights of neuraloperator's spectral layers over the domain, without whole fields."""
