"""`doctor` warns of versions that are malicious or have a known hole."""

import pytest

from lightning_shard.cli import doctor
from lightning_shard.cli.doctor import warnings_of_versions


def installed(**versions):
    return lambda name: versions.get(name, "not installed")


@pytest.mark.parametrize(
    ("version", "advisories"),
    [
        ("2.6.1", ["GHSA-qqmf-gpg7-g8gw"]),
        ("2.6.2", ["GHSA-w37p-236h-pfx3", "GHSA-qqmf-gpg7-g8gw"]),
        ("2.6.3", ["GHSA-w37p-236h-pfx3", "GHSA-qqmf-gpg7-g8gw"]),
        ("2.6.5", ["GHSA-qqmf-gpg7-g8gw"]),
        ("2.6.6", []),
        ("2.7.0.dev1", []),
    ],
)
def test_versions_of_lightning(version, advisories):
    found = list(warnings_of_versions(installed(lightning=version)))
    assert [sentence[-20:-1] for sentence in found] == advisories
    assert all(f"lightning {version} " in sentence for sentence in found)


def test_other_packages():
    assert not list(warnings_of_versions(installed()))
    (sentence,) = warnings_of_versions(installed(**{"pytorch-lightning": "2.5.0"}))
    assert "install 2.6.6 or later" in sentence


def test_doctor_prints_them(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "try_two_processes", lambda: (True, "not tried"))
    monkeypatch.setattr(doctor, "warnings_of_versions", lambda: ["lightning 2.6.3 is malicious"])
    doctor.doctor(None)
    assert "lightning 2.6.3 is malicious" in capsys.readouterr().out
