"""The fewest kernels of a graph, by trying every choice that the planner makes."""

import contextlib
import itertools

from tilewright.fusion.ir import REDUCTIONS
from tilewright.fusion.passes import remove_dead
from tilewright.fusion.plan import expand_moments
from tilewright.fusion.program import Kernels
from tilewright.fusion.segments import _Cutter, _largest


def passes(segments):
    """Kernels, but for those that put together what others left in parts."""
    return sum(s.row is not None for s in segments) or 1


class _Hopeless(Exception):
    """As many kernels as the best plan has, or a step that gets nothing done."""


class _Chosen(_Cutter):
    """At each kernel: any axes as the row, and any of the reductions that it could add up."""

    def __init__(self, graph, kernels, choices, best):
        super().__init__(graph, kernels)
        self.choices, self.best = choices, best
        self.options = []
        """How many there were at each kernel."""

    def best_row(self, outputs, needed, known, split):
        if passes(self.segments) >= self.best:
            raise _Hopeless
        space = _largest(self.graph.nodes[i].shape for i in needed)
        axes = [a for a, n in enumerate(space) if n > 1]
        rows = [row for k in range(len(axes) + 1) for row in itertools.combinations(axes, k)]
        found = []
        for row in rows:
            now, added = self.reach(row, needed, known)
            for count in range(len(added) + 1):
                for some in itertools.combinations(added, count):
                    done = [i for i in now if i not in known]
                    reduced = [i for i in done if self.graph.nodes[i].op in REDUCTIONS]
                    written = self.completed(outputs, now, some, known)
                    if reduced or some or written:
                        found.append((row, now, [*some]))
        at = len(self.options)
        if not found:
            raise _Hopeless
        self.options.append(len(found))
        return found[self.choices[at] if at < len(self.choices) else 0]


def fewest(graph, bound, most=200):
    """The fewest passes of any plan; `bound` if none has less, None if there are over `most`."""
    kernels = Kernels(2)
    graph = remove_dead(expand_moments(graph, kernels.corrects))
    best, choices = bound, []
    for _ in range(most):
        cutter = _Chosen(graph, kernels, choices, best)
        with contextlib.suppress(
            _Hopeless, ValueError
        ):  # a row that leaves no part of what it adds
            best = min(best, passes(cutter.run(False).segments))
        made = len(cutter.options)
        choices = [*choices, *[0] * made][:made]
        while choices and choices[-1] + 1 >= cutter.options[len(choices) - 1]:
            choices.pop()
        if not choices:
            return best
        choices[-1] += 1
    return None
