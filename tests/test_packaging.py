"""What the wheel and the sdist hold: installed elsewhere, they train from a config's bare name."""

import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

import lightning_shard

ROOT = Path(__file__).parents[1]


def command(*words: str | Path, cwd: Path) -> str:
    """Run a program, without this checkout on its path; return what it prints."""
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, words)), cwd=cwd, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


def build(kind: str, folder: Path) -> Path:
    command(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", folder, cwd=ROOT)
    (found,) = folder.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return found


def test_the_wheel_holds_the_configs(tmp_path):
    names = zipfile.ZipFile(build("wheel", tmp_path)).namelist()
    wanted = {f"lightning_modules/{p.relative_to(ROOT)}" for p in ROOT.glob("configs/**/*.yaml")}
    assert wanted
    assert wanted <= set(names)
    assert {"lightning_shard/py.typed", "lightning_modules/py.typed"} <= set(names)
    assert not [n for n in names if n.startswith(("tests", "notebooks", "benchmarks"))]


def test_an_index_shows_links_that_lead_somewhere(tmp_path, monkeypatch):
    """Where a workflow tells the repository; elsewhere no address is made up."""
    shown = {}
    for repository in ("", "someone/fields"):
        monkeypatch.setenv("GITHUB_REPOSITORY", repository)
        monkeypatch.setenv("GITHUB_SERVER_URL", "https://github.com")
        monkeypatch.setenv("GITHUB_REF_NAME", "v0.1.0")
        wheel = zipfile.ZipFile(build("wheel", tmp_path / (repository or "here")))
        (name,) = [name for name in wheel.namelist() if name.endswith("METADATA")]
        shown[repository] = wheel.read(name).decode()
    assert "\nProject-URL: " not in shown[""]
    text = shown["someone/fields"]
    for kind in ("Documentation", "Repository", "Changelog", "Issues"):
        assert f"Project-URL: {kind}, https://" in text
    code = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)#]+)", code)
    assert len(links) > 20
    assert not [link for link in links if not link.startswith("https://")]
    assert "https://github.com/someone/fields/raw/v0.1.0/docs/images/mesh.svg" in links


def test_each_version_of_the_changelog_has_a_date():
    """The newest one until it is published has none yet."""
    newest, *older = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    dated = r"\d+\.\d+\.\d+ \(\d{4}-\d\d-\d\d\)"
    assert newest == f"{lightning_shard.__version__} (unreleased)" or re.fullmatch(dated, newest)
    assert all(re.fullmatch(dated, version) for version in older)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_it_runs_where_it_is_installed(tmp_path, kind):
    """The other packages are those of this environment; ours is only what was built."""
    archive = build(kind, tmp_path / "dist")
    home = tmp_path / "env"
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site,) = home.glob("lib/python*/site-packages")
    (site / "others.pth").write_text("\n".join(paths))
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
    command(*pip, "--no-index", "--no-build-isolation", archive, cwd=tmp_path)

    where = command(python, "-c", "import lightning_shard as p; print(p.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(home)
    shard = home / "bin" / "lightning-shard"
    version = command(shard, "--version", cwd=tmp_path)
    assert version.startswith(f"lightning-shard {lightning_shard.__version__},")
    text = command(shard, "fit", "--config", "tfno_darcy", "--print_config", cwd=tmp_path)
    assert yaml.safe_load(text)["model"]["class_path"].endswith("TFNODarcy")


def test_the_version_is_in_one_place():
    """The page of public names has it; everything else asks the installed package for it."""
    version = lightning_shard.__version__
    page = ROOT / "lightning_shard/__init__.py"
    texts = [*ROOT.glob("lightning_shard/**/*.py"), *ROOT.glob("lightning_modules/**/*.py")]
    assert [path for path in texts if f'"{version}"' in path.read_text()] == [page]
    assert importlib.metadata.version("lightning-shard") == version


def test_hooks_run_what_tests_run_does():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    script = (ROOT / "tests" / "run").read_text().splitlines()
    # some print into a file, and one leaves the cores to the tests
    commands = [line.partition(" > ")[0].removeprefix("nice -n 10 ") for line in script]
    for hook in hooks:
        entry = hook["entry"].replace(" --force-exclude", "")
        assert entry in commands
        assert hook["language"] == "system"
