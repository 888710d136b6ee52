"""The function that a C++ kernel is called through: threads, work items, kept memory."""

from __future__ import annotations

from tilewright.fusion.cpp_loops import Loops
from tilewright.fusion.cpp_schedule import LoopSchedule
from tilewright.fusion.ir import Access, Graph

ENTRY = "tw_kernel"
POINTWISE_BLOCK = 16384
"""Elements of the lane axis in one work item: enough to hide its start, few enough to share out."""

C_TYPES = {
    **{"f16": "f16", "bf16": "bf16", "f32": "float", "f64": "double"},
    **{"i32": "i32", "i64": "i64", "bool": "boolean"},
}


def signature(graph: Graph) -> str:
    """Struct codes of the entry's arguments, as compile.launch has them."""
    pointers = "P" * (len(graph.inputs) + len(graph.outputs))
    return f"{pointers}q{''.join('d' if s == 'f64' else 'f' for s in graph.scalars)}qq"


def entry(loops: Loops, schedule: LoopSchedule) -> str:
    graph = loops.plan.graph
    parameters = [f"const void* x{k}" for k in range(len(graph.inputs))]
    parameters += [f"void* y{k}" for k in range(len(graph.outputs))]
    parameters += ["i64 count"]
    parameters += [f"{C_TYPES[s]} s{k}" for k, s in enumerate(graph.scalars)]
    values = [f"(const {c_type(a)}*)x{k}" for k, a in enumerate(graph.inputs)]
    values += [f"({c_type(a)}*)y{k}" for k, (_, a) in enumerate(graph.outputs)]
    values += [f"s{k}" for k in range(len(graph.scalars))]
    values += ["count"] if 0 not in graph.reduced else []
    size = "n0" if 0 in graph.reduced else "count"
    advice = [
        f"  if (huge_pages) advise_huge_pages(y{k}, {_extent(graph, access, size)});"
        for k, (_, access) in enumerate(graph.outputs)
    ]
    rows = " * ".join([size if a == 0 else f"n{a}" for a in loops.rows]) or "1"
    lane_size = size if loops.lane == 0 else f"n{loops.lane}"
    kept = sum(map(loops.kept_bytes, loops.kept_values)) * schedule.rows
    allocate = f"(char*)aligned_alloc(64, {kept} * {loops.kept_lanes})" if kept else "nullptr"
    return "\n".join(
        [
            f'extern "C" void {ENTRY}({", ".join(parameters)}, i64 threads, i64 huge_pages) {{',
            f"  const Arguments a = {{{', '.join(values)}}};",
            *advice,
            f"  const i64 rows = {rows}, together = {schedule.rows};",
            *_items(loops, lane_size),
            "#pragma omp parallel num_threads(threads) if (threads > 1 && items > 1)",
            "  {",
            f"    char* kept = {allocate};",
            "    (void)kept;",
            *(["    if (!kept) abort();"] if kept else []),
            "#pragma omp for schedule(static)",
            "    for (i64 item = 0; item < items; ++item) {",
            *_dispatch(loops, schedule.rows, lane_size),
            "    }",
            *(["    free(kept);"] if kept else []),
            *(["    finish_streams();"] if schedule.stream_stores else []),
            "  }",
            "}",
        ]
    )


def _items(loops: Loops, lane_size: str) -> list[str]:
    groups = "(rows + together - 1) / together"
    if loops.kind == "rows":
        return [f"  const i64 items = {groups};"]
    if loops.kind == "columns":
        stripes = f"({lane_size} + together * LANES - 1) / (together * LANES)"
        return [f"  const i64 stripes = {stripes}, items = rows * stripes;"]
    blocks = f"({lane_size} + {POINTWISE_BLOCK - 1}) / {POINTWISE_BLOCK}"
    return [f"  const i64 blocks = {blocks}, items = ({groups}) * blocks;"]


def _dispatch(loops: Loops, rows: int, lane_size: str) -> list[str]:
    if loops.kind == "columns":
        return [
            "      const i64 first = item / stripes;",
            "      const i64 column = item % stripes * together * LANES;",
            f"      if (column + together * LANES <= {lane_size})",
            f"        item_{rows}(a, first, column, All{{}}, kept);",
            "      else",
            f"        for (i64 c = column; c < {lane_size}; c += LANES) {{",
            f"          if (c + LANES <= {lane_size}) item_1(a, first, c, All{{}}, kept);",
            f"          else item_1(a, first, c, First{{{lane_size} - c}}, kept);",
            "        }",
        ]
    if loops.kind == "rows":
        head, rest = ["      const i64 first = item * together;"], "kept"
    else:
        head, rest = (
            [
                "      const i64 first = item / blocks * together;",
                f"      const i64 begin = item % blocks * {POINTWISE_BLOCK};",
                f"      const i64 last = begin + {POINTWISE_BLOCK};",
                f"      const i64 end = last < {lane_size} ? last : {lane_size};",
            ],
            "begin, end",
        )
    return [
        *head,
        f"      if (first + together <= rows) item_{rows}(a, first, {rest});",
        f"      else for (i64 r = first; r < rows; ++r) item_1(a, r, {rest});",
    ]


def _extent(graph: Graph, access: Access, count: str) -> str:
    steps = [
        f"({count if axis == 0 else graph.space[axis]} - 1) * {stride}"
        for axis, stride in enumerate(access.strides)
        if stride
    ]
    return f"({' + '.join([*steps, '1'])}) * {access.itemsize}"


def c_type(access: Access) -> str:
    return C_TYPES[access.dtype]
