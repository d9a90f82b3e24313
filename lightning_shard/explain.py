"""What to do about errors of torch and Lightning that only say what happened inside them."""

import traceback

_BY_MESSAGE = {
    "got mixed torch.Tensor and DTensor": (
        "A parameter was used outside of the steps of the LightningModule, where each rank holds a "
        "shard of it: call the module itself, or read parameters inside "
        "`with lightning_shard.whole_parameters(module):`."
    ),
    "FSDP does not support deepcopy": (
        "A module that was trained by this strategy cannot be copied, which a callback such as "
        "StochasticWeightAveraging does at the start of each stage: give the callback to the first "
        "fit only, and use another Trainer, or trainer.callbacks without it, for what follows."
    ),
}


def explain(error: BaseException) -> None:
    """Add a note to `error`, which its traceback then ends with, if we know more."""
    notes = [note for message, note in _BY_MESSAGE.items() if message in str(error)]
    frames = traceback.extract_tb(error.__traceback__)
    if (
        isinstance(error, AssertionError)
        and frames
        and "total_size == 0" in (frames[-1].line or "")
    ):
        notes.append(
            "The dataset has fewer samples than there are data replicas; use fewer processes, a "
            "larger domain_parallel_size, or more samples."
        )
    for note in notes:
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
