import os, time, traceback
import pytest, torch.distributed as dist
from tests.trainer.test_programs import check, cases
from tests.trainer import programs


def run(mesh):
    names = cases(mesh)
    pick = os.environ.get("PICK")
    out = open(f"/tmp/dev/{mesh}.{dist.get_rank()}", "w")
    for n, case in names.items():
        if (pick and not any(p in n for p in pick.split("|"))) or list(names).index(n) < int(
            os.environ.get("FROM", 0)
        ):
            continue
        t = time.time()
        out.write("> " + n + chr(10))
        out.flush()
        try:
            check(**case)
            word = "ok"
        except BaseException as e:
            word = f"{type(e).__name__}: {str(e)[: int(os.environ.get('LONG', 260))]}".replace(
                "\n", " "
            )
            if os.environ.get("TB"):
                word += "\n" + "".join(traceback.format_exception(e))[-2500:]
        out.write(f"{n} | {word} | {time.time() - t:.2f}\n")
        out.flush()
        dist.barrier()


@pytest.mark.spmd(2)
@pytest.mark.parametrize("mesh", ["1x2", "2x1"])
def test_two(mesh):
    run(mesh)


@pytest.mark.spmd(4)
def test_four():
    run("2x2")
