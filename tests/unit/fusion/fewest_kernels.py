"""The fewest kernels of a graph, by trying every choice that a planner could make."""

import contextlib
import itertools

from tilewright.fusion.ir import REDUCTIONS
from tilewright.fusion.passes import remove_dead
from tilewright.fusion.plan import expand_moments
from tilewright.fusion.program import Kernels, walking
from tilewright.fusion.segments import Cutter
from tilewright.fusion.subgraphs import largest
from tilewright.fusion.walks import Walks
from tilewright.fusion.ways import Hopeless, Met, Row

ON_CPUS = Kernels(2)


def passes(program):
    """Kernels, but for those that put together what others left in partials."""
    return len(walking(program.segments))


class _Chosen(Cutter):
    """At each kernel: any axes as the row, and any of the reductions that it could add up."""

    def ranked(self, needed):
        outputs, known = self.draft.remaining, self.draft.known
        walks = Walks(self.graph, self.kernels, self.draft.lane)
        space = largest(self.graph.nodes[i].shape for i in needed)
        axes = [a for a, n in enumerate(space) if n > 1]
        rows = [row for k in range(len(axes) + 1) for row in itertools.combinations(axes, k)]
        found = []
        for row in rows:
            now, added = walks.reach(row, needed, known)
            for count in range(len(added), -1, -1):
                for some in itertools.combinations(added, count):
                    done = [i for i in now if i not in known]
                    reduced = [i for i in done if self.graph.nodes[i].op in REDUCTIONS]
                    written = walks.written(outputs, now, some, known)
                    if reduced or some or written:
                        found.append(Row(True, (), row, now, [*some]))
        if not found:
            raise Hopeless
        return found


def fewest(graph, bound, kernels=ON_CPUS, most=2000):
    """The fewest passes of any plan; `bound` if none has less, None if there are over `most`."""
    graph = remove_dead(expand_moments(graph, corrected=True))
    best, choices, met = bound, [], Met()
    for _ in range(most):
        cutter = _Chosen(graph, kernels, choices, best, met)
        with contextlib.suppress(Hopeless):
            best = min(best, passes(cutter.run()))
        while cutter.chosen and cutter.chosen[-1][0] + 1 == cutter.chosen[-1][1]:
            cutter.chosen.pop()
        if not cutter.chosen:
            return best
        *before, (last, _) = cutter.chosen
        choices = [*(k for k, _ in before), last + 1]
    return None
