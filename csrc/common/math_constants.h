// Made by scripts/fit_math_constants.py, checked by csrc/tests/math_test.cpp.
#pragma once

namespace tpkernels {

// Largest relative error of the fit: 4.2e-18.
inline constexpr double kExpPolyDouble[] = {
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
// Largest relative error of the fit: 1.2e-15.
inline constexpr double kNormalPolyDouble[] = {
    1.6124763262936474e-3,  -1.399707862152165e-2,  5.3419852537114492e-2, -1.1705625478869799e-1,
    1.638943001242331e-1,   -1.6258844325599548e-1, 1.3437952234625641e-1, -8.942821841925785e-2,
    1.2850273633552189e-2,  1.1506158221422272e-2,  9.2081202132684248e-2, -7.3725150759876085e-2,
    -3.1501165838990043e-1, 4.5216385582408598e-1,  8.4988154594690782e-1, -3.5932567135846372,
    5.9500035536607033,     -6.1173064188983604,    4.2552885979953103,    -1.9947114020071782,
    5.0000000000000001e-1,
};
inline constexpr double kNormalShiftDouble = 5.0;
inline constexpr double kNormalBoundDouble = 38.5;

// Largest relative error of the fit: 2.5e-9.
inline constexpr float kExpPolyFloat[] = {
    1.39411084e-3f, 8.3751264e-3f, 4.16663529e-2f, 1.66664155e-1f,
    5.00000005e-1f, 1.00000004f,   1.0f,
};
// Largest relative error of the fit: 3.3e-7.
inline constexpr float kNormalPolyFloat[] = {
    4.1278885e-2f,   -1.18390518e-1f, 3.54195085e-2f, 1.76412152e-1f, 6.86483148e-2f,
    -9.73245059e-1f, 1.6662279f,      -1.39629867f,   5.00000003e-1f,
};
inline constexpr float kNormalShiftFloat = 3.5f;
inline constexpr float kNormalBoundFloat = 13.25f;

// Largest relative error of the fit: 3.5e-6.
inline constexpr float kExpPolyHalf[] = {
    4.18756445e-2f, 1.6792143e-1f, 4.99993721e-1f, 9.99962295e-1f, 1.0f,
};
// Largest relative error of the fit: 0.00018.
inline constexpr float kNormalPolyHalf[] = {
    1.06092314e-1f, -1.74849256e-1f, -2.87561967e-1f, 1.05413029f, -1.1969256f, 5.00001189e-1f,
};
inline constexpr float kNormalShiftHalf = 3.0f;
inline constexpr float kNormalBoundHalf = 13.25f;

}  // namespace tpkernels
