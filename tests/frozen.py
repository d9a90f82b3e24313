"""What is imported by now is never garbage: no collection looks at it, and forks share it."""

import gc

gc.collect()
gc.freeze()
