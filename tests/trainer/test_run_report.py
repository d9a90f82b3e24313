"""report.html stands alone, escapes what users write, and never costs a run."""

import os
import re
from html.parser import HTMLParser
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from matplotlib.image import imsave

from lightning_shard import RunReport
from lightning_shard.trainer.callbacks.run_report import MAX_POINTS, MeanCurve
from lightning_shard.trainer.report import chart as charts
from lightning_shard.trainer.report import page as pages
from lightning_shard.trainer.report import tables
from lightning_shard.trainer.report.chart import chart
from tests import training
from tests.training import shared_path

pytestmark = [  # Lightning's own, of loaders and intervals
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]
VOID = {"meta", "link", "img", "br", "hr"}
HOSTILE = "<script>alert('&')</script><img src=x onerror=alert(1)>"


class Parsed(HTMLParser):
    """The elements of a page, and that each is closed where it should be."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.words = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    def named(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def assert_stands_alone(text):
    """Nothing is loaded, nothing runs, and pictures are inside."""
    parsed = Parsed(text)
    assert not {"script", "iframe", "object", "embed", "base"} & {tag for tag, _ in parsed.elements}
    for tag, attributes in parsed.elements:
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href", "xlink:href", "srcset", "action"):
            # "#" names a part of this page
            assert attributes.get(name, "#").startswith(("data:", "#")), (tag, attributes)
    assert "url(" not in text.replace("url(#", "")
    names = [attributes["id"] for _, attributes in parsed.elements if "id" in attributes]
    assert len(names) == len(set(names))
    assert "@import" not in text
    assert len(text) < 2_000_000
    return parsed


class Draws(Callback):
    """Saves a picture as the galleries of the workloads do."""

    def __init__(self, folder):
        self.folder = folder

    def on_fit_end(self, trainer, pl_module):
        if trainer.is_global_zero:
            (self.folder / "gallery").mkdir(parents=True)
            imsave(self.folder / "gallery" / "final <b>.png", np.zeros((4, 4)))


QUIET = {
    "max_epochs": 1, "log_every_n_steps": 2, "enable_progress_bar": False, "logger": False,
    "enable_model_summary": False, "enable_checkpointing": False,
}  # fmt: skip


def data():
    return training.loader("simple_cnn", torch.float32, 2, 8)


def fit_alone(folder, *callbacks, config="", **options):
    """Under Lightning's own strategy."""
    report = RunReport(config)
    options = QUIET | {"accelerator": "cpu", "devices": 1} | options
    runner = Trainer(default_root_dir=folder, callbacks=[report, *callbacks], **options)
    runner.fit(training.make("simple_cnn", torch.float32), data())
    return report, runner


@pytest.mark.spmd(2)
def test_a_run_on_two_ranks():
    folder = shared_path("report")
    report = RunReport(f"name: {HOSTILE}")
    callbacks = [report, Draws(folder)]
    runner = training.trainer((2,), default_root_dir=folder, callbacks=callbacks)
    runner.fit(training.make("simple_cnn", torch.float32), data())
    page = folder / "report.html"
    if dist.get_rank():
        assert report.path is None
        return
    assert report.path == page
    text = page.read_text()
    parsed = assert_stands_alone(text)
    (picture,) = parsed.named("img")
    assert picture["src"].startswith("data:image/png;base64,iVBOR")
    assert len(parsed.named("svg")) >= 1
    words = " ".join(parsed.words)
    assert "SimpleCNNModule: report of a run" in words
    assert f"Training ended at step {runner.global_step}" in words
    assert "1 data x 2 domain ranks" in words
    assert "split over the domain: 0 (dim 2); whole: 1 (int64)" in words
    assert "rank 1" in words
    assert torch.__version__ in words
    assert words.count(HOSTILE) == 1  # as text


def test_a_page_that_cannot_be_written_costs_nothing(tmp_path):
    (tmp_path / "report.html").mkdir()
    with pytest.warns(UserWarning, match=r"report.html was not written: IsADirectoryError"):
        report, runner = fit_alone(tmp_path)
    assert runner.state.finished
    assert report.path is None


def test_a_full_disk_leaves_the_page_of_an_earlier_stage(tmp_path, monkeypatch):
    (tmp_path / "report.html").write_text("whole")

    def full(path, text, **_):
        path.write_bytes(text.encode()[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.warns(UserWarning, match=r"report.html was not written: .*No space left"):
        fit_alone(tmp_path)
    assert (tmp_path / "report.html").read_text() == "whole"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


class Breaks(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        raise ValueError(f"broken by {HOSTILE}")


def test_a_run_that_an_exception_ends_is_reported(tmp_path):
    with pytest.raises(ValueError, match="broken by"):
        fit_alone(tmp_path, Breaks())
    words = " ".join(assert_stands_alone((tmp_path / "report.html").read_text()).words)
    assert f"Stopped in train at step 1 by ValueError: broken by {HOSTILE}" in words
    assert "Not measured: no epoch of training ended." in words


def test_a_test_after_training_is_added(tmp_path):
    report, runner = fit_alone(tmp_path)
    assert "Test" not in re.findall("<h2>(.*)</h2>", report.path.read_text())
    runner.test(runner.lightning_module, data())
    text = report.path.read_text()
    assert "Test" in re.findall("<h2>(.*)</h2>", text)
    assert "test/accuracy" in " ".join(Parsed(text).words)


def test_nothing_is_written_for_a_dry_run(tmp_path):
    fit_alone(tmp_path, fast_dev_run=True)
    assert not (tmp_path / "report.html").exists()


def cells(text):
    rows = re.findall(r"<tr>(.*)</tr>", text)
    return [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in rows]


def test_results_by_resolution_are_one_table():
    metrics = {"test/l2_64": 0.1, "test/l2_32_baseline": 0.3, "test/l2_32": 0.2, "test/loss": 2.0}
    by_resolution, others = tables.result_tables(metrics)
    assert cells(by_resolution) == [
        ["", "test/l2", "test/l2_baseline"], ["32", "0.2000", "0.3000"], ["64", "0.1000", ""],
    ]  # fmt: skip
    assert cells(others) == [["metric", "value"], ["test/loss", "2.000"]]
    (_, alone) = tables.result_tables({"test/top_5": 0.5, "x/dataloader_idx_0": 1.0})
    assert cells(alone)[1:] == [["test/top_5", "0.5000"], ["x/dataloader_idx_0", "1.000"]]


def test_memory_of_many_ranks_is_that_of_the_extremes():
    (shown,) = tables.memory_table([float(n) for n in range(100, 200)], torch.device("cpu"))
    assert [row[0] for row in cells(shown)[1:]] == ["rank 0", "mean of 100 ranks", "rank 99"]


def lines_of(drawn):
    """The number of points of each line that is drawn within the axes."""
    paths = [e for e in Parsed(drawn).named("path") if "clip-path" in e and "d" in e]
    lines = [e["d"].count("L") + 1 for e in paths if "#e4e4e4" not in e.get("style", "")]
    return sorted(lines)


def test_charts():
    drawn = chart({"a<b": [(0, 1.0), (10, 100.0), (20, float("nan"))], "none": []}, "x", "y")
    assert lines_of(drawn) == [2]
    words = "".join(Parsed(drawn).words)
    assert "y (log)" in words
    assert "a<b" in words
    assert "none" not in words
    assert "(log)" not in chart({"a": [(0, -1.0), (10, 100.0)]}, "x", "y")
    assert Parsed(chart({"a": [(3, 5.0)]}, "x", "y")).named("use")
    assert chart({"a": [(3, float("inf"))]}, "x", "y") == ""


def test_names_of_lines_are_shown_as_they_are():
    names = [HOSTILE, "_begins", "$x_1$", "100 %"]
    points = [(0, 1.0), (1, 2.0)]
    drawn = chart(dict.fromkeys(names, points), "$x$", "y")
    words = [word.strip() for word in Parsed(drawn).words]
    assert {*names, "$x$"} <= set(words)


@pytest.mark.parametrize("number", [1, 12])
def test_names_of_lines_never_cover_lines(number):
    points = [(0, 1.0), (1, 2.0)]
    lines = {f"{'a long name ' * 4}{i}": points for i in range(number)}
    figure = charts._figure(lines, "x", "y")
    figure.draw_without_rendering()
    (axes,), (names,) = figure.axes, figure.legends
    assert names.get_window_extent().y1 <= axes.xaxis.label.get_window_extent().y0
    assert names.get_window_extent().y0 >= 0
    assert axes.get_window_extent().height > 0.5 * 100 * charts.INCHES[1]


def test_without_matplotlib_the_page_says_so(tmp_path):
    with mock.patch.object(charts.importlib.util, "find_spec", return_value=None):
        report, _ = fit_alone(tmp_path)
    parsed = Parsed(report.path.read_text())
    assert not parsed.named("svg")
    assert "pip install 'lightning-shard[pictures]' installs it." in " ".join(parsed.words)


def test_curves_of_a_quantity_share_a_chart():
    points = [(1, 1.0), (2, 2.0)]
    names = (
        "train/loss train/loss_step val/loss val/l2_32 val/l2_64 val/l2_64_baseline lr-Adam".split()
    )
    (row,) = tables.metric_charts(points, dict.fromkeys(names, points), {"rate": points[:1]}, 7)
    assert [each["aria-label"] for each in Parsed(row).named("svg")] == ["loss", "l2"]
    assert "loss_step" not in row
    assert "means over 7" in row


def test_a_long_curve_becomes_coarser():
    curve = MeanCurve()
    steps = 3 * MAX_POINTS
    for step in range(steps):
        curve.add(torch.tensor(float(step)))
        curve.close(step)
    curve.read()
    assert len(curve.points) <= MAX_POINTS
    assert np.mean([y for _, y in curve.points]) == pytest.approx((steps - 1) / 2)


def test_pictures_that_are_too_large_or_older_are_left_out(tmp_path):
    for name, age in (("old", 200), ("b", 100), ("a", 50)):
        path = tmp_path / f"{name}.png"
        path.write_bytes(b"x" * 1000)
        os.utime(path, (1000 - age, 1000 - age))
    with mock.patch.object(pages, "PICTURES_BYTES", 1500):
        shown = pages.pictures(tmp_path, since=850)
    assert len(shown) == 2
    assert 'alt="a"' in shown[0]
    assert shown[1].startswith("<p>Left out, to keep this page small: b.png, in ")
    assert pages.pictures(Path("nowhere"), since=0) == []
