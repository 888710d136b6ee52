"""Mean and m2, or the greatest value and the sum of exponentials below it, of what each warp holds,
in one sweep: the partials that `Joining` then joins."""

from __future__ import annotations

from collections.abc import Callable

from tilewright.fusion.cuda.kernel import FUNCTIONS, TYPES
from tilewright.fusion.cuda.rows.joining import SHARES
from tilewright.fusion.cuda.rows.steps import Steps
from tilewright.fusion.exponentials import OF_DIFFERENCES
from tilewright.fusion.plan import halves_of_moments


class Moments(Steps):
    """Each warp finds its own mean and, from what it holds, its own squared deviations.

    `merge` does so in two passes. With `lanes` each lane joins the moments of its vectors, and the
    warp those of its lanes, whose shuffles need not wait for a mean. `tensor_cores` adds up values
    and squares at once; products of halves are exact, so that m2, the difference of squares and
    mean, loses no more than two bits while the squares are at most four times m2: while the mean
    is within 1.7 deviations of zero. A warp that finds its mean further off goes over its values a
    second time.
    """

    def warp_exponentials(self, sums: list[int], known: frozenset[int]) -> None:
        """Each warp's greatest value, and then the sum of exponentials below that one."""
        for i in sums:
            n = self.graph.nodes[i]
            self.line(f"Scaled<{TYPES[n.dtype]}> partial{i}[{self.s.rows_per_thread}];")
            most = f"reduce_warp<Max, {self.warp_threads}>(greatest{i}[r])"
            self.line(f"{self.each_row()} partial{i}[r] = {{{most}, 0}};")
        self.again(sums, known, self.add_exponential)
        for i in sums:
            total = f"reduce_warp<Sum, {self.warp_threads}>(partial{i}[r].sum)"
            self.line(f"{self.each_row()} partial{i}[r].sum = {total};")

    def add_exponential(self, i: int, value: str) -> None:
        how, greatest = self.graph.nodes[i].attr, f"partial{i}[r].greatest"
        below = f"{value}, {greatest}" if how in OF_DIFFERENCES else f"sub({value}, {greatest})"
        power = f"{FUNCTIONS[how]}({below})"
        self.line(f"partial{i}[r].sum += fold<Sum>({power});")

    def warp_moments(self, moments: list[int], known: frozenset[int]) -> None:
        for i in moments:
            kind = TYPES[self.graph.nodes[i].dtype]
            self.line(f"Moments<{kind}> partial{i}[{self.s.rows_per_thread}];")
        if self.s.moments == "tensor_cores":
            self.multiplied(moments, known)
        elif self.s.moments == "lanes":
            self.by_lanes(moments)
        else:
            self.in_two_passes(moments, known)

    def in_two_passes(self, moments: list[int], known: frozenset[int]) -> None:
        for i in moments:
            self.open(self.each_row())
            total = f"reduce_warp<Sum, {self.warp_threads}>(total{i}[r])"
            mean = f"average({total}, warp_count, warp_inverse)"
            self.line(f"partial{i}[r] = {{{mean}, 0}};")
            self.close()
        squares = "partial{i}[r].m2 += fold<Sum>(mul(apart{i}, apart{i}));"
        self.around_the_mean(moments, known, squares)
        self.open(self.each_row())
        for i in moments:
            total = f"reduce_warp<Sum, {self.warp_threads}>(partial{i}[r].m2)"
            self.line(f"partial{i}[r].m2 = {total};")
        self.close()

    def declare_lanes(self, moments: list[int]) -> None:
        for i in moments:
            kind, rows = TYPES[self.graph.nodes[i].dtype], self.s.rows_per_thread
            self.line(f"{kind} total{i}[{rows}] = {{}}, squares{i}[{rows}] = {{}};")

    def by_lanes(self, moments: list[int]) -> None:
        self.open(self.each_row())
        for i in moments:
            found = f"total{i}[r], squares{i}[r], warp_count, warp_inverse, weights"
            self.line(f"partial{i}[r] = join_lanes<{SHARES}, {self.warp_threads}>({found});")
        self.close()

    def around_the_mean(self, moments: list[int], known: frozenset[int], text: str) -> None:
        """Sweep over the row, with `apart{i}` the values less the warp's mean."""

        def add(i: int, value: str) -> None:
            self.line(f"const auto apart{i} = sub({value}, partial{i}[r].mean);")
            self.line(text.format(i=i))

        self.again(moments, known, add)

    def again(
        self, reductions: list[int], known: frozenset[int], add: Callable[[int, str], None]
    ) -> None:
        """Sweep over the row once more, to `add` each reduction's operand."""
        wanted = {self.graph.nodes[i].args[0] for i in reductions}
        steps = self.needed(wanted - known, known)
        self.open_turns(0 if self.s.storage == "registers" else self.s.unroll)
        values = self.steps(steps, known, {}, per_row=False)
        self.open(self.each_row())
        values |= self.steps(steps, known, {}, per_row=True, values=values)
        for i in reductions:
            add(i, self.value_of(self.graph.nodes[i].args[0], values, known))
        self.close()
        self.close_turns()

    def multiplied(self, moments: list[int], known: frozenset[int]) -> None:
        """By tensor cores. What lies past the end of a row takes part as zeros."""
        (i,) = moments
        rows, half = self.s.rows_per_thread, halves_of_moments(self.graph)
        assert half is not None, "offered for moments of halves only"
        self.line(f"Gram gram[{rows}] = {{}};")
        self.open(f"TW_UNROLL for (int k = 0; k < {self.turns}; ++k)")
        self.line(f"{self.vector_type(half)} halves[{rows}] = {{}};")
        self.open_turn()
        steps = self.needed({half} - known, known)
        values = self.steps(steps, known, {}, per_row=False)
        self.open(self.each_row())
        values |= self.steps(steps, known, {}, per_row=True, values=values)
        self.line(f"halves[r] = {self.value_of(half, values, known)};")
        self.close()
        self.close_turn()
        self.line(f"{self.each_row()} add_halves(gram[r], k, halves[r]);")
        self.close()
        self.line("bool near = true;")
        found = f"moments_of(gram[r], warp_count, warp_inverse, partial{i}[r])"
        self.line(f"{self.each_row()} near = {found} && near;")
        self.open("if (!near)")
        self.line(f"float off[{rows}] = {{}}, squares[{rows}] = {{}};")
        self.around_the_mean(
            moments,
            known,
            "off[r] += fold<Sum>(apart{i}); squares[r] += fold<Sum>(mul(apart{i}, apart{i}));",
        )
        self.open(self.each_row())
        sums = "reduce_warp<Sum, 32>(off[r]), reduce_warp<Sum, 32>(squares[r])"
        self.line(f"correct(partial{i}[r], {sums}, warp_count, warp_inverse);")
        self.close()
        self.close()
