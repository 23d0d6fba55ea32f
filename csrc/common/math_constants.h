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
    -1.45603699e-2f, 7.78684847e-2f, -1.53492693e-1f, 1.16281563e-1f,
    -1.7180884e-2f,  7.60726019e-2f, -1.42214889e-1f, -2.02360225e-1f,
    7.69866983e-1f,  -8.9629706e-1f, 4.99999996e-1f,
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
    -6.850298877882599e-4,  7.7466085302496943e-3,  -3.9797770225195138e-2, 1.2262307879794882e-1,
    -2.5276774157465614e-1, 3.7091530046359694e-1,  -4.0767286384627678e-1, 3.5154246099505445e-1,
    -2.387015207372335e-1,  1.1733052824561279e-1,  -4.9655281148912458e-2, 4.5209276910337113e-2,
    -2.5598511030251544e-3, -8.4916579344902326e-2, -1.324807475511585e-2,  3.0210167248533349e-1,
    -1.5010451367572262e-1, -9.9998213498860289e-1, 2.5932743195633319,     -3.3567292226001642,
    2.7605771959835681,     -1.4947114020071514,    4.9999999999999999e-1,
};
inline constexpr double kMillsShiftD = 5.0;

}  // namespace tpkernels
