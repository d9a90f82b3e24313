"""Says what a checkpoint holds, in which files, and whether they are whole."""
