"""Fit the polynomials of csrc/common/math.h and print csrc/common/math_constants.h.

exp(r) on |r| <= ln(2)/2, and the upper tail of the normal distribution through its Mills ratio:
(a + k) * exp(a^2 / 2) * Phi(-a) as a polynomial in t = 2k / (a + k) - 1, which maps a in [0, inf)
to t in (-1, 1] (the change of variable of Shepherd and Laframboise, Math. Comp. 36 (1981) 249-253).
Chebyshev interpolation in 50 digits, so the result is within a small factor of the minimax.

Run: python scripts/fit_math_constants.py > csrc/common/math_constants.h   (needs mpmath)
"""

from collections.abc import Callable

import mpmath as mp

mp.mp.dps = 50
Function = Callable[[mp.mpf], mp.mpf]


def mills_function(k: int | float) -> Function:
    """Return t -> (a + k) * exp(a^2 / 2) * Phi(-a) with a = 2k / (t + 1) - k."""

    def function(t: mp.mpf) -> mp.mpf:
        a = 2 * mp.mpf(k) / (t + 1) - k
        u = a / mp.sqrt(2)
        if u < 25:
            return (a + k) * mp.exp(u * u) * mp.erfc(u) / 2
        total, term, n = mp.mpf(0), mp.mpf(1), 0
        while abs(term) > mp.mpf(10) ** -45:  # asymptotic series of erfc
            total += term
            term *= -(2 * n + 1) / (2 * u * u)
            n += 1
        return (a + k) * total / (2 * u * mp.sqrt(mp.pi))

    return function


def fit(function: Function, half_width: mp.mpf, degree: int) -> tuple[list[mp.mpf], mp.mpf]:
    """Return monomial coefficients on [-half_width, half_width] and the largest relative error."""
    count = degree + 1
    angles = [mp.pi * (j + mp.mpf(1) / 2) / count for j in range(count)]
    values = [function(half_width * mp.cos(angle)) for angle in angles]
    chebyshev = [
        (2 if i else 1)
        * sum(v * mp.cos(i * angle) for v, angle in zip(values, angles, strict=True))
        / count
        for i in range(count)
    ]
    # T_i as monomials, by T_{i+1} = 2 t T_i - T_{i-1}.
    previous, current = [mp.mpf(1)], [mp.mpf(0), mp.mpf(1)]
    monomial = [mp.mpf(0)] * count
    for i, coefficient in enumerate(chebyshev):
        term = previous if i == 0 else current
        for power, value in enumerate(term):
            monomial[power] += coefficient * value
        if i:
            following = [mp.mpf(0)] + [2 * value for value in current]
            for power, value in enumerate(previous):
                following[power] -= value
            previous, current = current, following
    grid = [half_width * mp.mpf(i) / 200 for i in range(-199, 201)]
    scaled = [c / half_width**power for power, c in enumerate(monomial)]
    worst = max(abs(mp.polyval(scaled[::-1], t) / function(t) - 1) for t in grid)
    return scaled, worst


def emit(name: str, real: str, coefficients: list[mp.mpf], worst: mp.mpf) -> None:
    """Print one C++ array, highest power first."""
    digits, suffix = (9, "f") if real == "float" else (17, "")
    print(f"// Largest relative error of the fit: {mp.nstr(worst, 2)}.")
    print(f"inline constexpr {real} {name}[] = {{")
    for coefficient in reversed(coefficients):
        print(f"    {mp.nstr(coefficient, digits, min_fixed=0, max_fixed=0)}{suffix},")
    print("};")


def main() -> None:
    """Print the header."""
    print("// Made by scripts/fit_math_constants.py; checked by csrc/tests/math_test.cpp. Do not edit.")
    print("#pragma once\n\nnamespace tpkernels {\n")
    for real, exp_degree, k, mills_degree in (("float", 6, 3.5, 10), ("double", 11, 5.0, 22)):
        suffix = "F" if real == "float" else "D"
        half_ln2 = mp.log(2) / 2
        emit(f"kExpPoly{suffix}", real, *fit(mp.exp, half_ln2, exp_degree))
        # Just inside (-1, 1]: t = -1 is a = infinity.
        emit(f"kMillsPoly{suffix}", real, *fit(mills_function(k), mp.mpf(1), mills_degree))
        print(f"inline constexpr {real} kMillsShift{suffix} = {k}{'f' if real == 'float' else ''};\n")
    print("}  // namespace tpkernels")


if __name__ == "__main__":
    main()
