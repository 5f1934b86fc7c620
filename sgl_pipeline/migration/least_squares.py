"""Least squares for times: no coefficient is negative, and shares of a time count, not seconds."""

import numpy as np

# Reading the weights limits few rows, computing limits many: an additional row never costs less
# than the last one. So the slope may only grow at these knots, and continues beyond the largest
# step.
KNOT_TOKENS = (1.0, 8.0, 32.0, 128.0, 512.0)
FIT_PASSES = 4


def rows_beyond_knots(num_tokens: int) -> list[float]:
    """The rows beyond each of `KNOT_TOKENS`: of 40 rows 39, 32 and 8 beyond the first three."""
    return [max(num_tokens - knot, 0.0) for knot in KNOT_TOKENS]


def relative_fit(
    features: np.ndarray, measured: np.ndarray, outlier_share: float = np.inf
) -> np.ndarray:
    """Coefficients of the columns of `features` [rows, columns] whose sums come nearest to
    `measured` [rows], in shares of it.

    Disturbances grow with a step; the first pass gives the weights. It also makes the mean of
    measured over fitted 1.

    Args:
        outlier_share: rows that are off by more than this share of their fit pull no harder than if
            they were off by just that.
    """
    fitted = np.full_like(measured, measured.mean())
    coefficients = np.zeros(features.shape[1])
    for number in range(FIT_PASSES):
        weights = 1.0 / np.maximum(fitted, 1e-9)
        if number > 0 and outlier_share < np.inf:
            off = np.abs(measured - fitted) * weights
            weights *= np.sqrt(np.minimum(1.0, outlier_share / np.maximum(off, outlier_share)))
        coefficients = non_negative_fit(features * weights[:, None], measured * weights)
        fitted = np.einsum("ij,j->i", features, coefficients)
    return coefficients


def non_negative_fit(features: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Least squares with coefficients that are not negative: the most negative one is dropped
    until none is."""
    scales = np.maximum(features.max(axis=0), 1e-12)
    scaled = features / scales
    # Sums of products, as small as the number of columns. Without BLAS: its threads would wait for
    # the cores that the stages compute on, and the scheduler for them.
    products = np.einsum("ij,ik->jk", scaled, scaled)
    targets = np.einsum("ij,i->j", scaled, values)
    used = np.ones(features.shape[1], bool)
    while True:
        solution = np.linalg.lstsq(products[np.ix_(used, used)], targets[used], rcond=None)[0]
        if solution.size == 0 or solution.min() >= 0.0:
            break
        used[np.flatnonzero(used)[solution.argmin()]] = False
    coefficients = np.zeros(features.shape[1])
    coefficients[used] = solution / scales[used]
    return coefficients
