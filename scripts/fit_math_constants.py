"""Fit the polynomials of csrc/common/math.h and print csrc/common/math_constants.h.

exp(r) on |r| <= ln(2) / 2, and the ratio R(a) = exp(a^2 / 2) * Phi(-a), Phi the distribution
function of the standard normal, as a polynomial in s = a / (a + k) for a in [0, bound] (a change of
variable in the manner of Shepherd and Laframboise, Math. Comp. 36 (1981) 249-253). Chebyshev
interpolation in 50 digits, so the result is within a small factor of the minimax.

Run: python scripts/fit_math_constants.py > csrc/common/math_constants.h   (needs mpmath)
"""

from collections.abc import Callable

import mpmath as mp

mp.mp.dps = 50
Function = Callable[[mp.mpf], mp.mpf]
# Precision, C++ type, degree of exp, k, bound and degree of R: about the smallest that fit to half
# a unit in the last place where the tail matters; for Half, to an eighth of fp16's. From the bound
# on, exp(-a^2 / 2) is 0.
PRECISIONS = (
    ("Double", "double", 11, 5.0, 38.5, 20),
    ("Float", "float", 6, 3.5, 13.25, 8),
    ("Half", "float", 4, 3.0, 13.25, 5),
)


def normal_ratio(k: float) -> Function:
    """Return s -> exp(a^2 / 2) * Phi(-a) with a = k s / (1 - s)."""

    def function(s: mp.mpf) -> mp.mpf:
        a = k * s / (1 - s)
        u = a / mp.sqrt(2)
        return mp.exp(u * u) * mp.erfc(u) / 2

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
    print("// Made by scripts/fit_math_constants.py, checked by csrc/tests/math_test.cpp.")
    print("#pragma once\n\nnamespace tpkernels {\n")
    for precision, real, exp_degree, k, bound, ratio_degree in PRECISIONS:
        half_ln2 = mp.log(2) / 2
        emit(real, f"kExpPoly{precision}", mp.exp, -half_ln2, half_ln2, exp_degree)
        top = mp.mpf(bound) / (bound + k)
        emit(real, f"kNormalPoly{precision}", normal_ratio(k), mp.mpf(0), top, ratio_degree)
        f = "f" if real == "float" else ""
        print(f"inline constexpr {real} kNormalShift{precision} = {k}{f};")
        print(f"inline constexpr {real} kNormalBound{precision} = {bound}{f};\n")
    print("}  // namespace tpkernels")


if __name__ == "__main__":
    main()
