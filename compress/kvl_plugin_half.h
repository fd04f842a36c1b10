/* binary16 for plug-ins, which link nothing of the host: IEEE 754 conversions, round to nearest even, and the range of inputs. */
#ifndef KVL_PLUGIN_HALF_H
#define KVL_PLUGIN_HALF_H
#include <math.h>
#include <stdint.h>
#include <string.h>

#define KVL_PLUGIN_HALF_MAX 65504.0f /* largest finite binary16 */

/* What every codec that stores 16 bits or fewer does to its input first: NaN becomes 0, the rest is clamped to +-65504. */
static inline float kvl_plugin_clamp_half(float x)
{
    return isnan(x) ? 0.0f : fminf(fmaxf(x, -KVL_PLUGIN_HALF_MAX), KVL_PLUGIN_HALF_MAX);
}

/* Finite values only: x after kvl_plugin_clamp_half. */
static inline uint16_t kvl_plugin_to_half(float x)
{
    const float magnitude = fabsf(x);
    const uint16_t sign = signbit(x) ? 0x8000u : 0;
    if (magnitude < 0x1p-14f) return sign | (uint16_t)rintf(magnitude * 0x1p24f); /* subnormal: units of 2^-24 */
    uint32_t bits;
    memcpy(&bits, &magnitude, sizeof bits);
    bits += 0xfffu + (bits >> 13 & 1u); /* round the 13 bits that go */
    return sign | (uint16_t)((bits >> 13) - (112u << 10));
}

static inline float kvl_plugin_from_half(uint16_t h)
{
    const uint32_t exponent = h >> 10 & 31u, mantissa = h & 1023u, bits = (exponent + 112u) << 23 | mantissa << 13;
    float magnitude = (float)mantissa * 0x1p-24f;
    if (exponent > 0) memcpy(&magnitude, &bits, sizeof bits);
    return h & 0x8000u ? -magnitude : magnitude;
}

#endif
