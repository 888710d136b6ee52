"""The tuner: workloads x implementations x strategy x runner -> records and rows.

For each workload: every implementation of ours that supports it is searched (compiled in
parallel, verified on the device, timed briefly), the candidates are thinned out by successive
halving, and the last few meet the heuristic's config and every baseline in one interleaved duel.
Every outcome, failures included, is recorded as it happens.
"""

from tilewright.tune.progress import Progress
from tilewright.tune.run import bench, tune, unsupporting, verify_all

__all__ = ["Progress", "bench", "tune", "unsupporting", "verify_all"]
