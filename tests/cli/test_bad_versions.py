"""`doctor` warns of versions that are malicious or have a known hole."""

import importlib.metadata

import pytest

from lightning_shard.cli import doctor
from lightning_shard.cli.bad_versions import warnings_of_versions


def installed(**versions):
    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    return version


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
    found = warnings_of_versions(installed(lightning=version))
    assert [sentence[-20:-1] for sentence in found] == advisories
    assert all(sentence.startswith(f"lightning {version} ") for sentence in found)


def test_other_packages():
    assert not warnings_of_versions(installed())
    (sentence,) = warnings_of_versions(installed(**{"pytorch-lightning": "2.5.0"}))
    assert "install 2.6.6 or later" in sentence


def test_doctor_prints_them(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "try_two_processes", lambda: (True, "not tried"))
    monkeypatch.setattr(doctor, "warnings_of_versions", lambda: ["lightning 2.6.3 is malicious"])
    doctor.doctor(None)
    assert "lightning 2.6.3 is malicious" in capsys.readouterr().out
