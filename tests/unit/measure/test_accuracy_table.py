"""The table of errors says what `tilewright verify` found."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import accuracy_table


def row(text, *outputs):
    fields = ("ulp", "vendor_ulp", "apart_ulp")
    return {"workload": text, "outputs": [dict(zip(fields, o, strict=True)) for o in outputs]}


def test_operators_are_lines_dtypes_columns_and_outputs_in_their_order():
    found = [
        row("softmax(x=f32[4,8])", (5.44, 5.6, 5.0)),
        row("rms_norm_backward(grad_output=f32[4,8], x=f32[4,8], rstd=f32[4,1], weight=f32[8])",
            (1.6, 2.3, 2.0), (5.1, 4.3, 6.0)),
        row("softmax(x=bf16[4,8])", (0.5, 0.5, 1.0)),
        row("softmax(x=f32[2,64])", (6.0, 6.0, 4.0)),
        row("lerp(x=f32[8], end=f32[4,8], weight=0.9999)", (0.4, 0.4, 0.0)),
    ]  # fmt: skip
    assert accuracy_table.table(found).splitlines() == [
        "| outputs | f32 own | f32 PyTorch | f32 apart | bf16 own | bf16 PyTorch | bf16 apart |",
        "|--|--|--|--|--|--|--|",
        "| softmax | 5.4 | 5.6 | 5.0 | 0.5 | 0.5 | 1.0 |",
        "| rms_norm_backward: x, weight | 1.6, 5.1 | 2.3, 4.3 | 2.0, 6.0 | - | - | - |",
        "| softmax of 2x64 | 6.0 | 6.0 | 4.0 | - | - | - |",
        "| lerp by 0.9999 | 0.4 | 0.4 | 0.0 | - | - | - |",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        ("no JSON", "is not what tilewright verify"),
        ('{"rows": []}', "is not what tilewright verify"),
        ('[{"workload": "softmax(x=f32[4,8])"}]', "is not what tilewright verify"),
    ],
)
def test_a_file_without_verdicts_is_refused_in_words(content, message, tmp_path):
    path = tmp_path / "accuracy.json"
    if content is not None:
        path.write_text(content)
    done = CliRunner().invoke(accuracy_table.main, [str(path)])
    assert done.exit_code == 2
    assert message in done.output


def test_the_documented_table_is_that_of_its_file():
    root = Path(__file__).parents[3]
    rows = json.loads((root / "benchmarks/results/h200/accuracy.json").read_text())
    assert f"\n\n{accuracy_table.table(rows)}\n\n" in (root / "docs/fusion.md").read_text()
