"""The README's table and picture say what the result file says."""

import xml.etree.ElementTree as ET

import pytest

import readme_table

LERP = "lerp(x=f32[16,1,1,1], end=f32[16,3,244,244], weight=f32[3,1,244])"
RESULT = {
    "suite": "quickstart",
    "date": "2026-01-02T03:04:05+00:00",
    "device": {"name": "Some CPU", "threads": 2},
    "versions": {"torch": "2.13.0"},
    "tuning_s": 61.2,
    "rows": [
        {
            "workload": LERP,
            "floor_us": 500.0,
            "baselines": {"aten": {"median_us": 4000.0}, "inductor": {"median_us": 2000.0}},
            "own": {"implementation": "fused", "median_us": 1000.0},
            "chosen": "fused",
        },
        {
            "workload": "softmax(x=bf16[4,8])",
            "floor_us": 0.0,
            "baselines": {"aten": {"median_us": 10.0}},
            "own": None,
            "chosen": "aten",
        },
    ],
    "summary": {"geomean_vs_aten": 4.0, "geomean_vs_inductor": 2.0},
}


def test_a_label_names_operator_dtype_and_distinct_shapes():
    assert readme_table.label(LERP) == "lerp f32 [16,1,1,1] [16,3,244,244] [3,1,244]"


def test_the_table_has_time_ratios_and_fraction_of_the_floor():
    lines = readme_table.table(RESULT).splitlines()
    shapes = "[16,1,1,1] [16,3,244,244] [3,1,244]"
    assert lines[2] == f"| lerp f32 {shapes} | fused | 1.00 ms | 4.00x | 2.00x | 0.50 |"
    assert lines[3] == "| softmax bf16 [4,8] | aten | 10.0 us | 1.00x | - | - |"
    assert "4.00x of eager's speed, 2.00x of torch.compile's" in lines[5]
    assert "of a copy" not in lines[0]
    assert not any("\\*" in line for line in lines)
    assert lines[-1] == "Measured on Some CPU, 2 threads, torch 2.13.0, 2026-01-02."


def test_a_gpu_s_table_has_max_autotune_copies_and_stars_where_verification_refused():
    row = {
        **RESULT["rows"][0],
        "copy_us": 750.0,
        "baselines": {
            **RESULT["rows"][0]["baselines"],
            "inductor_max": {"median_us": 1500.0},
        },
        "wrong": {"inductor_max": "0.6 ulp exceeds 0.5"},
    }
    summary = {**RESULT["summary"], "geomean_vs_inductor_max": 1.5, "geomean_of_copy": 0.75}
    result = {
        **RESULT,
        "device": {"name": "Some GPU", "sms": 132},
        "rows": [row, RESULT["rows"][1]],
        "summary": summary,
    }
    lines = readme_table.table(result).splitlines()
    assert lines[0].endswith("| against max-autotune | of the floor | of a copy |")
    assert lines[1].count("|") == lines[0].count("|")
    assert lines[2].endswith("| 4.00x | 2.00x | 1.50x* | 0.50 | 0.75 |")
    assert lines[3].endswith("| 1.00x | - | - | - | - |")
    assert (
        "2.00x of torch.compile's, 1.50x of that with max-autotune; 0.75 of a copy's." in lines[5]
    )
    assert "refuses its result" in lines[7]
    svg = ET.fromstring(readme_table.picture(result))
    widths = [float(r.get("width")) for r in svg if r.tag.endswith("rect") and r.get("y") != "34"]
    assert widths[3] / widths[1] == pytest.approx(4000 / 1500, rel=0.01)


def test_bars_are_as_long_as_the_speeds():
    svg = ET.fromstring(readme_table.picture(RESULT))
    widths = [float(r.get("width")) for r in svg if r.tag.endswith("rect") and r.get("y") != "34"]
    eager, compiled, own = widths[1:4]
    assert compiled / eager == pytest.approx(2.0, rel=0.01)
    assert own / eager == pytest.approx(4.0, rel=0.01)
