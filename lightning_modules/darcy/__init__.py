"""Darcy flow with a tensorized Fourier neural operator."""
