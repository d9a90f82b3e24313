"""Reads the part of a sample that a rank needs, from HDF5, Zarr, NetCDF and NIfTI files."""
