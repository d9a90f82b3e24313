"""`@pytest.mark.spmd(n)`: the test body runs on each rank of a pool of n gloo processes."""

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: processes at once share the cores

from lightning_shard.processes import variables
from lightning_shard.processes.cpu_settings import let_threads_run_on
from tests import REFERENCES

GLOBAL_HOOKS = (
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
)

# these hide the devices of NVIDIA, AMD and Intel
WITHOUT_DEVICES = {
    "CUDA_VISIBLE_DEVICES": "-1",
    "HIP_VISIBLE_DEVICES": "-1",
    "ONEAPI_DEVICE_SELECTOR": "!level_zero:*",
}

gc.disable()  # until the tests are collected: what is imported is no garbage
let_threads_run_on()  # in workers and in the ranks that they fork

LONG = (
    "tests/ops/test_operators.py",
    "tests/test_dependencies.py",
    "tests/test_notebooks.py",
    "tests/test_public_page.py",
    "tests/test_snippets.py",
    "tests/trainer/test_exactness.py",
    "tests/trainer/xpu",
    "tests/workloads/t5/test_ranks.py",
)


@pytest.hookimpl(tryfirst=True)  # before slow tests are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files that take long come first, so that no worker is left alone with one of them."""
    if not any("[" in word for word in config.args):
        _refuse_unknown_rows(items)
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


def _refuse_unknown_rows(items: list[pytest.Item]) -> None:
    """A row that was renamed would be slow, or not, in silence."""
    named: dict[str, set[str]] = defaultdict(set)
    for item in items:
        for mark in (item.get_closest_marker(name) for name in ("slow_rows", "quick_rows")):
            named[item.nodeid.partition("[")[0]] |= set(mark.args if mark else ())
    rows = {item.nodeid for item in items}
    unknown = {f"{test}[{row}]" for test, ids in named.items() for row in ids} - rows
    if unknown:
        raise pytest.UsageError(f"marks name rows that do not exist: {sorted(unknown)}")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark rows that take long, and let `-k NAME` find a group of rows by the name of each."""
    if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
        slow, quick = map(item.get_closest_marker, ("slow_rows", "quick_rows"))
        row = item.callspec.id
        if (slow and row in slow.args) or (quick and row not in quick.args):
            item.add_marker("slow")
        item.extra_keyword_matches.update(item.callspec.params.get("names", ()))


@pytest.hookimpl(optionalhook=True)  # in a session without xdist
def pytest_xdist_setupnodes(specs: Any) -> None:
    from tests.forked import fork_workers

    fork_workers(specs)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.together import Together

    return Together(config, log)


def pytest_collection_finish() -> None:
    """What is imported by now is never garbage: collections that look at it took a tenth."""
    gc.enable()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)  # and ranks, which are forks, collect less often
    if "torch" in sys.modules:  # not in the controller of the workers
        from tests import pool

        if not pool.UNPATCHED:
            pool.seed_quickly()


def pytest_configure(config: pytest.Config) -> None:
    """Hide devices from all tests but those marked gpu, which `-m gpu` runs.

    Where torch sees a device, the first backward pass of a session starts threads, after which no
    fork of it computes gradients, and ranks are forks.
    """
    if config.option.markexpr != "gpu":
        os.environ.update(WITHOUT_DEVICES)
    if REFERENCES not in os.environ:  # else those of the session that started this one
        os.environ[REFERENCES] = folder = tempfile.mkdtemp(prefix="references-")
        config.add_cleanup(lambda: shutil.rmtree(folder))
        config.add_cleanup(lambda: os.environ.pop(REFERENCES))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Ranks are forks of this process, without what the fixtures of a test change in it."""
    if marker := item.get_closest_marker("spmd"):
        from tests import pool  # imports torch, which the controller of the workers does without

        pool.pool_of(*marker.args)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    marker = pyfuncitem.get_closest_marker("spmd")
    if marker is None:
        return None
    from tests import pool

    names = pyfuncitem._fixtureinfo.argnames
    kwargs: dict[str, Any] = {name: pyfuncitem.funcargs[name] for name in names}
    pool.pool_of(*marker.args).run(pyfuncitem.obj, kwargs)
    return True


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    """A process group that a Trainer begins in this process ends with its test.

    Lightning's own strategies would take the next test for one of several processes.
    """
    yield
    if variables.joined() is not None:
        import torch.distributed as dist

        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def torch_is_left_as_it_was() -> Iterator[None]:
    """What a test leaves in torch would change the next test of this process, in some orders."""
    before = _state_of_torch()
    yield
    if before is not None:
        assert _state_of_torch() == before


def _state_of_torch() -> dict[str, Any] | None:
    if "torch" not in sys.modules:
        return None
    import torch
    from torch.nn.modules import module

    hooks = {name: list(held) for name, held in vars(module).items() if name in GLOBAL_HOOKS}
    return {
        **hooks,
        "default type": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "modes": torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack(),
        "saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(False) is not None,
    }


@pytest.fixture
def run_each(subtests: pytest.Subtests) -> Callable[..., None]:
    """Runs a body for each of several arguments, as subtests, on ranks that are woken once."""
    from tests import pool

    def run(ranks: int, body: Callable[..., None], cases: dict[str, dict[str, Any]]) -> None:
        waiting = list(cases)
        while waiting:
            ours = pool.pool_of(ranks)  # a new one after a failure
            for name in waiting:
                ours.send((body, cases[name]))
            while waiting and pool.is_open(ours):
                with subtests.test(waiting.pop(0)):
                    ours.wait()
            if pool.is_open(ours):
                ours.rest()

    return run


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C is heard here and in what is started: the background of a shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def pytest_unconfigure() -> None:
    if pool := sys.modules.get("tests.pool"):
        pool.close_all()
    gc.unfreeze()
