"""The function that a C++ kernel is called through: threads, work items, kept memory."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.fusion.cpp.loops import Loops
from tilewright.fusion.cpp.schedule import LoopSchedule
from tilewright.fusion.ir import Access, Draw, Positions
from tilewright.fusion.program import Program

ENTRY = "tw_kernel"
POINTWISE_BLOCK = 16384
"""Elements of the lane axis in one work item: enough to hide its start, few enough to share out."""

C_TYPES = {
    **{"f16": "f16", "bf16": "bf16", "f32": "float", "f64": "double"},
    **{"i32": "i32", "i64": "i64", "bool": "boolean"},
}
COMBINE = {
    "sum": ("added", "0"),
    "prod": ("multiplied", "1"),
    "amax": ("maximum", "-__builtin_inf()"),
    "amin": ("minimum", "__builtin_inf()"),
}
"""By reduction: the function that joins two values, and its identity."""

RUN = "run"
"""The function of one kernel, in a namespace of its own."""


def signature(program: Program, extents: int, scalars: Sequence[str]) -> str:
    """Struct codes of what the entry is given, as compile.launch has them: pointers to inputs,
    outputs and temporaries, so many extents, the run-time scalars, and two flags."""
    pointers = "P" * (program.inputs + program.outputs + len(program.temporaries))
    return f"{pointers}{'q' * extents}{'d' * len(scalars)}qq"


def entry(program: Program, extents: Sequence[Sequence[str]], scalars: Sequence[str]) -> str:
    """The function that runs one kernel after another, and returns 0, or the bytes that a thread
    found no memory for. What it is given comes as one structure: ctypes takes longer to convert ten
    arguments than a small kernel to run."""
    buffers = range(program.inputs + program.outputs + len(program.temporaries))
    fields = [f"{'const ' if b < program.inputs else ''}void* b{b};" for b in buffers]
    fields += [f"i64 {name}_{k};" for k, names in enumerate(extents) for name in names]
    fields += [f"double s{k};" for k in range(len(scalars))]
    lines = [f"struct Given {{ {' '.join(fields)} i64 threads, huge_pages; }};"]
    lines.append(f'extern "C" i64 {ENTRY}(const Given* g) {{')
    for k, segment in enumerate(program.segments):
        given = [f"g->b{b}" for b in (*segment.reads, *segment.writes)]
        given += [f"g->{name}_{k}" for name in extents[k]]
        given += [f"({C_TYPES[s]})g->s{i}" for i, s in enumerate(scalars)]
        call = f"kernel{k}::{RUN}({', '.join(given)}, g->threads, g->huge_pages)"
        lines.append(f"  if (const i64 lacking = {call}) return lacking;")
    return "\n".join([*lines, "  return 0;", "}"])


def runner(loops: Loops, schedule: LoopSchedule) -> str:
    """The function that runs one kernel: threads, work items, kept memory. It returns what
    `entry` does."""
    graph = loops.plan.graph
    parameters = [f"const void* x{k}" for k in range(len(graph.inputs))]
    parameters += [f"void* y{k}" for k in range(len(graph.outputs))]
    parameters += [f"i64 {name}" for name in loops.extents]
    parameters += [f"{C_TYPES[s]} s{k}" for k, s in enumerate(graph.scalars)]
    values = [_pointer(k, a) for k, a in enumerate(graph.inputs)]
    values += [f"({c_type(a)}*)y{k}" for k, (_, a) in enumerate(graph.outputs)]
    values += [f"s{k}" for k in range(len(graph.scalars))]
    values += loops.extents
    advice = [
        f"  if (huge_pages) advise_huge_pages(y{k}, {_span(access)});"
        for k, (_, access) in enumerate(graph.outputs)
        if k not in loops.added
    ]
    sizes = [f"n{a}" for a in range(len(graph.space))]
    kept = loops.kept_place(loops.kept_values * schedule.rows) if loops.kept_values else ""
    allocate = "(char*)aligned_alloc(64, kept_bytes)" if kept else "nullptr"
    tell = "__atomic_store_n(&lacking, kept_bytes, __ATOMIC_RELAXED)"  # several threads may
    return "\n".join(
        [
            f"i64 {RUN}({', '.join(parameters)}, i64 threads, i64 huge_pages) {{",
            f"  const Arguments a = {{{', '.join(values)}}};",
            "  (void)huge_pages;",
            *advice,
            *_items(loops, schedule.rows, sizes),
            *([f"  i64 lacking = 0, kept_bytes = ({kept}) * {loops.kept_lanes};"] if kept else []),
            f"  share({loops.splits if loops.added else 'items'}, threads, "
            "[&](i64 first, i64 last) TW_APART {",
            f"    char* kept = {allocate};",
            "    (void)kept;",
            *([f"    if (!kept) return {tell};"] if kept else []),
            *_loop(loops, schedule.rows, sizes),
            *(["    free(kept);"] if kept else []),
            *(["    finish_streams();"] if schedule.stream_stores else []),
            "  });",
            f"  return {'lacking' if kept else 0};",
            "}",
        ]
    )


def _loop(loops: Loops, rows: int, sizes: list[str]) -> list[str]:
    """What one thread does: its work items, or its splits, of which each adds up its own
    results."""
    if not loops.added:
        return [
            *_cursor(loops, "first", sizes),
            "    for (i64 item = first; item < last; ++item) {",
            *_dispatch(loops, rows, sizes),
            "    }",
        ]
    clear = []
    for k, i in loops.added.items():
        n = loops.plan.graph.nodes[i]
        size = " * ".join(sizes[a] for a, m in enumerate(n.shape) if m != 1) or "1"
        identity = f"({C_TYPES[n.dtype]}){COMBINE[n.op][1]}"
        clear += [
            f"      for (i64 j = 0; j < {size}; ++j) a.y{k}[split * ({size}) + j] = {identity};"
        ]
    return [
        "    for (i64 split = first; split < last; ++split) {",
        *clear,
        f"      const i64 first_item = items * split / {loops.splits};",
        f"      const i64 last_item = items * (split + 1) / {loops.splits};",
        *_cursor(loops, "first_item", sizes),
        "      for (i64 item = first_item; item < last_item; ++item) {",
        *_dispatch(loops, rows, sizes),
        "      }",
        "    }",
    ]


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


def _cursor(loops: Loops, item: str, sizes: list[str]) -> list[str]:
    """Where an item is. `_dispatch` goes on from there without divisions, which short rows feel:
    lerp of 10000 rows of 16 elements took 61 us, and 26 us since (AMD EPYC, 2 threads,
    2026-11-23)."""
    lines = [f"i64 block = {item} % blocks, group = {item} / blocks % groups;"]
    if loops.outer:
        lines.append(f"i64 outer = {item} / blocks / groups;")
    for axis in reversed(loops.outer[1:]):
        lines.append(f"i64 c{axis} = outer % {sizes[axis]}; outer /= {sizes[axis]};")
    lines += [f"i64 c{axis} = outer;" for axis in loops.outer[:1]]
    return [f"    {line}" for line in lines]


def _advance(loops: Loops, sizes: list[str]) -> list[str]:
    """To the next item, the innermost digit first."""
    digits = [("block", "blocks"), ("group", "groups")]
    digits += [(f"c{axis}", sizes[axis]) for axis in reversed(loops.outer[1:])]
    lines = [f"if (++{digit} < {size}) continue; {digit} = 0;" for digit, size in digits]
    lines += [f"++c{axis};" for axis in loops.outer[:1]]
    return [f"      {line}" for line in lines]


def _dispatch(loops: Loops, rows: int, sizes: list[str]) -> list[str]:
    """Compute one work item: its rows together, or one by one where fewer are left."""
    head = ["      const i64 at = group * together;"]
    given = ", ".join(["a", *(f"c{axis}" for axis in loops.outer)])
    if loops.kind == "columns":
        return [
            *head,
            f"      if (at + together <= length) item_{rows}({given}, at, All{{}}, kept);",
            "      else for (i64 c = at; c < length; c += LANES) {",
            f"        if (c + LANES <= length) item_1({given}, c, All{{}}, kept);",
            f"        else item_1({given}, c, First{{length - c}}, kept);",
            "      }",
            *_advance(loops, sizes),
        ]
    if loops.kind == "pointwise":
        head += [
            f"      const i64 begin = block * {POINTWISE_BLOCK};",
            f"      const i64 last = begin + {POINTWISE_BLOCK};",
            f"      const i64 end = last < {sizes[loops.lane]} ? last : {sizes[loops.lane]};",
        ]
    rest = "begin, end" if loops.kind == "pointwise" else "kept"
    rest += ", split" if loops.added else ""
    return [
        *head,
        f"      if (at + together <= length) item_{rows}({given}, at, {rest});",
        f"      else for (i64 r = at; r < length; ++r) item_1({given}, r, {rest});",
        *_advance(loops, sizes),
    ]


def _span(access: Access) -> str:
    """Bytes from a tensor's first element to behind its last."""
    strides = enumerate(access.strides)
    steps = [f"(n{axis} - 1) * {stride}" for axis, stride in strides if stride]
    return f"({' + '.join([*steps, '1'])}) * {access.itemsize}"


def _pointer(k: int, access: Access) -> str:
    match access.generator:
        case Draw(call, threshold):
            return f"{{*(const u64*)x{k}, 0, {call}, {threshold}u}}"
        case Positions(first):
            return f"{{{first}}}"
    return f"({input_type(access)})x{k}"


def input_type(access: Access) -> str:
    """Of what points to an input's elements."""
    if isinstance(access.generator, Positions):
        return f"Positions<{c_type(access)}>"
    return "Mask" if access.generator else f"const {c_type(access)}*"


def c_type(access: Access) -> str:
    return C_TYPES[access.dtype]
