"""The page beside the split-K study says what the study and the result files say."""

import re
import sys

import pytest

import split_k_table


def test_the_page_is_in_step_with_the_result_files(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["split_k_table.py", "--check"])
    assert split_k_table.main() == 0


@pytest.mark.parametrize(
    ("batch", "sums"), [(8, [2117, 870, 1612, 1919]), (256, [58335, 19672, 22871, 20884])]
)
def test_every_layer_of_the_study_has_a_line_and_their_times_add_up(batch, sums):
    *layers, last = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in split_k_table.table(batch).splitlines()[2:]
    ]
    assert len(layers) == 19
    assert [float(cell) for cell in last[1:5]] == sums
    assert all(re.fullmatch(r"-|refused|\d+(\.\d)?", cell) for row in layers for cell in row[1:])
    timed = [column for column in range(6, 12) if last[column] != "-"]
    assert len(timed) >= 5
    for column in timed:
        assert sum(float(row[column]) for row in layers) == pytest.approx(
            float(last[column]), rel=0.01
        )


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({}, "-"),
        ({"none_right": {"conv2d_weight_grad_sm90": {"configs": 82, "first": "wrong"}}}, "refused"),
        ({"none_right": {"conv2d_weight_grad_sm90": {"configs": 0, "first": ""}}}, "-"),
    ],
)
def test_a_layer_without_a_time_was_refused_or_not_reached(row, told):
    assert split_k_table.untimed((256, 512, 256, 1, 28, 2), row) == told


def test_a_file_that_does_not_tell_what_was_refused_is_told_apart_by_hand():
    cells = [line.split("|")[6].strip() for line in split_k_table.table(256).splitlines()[2:]]
    assert (cells.count("refused"), cells.count("-")) == (4, 1)  # the sum is of all
