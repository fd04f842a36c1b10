#include "half.h"
#include <string.h>

static float bits_to_float(uint32_t u)
{
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

float kvl_half_to_float(uint16_t h)
{
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 1023u;
    if (exponent == 31) return bits_to_float(sign | 0x7f800000u | mantissa << 13);
    if (exponent == 0) {
        const float magnitude = (float)mantissa * 0x1p-24f;
        return sign ? -magnitude : magnitude;
    }
    return bits_to_float(sign | (exponent + 112u) << 23 | mantissa << 13);
}

uint16_t kvl_float_to_half(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    const uint16_t sign = (uint16_t)(u >> 16 & 0x8000u);
    u &= 0x7fffffffu;
    if (u > 0x7f800000u) return sign | 0x7e00u;
    if (u >= 0x477ff000u) return sign | 0x7c00u; /* 65520 and above round to infinity */
    if (u < 0x38800000u) {                       /* below 2^-14: subnormal, in units of 2^-24 */
        const float scaled = bits_to_float(u) * 0x1p24f, shifted = scaled + 0x1p23f;
        return sign | (uint16_t)(shifted - 0x1p23f);
    }
    u += 0xfffu + (u >> 13 & 1u);
    return sign | (uint16_t)((u - 0x38000000u) >> 13);
}

float kvl_bf16_to_float(uint16_t b) { return bits_to_float((uint32_t)b << 16); }
