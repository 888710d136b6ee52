"""Config spaces: what is in them, how they are drawn from and walked."""

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.errors import InvalidArgument
from tilewright.space import ConfigSpace, NoConfig, config_dict, config_text, param


@dataclass(frozen=True)
class Tile:
    rows: int = param(1, 2, 4, 8)
    vector_bytes: int = param(4, 8, 16, default=8)
    storage: str = param("registers", "shared")


def rows_fit(most):
    def constraint(config):
        if config.rows * config.vector_bytes > most:
            return f"rows={config.rows} of {config.vector_bytes} bytes exceed {most}"
        return None

    return constraint


@st.composite
def spaces(draw):
    """Spaces over every subset of the values, under a constraint that may leave nothing."""
    values = {
        "rows": draw(st.lists(st.integers(1, 64), min_size=1, max_size=6, unique=True)),
        "vector_bytes": draw(st.lists(st.sampled_from([2, 4, 8, 16]), min_size=1, unique=True)),
    }
    return ConfigSpace(Tile, values, rows_fit(draw(st.integers(0, 1024))))


@given(spaces())
def test_iteration_gives_each_member_once_in_a_fixed_order(space):
    configs = list(space)
    assert len(set(configs)) == len(configs) <= space.size_unconstrained
    assert configs == list(space)
    assert all(config in space for config in configs)


@given(spaces(), st.integers(0, 80), st.sampled_from([2, 4, 8, 16]))
def test_a_config_is_in_the_space_exactly_if_iteration_gives_it(space, rows, vector_bytes):
    config = Tile(rows, vector_bytes)
    assert (config in space) == (config in list(space))
    assert (config in space) == (space.why_not(config) is None)


def test_each_refusal_says_why():
    space = ConfigSpace(Tile, {"rows": [1, 2]}, rows_fit(16))
    assert space.why_not(Tile(rows=3)) == "rows=3 is not one of 1, 2"
    assert space.why_not(Tile(2, 16)) == "rows=2 of 16 bytes exceed 16"
    assert space.why_not(Tile(1, 16)) is None
    assert space.why_not(Tile(rows=1.0)) == "rows=1.0 is not one of 1, 2"
    assert space.why_not(Tile(rows=True)) == "rows=True is not one of 1, 2"
    with pytest.raises(InvalidArgument, match=r"rows=2\.0 is not of the kind of 1, 2$"):
        space.restricted({"rows": [1, 2.0]})
    assert NoConfig() not in space


@settings(max_examples=40)
@given(spaces(), st.integers(0, 300), st.integers(0, 99))
def test_a_sample_is_distinct_members_and_all_of_them_if_there_are_few(space, count, seed):
    sample = space.sample(random.Random(seed), count)
    assert len(set(sample)) == len(sample) == min(count, len(list(space)))
    assert all(config in space for config in sample)
    assert sample == space.sample(random.Random(seed), count)


@dataclass(frozen=True)
class Large:
    a: int = param(*range(200))
    b: int = param(*range(200))


def test_a_large_space_is_sampled_without_being_enumerated():
    asked = []
    space = ConfigSpace(Large, constraint=lambda c: asked.append(c) or (c.a % 2 and "odd") or None)
    sample = space.sample(random.Random(0), 100)
    assert len(set(sample)) == 100
    assert all(config in space for config in sample)
    assert len(asked) < 1000 < space.size_unconstrained


def test_a_large_space_with_few_members_gives_what_it_finds():
    space = ConfigSpace(Large, constraint=lambda c: None if c.a + c.b < 2 else "too large")
    sample = space.sample(random.Random(0), 50)
    assert set(sample) <= {Large(0, 0), Large(0, 1), Large(1, 0)}


@given(spaces())
def test_neighbours_differ_in_one_knob_by_one_step_and_are_mutual(space):
    for config in space:
        for near in space.neighbours(config):
            assert near in space
            changed = [n for n in space.values if getattr(near, n) != getattr(config, n)]
            assert len(changed) == 1
            listed = space.values[changed[0]]
            i, j = (listed.index(getattr(c, changed[0])) for c in (config, near))
            assert abs(i - j) == 1
            assert config in space.neighbours(near)


def test_the_nearest_config_of_a_space_has_other_values_only_where_it_must():
    space = ConfigSpace(Tile, constraint=rows_fit(32))
    assert space.nearest(space.config({})) == space.config({})
    asked = space.restricted({"rows": [64, 4]})
    assert asked.nearest(Tile(rows=8)) == Tile(rows=4)
    assert space.restricted({"rows": [64]}).nearest(Tile(rows=8)) is None


def test_a_restricted_space_pins_knobs_and_keeps_the_constraint():
    space = ConfigSpace(Tile, constraint=rows_fit(32)).restricted({"rows": [4]})
    assert {config.rows for config in space} == {4}
    assert {config.vector_bytes for config in space} == {4, 8}


def test_an_unknown_knob_is_named_with_the_known_ones():
    space = ConfigSpace(Tile)
    known = "unknown knob 'colour'.*; known: rows, vector_bytes, storage"
    with pytest.raises(InvalidArgument, match=known):
        space.restricted({"colour": [1]})
    with pytest.raises(InvalidArgument, match=known):
        space.config({"colour": 1})
    with pytest.raises(InvalidArgument, match=r"unknown knob .* of NoConfig; known: none"):
        ConfigSpace(NoConfig).restricted({"rows": [1]})


@given(spaces())
def test_a_config_survives_its_dict(space):
    for config in space:
        assert space.config(config_dict(config)) == config


def test_a_config_takes_its_declared_defaults():
    assert ConfigSpace(Tile).config({"rows": 2}) == Tile(2, 8, "registers")
    assert config_text(Tile()) == "rows=1,vector_bytes=8,storage=registers"


def test_an_implementation_without_knobs_has_one_config():
    space = ConfigSpace(NoConfig)
    assert list(space) == [NoConfig()] == space.sample(random.Random(0), 5)
    assert space.neighbours(NoConfig()) == []
    assert config_text(NoConfig()) == ""


@dataclass(frozen=True)
class Slices:
    tile: int = param(64, 128)
    slices: int = param(1, 2, 8, counts=True)


def test_what_counts_may_be_any_number_that_fits():
    space = ConfigSpace(Slices, constraint=lambda c: "too many" if c.slices > 9 else None)
    assert space.why_not(Slices(slices=7)) is None
    assert space.unlisted(Slices(slices=7)) == ["slices"]
    assert space.why_not(Slices(slices=10)) == "too many"
    assert space.why_not(Slices(slices=0)) == "slices=0 is not one of 1, 2, 8"
    assert space.why_not(Slices(tile=65)) == "tile=65 is not one of 64, 128"
    assert space.restricted({"slices": [2]}).why_not(Slices(slices=7)) == "slices=7 is not one of 2"
    assert all(c.slices in (1, 2, 8) for c in space)


def test_beside_a_number_that_is_not_listed_are_those_next_in_size():
    around = ConfigSpace(Slices).neighbours(Slices(slices=7))
    assert [c.slices for c in around if c.tile == 64] == [2, 8]
    assert Slices(128, 7) in around


def test_a_value_that_the_constraint_knows_nothing_of_is_of_no_use():
    def constraint(config):
        return None if 16 // {1: 2, 2: 4, 4: 8, 8: 8}[config.rows] >= 2 else "too many"

    space = ConfigSpace(Tile, constraint=constraint).restricted({"rows": [3, 4]})
    assert {config.rows for config in space} == {4}
    assert space.why_not(Tile(rows=3)) == "rows=3 is of no use here"
    broken = ConfigSpace(Tile, constraint=lambda config: {}[config.rows])
    with pytest.raises(KeyError):  # a fault of its own is none of the caller's
        list(broken.restricted({"rows": [1, 4]}))
