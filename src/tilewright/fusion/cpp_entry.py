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
    sizes = [size if a == 0 else f"n{a}" for a in range(len(graph.space))]
    kept = sum(map(loops.kept_bytes, loops.kept_values)) * schedule.rows
    allocate = f"(char*)aligned_alloc(64, {kept} * {loops.kept_lanes})" if kept else "nullptr"
    return "\n".join(
        [
            f'extern "C" void {ENTRY}({", ".join(parameters)}, i64 threads, i64 huge_pages) {{',
            f"  const Arguments a = {{{', '.join(values)}}};",
            *advice,
            *_items(loops, schedule.rows, sizes),
            "#pragma omp parallel num_threads(threads) if (threads > 1 && items > 1)",
            "  {",
            f"    char* kept = {allocate};",
            "    (void)kept;",
            *(["    if (!kept) abort();"] if kept else []),
            "#pragma omp for schedule(static)",
            "    for (i64 item = 0; item < items; ++item) {",
            *_dispatch(loops, schedule.rows, sizes),
            "    }",
            *(["    free(kept);"] if kept else []),
            *(["    finish_streams();"] if schedule.stream_stores else []),
            "  }",
            "}",
        ]
    )


def _items(loops: Loops, rows: int, sizes: list[str]) -> list[str]:
    """Number the work items: outer axes, groups of rows (or columns), blocks of the lane axis."""
    outer = " * ".join(sizes[a] for a in loops.outer) or "1"
    length = "1" if loops.walked is None else sizes[loops.walked]
    each = " * LANES" if loops.kind == "columns" else ""
    lane = f"({sizes[loops.lane]} + {POINTWISE_BLOCK - 1}) / {POINTWISE_BLOCK}"
    return [
        f"  const i64 length = {length}, together = {rows}{each};",
        "  const i64 groups = (length + together - 1) / together;",
        f"  const i64 blocks = {lane if loops.kind == 'pointwise' else '1'};",
        f"  const i64 items = {outer} * groups * blocks;",
    ]


def _dispatch(loops: Loops, rows: int, sizes: list[str]) -> list[str]:
    """Compute one work item: its rows together, or one by one where fewer are left."""
    head = [
        "      const i64 outer = item / blocks / groups;",
        "      const i64 at = item / blocks % groups * together;",
    ]
    if loops.kind == "columns":
        return [
            *head,
            f"      if (at + together <= length) item_{rows}(a, outer, at, All{{}}, kept);",
            "      else for (i64 c = at; c < length; c += LANES) {",
            "        if (c + LANES <= length) item_1(a, outer, c, All{}, kept);",
            "        else item_1(a, outer, c, First{length - c}, kept);",
            "      }",
        ]
    if loops.kind == "pointwise":
        head += [
            f"      const i64 begin = item % blocks * {POINTWISE_BLOCK};",
            f"      const i64 last = begin + {POINTWISE_BLOCK};",
            f"      const i64 end = last < {sizes[loops.lane]} ? last : {sizes[loops.lane]};",
        ]
    rest = "begin, end" if loops.kind == "pointwise" else "kept"
    return [
        *head,
        f"      if (at + together <= length) item_{rows}(a, outer, at, {rest});",
        f"      else for (i64 r = at; r < length; ++r) item_1(a, outer, r, {rest});",
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
