"""A graph without reductions as a CUDA kernel: every thread takes a few vectors of elements."""

from __future__ import annotations

import math

from tilewright.fusion.cuda.kernel import ENTRY, TYPES, Kernel, Launch
from tilewright.fusion.cuda.pointwise.schedule import PointwiseSchedule, lies_flat
from tilewright.fusion.cuda.registers import launch_bounds
from tilewright.fusion.cuda.vectors import WIDEST_ACCESS, access_bytes
from tilewright.fusion.extents import pointwise_axes, with_extents
from tilewright.fusion.ir import Access, Graph
from tilewright.fusion.passes import with_axis


def emit_pointwise(
    graph: Graph, schedule: PointwiseSchedule, entry: str = ENTRY
) -> tuple[str, Launch]:
    """A kernel without reductions; its source and its launch."""
    return PointwiseKernel(graph, schedule, entry).emit()


class PointwiseKernel(Kernel):
    def __init__(self, graph: Graph, schedule: PointwiseSchedule, entry: str):
        graph = graph if graph.space else with_axis(graph)
        *rows, lane = range(len(graph.space))
        axes = pointwise_axes(graph, rows, lane) if schedule.sizes == "given" else ()
        super().__init__(with_extents(graph, axes, lane), entry)
        self.s = schedule
        # Whether a last vector may be incomplete, and is then left to single elements.
        self.tailed = len(graph.space) == 1 or schedule.flat
        self.axes = tuple(range(len(graph.space)))
        # 32-bit indices where even a tensor of twice the elements stays within them.
        accesses = [*graph.inputs, *(a for _, a in graph.outputs)]
        furthest = max(
            sum((n - 1) * s for n, s in zip(graph.space, a.strides, strict=True)) for a in accesses
        )
        self.index = "u32" if max(furthest, math.prod(graph.space)) < 2**30 else "u64"

    def emit(self) -> tuple[str, Launch]:
        s = self.s
        step, body = self.functions("blockIdx.x")
        bounds = launch_bounds(s.block_threads, 1, s.max_registers)
        parameters = ", ".join(self.parameters_of_kernel())
        head = f'extern "C" __global__ void {bounds} {self.entry}({parameters}) {{'
        self.lines = [*step, head, *body]
        extents = tuple(self.extents.values())
        launch = Launch(s.block_threads, self.per_block, 0, 1, self.signature(), extents=extents)
        return self.source(""), launch

    def emit_part(self) -> str:
        """A device function of the number of its block, and of what the kernel is given."""
        step, body = self.functions("block")
        parameters = ", ".join(["u32 block", *self.parameters_of_kernel()])
        head = f"TW_DEVICE void {self.entry}({parameters}) {{"
        return "\n".join([*step, head, *body, "}", ""])

    @property
    def per_block(self) -> int:
        return self.s.block_threads * self.s.vector * self.s.vectors_per_thread

    def functions(self, block: str) -> tuple[list[str], list[str]]:
        """What takes vectors of either width, and what a block does of them."""
        s, per_block, steps = self.s, self.per_block, f"{self.entry}_step"
        self.step()
        self.find_extents()
        parameters = self.parameters_of_kernel()
        arguments = ", ".join(p.split()[-1].replace("*", "") for p in parameters)
        step, self.lines, self.depth = self.lines, [], 1
        self.line(f"const i64 first = (i64){block} * {per_block};")
        self.line(f"const i64 whole = count / {s.vector};")
        self.line(
            f"{steps}<{s.vector}, {s.vectors_per_thread}, true>"
            f"(first / {s.vector} + threadIdx.x, whole, {arguments});"
        )
        if self.tailed and s.vector > 1:
            self.line(f"const i64 rest = whole * {s.vector} + threadIdx.x;")
            self.open(f"if (first + {per_block} >= count && rest < count)")
            self.line(f"{steps}<1, 1, false>(rest, count, {arguments});")
            self.close()
        template = f"template <int V, int TURNS, bool WIDE> TW_DEVICE void {steps}("
        head = template + ", ".join(["i64 start", "i64 limit", *parameters]) + ") {"
        return [head, *step, "}"], self.lines

    def step(self) -> None:
        """Loads of every turn first, so that they are in flight together; then the arithmetic."""
        graph = self.graph
        loads = [i for i, n in enumerate(graph.nodes) if n.op == "load"]
        read = [i for i in loads if not graph.generated(i)]
        self.declare_generated(range(len(graph.inputs)))
        if self.tailed and self.s.vector == 1:
            self.line("if (start >= limit) return;")
        else:
            self.line("if (limit == 0 || start >= limit) return;")
        for i in read:
            dtype = TYPES[graph.nodes[i].dtype]
            kind = f"Vec<{dtype}, V>" if self.vectorised(i) else dtype
            self.line(f"{kind} x{i}[TURNS];")
        self.open("TW_UNROLL for (int turn = 0; turn < TURNS; ++turn)")
        # Past the end a turn reads the last vector again and stores nothing.
        self.line(f"i64 vector = start + (i64)turn * {self.s.block_threads};")
        self.line("if (vector >= limit) vector = limit - 1;")
        self.gathered_offsets(read)
        at = self.coordinates_of_vector()
        first = self.s.broadcast_first
        for i in sorted(read, key=lambda i: lies_flat(graph, self.memory_of(i)) == first):
            self.line(f"x{i}[turn] = {self.load(i, at)};")
        self.close()
        self.open("TW_UNROLL for (int turn = 0; turn < TURNS; ++turn)")
        self.line(f"const i64 vector = start + (i64)turn * {self.s.block_threads};")
        self.line("if (vector >= limit) break;")
        self.gathered_offsets([i for i in loads if graph.generated(i)])
        at = self.coordinates_of_vector()
        names: dict[int, str] = {i: f"x{i}[turn]" for i in read}
        for i, n in enumerate(graph.nodes):
            if i not in names:
                vector = "V" if self.vectorised(i) else None
                operands = [names[a] for a in n.args]
                generated = graph.generated(i)
                value = self.load(i, at) if generated else self.expression(n, operands, vector)
                self.line(f"const auto v{i} = {value};")
                names[i] = f"v{i}"
        for k, (i, access) in enumerate(graph.outputs):
            wide = self.access_bytes(access)
            value = names[i] if self.vectorised(i) else f"splat<V>({names[i]})"
            pointer = f"out{k} + {self.place(access, at)}"
            guard = self.once(i, at)
            if access.strides[-1] != 1:
                self.line(f"{guard}scatter({pointer}, {access.strides[-1]}, {value});")
            else:
                how = f"(WIDE ? {wide} : {access.itemsize}), {str(self.s.stream_stores).lower()}"
                self.line(f"{guard}store<{how}>({pointer}, {value});")
        self.close()

    def load(self, i: int, at: dict[int, str]) -> str:
        index, access = self.graph.nodes[i].attr, self.memory_of(i)
        pointer = f"in{index} + {self.place(access, at)}"
        if not self.vectorised(i):
            return f"load_one({pointer})"
        if self.is_gathered(i):
            return f"gather_at<V>(in{index}, offsets{i})"
        width = f"(WIDE ? {self.access_bytes(access)} : {access.itemsize})"
        # What is read again along a dim it does not vary over should stay in cache.
        once = all(s or n == 1 for s, n in zip(access.strides, self.graph.space, strict=True))
        return self.fetch(access, pointer, "V", width, self.s.stream_loads and once)

    def memory_of(self, i: int) -> Access:
        """Where the values of load `i` lie."""
        return self.graph.inputs[self.graph.nodes[i].attr]

    def place(self, access: Access, at: dict[int, str]) -> str:
        """The offset of a vector; where elements lie in order nothing waits for divisions."""
        flat = lies_flat(self.graph, access)
        return "element" if flat else self.offset(access, self.axes, at)

    def access_bytes(self, access: Access) -> int:
        if not self.s.flat:
            return access_bytes(access, self.s.vector)
        return max(math.gcd(self.s.vector * access.itemsize, access.align, WIDEST_ACCESS), 1)

    def is_gathered(self, i: int) -> bool:
        """Whether a flat vector's elements are not one after another in the tensor."""
        return self.s.flat and self.vectorised(i) and not lies_flat(self.graph, self.memory_of(i))

    def gathered_offsets(self, loads: list[int]) -> None:
        """Of each element of a flat vector, where it is in tensors that are broadcast to it."""
        loads = [i for i in loads if self.is_gathered(i)]
        if not loads:
            return
        for i in loads:
            self.line(f"i64 offsets{i}[V];")
        self.open("TW_UNROLL for (int e = 0; e < V; ++e)")
        self.line(f"const {self.index} element = ({self.index})vector * V + e;")
        at = self.coordinates("element", "c", self.axes, self.index)
        for i in loads:
            self.line(f"offsets{i}[e] = {self.offset(self.memory_of(i), self.axes, at)};")
        self.close()

    def coordinates_of_vector(self) -> dict[int, str]:
        self.line(f"const {self.index} element = ({self.index})vector * V;")
        if self.s.flat:
            return {**dict.fromkeys(self.axes, "0"), self.axes[-1]: "element"}
        return self.coordinates("element", "c", self.axes, self.index)

    def once(self, i: int, at: dict[int, str]) -> str:
        """The condition under which one thread of many stores what does not vary over all axes."""
        sizes = zip(self.graph.nodes[i].shape, self.graph.space, strict=True)
        alike = [a for a, (own, whole) in enumerate(sizes) if own == 1 != whole]
        return f"if ({' && '.join(f'{at[a]} == 0' for a in alike)}) " if alike else ""

    def vectorised(self, i: int) -> bool:
        shape = self.graph.nodes[i].shape
        return any(n != 1 for n in shape) if self.s.flat else shape[-1] != 1
