"""doctor: what is here, what is missing, and how to get it."""

import json

import pytest
import torch

from tilewright import cli
from tilewright.compile import cxx, nvrtc
from tilewright.profiling.doctor import Diagnosis, diagnose
from tilewright.record import Record
from tilewright.store import Store


@pytest.fixture(autouse=True)
def own_store(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_STORE", f"sqlite:///{tmp_path / 'records.db'}")
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))


def found(diagnosis: Diagnosis, section: str, subject: str) -> str | None:
    return next(f.found for f in diagnosis.sections[section] if f.subject == subject)


def test_cpu_torch_and_compiler_are_named():
    here = diagnose(measure=False)
    assert f"{torch.get_num_threads()} threads" in found(here, "devices", "cpu")
    assert found(here, "versions", "torch") == torch.__version__
    assert found(here, "compilers", "C++") == cxx.version()
    assert here.ceilings is None


@pytest.mark.parametrize(("module", "subject"), [(cxx, "C++"), (nvrtc, "NVRTC")])
def test_a_missing_compiler_comes_with_its_remedy(module, subject, monkeypatch):
    monkeypatch.setattr(module, "missing", lambda: "not here; apt install it")
    monkeypatch.setattr(module, "version", lambda: pytest.fail("asked a missing compiler"))
    monkeypatch.setattr("tilewright.profiling.doctor.environment", lambda device: ("", {}, {}))
    missing = {f.subject: f.remedy for f in diagnose("cpu", measure=False).missing}
    assert missing[subject] == "not here; apt install it"


def test_records_and_cache_are_counted(tmp_path):
    with Store() as store:
        store.add([Record("softmax(x=f32[4,4])", "softmax", "aten", {}, "ok", "cpu")])
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "binary").write_bytes(b"x" * 1_500_000)
    here = diagnose("cpu", measure=False)
    assert found(here, "records", "store") == f"{tmp_path / 'records.db'}, 1 record"
    assert found(here, "records", "cache") == f"{tmp_path / 'cache'}, 1 file, 1.5 MB"


def test_a_cache_that_cannot_be_written_is_a_finding_not_a_failure(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert cli.main(["doctor", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "set TILEWRIGHT_CACHE_DIR to a folder that can be written" in shown
    assert "GB/s read + written" in shown  # of PyTorch's own kernels


def test_a_device_that_no_machine_has_is_refused(capsys):
    assert cli.main(["doctor", "--no-measure", "--device", "cpu:7"]) == 2
    assert "unknown device 'cpu:7'; use cpu, cuda or cuda:<index>" in capsys.readouterr().err


def test_a_corrupt_store_is_a_finding_not_a_failure(tmp_path):
    (tmp_path / "records.db").write_text("this is not a database" * 100)
    here = diagnose("cpu", measure=False)
    assert found(here, "records", "store") is None
    assert any("records.db" in f.remedy for f in here.missing)


def test_a_corrupt_store_is_not_called_missing(tmp_path, capsys):
    (tmp_path / "records.db").write_text("this is not a database" * 100)
    assert cli.main(["doctor", "--device", "cpu", "--no-measure"]) == 0
    (line,) = (x for x in capsys.readouterr().out.splitlines() if x.strip().startswith("store"))
    assert line.split(maxsplit=1)[1].startswith("not usable: cannot read the record store")


def test_measured_ceilings_are_positive_and_in_the_json(capsys):
    assert cli.main(["doctor", "--device", "cpu", "--quick", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["ceilings"]["copy_bytes_per_s"] > 1e8
    assert {f["subject"] for f in content["sections"]["ceilings"]} >= {"copy", "matmul f32"}


def test_the_tables_name_every_section(capsys):
    assert cli.main(["doctor", "--no-measure"]) == 0
    out = capsys.readouterr().out
    for section in ("devices", "compilers", "versions", "records"):
        assert section in out
