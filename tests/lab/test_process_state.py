"""What changes in a module at run time is named as state of a process, or meant for all ranks.

A module names it in `PROCESS_STATE`, which lab/simulated/state.py reads.
"""

import ast
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

import lightning_shard

ROOT = Path(lightning_shard.__file__).parent
CHANGES = {
    "add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove",
    "setdefault", "update",
}  # fmt: skip

# values that all ranks of a process may share, and why
SHARED = {
    "domain/one_thread:_of_parent": "belongs to forked processes",
    "domain/subdomain:_uncounted": "a write is looked for by its memory, which one rank has",
    "memory/paging/mode:_ALONE": "lists operators, which ranks share",
    "fsdp/plain_gradients:_followed": "lists modules, of which each rank has its own",
    "lab/run:_levels": "loggers are the process's",
    "lab/run:_silenced": "counts ranks",
    "lab/simulate:_running": "there is one simulation in a process",
    "lab/simulated/state:_attributes": "lists what each rank has of its own",
    "lab/simulated/state:_count": "counts modules, which ranks share",
    "lab/simulated/state:_looked_at": "lists modules, which ranks share",
    "ops/registry:_OPERATORS": "rules are the same for all",
    "ops/attention/rule:_decisions": "a choice follows from layouts and types alone",
    "ops/view/reshape:_kept": "a layout follows from another layout alone",
    "processes/failures/failure_watch:_open": "watches processes",
    "processes/failures/failure_watch:_runs": "watches processes",
    "processes/failures/store_thread:_threads": "all of them end with the process",
    "processes/forking:_OF_PARENT": "belongs to forked processes",
    "processes/script_processes:_started": "belongs to the process that has started others",
    "processes/store:_of_meetings": "belongs to ranks that meet at an address",
    "tiles/crew:_crews": "all of them end with the process",
    "tensor/wrong_calls:_accepted": "whether torch takes a call follows from its shapes alone",
}


def changed_at_run_time(tree: ast.Module) -> set[str]:
    """The names of a module that its functions bind anew, or whose contents they change."""
    of_module = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    found: set[str] = set()
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.Lambda)]
    for function in functions:
        local = {arg.arg for arg in [*function.args.args, *function.args.kwonlyargs]}
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                local.add(node.id)
        for node in ast.walk(function):
            if isinstance(node, ast.Global):
                found.update(node.names)
            changed: Any = None
            if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                changed = node.value
            elif isinstance(node, ast.Call):
                called = node.func
                if isinstance(called, ast.Attribute) and called.attr in CHANGES:
                    changed = called.value
                elif isinstance(called, ast.Name) and called.id == "next" and node.args:
                    changed = node.args[0]
            if isinstance(changed, ast.Name) and changed.id in of_module - local:
                found.add(changed.id)
    return found


def test_what_changes_in_a_module_at_run_time_is_named_or_meant_for_all_ranks():
    missing: set[str] = set()
    unknown = set(SHARED)
    for path in sorted(ROOT.rglob("*.py")):
        module = path.relative_to(ROOT).with_suffix("").as_posix()
        tree = ast.parse(path.read_text())
        named: set[Any] = set()
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PROCESS_STATE":
                assert isinstance(node.value, ast.Dict)
                named = {ast.literal_eval(key) for key in node.value.keys if key}
        changed = {f"{module}:{name}" for name in changed_at_run_time(tree) - named}
        missing |= changed - set(SHARED)
        unknown -= changed
    assert not missing, "name them in PROCESS_STATE of their module, or in SHARED with a reason"
    assert not unknown, "they do not change any more"


def state_of(module):
    return module.count, module.names, module.cached.cache_info().currsize


def test_each_rank_has_its_own_value_of_what_is_named(monkeypatch):
    module: Any = ModuleType("lightning_shard.for_this_test")
    module.count, module.names, module.cached = 0, {"caller"}, lru_cache(dist.get_world_size)
    module.PROCESS_STATE = {name: getattr(module, name) for name in ("count", "names", "cached")}
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def body():
        module.count += 1 + dist.get_rank()
        module.names.add(str(dist.get_rank()))
        module.cached()
        dist.barrier()
        return state_of(module)

    found = lightning_shard.simulate(body, processes=3)
    assert found == [(1, {"caller", "0"}, 1), (2, {"caller", "1"}, 1), (3, {"caller", "2"}, 1)]
    assert state_of(module) == (0, {"caller"}, 0)


def test_a_module_that_a_rank_imports_is_new_to_the_others():
    name = "lightning_shard.imported_by_a_rank"

    def body():
        if dist.get_rank() == 0:
            module: Any = ModuleType(name)
            module.count, module.names = 0, {}
            module.PROCESS_STATE = {"count": module.count, "names": module.names}
            sys.modules[name] = module
            module.count, module.names["by"] = 5, "rank 0"
        dist.barrier()
        module = sys.modules[name]
        return module.count, module.names

    try:
        found = lightning_shard.simulate(body, processes=2)
    finally:
        sys.modules.pop(name, None)
    assert found == [(5, {"by": "rank 0"}), (0, {})]
