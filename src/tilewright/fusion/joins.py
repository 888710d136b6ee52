"""Results that kernels leave in partials, and the small kernels that put these together.

A kernel that walks rows leaves one partial of a result for each of its splits, or one for each row.
A later one combines all partials of results of the same dims, and computes what follows from these
alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from tilewright.fusion.draft import Draft, kept
from tilewright.fusion.ir import REDUCTIONS, Graph, Node
from tilewright.fusion.program import Segment
from tilewright.fusion.subgraphs import Known, Store, ancestor_space, ancestors, main_axis, within
from tilewright.fusion.walks import Walks
from tilewright.tensor_spec import HALVES

LITTLE = 16
"""Times fewer elements than a kernel walks: sums over them are no pass that counts."""
JOINED = "the partials of a result are put together"


# ---- rows that leave a partial each ----


def completes(graph: Graph, i: int, row: tuple[int, ...]) -> bool:
    """Whether a kernel whose rows leave a partial each completes reduction `i` itself: over all
    rows, not along them."""
    return not set(row) < set(graph.axes(i))


def partials_of_rows(
    graph: Graph, sums: dict[int, Known], row: tuple[int, ...]
) -> tuple[Graph, list[Store]]:
    """The graph with the reductions over one row each, and their places among the partials."""
    nodes, stores = [*graph.nodes], list[Store]()
    for i, known in sums.items():
        if completes(graph, i, row):
            stores.append((i, known.buffer, known.access))
            continue
        n = graph.nodes[i]
        operand = graph.nodes[n.args[0]].shape
        shape = tuple(1 if a in row else size for a, size in enumerate(operand))
        strides, step = list(known.access.strides), math.prod(n.shape)
        for a in reversed(graph.axes(i)):
            if a not in row:
                strides[a], step = step, step * shape[a]
        stores.append((len(nodes), known.buffer, known.access.along(tuple(strides))))
        nodes.append(replace(n, shape=shape))
    return replace(graph, nodes=tuple(nodes)), stores


def joined_by_row(draft: Draft, sums: dict[int, Known], row: tuple[int, ...]) -> dict[int, Known]:
    """Those results in a partial for each row, or in fewer where rows are many."""
    graph, found = draft.graph, dict[int, Known]()
    for i, known in sums.items():
        across = [graph.space[a] for a in graph.axes(i) if a not in row]
        found[i] = draft.in_partials(known, 1 if completes(graph, i, row) else math.prod(across))
    numbers = [i for i in sums if math.prod(graph.nodes[i].shape) == 1]
    many = [i for i in numbers if found[i].partials > draft.kernels.most_joined]
    return {**found, **_fewer(draft, many, found)} if many else found


def _fewer(draft: Draft, sums: list[int], partials: dict[int, Known]) -> dict[int, Known]:
    """A kernel whose blocks each join a share of the partials of these numbers."""
    count = partials[sums[0]].partials
    shares = {i: draft.temporary(i) for i in sums}
    nodes: list[Node] = []
    for n in (draft.graph.nodes[i] for i in sums):
        nodes.append(Node("load", (), n.dtype, (count,), len(nodes) // 2))
        nodes.append(n.moved((len(nodes) - 1,), (1,)))
    inputs = tuple(partials[i].access.along((1,)) for i in sums)
    ends = enumerate(shares.values())
    outputs = tuple((2 * k + 1, known.access.along((0,))) for k, known in ends)
    graph = Graph(tuple(nodes), (count,), inputs, outputs, draft.graph.scalars).check()
    reads, writes = (tuple(known[i].buffer for i in sums) for known in (partials, shares))
    reason = draft.at(sums[0], "blocks share the partials of a result")
    draft.segments.append(Segment(graph, reads, writes, (), 0, reason=reason))
    return draft.divide(shares)


# ---- kernels that put partials together ----


def combine(draft: Draft, added: Iterable[int]) -> None:
    """Kernels that put partials together, one for all results of the same dims."""
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for i in added:
        by_shape.setdefault(draft.graph.nodes[i].shape, []).append(i)
    for sums in by_shape.values():
        _combine_alike(draft, sums)


def _combine_alike(draft: Draft, sums: list[int]) -> None:
    known = draft.known
    stores = draft.write(epilogue(draft, sums, sums))
    wanted = draft.wanted()
    whole = {i: replace(known[i], partials=0) for i in sums if known[i].partials == 1}
    joined = {i: draft.temporary(i) for i in sums if i in wanted and i not in whole}
    single = len(whole) == len(sums)
    if single and (own := _places_in(draft, stores, whole)):
        draft.redirect({whole[i].buffer: place for i, place in own.items()})
        whole |= own
    elif stores := [*stores, *kept(joined)]:
        reason = draft.needs(sums[0]) if single else draft.at(sums[0], JOINED)
        draft.add(stores, None, reason)
    whole |= joined
    draft.awaited |= {k.buffer: draft.needs(i) for i, k in whole.items()}
    draft.known = {**known, **whole}


def epilogue(draft: Draft, sums: Sequence[int], left: Iterable[int]) -> set[int]:
    """Steps that follow from these results, of all that are left, and from parameters of their
    shape alone."""
    nodes = draft.graph.nodes
    at_hand = {*left, *(i for i, k in draft.known.items() if not k.partials)}
    here: set[int] = set()
    follows: set[int] = set()
    for i in draft.needed(draft.remaining, left):
        n = nodes[i]
        can = i in at_hand or (n.op not in REDUCTIONS and here.issuperset(n.args))
        if can and within(n.shape, nodes[sums[0]].shape):
            here.add(i)
            if i in sums or (i not in at_hand and not follows.isdisjoint(n.args)):
                follows.add(i)
    return follows


def _places_in(draft: Draft, stores: list[Store], whole: dict[int, Known]) -> dict[int, Known]:
    """Those of these sums that are outputs, as they lie there, or that an output rounds; none where
    some output follows from sums, or is one in another order: a kernel of its own stores them."""
    found = {}
    for output, buffer, access in stores:
        i = _rounded_sum(draft, output)
        here = whole.get(i)
        if i in found or here is None or not draft.kernels.stores_sums:
            return {}
        shape = draft.graph.nodes[i].shape
        lie = zip(shape, here.access.strides, access.strides, strict=True)
        if access.align < here.access.align or any(n > 1 and a != b for n, a, b in lie):
            return {}
        found[i] = replace(here, buffer=buffer, access=access)
    return found


def _rounded_sum(draft: Draft, i: int) -> int:
    """What an output is a rounding of, if nothing else asks for that and kernels store it so; else
    the output itself."""
    graph, n = draft.graph, draft.graph.nodes[i]
    if n.op != "cast" or not draft.kernels.rounds_sums or n.dtype not in HALVES:
        return i
    (j,) = n.args
    alone = graph.users(j) == [i] and j not in [k for k, _ in graph.outputs]
    return j if alone and graph.nodes[j].op in REDUCTIONS else i


def add_up_little(draft: Draft, added: Sequence[int]) -> None:
    """Kernels for sums over little, which outputs need beside those that were just added up: so
    that one kernel puts partials together and computes what follows from both."""
    for sums in _little_sums(draft, added):
        needed = ancestors(draft.graph, sums, draft.known)
        draft.lane = main_axis(draft.graph, needed)
        walks = Walks(draft.graph, draft.kernels, draft.lane)
        found = [i for i in walks.reach((), needed, draft.known)[1] if i in sums]
        if found:
            here = {i: draft.temporary(i) for i in found}
            reason = draft.at(found[0], "it reads other dims than the kernels before")
            draft.add(kept(here), (), reason)
            draft.known = {**draft.known, **draft.divide(here)}
            combine(draft, found)


def _little_sums(draft: Draft, added: Sequence[int]) -> list[list[int]]:
    """Those sums, by the space that they are over."""
    nodes, most = draft.graph.nodes, math.prod(draft.segments[-1].graph.space) // LITTLE
    outputs = [k for k in draft.remaining if not {*added}.isdisjoint(draft.needed([k]))]
    at_hand, little = set[int](), dict[tuple[int, ...], list[int]]()
    for i in draft.needed(outputs):
        if i in added or not (i in draft.known or at_hand.issuperset(nodes[i].args)):
            continue
        if i in draft.known or nodes[i].op not in REDUCTIONS:
            at_hand.add(i)
        elif math.prod(space := ancestor_space(draft.graph, i)) <= most:
            little.setdefault(space, []).append(i)
    return list(little.values())


def join_apart(draft: Draft) -> None:
    """A kernel for what reduces nothing but results of earlier ones."""
    nodes, known, here = draft.graph.nodes, draft.known, set[int]()
    needed = draft.needed(draft.remaining)
    for i in needed:
        if i in known or (nodes[i].op != "load" and here.issuperset(nodes[i].args)):
            here.add(i)
    new = [i for i in needed if i in here and i not in known and nodes[i].op != "const"]
    sums = [i for i in new if nodes[i].op in REDUCTIONS]
    if not sums:
        return
    stores = draft.write(new)
    used = {a for i in draft.wanted() if i not in here for a in nodes[i].args}
    joined = {i: draft.temporary(i) for i in new if i in used}
    draft.add([*stores, *kept(joined)], None, draft.at(sums[0], JOINED))
    draft.awaited |= dict.fromkeys((k.buffer for k in joined.values()), draft.needs(sums[0]))
    draft.known = {**known, **joined}
