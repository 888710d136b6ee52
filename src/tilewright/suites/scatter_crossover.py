"""Which kernel from how many elements on: updates and sums by size, dtype, rank and density.

Density is positions for each place. A budget of ten minutes will do; benchmarks/crossover_table.py
lays the result out.
"""

from itertools import product

from tilewright.suite import suite

POSITIONS = (2**12, 2**15, 2**18, 2**21)
COLUMNS = 64
"""Of the matrices, whose first dim is the scattered one."""
DENSITIES = (1 / 16, 1, 16)


def shape(elements: float, rank: int) -> str:
    return f"{int(elements)}" if rank == 1 else f"{int(elements) // COLUMNS},{COLUMNS}"


scatter_crossover = suite(
    "scatter_crossover",
    [
        f"{op}(x={dtype}[{shape(n / density, rank)}], dim=0, index=i64[{shape(n, rank)}], "
        f"src={dtype}[{shape(n, rank)}])"
        for op, dtype, rank, density, n in product(
            ("scatter", "scatter_add"), ("f16", "f32", "f64"), (1, 2), DENSITIES, POSITIONS
        )
    ],
)
