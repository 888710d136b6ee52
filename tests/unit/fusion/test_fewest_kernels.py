"""The planner's passes over memory, held against those of every plan for the same graph."""

from collections import Counter

from fewest_kernels import ON_CPUS, fewest, passes
from hypothesis import given, seed
from torch.nn import functional as F

import tilewright as tw
from random_graphs import Program, forget, gradients_of, programs, run_examples, workload
from tilewright.dispatch.functions.fuse import fuse
from tilewright.fusion import segments
from tilewright.fusion.cuda.tiles.capabilities import TileKernels
from tilewright.fusion.cuda.tiles.schedule import TileSchedule
from tilewright.fusion.segments import Cutter, cut
from tilewright.fusion.ways import Met
from tilewright.impls.fused import graph_of
from tilewright.op import Workload
from tilewright.tensor_spec import TensorSpec

WAYS = [{}, {"rows": True}, {"rows": True, "columns": True}, {"adds_across": True}]
ON_GPUS = [TileKernels(TileSchedule(), **way) for way in WAYS]
"""Walks over columns, and rows that leave a partial each, which add up over all rows, too, or not;
and rows across the order of memory that add up along it."""
KINDS = (*["binary"] * 3, *["reduce"] * 3, "total")


def graph_of_program(program):
    try:
        return graph_of(workload(program))
    finally:
        forget()


def planned(graph, kernels=ON_CPUS):
    return passes(cut(graph, kernels=kernels))


def test_random_graphs_take_as_many_passes_as_the_best_plan():
    """Not those of rows that add up over all rows, too: every choice has some there that no kernel
    of a GPU runs, rows across the order of memory beside such a sum."""
    kinds = {"cpu": ON_CPUS, "columns": ON_GPUS[0], "rows": ON_GPUS[1], "across": ON_GPUS[3]}
    held, given_up = {kind: Counter() for kind in kinds}, {kind: [] for kind in kinds}

    @seed(2)
    @given(programs(most_steps=10, kinds=KINDS, dtypes=("f32",), sizes=(2, 3, 5, 7)))
    def check(program):
        graph = graph_of_program(program)
        for kind, kernels in kinds.items():
            ours = planned(graph, kernels)
            if ours <= 1:
                continue
            # One more than ours, so that the search itself has to find a plan as good.
            least = fewest(graph, ours + 1, kernels)
            if least is None:
                given_up[kind].append(program)
            else:
                held[kind][ours] += 1
                assert least == ours, (kind, program)

    run_examples(check, 300, derandomize=False, shrink=False)
    for kind in kinds:
        assert held[kind][2] > 20
        assert held[kind].total() - held[kind][2] > 5
        assert len(given_up[kind]) < 5


def test_a_row_that_completes_most_now_is_not_taken_where_it_costs_a_pass_later():
    """The row (0, 1) completes two reductions, one of the other's result, while a third, which a
    fourth waits for, has its pass afterwards. Both waited for can be added up in one pass."""
    x, y = TensorSpec("f32", (7, 3, 7)), TensorSpec("f32", (1, 1, 7))
    greatest, product = ("amax", (0,), (0, 1)), ("mul", (0, 1), ())
    least = ("amin", (4,), (0, 1))
    chain = (("any", (0,), (0,)), ("mean", (6,), (0, 1)))
    steps = (greatest, product, ("add", (3, 2), ()), least, chain[0], chain[1])
    graph = graph_of_program(Program((x, y), steps, (7, 5)))
    assert (planned(graph), fewest(graph, 3)) == (2, 2)


def test_a_graph_of_many_passes_takes_the_fewest():
    """What gets most done first takes four."""
    x, y = TensorSpec("f32", (5, 2, 3)), TensorSpec("f32", (1, 2, 3))
    spread = (("lerp", (0, 0), ()), ("var", (2,), (0, 1)), ("least of all", (2,), ()))
    rows = (("var", (2,), (1,)), ("maximum", (5, 5), ()), ("mul", (3, 1), ()))
    ends = (("any", (5,), (0, 1, 2)), ("maximum", (8, 7), ()))
    graph = graph_of_program(Program((x, y), (*spread, *rows, *ends), (9, 4, 5, 6)))
    assert (planned(graph), fewest(graph, 3)) == (3, 3)  # and none takes two


class _Forgetful(Met):
    def costs_no_more(self, left, way):
        return False


def test_what_a_search_does_not_try_again_changes_no_cut(monkeypatch):
    tried = []

    @seed(3)
    @given(programs(most_steps=10, kinds=KINDS, dtypes=("f32",), sizes=(2, 3, 5, 7)))
    def check(program):
        graph = graph_of_program(program)
        if len(graph.reduction_sets) < 2:
            return
        for kernels in (ON_CPUS, *ON_GPUS):
            rows = segments._rows_of_fewest_passes.__wrapped__(graph, kernels)
            with monkeypatch.context() as patch:
                patch.setattr(segments, "Met", _Forgetful)
                assert rows == segments._rows_of_fewest_passes.__wrapped__(graph, kernels), program
            tried.append(len(rows))

    run_examples(check, 60, derandomize=False, shrink=False)
    assert max(tried) > 2


def test_gradients_of_rows_and_columns_in_turn_are_cut_in_few_tries(
    records_of_its_own, monkeypatch
):
    """Without what was tried before it is a thousand, and 6 to 9 s, with each kind of kernels."""

    @tw.fuse
    def doubly_normalised(x):
        for _ in range(3):
            x = x - x.logsumexp(-1, keepdim=True)
            x = x - x.logsumexp(0, keepdim=True)
        return x.exp()

    arguments = "grad_output=f32[1000,512], x=f32[1000,512]"
    graph = graph_of(tw.Workload.parse(f"doubly_normalised_backward({arguments})"))
    tries, run = [], Cutter.run
    monkeypatch.setattr(Cutter, "run", lambda self: tries.append(0) or run(self))
    for kernels, most in zip((ON_CPUS, *ON_GPUS), (9, 11, 11, 9, 9), strict=True):
        tries.clear()
        assert cut(graph, kernels=kernels).large() == most
        assert len(tries) < 100


def windows_of_rolled_norms(x, w, b):
    x = F.layer_norm(x, x.shape[-1:], w, b).roll((-1, -1), (1, 2))
    n, height, width, channels = x.shape
    x = x.view(n, height // 2, 2, width // 2, 2, channels)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, channels)


def test_a_search_in_a_large_graph_ends(monkeypatch, forgets_functions):
    fuse(windows_of_rolled_norms)
    text = "windows_of_rolled_norms(x=f32[2,4,6,8], w=f32[8], b=f32[8])"
    graph = graph_of(gradients_of(Workload.parse(text)))
    walk, planned = segments.Cutter.walk, []

    def counting(self, *args):
        planned.append(len(self.graph.nodes))
        return walk(self, *args)

    monkeypatch.setattr(segments.Cutter, "walk", counting)
    cut(graph, kernels=TileKernels(TileSchedule(), rows=True))
    assert segments.MOST_STEPS < sum(planned) < 1.5 * segments.MOST_STEPS
