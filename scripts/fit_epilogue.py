"""Fit the polynomial of the 16-bit GELU in tpkernels/kernels/epilogue.py and print it.

exp(m^2 / 2) * Phi(-m), Phi the distribution function of the standard normal, for m in [0, 6]:
the polynomial in m of the least largest relative error, by Lawson's iteration (reweighted least
squares). Past 6 the product m * Phi(-m), below 6e-9, is less than half of float16's smallest.

Run: python scripts/fit_epilogue.py   (needs numpy)
"""

import math

import numpy as np

BOUND, DEGREE, ROUNDS = 6.0, 9, 4000


def fit() -> tuple[np.ndarray, float]:
    """(coefficients in ascending powers, largest relative error of the float64 polynomial)."""
    m = (np.cos(np.linspace(0.0, math.pi, 4001)) + 1.0) / 2.0 * BOUND
    target = np.array([0.5 * math.erfc(x / math.sqrt(2.0)) * math.exp(x * x / 2.0) for x in m])
    basis = np.polynomial.chebyshev.chebvander(2.0 * m / BOUND - 1.0, DEGREE) / target[:, None]
    weights = np.ones_like(m)
    for _ in range(ROUNDS):
        root = np.sqrt(weights)
        found, *_ = np.linalg.lstsq(basis * root[:, None], root, rcond=None)
        error = np.abs(basis @ found - 1.0)
        weights *= error + 1e-15
        weights /= weights.sum()
    series = np.polynomial.Chebyshev(found, domain=[0.0, BOUND])
    powers = series.convert(kind=np.polynomial.Polynomial, domain=[-1, 1], window=[-1, 1])
    return powers.coef, float(error.max())


if __name__ == "__main__":
    coefficients, largest = fit()
    print(f"# largest relative error {largest:.1e}")
    for power, value in enumerate(coefficients):
        print(f"TAIL_{power} = tl.constexpr({value:.9e})")
