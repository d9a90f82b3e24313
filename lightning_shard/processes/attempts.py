"""torchrun starts ranks again that end with an error; what cannot succeed asks it not to."""

import atexit
import os
import signal
from pathlib import Path


def end_attempts() -> None:
    """When this process ends, let the agent of torchrun that has started it end, too.

    A status that says so does not exist, so the agent gets SIGTERM. Each agent has a first local
    rank, which sends it.
    """
    env = os.environ
    restarts = env.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if restarts and env.get("LOCAL_RANK") == "0" and _is_agent(os.getppid()):
        atexit.register(os.kill, os.getppid(), signal.SIGTERM)


def _is_agent(process: int) -> bool:
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(w == b"torch.distributed.run" or w.endswith(b"/torchrun") for w in words)
