"""Fit the polynomials of csrc/common/math.h and print csrc/common/math_constants.h.

exp(r) on |r| <= ln(2)/2, and the lower tail of the normal distribution through its Mills ratio:
(1 + a / k) * exp(a^2 / 2) * Phi(-a) as a polynomial in s = a / (a + k), which maps a in
[0, infinity) to s in [0, 1) (a change of variable in the manner of Shepherd and Laframboise, Math.
Comp. 36 (1981) 249-253). The constant term is 1/2, so that the tail is exact where a is small.
Chebyshev interpolation in 50 digits, so the result is within a small factor of the minimax.

Run: python scripts/fit_math_constants.py > csrc/common/math_constants.h   (needs mpmath)
"""

from collections.abc import Callable

import mpmath as mp

mp.mp.dps = 50
Function = Callable[[mp.mpf], mp.mpf]
# type, suffix of names, degree of exp, k and degree of the tail: the smallest that fit to half a
# unit in the last place of the type.
TYPES = (("float", "F", 6, 3.5, 10), ("double", "D", 11, 5.0, 22))


def mills_function(k: float) -> Function:
    """Return s -> (1 + a / k) * exp(a^2 / 2) * Phi(-a) with a = k s / (1 - s)."""

    def function(s: mp.mpf) -> mp.mpf:
        a = k * s / (1 - s)
        u = a / mp.sqrt(2)
        if u < 25:
            return (1 + a / k) * mp.exp(u * u) * mp.erfc(u) / 2
        total, term, n = mp.mpf(0), mp.mpf(1), 0
        while abs(term) > mp.mpf(10) ** -45:  # asymptotic series of erfc
            total += term
            term *= -(2 * n + 1) / (2 * u * u)
            n += 1
        return (1 + a / k) * total / (2 * u * mp.sqrt(mp.pi))

    return function


def add_scaled(target: list[mp.mpf], source: list[mp.mpf], factor: mp.mpf) -> list[mp.mpf]:
    """Return target + factor * source, as polynomials in ascending powers."""
    size = max(len(target), len(source))
    padded = [*target, *[mp.mpf(0)] * (size - len(target))]
    for power, value in enumerate(source):
        padded[power] += factor * value
    return padded


def fit(function: Function, low: mp.mpf, high: mp.mpf, degree: int) -> list[mp.mpf]:
    """Return the coefficients, in ascending powers, of the Chebyshev interpolant."""
    count, middle, half = degree + 1, (low + high) / 2, (high - low) / 2
    angles = [mp.pi * (j + mp.mpf(1) / 2) / count for j in range(count)]
    values = [function(middle + half * mp.cos(angle)) for angle in angles]
    result: list[mp.mpf] = []
    previous: list[mp.mpf] = []
    current = [mp.mpf(1)]
    for i in range(count):
        dot = sum(v * mp.cos(i * angle) for v, angle in zip(values, angles, strict=True))
        result = add_scaled(result, current, (2 if i else 1) * dot / count)
        # T_{i+1} = 2 t T_i - T_{i-1} with t = (x - middle) / half; T_1 = t.
        twice = mp.mpf(2 if i else 1)
        following = add_scaled(
            [mp.mpf(0), *[twice / half * v for v in current]], current, -twice * middle / half
        )
        previous, current = current, add_scaled(following, previous, mp.mpf(-1))
    return result


def emit(real: str, name: str, function: Function, low: mp.mpf, high: mp.mpf, degree: int) -> None:
    """Print one C++ array, highest power first, with the fit's error."""
    coefficients = fit(function, low, high, degree)
    grid = [low + (high - low) * mp.mpf(i) / 400 for i in range(400)]
    worst = max(abs(mp.polyval(coefficients[::-1], x) / function(x) - 1) for x in grid)
    digits, suffix = (9, "f") if real == "float" else (17, "")
    print(f"// Largest relative error of the fit: {mp.nstr(worst, 2)}.")
    print(f"inline constexpr {real} {name}[] = {{")
    for coefficient in reversed(coefficients):
        print(f"    {mp.nstr(coefficient, digits, min_fixed=0, max_fixed=0)}{suffix},")
    print("};")


def main() -> None:
    """Print the header."""
    print(
        "// Made by scripts/fit_math_constants.py; checked by csrc/tests/math_test.cpp. Do not edit."
    )
    print("#pragma once\n\nnamespace tpkernels {\n")
    for real, suffix, exp_degree, k, mills_degree in TYPES:
        half_ln2 = mp.log(2) / 2
        emit(real, f"kExpPoly{suffix}", mp.exp, -half_ln2, half_ln2, exp_degree)
        emit(real, f"kMillsPoly{suffix}", mills_function(k), mp.mpf(0), mp.mpf(1), mills_degree)
        literal = f"{k}f" if real == "float" else f"{k}"
        print(f"inline constexpr {real} kMillsShift{suffix} = {literal};\n")
    print("}  // namespace tpkernels")


if __name__ == "__main__":
    main()
