// Made by scripts/fit_math_constants.py; checked by csrc/tests/math_test.cpp. Do not edit.
#pragma once

namespace tpkernels {

// Largest relative error of the fit: 2.5e-9.
inline constexpr float kExpPolyF[] = {
    1.39411084e-3f, 8.3751264e-3f, 4.16663529e-2f, 1.66664155e-1f,
    5.00000005e-1f, 1.00000004f,   1.0f,
};
// Largest relative error of the fit: 1.1e-8.
inline constexpr float kMillsPolyF[] = {
    -4.97668894e-5f, -3.46352008e-5f, 4.5269392e-4f,  4.17768598e-4f,
    -3.1789859e-3f,  -6.46523408e-3f, 1.74060587e-2f, 1.16049045e-1f,
    3.15425058e-1f,  5.65561909e-1f,  7.44416075e-1f,
};
inline constexpr float kMillsShiftF = 3.5f;

// Largest relative error of the fit: 4.2e-18.
inline constexpr double kExpPolyD[] = {
    2.5110037605963778e-8,
    2.763263963904103e-7,
    2.755724091857897e-6,
    2.4801485482328492e-5,
    1.9841269890047114e-4,
    1.3888888952314775e-3,
    8.3333333333196006e-3,
    4.1666666666488095e-2,
    1.6666666666666681e-1,
    5.0000000000000184e-1,
    1.0,
    1.0,
};
// Largest relative error of the fit: 4.7e-17.
inline constexpr double kMillsPolyD[] = {
    -8.1661926244289863e-10, -5.0373021263798561e-10, 9.4468275196773665e-9,  5.0156499398578569e-9,
    -6.7825553132911554e-8,  -3.5818400515432234e-8,  4.3402625948297753e-7,  3.310698071526862e-7,
    -2.7693378710438542e-6,  -3.9779126405932422e-6,  1.6681099115863467e-5,  4.9761771189792182e-5,
    -5.9375673286488656e-5,  -5.4489883090093001e-4,  -7.9786940948080635e-4, 2.99337673822322e-3,
    2.0795066800941615e-2,   6.9118638708814328e-2,   1.6502036617034281e-1,  3.1353315667121377e-1,
    4.9530561596997679e-1,   6.6538250289005768e-1,   7.6919304975006296e-1,
};
inline constexpr double kMillsShiftD = 5.0;

}  // namespace tpkernels
