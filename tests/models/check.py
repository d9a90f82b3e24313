"""One unmodified model against one process, as a test does it."""

from benchmarks.model_zoo import cases
from benchmarks.model_zoo.comparison import differences
from tests.parity import mesh_of


def check(library: str, name: str, *mesh: int) -> None:
    """Outputs, gradients and buffers of a model of benchmarks/model_zoo on a mesh of all ranks."""
    case = cases(library)[name]
    errors = differences(case, mesh_of(*mesh))
    assert any(what.startswith("gradient") for what in errors)
    wrong = {what: error for what, error in errors.items() if not error <= case.tolerance}
    assert not wrong, wrong
