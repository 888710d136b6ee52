"""Every strategy, those added later included, on synthetic landscapes with failures."""

import math
import os
import random
import subprocess
import sys
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.search import STRATEGIES, Budget, run_search
from tilewright.space import ConfigSpace, NoConfig, param


@dataclass(frozen=True)
class Knobs:
    a: int = param(1, 2, 4, 8, 16)
    b: int = param(0, 1, 2, 3)
    c: str = param("registers", "shared", "again")


@st.composite
def landscapes(draw):
    """A space, some of it forbidden, and a time for each config; some of them fail."""
    most = draw(st.integers(1, 64))
    space = ConfigSpace(Knobs, constraint=lambda k: "large" if k.a * (k.b + 1) > most else None)
    rng = random.Random(draw(st.integers(0, 10**6)))
    failing = draw(st.sampled_from([0.0, 0.3, 0.9, 1.0]))
    times = {k: math.inf if rng.random() < failing else rng.uniform(1e-6, 1e-3) for k in space}
    return space, times


def tried(name, landscape, seed=0, **options):
    space, times = landscape
    budget = options.pop("budget", None) or Budget()
    evaluate = lambda configs: [times[c] for c in configs]  # noqa: E731
    return run_search(STRATEGIES[name], space, random.Random(seed), evaluate, budget, **options)


everyone = pytest.mark.parametrize("name", list(STRATEGIES))
few = settings(max_examples=25)


@everyone
@few
@given(landscapes(), st.integers(0, 99))
def test_a_strategy_tries_members_of_the_space_only_and_ends(name, landscape, seed):
    space, times = landscape
    found = tried(name, landscape, seed)
    assert all(config in space for config, _ in found)
    assert found
    assert dict(found).items() <= times.items()


@everyone
@few
@given(landscapes(), st.integers(1, 30))
def test_a_strategy_keeps_the_budget(name, landscape, configs):
    assert len(tried(name, landscape, budget=Budget(configs=configs))) <= configs


@everyone
@few
@given(landscapes(), st.integers(0, 99))
def test_a_seed_fixes_what_a_strategy_does(name, landscape, seed):
    random.seed(1)
    first = tried(name, landscape, seed)
    random.seed(2)
    assert tried(name, landscape, seed) == first


@everyone
@few
@given(landscapes(), st.integers(0, 10**6))
def test_the_result_is_no_worse_than_any_start(name, landscape, pick):
    _, times = landscape
    start = list(times)[pick % len(times)]
    found = dict(tried(name, landscape, starts=[start]))
    assert min(found.values()) <= times[start]


@everyone
def test_a_space_of_one_config_is_enough(name):
    space = ConfigSpace(NoConfig)
    found = run_search(STRATEGIES[name], space, random.Random(0), lambda cs: [1.0], Budget())
    assert found == [(NoConfig(), 1.0)]


@everyone
def test_an_empty_space_is_no_error(name):
    space = ConfigSpace(Knobs, constraint=lambda k: "nothing fits")
    assert run_search(STRATEGIES[name], space, random.Random(0), lambda cs: [], Budget()) == []


@pytest.mark.parametrize("name", ["exhaustive", "random_search"])
@few
@given(landscapes(), st.integers(0, 99))
def test_without_a_limit_the_whole_space_is_tried(name, landscape, seed):
    _, times = landscape
    assert dict(tried(name, landscape, seed)) == times


def test_random_search_tries_other_configs_for_another_seed():
    space = ConfigSpace(Knobs)
    landscape = space, dict.fromkeys(space, 1.0)
    one, other = (tried("random_search", landscape, s, budget=Budget(configs=10)) for s in (1, 2))
    assert one != other


@few
@given(landscapes(), st.integers(0, 99))
def test_hill_climb_ends_in_a_local_optimum(landscape, seed):
    space, _ = landscape
    found = dict(tried("hill_climb", landscape, seed))
    best = min(found, key=found.__getitem__)
    assert all(found[near] >= found[best] for near in space.neighbours(best))


def test_hill_climb_follows_a_valley_to_its_end_with_few_measurements():
    space = ConfigSpace(Wide)
    times = {c: 1e-6 * (1 + (c.x - 31) ** 2 + (c.y - 7) ** 2) for c in space}
    found = tried("hill_climb", (space, times), starts=[Wide(0, 0)], budget=Budget(configs=200))
    assert dict(found)[Wide(31, 7)] == 1e-6
    assert len(times) == 1600


def test_a_sweep_is_the_product_of_the_pinned_knobs_beside_the_start():
    space = ConfigSpace(Knobs, constraint=lambda k: "large" if k.a * k.b > 16 else None)
    space = space.restricted({"a": (2, 16)}).restricted({"b": (0, 1, 3)})
    found = tried("sweep", (space, dict.fromkeys(space, 1.0)), starts=[Knobs(2, 0, "shared")])
    product = [(2, 0), (2, 1), (2, 3), (16, 0), (16, 1)]
    assert [config for config, _ in found] == [Knobs(a, b, "shared") for a, b in product]


def test_hill_climb_starts_at_the_starts():
    space = ConfigSpace(Wide)
    times = {c: 1e-6 * (1 + c.x + c.y) for c in space}
    found = tried("hill_climb", (space, times), starts=[Wide(20, 20)], budget=Budget(configs=5))
    assert [c for c, _ in found] == [Wide(20, 20), *space.neighbours(Wide(20, 20))]


@dataclass(frozen=True)
class Wide:
    x: int = param(*range(40))
    y: int = param(*range(40))


PLUGIN = '''
"""The last config first."""

from tilewright.search import strategy


@strategy
def backwards(space, rng, starts=()):
    """From the end of the space to its beginning."""
    yield list(space)[::-1]
'''

USE = """
import random
from dataclasses import dataclass
from tilewright.search import STRATEGIES, Budget, run_search
from tilewright.space import ConfigSpace, param

@dataclass(frozen=True)
class Knob:
    n: int = param(1, 2, 3)

found = run_search(STRATEGIES["backwards"], ConfigSpace(Knob), random.Random(0),
                   lambda configs: [float(c.n) for c in configs], Budget(configs=2))
print([c.n for c, _ in found], "exhaustive" in STRATEGIES)
"""


def test_a_file_in_a_plugin_folder_is_a_strategy(tmp_path):
    folder = tmp_path / "mine" / "strategies"
    folder.mkdir(parents=True)
    (folder / "backwards.py").write_text(PLUGIN)
    environment = {**os.environ, "TILEWRIGHT_PLUGINS": str(tmp_path / "mine")}
    ran = subprocess.run([sys.executable, "-c", USE], env=environment, capture_output=True)
    assert ran.stdout.decode().strip() == "[3, 2] True", ran.stderr.decode()
