"""Two result files of one suite: what is a regression, and what is a slower day."""

import json
import math

import pytest

from tilewright.cli import main
from tilewright.errors import InvalidArgument
from tilewright.regressions import changes
from tilewright.report import Baseline, Own, Report, Row
from tilewright.results import as_dict, write_data

TEXT = "softmax(x=f16[16,1024])"
VERSIONS = {"torch": "2.11", "cuda": "13.0", "driver": "580", "tilewright": "0.1"}


def interval(us, spread=0.01):
    return (us * (1 - spread), us * (1 + spread))


def result(
    own_us,
    aten_us=40.0,
    floor_us=4.0,
    spread=0.01,
    text=TEXT,
    suite="norms_sweep",
    device="NVIDIA H200",
):
    own = own_us and Own(own_us, interval(own_us, spread), "fused", {"threads": 128})
    aten = {"aten": Baseline(aten_us, interval(aten_us, spread))} if aten_us else {}
    row = Row(
        workload=text, floor_us=floor_us, copy_us=8.0, method="graph", distribution=None,
        host_us={}, baselines=aten, own=own, chosen="fused" if own else "aten", candidates=7,
        verified=None,
    )  # fmt: skip
    return as_dict(suite, Report([row], {"name": device}, VERSIONS, 10.0))


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ((10.0, 40.0), (10.0, 40.0), "same"),
        ((10.0, 40.0), (11.0, 40.0), "slower"),
        ((10.0, 40.0), (9.0, 40.0), "faster"),
        ((10.0, 40.0), (11.0, 44.0), "same"),  # the machine has a slow day
        ((10.0, 40.0), (10.0, 30.0), "same"),  # another PyTorch
        ((9.0, 14.1, 8.8), (10.1, 15.3, 9.6), "same"),  # another host, 0.8 us a call
        ((9.0, 14.1, None), (10.1, 14.1, None), "slower"),
        ((10.0, 40.0), (10.3, 40.0), "same"),  # within the intervals
        ((10.0, None), (11.0, None), "slower"),
        ((10.0, 40.0), (None, 40.0), "gone"),
    ],
)
def test_slower_is_what_is_slower_by_the_clock_beside_baselines_and_over_the_floor(
    old, new, verdict
):
    (change,) = changes(result(*old), result(*new))
    assert change.verdict == verdict


def test_a_row_that_is_no_longer_measured_is_gone_and_a_new_one_is_no_change():
    (change,) = changes(result(10.0), result(10.0, text="softmax(x=f16[16,768])"))
    assert (change.workload, change.verdict, change.times) == (TEXT, "gone", None)


def test_the_tolerance_is_on_top_of_the_intervals():
    old, new = result(10.0, spread=0.0), result(10.5, spread=0.0)
    assert changes(old, new, tolerance=0.03)[0].verdict == "slower"
    assert changes(old, new, tolerance=0.06)[0].verdict == "same"


@pytest.mark.parametrize("tolerance", [math.nan, math.inf, -0.01])
def test_a_tolerance_that_is_no_part_is_refused(tolerance):
    with pytest.raises(InvalidArgument, match=r"the tolerance is .*; give a part"):
        changes(result(10.0), result(10.0), tolerance)


def test_a_file_without_a_kernel_of_ours_is_no_gate():
    with pytest.raises(InvalidArgument, match="no row with a kernel of ours, so nothing can be he"):
        changes(result(None), result(10.0))


@pytest.mark.parametrize("other", [{"suite": "quickstart"}, {"device": "NVIDIA A100"}])
def test_files_of_other_suites_and_devices_are_refused(other):
    with pytest.raises(
        InvalidArgument, match=f"differ in {(what := next(iter(other)))}: .* of the same {what}"
    ):
        changes(result(10.0), result(10.0, **other))


@pytest.mark.parametrize(("new_us", "code"), [(10.0, 0), (9.0, 0), (12.0, 1)])
def test_the_command_exits_with_1_where_a_row_is_slower(new_us, code, tmp_path, capsys):
    paths = [tmp_path / name for name in ("old.json", "new.json")]
    for path, us in zip(paths, (10.0, new_us), strict=True):
        write_data(path, result(us))
    assert main(["compare", *map(str, paths)]) == code
    shown = capsys.readouterr().out
    assert f"{code} slower, 0 gone" in shown
    assert ("1.20x" in shown) == (code == 1)
    assert main(["compare", *map(str, paths), "--json", "-"]) == code
    assert json.loads(capsys.readouterr().out)[0]["old_us"] == 10.0
